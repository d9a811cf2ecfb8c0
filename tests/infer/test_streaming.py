"""Streaming: the same text as all at once, in whole characters, up to the stop strings."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import allyouneed as ayn
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.folder import Folder
from allyouneed.infer.decoding.detokenizer import StopStrings, StreamingDetokenizer, detokenize
from allyouneed.infer.predictors.generator import Generation, Generator

TEXT = "Tous les êtres humains: 你好，世界。今天 👩‍👩‍👧 How are you? The quick brown fox."


def model(tokenizer: Tokenizer, seed: int = 0) -> Generator:
    torch.manual_seed(seed)
    layer = {
        "mixer": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "rotary"},
        "channel": {"kind": "ffn", "hidden": 32},
    }
    tree = {"kind": "decoder", "vocab": tokenizer.size, "width": 16, "wiring": "pre-norm", "decoder": [layer]}
    tree["decoder"] = [layer | {"wiring": tree.pop("wiring")}]
    module = ayn.build(tree).eval()
    with torch.no_grad():
        module.embed.tokens.weight.normal_()  # type: ignore[union-attr,operator]
    return Generator(Folder(module, Vocabularies(tokenizer, tokenizer), task={"kind": "causal-lm"}, max_tokens=500))


@pytest.fixture(scope="module")
def generator(tokenizer: Tokenizer) -> Generator:
    return model(tokenizer)


DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"method": "greedy", "max_length": 40},
    "sample": {"method": "sample", "temperature": 1.5, "seed": 3, "max_length": 60},
    "penalised": {"method": "sample", "seed": 3, "repetition_penalty": 1.3, "no_repeat": 3, "max_length": 40},
    "beam": {"method": "beam", "beam": 3, "max_length": 20},
    "a beam of one": {"method": "beam", "beam": 1, "max_length": 20},
}


def whole(stream: Any) -> tuple[list[str], Generation]:
    pieces: list[str] = []
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as over:
            return pieces, over.value


@pytest.mark.parametrize("decoding", DECODINGS)
@pytest.mark.parametrize("prompt", ["the cat", "", "你好", " a b\n"])
def test_the_pieces_add_up_to_the_text(generator: Generator, decoding: str, prompt: str) -> None:
    pieces, full = whole(generator.stream(prompt, **DECODINGS[decoding]))
    (expected,) = generator.generate_full([prompt], **DECODINGS[decoding])
    assert "".join(pieces) == expected.text == full.text and full == expected
    assert all(pieces), "an empty piece says nothing"
    if "beam" not in decoding:
        assert len(pieces) > 3, "it comes bit by bit"


def test_a_stream_is_lazy_and_restores_the_modes(generator: Generator) -> None:
    """One model step per token; neither inference nor evaluation mode is left on."""
    steps = 0
    advance, generator.model.train = generator.model.advance, generator.model.train

    def counted(*args: Any, **continuation_limit: Any) -> Any:
        nonlocal steps
        steps += 1
        return advance(*args, **continuation_limit)

    generator.model.advance = counted
    try:
        generator.model.train()
        stream = generator.stream("the cat", method="greedy", max_length=30)
        assert steps == 0
        next(stream)
        early = steps
        assert early < 10 and not torch.is_inference_mode_enabled()
        stream.close()
        assert steps == early and generator.model.training
    finally:
        generator.model.advance = advance
        generator.model.eval()


def test_errors_are_raised_before_the_first_piece(generator: Generator) -> None:
    for options, token_lists in (
        ({"best": 2}, "remove `best`"),
        ({"beem": 2}, "beem"),
        ({"stop": [""]}, "stop"),
        ({"top_p": 2}, "top_p"),
    ):
        with pytest.raises(ayn.UserError, match=token_lists):
            generator.stream("x", **options)
    with pytest.raises(ayn.UserError, match="must be a string"):
        generator.stream(["x"])  # type: ignore[arg-type]


def test_a_sampling_option_selects_sampling(tokenizer: Tokenizer) -> None:
    own = model(tokenizer)
    own.folder.decoding.update(method="greedy")
    drawn = {own.generate("x", temperature=3.0, seed=seed, max_length=8) for seed in range(3)}
    assert len(drawn) == 3 and own.generate("x", max_length=8) not in drawn
    assert own.generate("x", seed=0, max_length=8) == own.generate("x", method="sample", seed=0, max_length=8)


# --- stop strings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoding", ["greedy", "sample", "beam"])
def test_the_text_ends_before_a_stop_string(generator: Generator, decoding: str) -> None:
    """For any substring, also across tokens, and with fewer tokens decoded."""
    options = DECODINGS[decoding] | {"repetition_penalty": 1.2}
    (free,) = generator.generate_full(["the cat"], **options)
    tried = 0
    for key in range(0, len(free.text) - 4, 3):
        stop = free.text[key : key + 3]
        if "\ufffd" in stop:
            continue
        pieces, full = whole(generator.stream("the cat", stop=[stop, "never said"], **options))
        assert "".join(pieces) == full.text == generator.generate("the cat", stop=stop, **options)
        assert stop not in full.text
        if decoding != "beam":  # which may find something else, now that texts end sooner
            assert full.text == free.text[: free.text.index(stop)]
            assert full.candidates[0].finished and full.candidates[0].tokens <= free.candidates[0].tokens
            tried += full.candidates[0].tokens < free.candidates[0].tokens
    assert decoding == "beam" or tried > 3


def test_the_earliest_stop_string_counts_and_a_partial_one_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three four")
    spoken = StreamingDetokenizer(tokenizer, stop=["two three fifth"])
    pieces = [spoken.add(token) for token in ids]
    assert "".join(pieces) + spoken.end() == "one two three four"
    (shown,) = [piece for piece in pieces if len(piece) > len(" three")]
    assert shown.startswith("two three f"), "told when it is sure"
    assert detokenize(tokenizer, ids, stop=["four", "two"]) == "one "
    assert detokenize(tokenizer, ids, stop=["two tree", "fourth"]) == "one two three four", (
        "held-back text comes at the end"
    )


def test_each_row_stops_independently(generator: Generator) -> None:
    prompts = ["the cat", "a dog", "", "你好"]
    options = DECODINGS["sample"]
    free = generator.generate(prompts, **options)
    stop = next(text for text in map("".join, pairwise(free[0][5:])) if text.isascii())
    found = generator.generate(prompts, stop=stop, **options)
    assert found == [text.partition(stop)[0] for text in free] and found[0] != free[0] and found[1] == free[1]


def test_a_stop_string_in_the_prompt_does_not_stop(generator: Generator) -> None:
    assert generator.generate("the cat", stop="cat", **DECODINGS["greedy"]) == generator.generate(
        "the cat", **DECODINGS["greedy"]
    )


# --- tokens as text -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_tokens_stream_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Also with invalid bytes: the pieces equal the text decoded at once, and none is taken back."""
    ids = data.draw(st.lists(st.integers(3, tokenizer.size - 1), max_size=40))
    begin = tokenizer.encode(data.draw(st.sampled_from(["", "a", "你"])))
    base = tokenizer.decode(begin)
    assert detokenize(tokenizer, ids, begin) == tokenizer.decode([*begin, *ids])[len(base) :]


def test_no_piece_is_half_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    spoken = StreamingDetokenizer(tokenizer)
    pieces = [spoken.add(token) for token in ids]
    assert "".join(pieces) == TEXT and spoken.end() == ""
    assert "\ufffd" not in "".join(pieces) and "" in pieces, "some tokens are only a part of a character"


def inner(kind: str) -> Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    if kind == "pieces with bytes":  # as Llama's
        names = ["<s>", "▁the", "▁cat", "s", "▁", "▁你", *(f"<0x{byte:02X}>" for byte in range(256))]
        made = Inner(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(steps)
    elif kind == "pieces":  # as T5's
        names = ["<s>", "▁the", "▁cat", "s", "▁", "▁你", "!"]
        made = Inner(models.Unigram([(name, -float(n)) for n, name in enumerate(names)]))
        made.decoder = decoders.Metaspace()
    else:  # as BERT's
        names = ["[UNK]", "the", "cat", "##s", "##!", "你", "."]
        made = Inner(models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
        made.decoder = decoders.WordPiece()
    return Tokenizer(made, 0, 0, 0)


@pytest.mark.parametrize("kind", ["pieces with bytes", "pieces", "words"])
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_other_tokenizers_stream_whole_words(kind: str, data: st.DataObject) -> None:
    """Spaces between words appear where they belong."""
    tokenizer: Any = inner(kind)
    size = 6 if kind == "pieces with bytes" else 7
    ids = data.draw(st.lists(st.integers(1, size - 1), max_size=12))
    begin = data.draw(st.sampled_from([[], [1], [1, 2]]))
    base = tokenizer.decode(begin)
    assert detokenize(tokenizer, ids, begin) == tokenizer.decode([*begin, *ids])[len(base) :]


def test_byte_tokens_are_streamed_as_whole_characters() -> None:
    tokenizer: Any = inner("pieces with bytes")
    ids = [1, *(6 + byte for byte in "é\n好".encode()), 2]
    spoken = StreamingDetokenizer(tokenizer)
    assert [spoken.add(token) for token in ids] == ["the", "", "é", "\n", "", "", "好", " cat"]
    assert StopStrings(tokenizer, ["\n"])(ids[:4]) and not StopStrings(tokenizer, ["\n"])(ids[:3])
