"""Whisper's own `.pt` files: the scores of Hugging Face's Whisper with the same weights, and the same vocabulary."""

from __future__ import annotations

import base64
import io
import os

import pytest
import torch

from allyouneed.errors import UserError
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.single_file import detect as single_file
from allyouneed.interop.tokenizers.tiktoken import byte_pair_encoding, read_ranks
from allyouneed.nn.batch import Batch, Rows, Signal
from tiny_whisper import MERGED, PIECES, ranks_file, write_openai


def test_the_scores_of_the_same_weights(tmp_path):
    theirs, path = write_openai(tmp_path, PIECES + MERGED)
    ranks_file(tmp_path / "gpt2.tiktoken", PIECES + MERGED)
    folder = single_file.read(path)
    frames, tokens = torch.randn(2, 8, 100), torch.tensor([[5, 300, 7, 1000], [268, 269, 3, 4]])
    with torch.no_grad():
        expected = theirs(input_features=frames, decoder_input_ids=tokens).logits
        found = folder.model.logits(Batch(target=Rows(tokens), source=Signal(frames)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    model = predictor(folder)
    assert model.speech.seconds == 1.0 and not model.languages
    assert model.tokenizer.special("<|0.00|>") == model.speech.first_time
    assert model.tokenizer.special("<|30.00|>") == folder.model.config.vocab - 1
    assert isinstance(model.transcribe(0.1 * torch.randn(16_000), temperatures=(0.0,)), str)


def test_the_vocabulary_size_decides_multilingual(tmp_path):
    pairs = [bytes([n // 256, n % 256]) for n in range(50_001)]
    _, path = write_openai(tmp_path, PIECES + pairs, languages=100)
    ranks_file(tmp_path / "multilingual.tiktoken", PIECES + pairs)
    speech = predictor(single_file.read(path)).speech
    end = len(PIECES + pairs)
    assert (speech.end, speech.start, speech.languages["en"], speech.languages["yue"]) == (
        end,
        end + 1,
        end + 2,
        end + 101,
    )
    assert (speech.tasks["translate"], speech.tasks["transcribe"]) == (end + 102, end + 103)
    assert (speech.previous, speech.no_speech, speech.no_timestamps) == (end + 105, end + 106, end + 107)


@pytest.mark.parametrize("text", ["the thing in there", "hello 你好 ♪♪", "\n\t the  \x00", "", "ell tell'll 12 "])
def test_pairs_are_joined_by_rank(text, tmp_path):
    """Written out: within a word as GPT-2 cuts them, the pair of the lowest rank is joined, again and again."""
    import regex

    ranks = read_ranks(ranks_file(tmp_path / "a.tiktoken", PIECES + MERGED))
    words = regex.findall(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", text)
    expected = []
    for word in words:
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [
                (ranks[parts[n] + parts[n + 1]], n) for n in range(len(parts) - 1) if parts[n] + parts[n + 1] in ranks
            ]
            if not joined:
                break
            _, n = min(joined)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        expected += [ranks[part] for part in parts]
    made = byte_pair_encoding(ranks, ["<end>"])
    assert made.encode(text).ids == expected
    assert made.decode(expected) == text and made.token_to_id("<end>") == len(ranks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nonsense\n", "not a tiktoken file"),
        (b"", "incomplete tiktoken file"),
        (b"".join(base64.b64encode(bytes([n])) + b" %d\n" % n for n in range(255)), "incomplete tiktoken file"),
    ],
)
def test_invalid_ranks_are_refused(content, message, tmp_path):
    (tmp_path / "a.tiktoken").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_ranks(tmp_path / "a.tiktoken")


def test_pieces_that_no_merge_makes_are_refused():
    ranks = {piece: n for n, piece in enumerate([*PIECES, b"abc"])}
    with pytest.raises(UserError, match="is not a merge of two lower ranks"):
        byte_pair_encoding(ranks, [])


def test_a_missing_or_wrong_vocabulary_is_refused(tmp_path):
    _, path = write_openai(tmp_path, PIECES + MERGED)
    with pytest.raises(UserError, match=r"put gpt2.tiktoken beside it"):
        single_file.read(path)
    with pytest.raises(UserError, match="does not match"):
        single_file.read(path, ranks_file(tmp_path / "other.tiktoken", PIECES))


class Evil:
    def __reduce__(self):
        return os.system, ("echo run > evil.txt",)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"dims": {}, "model_state_dict": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match=r"evil.pt: cannot be read as weights"):
        single_file.read(tmp_path / "evil.pt")
    assert not (tmp_path / "evil.txt").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["dims"].update(n_text_layer=10**9), "n_text_layer: 1000000000"),
        (lambda content: content["dims"].update(n_mels=-8, n_audio_head="2"), "n_mels: -8\n  n_audio_head: '2'"),
        (lambda content: content["dims"].pop("n_mels"), "unsupported Whisper sizes: n_mels"),
        (lambda content: content["dims"].update(n_text_state=32), "encoder and decoder widths differ"),
        (lambda content: content["model_state_dict"].update(extra=3), "extra: not a tensor"),
        (lambda content: content["model_state_dict"].update(wide=torch.zeros(1).expand(10**12)), "wide declares more"),
        (lambda content: content.update(dims=[1, 2]), "no sizes and weights by name"),
        (lambda content: content["model_state_dict"].pop("encoder.conv1.bias"), "conv1.bias: missing"),
        (lambda content: content["model_state_dict"].update({"encoder.conv1.bias": torch.zeros(3)}), r"\(3,\)"),
    ],
)  # fmt: skip
def test_impossible_sizes_and_weights_are_refused(change, message, tmp_path):
    _, path = write_openai(tmp_path, PIECES + MERGED)
    ranks_file(tmp_path / "gpt2.tiktoken", PIECES + MERGED)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(UserError, match=message):
        single_file.read(path)


def test_other_files_are_refused(tmp_path):
    torch.save({"weights": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="not a Whisper model"):
        single_file.read(tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(io.BytesIO(b"no zip, no pickle").read())
    with pytest.raises(UserError, match="cannot be read: File is not a zip file"):
        single_file.read(tmp_path / "b.pt")
    (tmp_path / "c.onnx").write_bytes(b"x")
    with pytest.raises(UserError, match="not a model folder"):
        single_file.read(tmp_path / "c.onnx")
