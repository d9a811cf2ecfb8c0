"""llama2.c's files: the same scores, tokens and stories as a plain loop over the file."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from allyouneed.errors import UserError
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.single_file import detect as single_file
from allyouneed.nn.batch import Batch, Rows
from plain_llama import PlainLlama, PlainPieces, write_stories

SHAPES = [
    {},
    {"heads": 4, "kv_heads": 2, "tied": False, "seed": 1},
    {"heads": 6, "kv_heads": 1, "layers": 3, "seed": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_and_story_of_the_plain_loop(shape, tmp_path):
    path = write_stories(tmp_path, **shape)
    plain, folder = PlainLlama(path), single_file.read(path)
    tokens = [1, 270, 265, 259, 30, 261]
    expected = torch.from_numpy(np.stack([plain.step(token) for token in tokens])).float()
    with torch.no_grad():
        found = folder.model.logits(Batch(Rows(torch.tensor([tokens]))))[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    model = predictor(folder)
    story = PlainLlama(path).story(PlainPieces(tmp_path / "tokenizer.bin").encode("the ab"), 30)
    answer = model.engine.complete([[1, *model.tokenizer.encode("the ab")]], max_length(len(story)))[0][0]
    assert answer.tokens[: len(story)] == story and len(story) > 3


def max_length(count):
    from allyouneed.infer.decoding.options import Decoding

    return Decoding(method="greedy", max_length=count)


@pytest.mark.parametrize("text", ["the abc", "  the", "äbc 李 x", "tththehe", "", "a\nb", "😀 é", "bcab the theab"])
def test_texts_are_tokenized_as_in_the_original(text, tmp_path):
    tokenizer = single_file.read(write_stories(tmp_path)).vocabularies.target
    expected = PlainPieces(tmp_path / "tokenizer.bin").encode(text)[1:]
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


def test_the_folder_can_be_kept(tmp_path):
    folder = single_file.read(write_stories(tmp_path))
    folder.save(tmp_path / "ours")
    from allyouneed.folder import Folder

    again = Folder.load(tmp_path / "ours")
    assert again.vocabularies.target.encode("the ab") == folder.vocabularies.target.encode("the ab")
    assert predictor(again).generate("the", max_length=5) == predictor(folder).generate("the", max_length=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda whole: whole[:-4], "its header implies"),
        (lambda whole: whole[:10], "not llama2.c's version 0 layout"),
        (lambda whole: b"24ka" + whole[4:], "version 0 layout"),
        (lambda whole: struct.pack("<i", -5) + whole[4:], "impossible sizes"),
        (lambda whole: struct.pack("<i", 2_000_000_000) + whole[4:], "impossible sizes"),
        (lambda whole: whole[:4] + struct.pack("<i", 1 << 19) + whole[8:], "its header implies"),
    ],
)
def test_a_damaged_file_is_refused(change, message, tmp_path):
    path = write_stories(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=message):
        single_file.read(path)


def test_the_vocabulary_must_be_there_and_fit(tmp_path):
    path = write_stories(tmp_path)
    words = tmp_path / "tokenizer.bin"
    words.write_bytes(words.read_bytes()[:-3])
    with pytest.raises(UserError, match="not the vocabulary of this model"):
        single_file.read(path)
    words.rename(tmp_path / "other.bin")
    with pytest.raises(UserError, match=r"put tokenizer.bin beside it"):
        single_file.read(path)
