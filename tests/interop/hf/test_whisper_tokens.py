"""Whisper's control tokens: from newer folders, older ones, and ones without them."""

import pytest
from tokenizers import AddedToken, Tokenizer, models

from allyouneed.config import parse
from allyouneed.data.media.speech import Speech
from allyouneed.data.tokenizers.base import Tokenizer as Ours
from allyouneed.data.tokenizers.special_tokens import Template
from allyouneed.interop.hf.whisper_tokens import speech_options

WORDS = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|zh|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
]
WORDS += ["<|startofprev|>", "<|nocaptions|>", "<|notimestamps|>"]
OLD = {"decoder_start_token_id": 2, "eos_token_id": 1, "suppress_tokens": [5], "begin_suppress_tokens": [0, 1]}
OLD |= {"max_source_positions": 1500, "vocab_size": 51865}


@pytest.fixture
def tokenizer():
    inner = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    inner.add_special_tokens([AddedToken(word, special=True) for word in WORDS])
    return Ours(inner, 1, 1, 1, template=Template())


def test_an_old_folder_keeps_tokens_in_config_and_tokenizer(tokenizer):
    speech = parse(Speech, speech_options(OLD, {}, tokenizer))
    assert (speech.start, speech.end, speech.no_timestamps, speech.previous, speech.no_speech) == (2, 1, 10, 8, 9)
    assert speech.languages == {"en": 3, "zh": 4} and speech.tasks == {"transcribe": 6, "translate": 5}
    assert (speech.suppress, speech.begin_suppress, speech.seconds, speech.first_within) == ((5,), (0, 1), 30.0, 1.0)


def test_a_newer_folder_keeps_tokens_in_its_generation_config(tokenizer):
    said = {"is_multilingual": True, "lang_to_id": {"<|de|>": 30}, "task_to_id": {"transcribe": 31, "translate": 32}}
    said |= {"no_timestamps_token_id": 40, "prev_sot_token_id": 38, "suppress_tokens": None, "eos_token_id": [7]}
    speech = parse(Speech, speech_options(OLD, said | {"max_initial_timestamp_index": 25}, None))
    assert speech.languages == {"de": 30} and speech.tasks == {"transcribe": 31, "translate": 32}
    assert (speech.end, speech.no_timestamps, speech.previous, speech.no_speech) == (7, 40, 38, None)
    assert (speech.suppress, speech.first_within) == ((5,), 0.5)


def test_an_english_only_model_has_no_language_tokens(tokenizer):
    assert parse(Speech, speech_options(OLD | {"vocab_size": 51864}, {}, tokenizer)).languages == {}
    assert parse(Speech, speech_options(OLD, {"is_multilingual": False}, tokenizer)).languages == {}


def test_missing_tokens_are_named(tokenizer):
    assert "the token for no_timestamps" in speech_options(OLD, {}, None)["lacks"]
    assert "multilingual" in speech_options(OLD, {"no_timestamps_token_id": 9}, None)["lacks"]
