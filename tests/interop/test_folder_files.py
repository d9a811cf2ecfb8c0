"""Every file that is read with a model folder goes through the one check of folders: a link to a file outside is
refused, whichever file it is."""

from __future__ import annotations

import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hostile_files as hostile
import tiny_folders
import translation_files
from allyouneed.data.chat.template import FILES, find_template
from allyouneed.errors import UserError
from allyouneed.folder import ORIGINALS
from allyouneed.interop.export import writer
from allyouneed.interop.load import load

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def ours(path: Path) -> None:
    hostile.translator(path)


def theirs(path: Path) -> None:
    hostile.foreign(path)
    (path / "README.md").write_text("A card.")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def imported(path: Path) -> None:
    theirs(path.with_name("original"))
    load(path.with_name("original"), as_stored=True).save(path)
    shutil.rmtree(path.with_name("original"))


def vocabulary_files(path: Path) -> None:
    hostile.vocab_files(path)


def sharded(path: Path) -> None:
    tiny_folders.write(path)
    tiny_folders.shard(path)


def pickled(path: Path) -> None:
    tiny_folders.write(path)
    tiny_folders.shard(path, ".bin")


def sentence_transformers(path: Path) -> None:
    theirs(path)
    (path / "1_Pooling").mkdir()
    hostile.write(path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    hostile.write(path / "sentence_bert_config.json", {"max_seq_length": 16})
    types = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": name, "type": f"sentence_transformers.models.{kind}"} for name, kind in types.items()]
    hostile.write(path / "modules.json", modules)


def ctranslate2(path: Path) -> None:
    marian(path.with_name("source"))
    path.mkdir()
    writer("ctranslate2")(load(path.with_name("source")), path)
    shutil.rmtree(path.with_name("source"))


def marian(path: Path) -> None:
    pieces = translation_files.train_pieces()
    names = ["</s>", "<unk>", *translation_files.tokens_of(pieces)]
    settings = translation_files.ORDINARY
    translation_files.write_marian(path, translation_files.marian_arrays(len(names), settings), settings)
    translation_files.write_vocabulary(path, names)
    for side in ("source", "target"):
        (path / f"{side}.spm").write_bytes(pieces)
    (path / "decoder.yml").write_text("vocabs: [vocab.yml, vocab.yml]\n")


def fairseq(path: Path) -> None:
    path.mkdir()
    pieces = translation_files.train_pieces()
    tokens = translation_files.tokens_of(pieces)
    options = translation_files.fairseq_options()
    weights = translation_files.fairseq_weights(len(tokens) + 4, options)
    torch.save({"args": options, "model": weights}, path / "checkpoint_best.pt")
    for language in ("de", "en"):
        (path / f"dict.{language}.txt").write_text("".join(f"{token} 1\n" for token in tokens), encoding="utf-8")
    (path / "sentencepiece.model").write_bytes(pieces)


KINDS: list[Callable[[Path], None]] = [
    ours, theirs, imported, vocabulary_files, sharded, pickled, sentence_transformers, ctranslate2, marian, fairseq,
]  # fmt: skip


def read_all(path: Path) -> None:
    """What a command or a server reads of a model folder."""
    found = load(path, as_stored=True)
    find_template(found.path, found.originals)
    find_template(path)


_watched: list[tuple[Path, set[Path]]] = []


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes | os.PathLike):
        folder, opened = _watched[-1]
        path = Path(os.path.realpath(os.fsdecode(arguments[0])))
        if path.is_relative_to(folder):
            opened.add(path)


sys.addaudithook(_record)


@contextmanager
def opened_files(folder: Path) -> Iterator[set[Path]]:
    """The files below this folder that are opened inside."""
    _watched.append((folder.resolve(), set()))
    try:
        yield _watched[-1][1]
    finally:
        _watched.pop()


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_no_file_of_a_folder_is_read_through_a_link_out_of_it(make: Callable[[Path], None], tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "outside"
    outside.mkdir()
    make(folder)
    with opened_files(folder) as read:
        read_all(folder)
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    assert len(read) > 1 and read <= {folder.resolve() / name for name in names}
    refused = []
    for name in names:
        moved = outside / Path(name).name
        (folder / name).rename(moved)
        (folder / name).symlink_to(moved)
        with opened_files(outside) as followed:
            try:
                read_all(folder)
            except UserError as error:
                refused.append(name)
                assert "link to a file outside the folder" in str(error), (name, error)
        assert not followed, name
        (folder / name).unlink()
        moved.rename(folder / name)
    # what was opened is checked; files that this library does not read may be anywhere
    assert {file.relative_to(folder.resolve()).as_posix() for file in read} <= set(refused)


@pytest.mark.parametrize("name", [*FILES, *(f"{ORIGINALS}/{name}" for name in FILES)])
def test_chat_templates_are_bounded_files_of_the_folder(tmp_path: Path, name: str) -> None:
    folder, secret = tmp_path / "model", tmp_path / "secret"
    (folder / ORIGINALS).mkdir(parents=True)
    secret.write_text("root:x:0:0")
    (folder / name).symlink_to(secret)
    with pytest.raises(UserError, match="link to a file outside the folder"):
        find_template(folder)
    (folder / name).unlink()
    with (folder / name).open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match="1,073,741,824 bytes; at most"):
        find_template(folder)
    (folder / name).unlink()
    long = "x" * (2 << 20)
    (folder / name).write_text(long if name.endswith(".jinja") else json.dumps({"chat_template": long}))
    with pytest.raises(UserError, match="chat template of 2,097,152 characters"):
        find_template(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"chat_template": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"chat_template": ' + "9" * 5000 + "}", "digits"),
        ("{", "not valid JSON"),
        ('{"chat_template": [{"name": ["default"], "template": "a"}, {"name": {}}, 5, {"template": []}]}', ""),
        ('{"chat_template": [{"name": "default", "template": ["a"]}]}', ""),
        ('{"bos_token": {"content": {}}, "chat_template": 5}', ""),
        ("[]", ""),
    ],
)
def test_a_malformed_chat_template_is_refused_or_absent(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    if message:
        with pytest.raises(UserError, match=f"tokenizer_config.json: .*{message}"):
            find_template(tmp_path)
    else:
        assert find_template(tmp_path) == (None, {})


def test_the_vocabulary_beside_a_single_file_is_no_link(tmp_path: Path) -> None:
    """Unless the caller names it."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = (8, 16, 1, 2, 2, 300, 4)
    count = 300 * 8 + 8 + 4 * 8 * 8 + 8 + 3 * 8 * 16 + 8 + 2 * 4 * 2
    values = np.zeros(count, "<f4").tobytes()
    (folder / "stories.bin").write_bytes(struct.pack("<7i", *sizes) + values)
    spelled = [b"<unk>", b"<s>", b"</s>", *(f"<0x{n:02X}>".encode() for n in range(256))]
    pieces = spelled + [f"p{n}".encode() for n in range(300 - len(spelled))]
    vocabulary = struct.pack("<i", 8) + b"".join(struct.pack("<fi", 0.0, len(raw)) + raw for raw in pieces)
    (tmp_path / "words").write_bytes(vocabulary)
    (folder / "tokenizer.bin").symlink_to(tmp_path / "words")
    with pytest.raises(UserError, match="link to a file outside the folder"):
        load(folder / "stories.bin")
    load(folder / "stories.bin", tokenizer=folder / "tokenizer.bin")
