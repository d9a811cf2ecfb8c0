"""How the next token is chosen: the options as data, and the arithmetic of one step as functions of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from allyouneed.config import Config, model_validator, parse
from allyouneed.errors import UserError
from allyouneed.infer.decoding.topk import Without, best_few, likeliest

SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class Decoding(Config):
    """Beam search as in "Attention Is All You Need" (6.1: beam 4, α = 0.6, at most 50 tokens more than the source),
    or the likeliest token each time (greedy), or one drawn by chance (sample). A beam of 1 is greedy."""

    method: Literal["beam", "greedy", "sample"] = "beam"
    beam: Annotated[int, Field(gt=0, le=1000)] = 4  # more than a thousand is a slip of the hand
    best: Annotated[int, Field(gt=0)] = 1  # how many hypotheses come back, best first; for sample: how many are drawn
    length_penalty: float = 0.6  # α: higher prefers longer hypotheses, 0 compares plain log-probabilities
    penalty: Literal["paper", "power"] = "paper"
    early: bool = False  # a beam search is over with its first `beam` finished hypotheses
    extra: Annotated[int, Field(ge=0)] = 50  # a hypothesis has at most this many tokens more than its source
    max_length: Annotated[int, Field(gt=0)] | None = None  # and at most this many in all, the end mark counted
    min_length: Annotated[int, Field(ge=0)] = 0  # and at least this many before the end mark
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_k: Annotated[int, Field(gt=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0  # what was read or said before gets less likely by it
    no_repeat: Annotated[int, Field(gt=0)] | None = None  # no run of so many tokens comes twice
    # a text that says the same so many times on end (and for 32 tokens) is stopped; None or 0: it is not
    loops: Annotated[Annotated[int, Field(gt=1)] | None, BeforeValidator(lambda n: n or None)] = 8
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_one_or_many)] = ()
    seed: Annotated[int, Field(ge=0)] = 0  # with a sentence's place in the request it decides what is drawn

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
    def settled(cls, defaults: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults with changes; a default the changed method has no use for is dropped."""
        tree = dict(defaults)
        if changes.get("method", "sample") != "sample":
            tree = {key: value for key, value in tree.items() if key not in SAMPLING}
        if changes.get("method", "beam") != "beam":
            tree.pop("early", None)
        if changes.get("method") == "greedy":
            tree.pop("best", None)
        return tree | dict(changes)

    @classmethod
    def of(cls, defaults: Mapping[str, Any], **changes: Any) -> Decoding:
        """A model's own defaults with a request's changes."""
        found = parse(cls, cls.settled(defaults, changes), "decoding")
        for option, method in (("beam", "beam"), ("seed", "sample")):
            if option in changes and found.method != method:
                raise UserError(f"decoding: {option}: only for method '{method}', this is '{found.method}'")
        return found

    @property
    def rows(self) -> int:
        """How many hypotheses of one source are followed side by side."""
        return {"beam": self.beam, "greedy": 1, "sample": self.best}[self.method]

    def limit(self, source_length: int) -> int:
        """The most tokens a hypothesis for this source may have, the end mark counted."""
        longest = max(source_length + self.extra, self.min_length, 1)
        return longest if self.max_length is None else min(longest, self.max_length)

    def more(self) -> int:
        """The most tokens a text may be continued by, the end mark counted: `max_length`, else `extra`."""
        return self.max_length or max(self.extra, self.min_length, 1)

    def normalise(self, length: int) -> float:
        """What a log-probability of `length` tokens (the end mark counted) is divided by to compare hypotheses.

        paper: ((5 + length) / 6)^α (Wu et al. 2016, eq. 14); power: length^α, as Hugging Face does.
        """
        return float(((5 + length) / 6 if self.penalty == "paper" else length) ** self.length_penalty)


class Candidates(NamedTuple):
    """Ways to go on with each source's hypotheses, likeliest first; each tensor is (sources, count)."""

    scores: Tensor  # log-probability of the whole hypothesis
    parents: Tensor  # which hypothesis it continues
    tokens: Tensor  # with which token
    gains: Tensor  # log-probability of that token


def expand(
    logits: Tensor, scores: Tensor, count: int, banned: Tensor | None = None, mass: Tensor | None = None
) -> Candidates:
    """The `count` likeliest continuations of hypotheses with these `scores` (sources, beams).

    logits (sources, beams, vocab). Where there are fewer, the rest have a score of -inf. Banned tokens get no chance,
    but keep their share of the probability. Only each beam's best few are normalised: no other could win. `mass`: what
    to normalise by (sources, beams, 1), where the logits are no longer those that make up the whole.
    """
    few = min(count, logits.shape[-1])
    if mass is None:
        tokens, gains = best_few(logits, few, banned)  # (sources, beams, few)
    else:
        with Without(logits, banned):
            best, tokens = likeliest(logits, few)
        gains = best - mass
    return among(gains, tokens, scores, count)


def among(gains: Tensor, tokens: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` likeliest of each hypothesis' best few continuations (sources, beams, few), best first."""
    few, totals = gains.shape[-1], (gains + scores[..., None]).flatten(1)
    kept, index = totals.topk(min(count, totals.shape[1]))
    found = Candidates(kept, index // few, tokens.flatten(1).gather(1, index), gains.flatten(1).gather(1, index))
    missing = count - kept.shape[1]
    if missing:
        fills = (-torch.inf, 0, 0, 0.0)
        found = Candidates(
            *(nn.functional.pad(part, (0, missing), value=v) for part, v in zip(found, fills, strict=True))
        )
    return found


def keep_likely(
    logits: Tensor, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Rule out all but the `top_k` likeliest tokens, all outside the smallest set of probability `top_p` (nucleus,
    Holtzman et al. 2020), and all less than `min_p` times as likely as the likeliest (Nguyen et al. 2024). The
    likeliest token always stays."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, index = logits.sort(descending=True)
        chances = ordered.softmax(-1)
        outside = chances.cumsum(-1) - chances >= top_p  # what stands before it is already enough
        outside[..., 0] = False
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)
    if min_p is not None:
        chances = logits.softmax(-1)
        logits = logits.masked_fill(chances < min_p * chances.amax(-1, keepdim=True), -torch.inf)
    return logits


def draw(logits: Tensor, chance: Tensor) -> Tensor:
    """Sample a token of each row (rows, vocab) by inverting the distribution at `chance` (rows,), uniform in [0, 1).

    One number decides one row, so a row's luck does not depend on who its neighbours are.
    """
    return inverted(logits.double().softmax(-1), chance)


def inverted(weights: Tensor, chance: Tensor) -> Tensor:
    """The token of each row (rows, vocab) whose share of the row's weight `chance` (rows,) falls into."""
    mass = weights.cumsum(-1)
    picked = torch.searchsorted(mass, (chance[:, None] * mass[:, -1:]), right=True)[:, 0]
    return picked.clamp(max=weights.shape[-1] - 1)
