"""generation_config.json as our decoding options. What would change the text and is not here is noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GENERATES = ("causal-lm", "translation", "seq2seq")
PROMPTED = ("causal-lm",)  # what is given counts as said: a length in all says nothing about what is new
# their option: (ours, what means that it is off)
ALWAYS = {"repetition_penalty": ("repetition_penalty", 1.0), "no_repeat_ngram_size": ("no_repeat", 0)}
SAMPLING = {"temperature": ("temperature", 1.0), "top_p": ("top_p", 1.0), "min_p": ("min_p", 0.0)}
WIDEST = 1000  # beams: more are a mistake, or meant to fill the memory
TOP_K = 50  # theirs, where a sampling model does not say
# options that are not here, and what means that they are off
LACKING = {
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


def decoding_of(
    config: Mapping[str, Any], generation: Mapping[str, Any], kind: str
) -> tuple[dict[str, Any], list[str]]:
    """Options for `Decoding`, and notes. Older folders say them in config.json."""
    if kind not in GENERATES:
        return {}, []
    said = {**config, **{key: value for key, value in generation.items() if value is not None}}
    found = _method(said) | _lengths(said, kind)
    for key, (ours, off) in ALWAYS.items():
        if said.get(key) is not None and said[key] != off:
            found[ours] = said[key]
    if stop := said.get("stop_strings"):
        found["stop"] = [stop] if isinstance(stop, str) else list(stop)
    notes = [f"{key}: {said[key]!r} is not done here" for key, off in LACKING.items() if _on(said, key, off)]
    if said.get("early_stopping") == "never" and found["method"] == "beam":
        notes.append("early_stopping: 'never' is not done here; a beam ends when it is very unlikely to get better")
    banned = [words for words in said.get("bad_words_ids") or [] if len(words) > 1]  # single ones are: marks.never
    if banned:
        notes.append(f"bad_words_ids: {len(banned)} banned sequences are not banned here")
    return found, notes


def _method(said: Mapping[str, Any]) -> dict[str, Any]:
    beams = said.get("num_beams") or 1
    if not isinstance(beams, int) or not 0 < beams <= WIDEST:
        raise ValueError(f"num_beams: {beams!r} is no width of a beam")
    if said.get("do_sample"):
        top_k = said.get("top_k", TOP_K)
        found: dict[str, Any] = {"method": "sample"} | ({"top_k": top_k} if top_k else {})
        for key, (ours, off) in SAMPLING.items():
            if said.get(key) is not None and said[key] != off:
                found[ours] = said[key]
        return found
    if beams > 1:
        penalty = said.get("length_penalty")
        found = {"method": "beam", "beam": beams, "penalty": "power"}
        found |= {"length_penalty": 1.0 if penalty is None else penalty}
        return found | ({"early": True} if said.get("early_stopping") is True else {})
    return {"method": "greedy"}


def _lengths(said: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Theirs in all count the start token; ours count what is said, a forced beginning included."""
    most, least = said.get("max_new_tokens"), said.get("min_new_tokens")
    if kind not in PROMPTED:
        most = (said["max_length"] - 1 if said.get("max_length") else None) if most is None else most
        least = (said.get("min_length") or 0) - 1 if least is None else least
    found = {"max_length": max(1, most), "extra": max(1, most)} if most else {}
    return found | ({"min_length": least} if least and least > 0 else {})


def _on(said: Mapping[str, Any], key: str, off: Any) -> bool:
    return said.get(key) is not None and said[key] != off


def generation_of(decoding: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Our decoding options as theirs, as far as they have them: a length penalty only as a power of the length."""
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
