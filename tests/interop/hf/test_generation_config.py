"""generation_config.json: options that we have are taken over, the rest is noted."""

from __future__ import annotations

from typing import Any

import pytest

from allyouneed.config import parse
from allyouneed.infer.decoding.options import Decoding
from allyouneed.interop.hf.generation_config import read_decoding, write_generation


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("causal-lm", {}, {"method": "greedy"}),
        ("causal-lm", {"max_length": 20}, {"method": "greedy"}),
        ("causal-lm", {"max_new_tokens": 9}, {"method": "greedy", "max_length": 9, "extra": 9}),
        ("causal-lm", {"do_sample": True}, {"method": "sample", "top_k": 50}),
        (
            "causal-lm",
            {"do_sample": True, "top_k": 0, "temperature": 0.6, "top_p": 0.95, "min_p": 0.1},
            {"method": "sample", "temperature": 0.6, "top_p": 0.95, "min_p": 0.1},
        ),
        ("causal-lm", {"temperature": 0.6, "top_p": 0.9}, {"method": "greedy"}),
        ("causal-lm", {"repetition_penalty": 1.2}, {"method": "greedy", "repetition_penalty": 1.2}),
        ("causal-lm", {"stop_strings": "###"}, {"method": "greedy", "stop": ["###"]}),
        (
            "translation",
            {"num_beams": 6, "max_length": 512, "bad_words_ids": [[58100]], "pad_token_id": 58100},
            {
                "method": "beam",
                "beam": 6,
                "penalty": "power",
                "length_penalty": 1.0,
                "max_length": 511,
                "extra": 511,
            },
        ),
        (
            "seq2seq",
            {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "min_length": 56, "max_new_tokens": 9},
            {
                "method": "beam",
                "beam": 4,
                "penalty": "power",
                "length_penalty": 2.0,
                "early": True,
                "max_length": 9,
                "extra": 9,
                "min_length": 55,
            },
        ),
        ("seq2seq", {"no_repeat_ngram_size": 3}, {"method": "greedy", "no_repeat": 3}),
        ("masked-lm", {"num_beams": 6}, {}),
        ("transcription", {"num_beams": 6}, {}),
    ],
)
def test_options_are_taken_over(kind: str, said: dict[str, Any], expected: dict[str, Any]) -> None:
    found, notes = read_decoding({}, said, kind)
    assert (found, notes) == (expected, [])
    if "min_length" not in found:
        parse(Decoding, found)


def test_generation_config_overrides_config() -> None:
    assert read_decoding({"num_beams": 3}, {}, "translation")[0]["beam"] == 3
    assert read_decoding({"num_beams": 3}, {"num_beams": 5}, "translation")[0]["beam"] == 5


def test_unsupported_options_are_noted() -> None:
    said = {"typical_p": 0.5, "bad_words_ids": [[3, 4]], "num_beams": 4, "early_stopping": "never", "eta_cutoff": 0.0}
    _, notes = read_decoding({}, said, "seq2seq")
    assert [note.split(":")[0] for note in notes] == ["typical_p", "early_stopping", "bad_words_ids"]


@pytest.mark.parametrize(
    "ours",
    [
        {"method": "greedy"},
        {"method": "greedy", "repetition_penalty": 1.5, "no_repeat": 2, "stop": ["."]},
        {"method": "beam", "beam": 6, "penalty": "power", "length_penalty": 0.8, "early": True},
        {"method": "sample", "top_k": 7, "top_p": 0.5, "temperature": 0.7, "min_p": 0.2, "max_length": 30, "extra": 30},
    ],
)
def test_our_decoding_options_round_trip(ours: dict[str, Any]) -> None:
    assert read_decoding({}, write_generation(ours, "seq2seq"), "seq2seq")[0] == ours
