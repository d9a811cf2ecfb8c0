"""Decoding options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field

from allyouneed.config import Config, model_validator, parse
from allyouneed.errors import UserError

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
MAX_TOKENS = 1 << 20  # of a hypothesis


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _keys_or_all(value: Any) -> Any:
    """A number of keys stands for the options; 0 and false for none."""
    if isinstance(value, bool) or value == 0:
        return {} if value else None
    return {"keys": value} if isinstance(value, int) else value


class Unlimited(Config):
    """Sources of any length, for any encoder-decoder (Unlimiformer: Bertsch et al. 2023): the source is encoded in
    overlapping chunks, and every head of the decoder attends to the nearest of all its tokens."""

    keys: Annotated[int, Field(gt=0)] = 1024
    """Source tokens that a head attends to (top-k); the paper: as many as the model was trained with."""
    chunk: Annotated[int, Field(gt=0)] | None = None
    """Tokens encoded at once; default: the model's training length, within its limit."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of a chunk that its neighbours encode too; what is at the edge of a chunk is kept from another one."""
    index: Literal["exact", "faiss"] = "exact"
    """Compare with all tokens, or search an index (faiss; above 16,384 tokens its search is approximate)."""


class Decoding(Config):
    """Beam search as in "Attention Is All You Need" (6.1: beam 4, α = 0.6, at most 50 tokens more than the source),
    greedy decoding (the likeliest token at each step), or sampling. A beam of 1 is greedy."""

    method: Literal["beam", "greedy", "sample"] = "beam"
    """Beam search, greedy decoding, or sampling."""
    beam: Annotated[int, Field(gt=0, le=1000)] = 4
    """Beam width; 1 is greedy."""
    best: Annotated[int, Field(gt=0, le=10_000)] = 1
    """Hypotheses returned, best first; for `sample`, how many are drawn."""
    length_penalty: Annotated[float, Field(ge=-20, le=20)] = 0.6
    """α: higher prefers longer hypotheses, 0 compares plain log-probabilities."""
    penalty: Literal["paper", "power"] = "paper"
    """Divide by ((5 + length) / 6)^α (the paper) or by length^α."""
    early: bool = False
    """Stop a beam search at its first `beam` finished hypotheses."""
    extra: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 50
    """At most this many tokens more than the source."""
    max_length: Annotated[int, Field(gt=0, le=MAX_TOKENS)] | None = None
    """At most this many tokens in all, the end mark included; default: no limit."""
    min_length: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """At least this many tokens before the end mark."""
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Softmax temperature of sampling; higher is more random."""
    top_k: Annotated[int, Field(gt=0)] | None = None
    """Sample from the k most likely tokens; default: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens with this probability; default: all."""
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Drop tokens less likely than this times the most likely one; default: none."""
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Above 1, tokens seen so far get less likely."""
    no_repeat: Annotated[int, Field(gt=0)] | None = None
    """No n-gram of this size occurs twice; default: allowed."""
    loops: Annotated[Annotated[int, Field(gt=1)] | None, BeforeValidator(lambda n: n or None)] = 8
    """Stop a text that repeats a part this many times in a row (and over 32 tokens); null or 0: never."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)] = ()
    """Texts at which to stop; not part of the answer."""
    iterations: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Rounds of mask-predict; default: 10. Other models do not have it."""
    unlimited: Annotated[Unlimited | None, BeforeValidator(_keys_or_all)] = None
    """Read sources of any length, attending to the nearest tokens (Unlimiformer): a number of keys, or its options;
    default: sources are at most as long as the model's limit."""
    shortlist: bool = True
    """Choose among the tokens that the model's shortlist allows for a source, if it has one; false: among all."""
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 0
    """With a text's index in the request, it decides what is sampled."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.method != "sample":
            stray = [name for name in SAMPLING if getattr(self, name) != type(self).model_fields[name].default]
            if stray:
                raise ValueError(f"{', '.join(stray)}: only for method 'sample', this is '{self.method}'")
        if self.early and self.method != "beam":
            raise ValueError(f"early: only for method 'beam', this is '{self.method}'")
        if self.method == "greedy" and self.best > 1:
            raise ValueError(f"best={self.best}: greedy finds one hypothesis; use method 'beam' or 'sample' for more")
        if self.method == "beam" and self.best > self.beam:
            raise ValueError(f"best={self.best}: a beam of {self.beam} finds at most {self.beam}; widen the beam")
        if self.max_length is not None and self.min_length > self.max_length:
            raise ValueError(f"min_length={self.min_length} is more than max_length={self.max_length}")
        return self

    @classmethod
    def merge(cls, defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults updated by changes, without defaults that do not apply to a changed method. A change of a sampling
        option or of the seed selects sampling, unless the changes name a method."""
        tree, changes = dict(defaults), dict(changes)
        if "method" not in changes and any(changes.get(name) is not None for name in (*SAMPLING, "seed")):
            changes["method"] = "sample"
        if changes.get("method", "sample") != "sample":
            tree = {key: value for key, value in tree.items() if key not in SAMPLING}
        if changes.get("method", "beam") != "beam":
            tree.pop("early", None)
        if changes.get("method") == "greedy":
            tree.pop("best", None)
        return tree | changes

    @classmethod
    def of(cls, defaults: Mapping[str, Any], **changes: Any) -> Decoding:
        """A model's defaults with a request's changes."""
        found = parse(cls, cls.merge(defaults, changes), "decoding")
        for option, method in (("beam", "beam"), ("seed", "sample")):
            if option in changes and found.method != method:
                raise UserError(f"decoding: {option}: only for method '{method}', this is '{found.method}'")
        return found

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.no_repeat is not None

    @property
    def rows(self) -> int:
        """Rows decoded for one source."""
        if self.method == "greedy":
            return 1
        return self.beam if self.method == "beam" else self.best

    def limit(self, source_length: int) -> int:
        """The most tokens of a hypothesis for this source, including the end mark."""
        longest = min(max(source_length + self.extra, self.min_length, 1), MAX_TOKENS)
        return longest if self.max_length is None else min(longest, self.max_length)

    def continuation_limit(self) -> int:
        """The most tokens that continue a prompt, including the end mark: `max_length`, else `extra`."""
        return self.max_length or max(self.extra, self.min_length, 1)

    def length_divisor(self, length: int) -> float:
        """The length penalty: what the log-probability of `length` tokens (including the end mark) is divided by.

        paper: ((5 + length) / 6)^α (Wu et al. 2016, eq. 14); power: length^α, as Hugging Face does.
        """
        return float(((5 + length) / 6 if self.penalty == "paper" else length) ** self.length_penalty)
