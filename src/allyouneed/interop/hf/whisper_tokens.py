"""Which tokens of a Whisper folder tell it what to do: from its config, generation config and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from allyouneed.data.media.sound import HOP, RATE
from allyouneed.data.media.speech import LANGUAGES, TASKS, TICK
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError

FRAMES = 2  # that become one place of the encoder
MULTILINGUAL = 51865  # from so many tokens on a vocabulary of Whisper's knows other languages than English


def rules(config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The keys of `data.speech.Speech`. Old folders say in the config what newer ones say in the generation config.

    Where some token is nowhere named, only `lacks`, which says so: such a model can be called, but hears nothing.
    """
    said = {**config, **{key: value for key, value in generation.items() if value is not None}}

    def mark(key: str, *spellings: str) -> int | None:
        if said.get(key) is not None:
            return int(said[key])
        found = [] if tokenizer is None else [_special(tokenizer, spelling) for spelling in spellings]
        return next((number for number in found if number is not None), None)

    ids = {
        "start": mark("decoder_start_token_id", "<|startoftranscript|>"),
        "end": _first(said.get("eos_token_id")),
        "no_timestamps": mark("no_timestamps_token_id", "<|notimestamps|>"),
    }
    missing = [name for name, number in ids.items() if number is None]
    if missing:
        return {"lacks": f"neither generation_config.json nor the tokenizer says which token is {', '.join(missing)}"}
    found: dict[str, Any] = ids | {
        "previous": mark("prev_sot_token_id", "<|startofprev|>"),
        "no_speech": mark("no_speech_token_id", "<|nospeech|>", "<|nocaptions|>"),
        "suppress": [number for number in said.get("suppress_tokens") or [] if number >= 0],
        "begin_suppress": said.get("begin_suppress_tokens") or [],
        "seconds": config.get("max_source_positions", 1500) * FRAMES * HOP / RATE,
    }
    if said.get("max_initial_timestamp_index") is not None:
        found["first_within"] = said["max_initial_timestamp_index"] * TICK
    if said.get("is_multilingual", config.get("vocab_size", 0) >= MULTILINGUAL):
        several = _languages(said, tokenizer)
        if not all(several.values()):
            return {"lacks": "it knows several languages, but neither its files nor its tokenizer name their tokens"}
        found |= several
    return found


def _languages(said: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    languages = {name.strip("<|>"): number for name, number in (said.get("lang_to_id") or {}).items()}
    tasks = {name: number for name, number in (said.get("task_to_id") or {}).items() if name in TASKS}
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
