"""Synchronous bidirectional beam search (Zhou et al. 2019, 3.3): half of the beams write from left to right, half from
right to left; hypotheses of equal rank attend to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, Hypothesis, RequestState, make_hypothesis
from allyouneed.infer.decoding.rules import (
    TokenRules,
    add_finished,
    beam_candidates,
    beam_step,
    can_improve,
    find_short,
)
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.infer.whole_targets.engine import TargetEngine
from allyouneed.nn.batch import Rows
from allyouneed.nn.states.base import States


class SynchronousEngine(TargetEngine):
    method = "synchronous-translation"

    def targets(self, sources: list[Sequence[int]], spec: DecodingSpec) -> list[list[Hypothesis]]:
        half = 1 if spec.decoding.method == "greedy" else max(1, spec.decoding.beam // 2)
        spec = replace(spec, decoding=spec.decoding.model_copy(update={"method": "beam", "beam": half, "best": 1}))
        search = SynchronousSearch(self.runner, sources, spec)
        while search.active:
            search.step()
        found = [join(ahead.hypotheses, back.hypotheses) for ahead, back in zip(*search.requests, strict=True)]
        return found


def join(ahead: list[Hypothesis], back: list[Hypothesis]) -> list[Hypothesis]:
    """Hypotheses of both directions, left to right, best first; of equal ones the better."""
    turned = [
        replace(
            one,
            tokens=one.tokens[::-1],
            log_probs=[*one.log_probs[: len(one.tokens)][::-1], *one.log_probs[len(one.tokens) :]],
        )
        for one in back
    ]
    best = sorted([*ahead, *turned], key=lambda one: (-one.finished, -one.score))
    texts = dict.fromkeys(tuple(one.tokens) for one in best)
    return [next(one for one in best if tuple(one.tokens) == text) for text in texts]


class SynchronousSearch:
    """Rows are ordered by direction, source, beam: all of them have the same length."""

    def __init__(self, runner: ModelRunner, sources: list[Sequence[int]], spec: DecodingSpec) -> None:
        self.spec, self.half = spec, spec.decoding.beam
        limits = [spec.decoding.limit(len(source)) for source in sources]
        limits = limits if runner.limit is None else [min(one, runner.limit) for one in limits]
        # left to right and right to left, of each source
        self.requests = [
            [RequestState(Request([begin], limit, (0,)), spec, limit) for limit in limits]
            for begin in (runner.bos, runner.eos)
        ]
        self.active = list(range(len(sources)))
        self.decoder = runner.decoder
        self.states: States = self.decoder.start(Rows.of(sources, runner.pad).to(runner.device))
        self.states.select([*self.active, *self.active])
        self.states.repeat_rows(self.half)
        rows = 2 * len(sources)
        self.newest = torch.tensor([runner.bos, runner.eos], device=runner.device).repeat_interleave(
            rows * self.half // 2
        )
        self.scores = torch.full((rows, self.half), -torch.inf, device=runner.device)
        self.scores[:, 0] = 0.0
        self.tokens = torch.empty(rows, self.half, 0, dtype=torch.long, device=runner.device)
        self.log_probs = torch.empty(rows, self.half, 0, device=runner.device)
        self.rules = TokenRules(spec, runner.device)

    def step(self) -> None:
        hidden = self.decoder.advance(Rows(self.newest[:, None], mirrored=True), self.states)[:, -1]
        logits = self.decoder.head(hidden).float().unflatten(0, (-1, self.half))
        states = [direction[number] for direction in self.requests for number in self.active]
        done = self.tokens.shape[2]
        lengths = torch.full((len(states),), done, device=logits.device)
        limits = torch.tensor([state.limit for state in states], device=logits.device)
        short = find_short([done], self.rules.min_tokens)
        found = beam_candidates(
            logits, self.scores, 2 * self.half, lengths, limits, self.rules, self.spec.force_eos, short
        )
        ended = self.rules.is_eos(found.tokens) | (limits <= lengths + 1)[:, None]
        step = beam_step(found, ended, self.half)
        for row, rank in step.finished.nonzero().tolist():
            if not states[row].done:
                self._finish(states[row], row, rank, found)
        for state, best in zip(states, step.scores[:, 0].tolist(), strict=True):
            state.done = state.done or done + 1 >= state.limit or not can_improve(state, self.spec, best, done + 1)
        self._continue(step.parents, step.tokens, step.log_probs, step.scores)

    def _finish(self, state: RequestState, row: int, rank: int, found: Sequence[Tensor]) -> None:
        score, parent, token, log_prob = (part[row, rank].item() for part in found)
        tokens = [*self.tokens[row, int(parent)].tolist(), int(token)]
        log_probs = [*self.log_probs[row, int(parent)].tolist(), log_prob]
        add_finished(state, make_hypothesis(self.spec, state, tokens, log_probs, score), self.half)

    def _continue(self, parents: Tensor, tokens: Tensor, log_probs: Tensor, scores: Tensor) -> None:
        """Go on with these beams (rows, half) of the sources that are not done in both directions."""
        count, both = len(self.active), list(zip(*self.requests, strict=True))
        left = [n for n, number in enumerate(self.active) if not all(state.done for state in both[number])]
        rows = [direction * count + n for direction in (0, 1) for n in left]
        kept = torch.tensor(rows, dtype=torch.long, device=parents.device)
        self.active = [self.active[n] for n in left]
        if not left:
            return
        parents = parents[kept]
        order = kept[:, None] * self.half + parents  # (rows, half)
        self.states.select(order.flatten().tolist())
        past = parents[..., None].expand(-1, -1, self.tokens.shape[2])
        self.tokens = torch.cat([self.tokens[kept].gather(1, past), tokens[kept][..., None]], -1)
        self.log_probs = torch.cat([self.log_probs[kept].gather(1, past), log_probs[kept][..., None]], -1)
        self.newest, self.scores = tokens[kept].flatten(), scores[kept]
