"""The control tokens of a Whisper folder, from its config, generation config and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.media.speech import LANGUAGES, TASKS, TICK
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError

FRAMES = 2  # per encoder position
MULTILINGUAL = 51865  # vocabularies of at least this size are multilingual


def speech_options(
    config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The keys of `data.speech.Speech`. Old folders keep them in config.json, newer ones in generation_config.json.

    Where a required token is missing, only `lacks` with the reason: the model runs, but cannot transcribe.
    """
    options = {**config, **{key: value for key, value in generation.items() if value is not None}}

    def token(key: str, *spellings: str) -> int | None:
        if options.get(key) is not None:
            return int(options[key])
        found = [] if tokenizer is None else [_special(tokenizer, spelling) for spelling in spellings]
        return next((number for number in found if number is not None), None)

    ids = {
        "start": token("decoder_start_token_id", "<|startoftranscript|>"),
        "end": _first(options.get("eos_token_id")),
        "no_timestamps": token("no_timestamps_token_id", "<|notimestamps|>"),
    }
    missing = [name for name, number in ids.items() if number is None]
    if missing:
        return {"lacks": f"neither generation_config.json nor the tokenizer defines the token for {', '.join(missing)}"}
    found: dict[str, Any] = ids | {
        "previous": token("prev_sot_token_id", "<|startofprev|>"),
        "no_speech": token("no_speech_token_id", "<|nospeech|>", "<|nocaptions|>"),
        "suppress": [number for number in options.get("suppress_tokens") or [] if number >= 0],
        "begin_suppress": options.get("begin_suppress_tokens") or [],
        "seconds": config.get("max_source_positions", 1500) * FRAMES * HOP / RATE,
    }
    if options.get("max_initial_timestamp_index") is not None:
        found["first_within"] = options["max_initial_timestamp_index"] * TICK
    if options.get("is_multilingual", config.get("vocab_size", 0) >= MULTILINGUAL):
        several = _languages(options, tokenizer)
        if not all(several.values()):
            return {
                "lacks": "the model is multilingual, but neither its files nor its tokenizer define language tokens"
            }
        found |= several
    return found


def _languages(options: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    languages = {name.strip("<|>"): number for name, number in (options.get("lang_to_id") or {}).items()}
    tasks = {name: number for name, number in (options.get("task_to_id") or {}).items() if name in TASKS}
    if tokenizer is not None and not languages:
        spelled = {code: _special(tokenizer, f"<|{code}|>") for code in LANGUAGES}
        languages = {code: number for code, number in spelled.items() if number is not None}
    if tokenizer is not None and not tasks:
        found = {name: _special(tokenizer, f"<|{name}|>") for name in TASKS}
        tasks = {name: number for name, number in found.items() if number is not None}
    return {"languages": languages, "tasks": tasks}


def _special(tokenizer: Tokenizer, spelling: str) -> int | None:
    try:
        return tokenizer.special(spelling)
    except UserError:
        return None


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value
