"""Decoding rules as pure functions: which tokens are banned, how one is chosen, how beams are expanded and when a beam
search is over.

Host search (beam.py, sample.py), device search (cuda_graph/device_search.py) and speculative decoding apply the same
functions. Fused versions for single steps: kernels/triton/topk.py on a GPU, `topk.greedy_tokens` on CPU.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.sampling import invert_cdf, token_probs
from allyouneed.infer.decoding.topk import MaskedColumns, argmax, topk, topk_log_probs

if TYPE_CHECKING:
    from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState

Short = Literal["all", "some", "none"]


class NonFiniteError(UserError):
    """The logits of a request are not finite, so that there is no next token. A search knows by the log-probability of
    the token it chooses, which is NaN then."""

    def __init__(self) -> None:
        super().__init__(
            "the model computed numbers that are not finite (NaN or infinity): its weights are damaged, or its values "
            "too large for their dtype (--dtype float32 or bfloat16 holds larger ones than float16)"
        )


# --- banned tokens --------------------------------------------------------------------------------------------------


def find_short(lengths: Iterable[int], min_tokens: int) -> Short:
    """Which texts have fewer than `min_tokens`, so that they may not end yet."""
    if min_tokens <= 0:
        return "none"
    found = {length < min_tokens for length in lengths}
    return "some" if len(found) > 1 else "all" if True in found else "none"


class TokenRules:
    """The token ids of a `DecodingSpec` on one device: which end a text, which are never generated."""

    def __init__(self, spec: DecodingSpec, device: torch.device) -> None:
        self.eos, self.eos_ids = spec.eos, spec.eos_ids
        self.eos_tokens = torch.tensor(sorted(self.eos_ids), device=device)
        banned = [token for token in spec.forbidden if token not in self.eos_ids]
        self.banned = torch.tensor(banned, dtype=torch.long, device=device) if banned else None
        # eos is banned as well as long as a text is too short to end
        self.banned_while_short = self.eos_tokens if self.banned is None else torch.cat([self.banned, self.eos_tokens])
        self.min_tokens, self.device = spec.min_new_tokens, device
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}  # by vocabulary size

    def ban_table(self, vocab: int) -> Tensor:
        """(2, vocab): 0, or -inf where a token is banned; row 0 for texts that may end, row 1 for those too short."""
        return self._made(vocab)[0]

    def eos_only(self, vocab: int) -> Tensor:
        """(vocab,) log-probabilities: 0 for eos, -inf for every other token."""
        return self._made(vocab)[1]

    def _made(self, vocab: int) -> tuple[Tensor, Tensor]:
        if vocab not in self._tables:
            table, only = torch.zeros(2, vocab), torch.full((vocab,), -torch.inf)
            if self.banned is not None:
                table[:, self.banned.cpu()] = -torch.inf
            table[1, self.eos_tokens.cpu()] = -torch.inf
            only[self.eos] = 0
            self._tables[vocab] = table.to(self.device), only.to(self.device)
        return self._tables[vocab]

    def is_eos(self, tokens: Tensor) -> Tensor:
        return tokens == self.eos if len(self.eos_ids) == 1 else torch.isin(tokens, self.eos_tokens)

    def ban_tokens(self, logits: Tensor, lengths: Tensor, short: Short = "some") -> Tensor:
        """Logits (…, vocab) with banned tokens at -inf; `lengths` (…): tokens generated so far."""
        table = self.ban_table(logits.shape[-1])
        if self.min_tokens <= 0 or short == "none":
            return logits if self.banned is None else logits + table[0]
        return logits + (table[1] if short == "all" else table[(lengths < self.min_tokens).long()])


# --- one token per row ----------------------------------------------------------------------------------------------


def choose_tokens(logits: Tensor, options: Decoding, uniforms: Tensor | None) -> Tensor:
    """(rows, vocab) to (rows,): the likeliest token, or the one that `uniforms` (rows,) draw."""
    return argmax(logits) if uniforms is None else invert_cdf(token_probs(logits, options), uniforms)


def force_eos_at_limit(
    tokens: Tensor, log_probs: Tensor, lengths: Tensor, limits: Tensor, eos: int
) -> tuple[Tensor, Tensor]:
    """All (rows,): the token that reaches a row's limit becomes eos, with log-probability 0, but NaN stays."""
    last = limits == lengths + 1
    return tokens.masked_fill(last, eos), log_probs.masked_fill(last & ~log_probs.isnan(), 0.0)


# --- beams ----------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """Continuations of each source's hypotheses, likeliest first; each tensor is (sources, count)."""

    scores: Tensor  # log-probability of the whole hypothesis
    parents: Tensor  # the beam it continues
    tokens: Tensor  # by this token
    log_probs: Tensor  # of that token


class BeamStep(NamedTuple):
    """`finished` (sources, beams): which of the first candidates are finished hypotheses. The others (sources, beams):
    the hypotheses that continue."""

    finished: Tensor
    scores: Tensor
    parents: Tensor
    tokens: Tensor
    log_probs: Tensor


def expand_beams(
    logits: Tensor, scores: Tensor, count: int, banned: Tensor | None = None, normaliser: Tensor | None = None
) -> Candidates:
    """The `count` likeliest continuations of hypotheses with these `scores` (sources, beams).

    logits (sources, beams, vocab). Where there are fewer, the rest have a score of -inf. Banned tokens are never
    chosen, but keep their share of the probability. Only each beam's best few are normalised: no other can be among
    the best. `normaliser` (sources, beams, 1): log Σ exp to divide by, where it is not that of the logits.
    """
    few = min(count, logits.shape[-1])
    if normaliser is None:
        tokens, log_probs = topk_log_probs(logits, few, banned)  # (sources, beams, few)
    else:
        with MaskedColumns(logits, banned):
            best, tokens = topk(logits, few)
        log_probs = best - normaliser
    return best_candidates(log_probs, tokens, scores, count)


def best_candidates(log_probs: Tensor, tokens: Tensor, scores: Tensor, count: int) -> Candidates:
    """The `count` best of each beam's few continuations (sources, beams, few), best first."""
    few, totals = log_probs.shape[-1], (log_probs + scores[..., None]).flatten(1)
    kept, index = totals.topk(min(count, totals.shape[1]))
    found = Candidates(kept, index // few, tokens.flatten(1).gather(1, index), log_probs.flatten(1).gather(1, index))
    missing = count - kept.shape[1]
    if missing:
        fills = (-torch.inf, 0, 0, 0.0)
        found = Candidates(
            *(nn.functional.pad(part, (0, missing), value=v) for part, v in zip(found, fills, strict=True))
        )
    return found


def beam_candidates(
    logits: Tensor,
    scores: Tensor,
    count: int,
    lengths: Tensor,
    limits: Tensor,
    rules: TokenRules,
    force_eos: bool,
    short: Short,
    normalised: bool = False,
) -> Candidates:
    """`expand_beams` under the rules, by logits (sources, beams, vocab) of sources with `lengths` and `limits`
    (sources,). `force_eos`: a hypothesis that reaches its limit ends with eos, at log-probability 0. `normalised`: the
    logits are log-probabilities."""
    normaliser, banned = None, rules.banned
    if force_eos:
        log_probs = logits if normalised else logits.log_softmax(-1)
        only = rules.eos_only(logits.shape[-1])
        logits = torch.where((limits == lengths + 1)[:, None, None], only, log_probs)
    if normalised or force_eos:
        normaliser = logits.new_zeros(len(logits), 1, 1)
    if short == "all":
        banned = rules.banned_while_short
    elif short == "some":  # eos is not chosen, but keeps its share of the probability
        normaliser = logits.logsumexp(-1, keepdim=True) if normaliser is None else normaliser
        logits, banned = rules.ban_tokens(logits, lengths[:, None].expand(logits.shape[:2])), None
    return expand_beams(logits, scores, count, banned, normaliser)


def beam_step(candidates: Candidates, ended: Tensor, beams: int) -> BeamStep:
    """Choose among twice as many candidates as beams: `ended` ones (sources, candidates) in the first half finish, the
    best of the others continue."""
    finished = (ended & candidates.scores.isfinite())[:, :beams]
    scores, picked = candidates.scores.masked_fill(ended, -torch.inf).topk(beams)
    parents, tokens, log_probs = (part.gather(1, picked) for part in candidates[1:])
    return BeamStep(finished, scores, parents, tokens, log_probs)


def can_improve(state: RequestState, spec: DecodingSpec, best: float, length: int) -> bool:
    """Whether a running hypothesis may still be among the `beam` best. `best`: the highest log-probability of those
    that continue, after `length` tokens, scored as if it ended here (Hugging Face's `early_stopping=False`)."""
    if len(state.hypotheses) < spec.decoding.beam:
        return best > float("-inf")
    if spec.decoding.early:
        return False
    return best / spec.decoding.length_divisor(length + spec.counted_prompt) > state.hypotheses[-1].score


def add_finished(state: RequestState, hypothesis: Hypothesis, beams: int) -> None:
    """Keep the best `beams` finished hypotheses, best first."""
    insort(state.hypotheses, hypothesis, key=lambda h: -h.score)
    del state.hypotheses[beams:]


def close_request(state: RequestState, best: int, running: Iterable[Hypothesis] = ()) -> None:
    """Mark a request as done, with its `best` hypotheses; where none is finished, with the `running` ones."""
    if not state.hypotheses:
        state.hypotheses = sorted(running, key=lambda h: -h.score)
    del state.hypotheses[best:]
    state.done = not state.cancelled
