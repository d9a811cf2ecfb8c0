"""Sources longer than a model's limit: promises of `unlimited` to users."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.apps.translate.translator import Translator
from allyouneed.config import ConfigError, parse
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding, Unlimited
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import to_int8

LIMIT = 24
SHORT = "The quick brown fox"
LONG = "The quick brown fox jumps over the lazy dog. How are you today? " * 8


def folder(tokenizer: Tokenizer, **keys: Any) -> Folder:
    """An encoder-decoder with as many learned positions as `LIMIT`."""
    attention = {"kind": "attention", "heads": 2}
    block = {"wiring": "pre-norm", "channel": {"kind": "ffn", "hidden": 24}}
    tree = {
        "kind": "encoder-decoder",
        "vocab": tokenizer.size,
        "width": 16,
        "embed": {"positions": {"kind": "learned", "length": LIMIT}},
        "encoder": [block | {"mixer": attention}],
        "decoder": [block | {"mixer": attention | {"pattern": "causal"}, "cross": attention}],
    }
    torch.manual_seed(0)
    model = parse(Model, tree | keys).build()  # type: ignore[type-abstract]
    return Folder(model.eval(), Vocabularies(tokenizer, tokenizer), max_tokens=LIMIT)


def test_a_long_text_is_rewritten_whole(tokenizer: Tokenizer) -> None:
    predictor = Seq2Seq(folder(tokenizer))
    with pytest.raises(UserError, match=f"more than the model's {LIMIT}.*--unlimited"):
        predictor.seq2seq(LONG)
    for decoding in ({"beam": 3}, {"method": "greedy"}, {"method": "sample", "seed": 1}):
        options: dict[str, Any] = {"max_length": 12} | decoding
        found = predictor.seq2seq([LONG, SHORT], unlimited=16, **options)
        alone = [predictor.seq2seq(text, unlimited=16, first=n, **options) for n, text in enumerate((LONG, SHORT))]
        assert alone == found
        # a text within the limit, with all of its tokens as keys, is an ordinary one
        assert found[1] == predictor.seq2seq(SHORT, first=1, **options)
    scores = [predictor.seq2seq_full([text], unlimited=16, max_length=4)[0].score for text in (LONG, LONG[64:])]
    assert scores[0] != scores[1]  # what lies beyond the limit is read


def test_a_line_is_translated_whole(tokenizer: Tokenizer) -> None:
    translator = Translator(folder(tokenizer))
    options: dict[str, Any] = {"max_length": 10, "protect": False, "method": "greedy"}
    split = translator.translate_full([LONG], **options)[0]
    whole = translator.translate_full([LONG], unlimited=8, **options)[0]
    sentences = LONG.count(".") + LONG.count("?")
    assert len(split.text.split()) > len(whole.text.split()) and sentences == 16
    assert not any("in parts" in note or "cut" in note for note in whole.notes)
    with pytest.raises(UserError, match="remove align or unlimited"):
        translator.translate_full([LONG], unlimited=8, align=True, **options)


def test_int8_weights_are_searched_by_their_keys(tokenizer: Tokenizer) -> None:
    plain = folder(tokenizer)
    to_int8(plain.model)
    predictor = Seq2Seq(plain)
    assert predictor.seq2seq(SHORT, unlimited=99, max_length=8) == predictor.seq2seq(SHORT, max_length=8)
    assert isinstance(predictor.seq2seq(LONG, unlimited=4, max_length=8), str)


def test_the_option_may_be_a_number_a_mapping_or_off() -> None:
    assert Decoding.of({}, unlimited=7).unlimited == Unlimited(keys=7)
    assert Decoding.of({}, unlimited={"chunk": 9, "overlap": 0}).unlimited == Unlimited(chunk=9, overlap=0)
    assert Decoding.of({"unlimited": 7}, unlimited=0).unlimited is None
    assert Decoding.of({}, unlimited=True).unlimited == Unlimited()
    for wrong in (-1, {"overlap": 1}, {"keys": 0}, "all"):
        with pytest.raises(ConfigError, match="unlimited"):
            Decoding.of({}, unlimited=wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unlimited": {"chunk": LIMIT + 1}}, f"25 tokens, more than the {LIMIT} positions"),
        ({"unlimited": 8, "draft": "lookup", "method": "greedy"}, "remove draft or unlimited"),
    ],
)
def test_impossible_options_are_refused(tokenizer: Tokenizer, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Seq2Seq(folder(tokenizer)).seq2seq(LONG, **options)


def test_a_windowed_cross_is_refused(tokenizer: Tokenizer) -> None:
    cross = {"kind": "attention", "heads": 2, "pattern": "window(3)"}
    mixer = {"kind": "attention", "heads": 2, "pattern": "causal"}
    predictor = Seq2Seq(folder(tokenizer, decoder=[{"mixer": mixer, "cross": cross}]))
    with pytest.raises(UserError, match="layer 0 of the decoder has another cross"):
        predictor.seq2seq(LONG, unlimited=4)


def test_a_model_without_an_encoder_refuses_it(tokenizer: Tokenizer) -> None:
    layer = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}}
    tree = {"kind": "decoder", "vocab": tokenizer.size, "width": 16, "decoder": [layer]}
    model = parse(Model, tree).build()  # type: ignore[type-abstract]
    with pytest.raises(UserError, match="unlimited: only for encoder-decoder models"):
        Generator(Folder(model.eval(), Vocabularies(tokenizer, tokenizer))).generate("hello", unlimited=4)


def test_a_saved_folder_may_have_it_as_its_default(tokenizer: Tokenizer, tmp_path: Any) -> None:
    made = folder(tokenizer)
    made.task, made.decoding = {"kind": "seq2seq"}, {"unlimited": {"keys": 16}, "max_length": 6}
    made.save(tmp_path / "model")
    predictor = ayn.load(tmp_path / "model")
    assert isinstance(predictor.seq2seq(LONG), str)
