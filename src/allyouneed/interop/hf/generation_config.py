"""generation_config.json <-> our decoding options. Options that would change the text and have no counterpart are
noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StrictInt, StrictStr

from allyouneed.config import Config, parse
from allyouneed.folder import REWRITING

GENERATION = "generation_config.json"
GENERATES = ("causal-lm", "chat", "dpo", "translation", *REWRITING)
PROMPTED = ("causal-lm",)  # `max_length` includes the prompt, so it does not bound the number of new tokens
# their option: (ours, the value that turns it off)
ALWAYS = {"repetition_penalty": ("repetition_penalty", 1.0), "no_repeat_ngram_size": ("no_repeat", 0)}
SAMPLING = {"temperature": ("temperature", 1.0), "top_p": ("top_p", 1.0), "min_p": ("min_p", 0.0)}
MAX_BEAMS = 1000  # more is a mistake, or an attempt to exhaust memory
TOP_K = 50  # the default of transformers for sampling
# options without a counterpart: the value that turns them off
UNSUPPORTED = {
    "diversity_penalty": 0.0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1.0,
    "num_beam_groups": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": None,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}


Length = Annotated[StrictInt, Field(ge=0, lt=1 << 31)] | None
Number = Annotated[float, Field(strict=True)] | None


class GenerationConfig(Config):
    """The options of theirs that are read here."""

    model_config = ConfigDict(extra="ignore")

    num_beams: Annotated[StrictInt, Field(ge=0, le=MAX_BEAMS)] | None = None
    top_k: Length = None
    temperature: Number = None
    top_p: Number = None
    min_p: Number = None
    length_penalty: Number = None
    early_stopping: bool | Literal["never"] | None = None
    max_new_tokens: Length = None
    min_new_tokens: Length = None
    max_length: Length = None
    min_length: Length = None
    repetition_penalty: Number = None
    no_repeat_ngram_size: Length = None
    stop_strings: StrictStr | list[StrictStr] | None = None
    bad_words_ids: list[list[StrictInt]] | None = None


def read_decoding(
    config: Mapping[str, Any], generation: Mapping[str, Any], kind: str, where: str = GENERATION
) -> tuple[dict[str, Any], list[str]]:
    """Options for `Decoding`, and notes. Older folders keep generation options in config.json."""
    if kind not in GENERATES:
        return {}, []
    options = {**config, **{key: value for key, value in generation.items() if value is not None}}
    unread = ("max_length", "min_length") if kind in PROMPTED else ()
    parse(GenerationConfig, {key: value for key, value in options.items() if key not in unread}, where)
    found = _method(options) | _lengths(options, kind)
    for key, (ours, off) in ALWAYS.items():
        if _is_on(options, key, off):
            found[ours] = options[key]
    if stop := options.get("stop_strings"):
        found["stop"] = [stop] if isinstance(stop, str) else list(stop)
    notes = [
        f"{key}: {options[key]!r} is not supported" for key, off in UNSUPPORTED.items() if _is_on(options, key, off)
    ]
    if options.get("early_stopping") == "never" and found["method"] == "beam":
        notes.append("early_stopping: 'never' is not supported; a beam ends when it is very unlikely to improve")
    banned = [words for words in options.get("bad_words_ids") or [] if len(words) > 1]  # single ones: `Template.never`
    if banned:
        notes.append(f"bad_words_ids: {len(banned)} sequences of several tokens are not banned")
    return found, notes


def _method(options: Mapping[str, Any]) -> dict[str, Any]:
    beams = options.get("num_beams") or 1
    if options.get("do_sample"):
        top_k = options.get("top_k", TOP_K)
        found: dict[str, Any] = {"method": "sample"} | ({"top_k": top_k} if top_k else {})
        for key, (ours, off) in SAMPLING.items():
            if _is_on(options, key, off):
                found[ours] = options[key]
        return found
    if beams > 1:
        penalty = options.get("length_penalty")
        found = {"method": "beam", "beam": beams, "penalty": "power"}
        found |= {"length_penalty": 1.0 if penalty is None else penalty}
        return found | ({"early": True} if options.get("early_stopping") is True else {})
    return {"method": "greedy"}


def _lengths(options: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """`max_length` counts the start token; ours counts generated tokens, forced ones included."""
    most, least = options.get("max_new_tokens"), options.get("min_new_tokens")
    if kind not in PROMPTED:
        most = (options["max_length"] - 1 if options.get("max_length") else None) if most is None else most
        least = (options.get("min_length") or 0) - 1 if least is None else least
    found = {"max_length": max(1, most), "extra": max(1, most)} if most else {}
    return found | ({"min_length": least} if least and least > 0 else {})


def _is_on(options: Mapping[str, Any], key: str, off: Any) -> bool:
    return options.get(key) is not None and options[key] != off


def write_generation(decoding: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Our decoding options as generation_config.json, as far as it has them: length penalties only as a power."""
    method = decoding.get("method", "beam")
    found: dict[str, Any] = {
        "do_sample": method == "sample",
        "num_beams": decoding.get("beam", 4) if method == "beam" else 1,
    }
    if method == "beam" and decoding.get("penalty") == "power":
        found["length_penalty"] = decoding.get("length_penalty", 0.6)
    if method == "beam" and decoding.get("early"):
        found["early_stopping"] = True
    if method == "sample":
        found |= {ours: decoding[ours] for ours, _ in SAMPLING.values() if ours in decoding}
        found["top_k"] = decoding.get("top_k", 0)
    found |= {key: decoding[ours] for key, (ours, _) in ALWAYS.items() if ours in decoding}
    if "max_length" in decoding:
        found["max_new_tokens"] = decoding["max_length"]
    return found | ({"stop_strings": list(decoding["stop"])} if decoding.get("stop") else {})
