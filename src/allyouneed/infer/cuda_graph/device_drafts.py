"""Drafts (speculative/drafts.py) on the device: they propose tokens of fixed shape without the host, so that a round of
speculative decoding is one captured graph (speculation.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.sampling import invert_cdf, token_probs
from allyouneed.infer.decoding.topk import argmax
from allyouneed.infer.request import Request
from allyouneed.infer.speculative.drafts import MAX_NGRAM, MIN_NGRAM, Draft, DraftModel, PromptLookup, fit_requests
from allyouneed.nn.batch import to_device
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.multi_token import accept, keep
from allyouneed.runtime.cuda.static_cache import StaticStates

if TYPE_CHECKING:
    from allyouneed.infer.cuda_graph.speculation import DeviceSpeculation


class Proposal(NamedTuple):
    """Draft tokens (rows, ahead); the first `counts` (rows,) are proposed; `probs` (rows, ahead, vocab): the
    distributions they were drawn from; None: they were not drawn."""

    tokens: Tensor
    counts: Tensor
    probs: Tensor | None = None


class DeviceDrafter(ABC):
    @abstractmethod
    def propose(self, search: DeviceSpeculation) -> Proposal:
        """The next tokens of every row, without the host."""

    @abstractmethod
    def assign(self, slots: Sequence[int], requests: Sequence[RequestState]) -> None:
        """New requests in these slots."""

    def accept(self, counts: Tensor) -> None:
        """`counts` (rows,) tokens were appended to each row since `propose`."""
        return

    def reset(self) -> None:
        """Forget the tokens of a warm-up."""
        return


def device_drafter(draft: Draft, search: DeviceSpeculation) -> DeviceDrafter:
    if isinstance(draft, DraftModel):
        return DeviceModelDrafter(draft, search)
    assert isinstance(draft, PromptLookup)
    return DeviceLookup(draft, search)


class DeviceLookup(DeviceDrafter):
    """`LookupIndex.continuation` of every row."""

    def __init__(self, draft: PromptLookup, search: DeviceSpeculation) -> None:
        states, self.ahead = search.states, draft.ahead
        size = (states.rows, states.source_capacity if draft.source else 0)
        self.slots, self.group = states.slot_count, states.group
        self.sources = torch.zeros(size, dtype=torch.long, device=states.device)
        self.source_lengths = torch.zeros(states.rows, dtype=torch.long, device=states.device)

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState]) -> None:
        size, device = self.sources.shape[1], self.sources.device
        if not size:
            return
        tokens, lengths = torch.zeros(len(slots), size, dtype=torch.long), torch.zeros(len(slots), dtype=torch.long)
        for number, state in enumerate(requests):
            source = list(state.request.source or ())
            tokens[number, : len(source)], lengths[number] = torch.tensor(source, dtype=torch.long), len(source)
        at = to_device(torch.tensor(list(slots)), device)
        self.sources.view(self.slots, self.group, size)[at] = to_device(tokens, device)[:, None]
        self.source_lengths.view(self.slots, self.group)[at] = to_device(lengths, device)[:, None]

    def propose(self, search: DeviceSpeculation) -> Proposal:
        texts = search.token_history.tokens
        count = (search.token_history.prompts + search.row_lengths).clamp(
            max=texts.shape[1]
        )  # rows go on after the end
        in_text, in_source = (torch.zeros_like(count) for _ in range(2))  # where a continuation begins; 0: not found
        for size in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
            last = last_tokens(texts, count, size)
            in_text = torch.where(in_text + in_source > 0, in_text, find_ngram(texts, count, last, count >= size))
            if self.sources.shape[1] >= size:
                at = find_ngram(self.sources, self.source_lengths, last, count >= size)
                in_source = torch.where(in_text + in_source > 0, in_source, at)
        steps = torch.arange(self.ahead, device=count.device)
        period = (count - in_text).clamp(min=1)[:, None]
        tokens = texts.gather(1, in_text[:, None] + steps % period)  # a repetition up to here continues
        found = torch.where(in_text > 0, self.ahead, 0)
        if self.sources.shape[1]:
            at = torch.where(in_source > 0, in_source, self._nearest(last_tokens(texts, count, 1), count))
            places = (at[:, None] + steps).clamp(max=self.sources.shape[1] - 1)
            tokens = torch.where(in_text[:, None] > 0, tokens, self.sources.gather(1, places))
            found = torch.where((in_text == 0) & (at > 0), (self.source_lengths - at).clamp(max=self.ahead), found)
        return Proposal(tokens, torch.minimum(found, search.wanted()))

    def _nearest(self, last: Tensor, count: Tensor) -> Tensor:
        """The place after the last token (rows, 1) in the source, nearest to the current position; 0: it does not
        occur."""
        places = torch.arange(self.sources.shape[1], device=count.device)[None]
        found = (self.sources == last) & (places < self.source_lengths[:, None] - 1)
        distance = (places + 1 - count[:, None]).abs() * places.shape[1] + places  # of equally near ones the first
        nearest = distance.masked_fill(~found, torch.iinfo(torch.long).max).argmin(1)
        return torch.where(found.any(1), nearest + 1, 0)


def last_tokens(texts: Tensor, counts: Tensor, size: int) -> Tensor:
    """The last `size` of the first `counts` (rows,) tokens of each text: (rows, size)."""
    places = counts[:, None] - size + torch.arange(size, device=texts.device)
    return texts.gather(1, places.clamp(min=0, max=texts.shape[1] - 1))


def find_ngram(texts: Tensor, counts: Tensor, ngram: Tensor, known: Tensor) -> Tensor:
    """The end of the last occurrence of an n-gram (rows, n) in texts (rows, size) that has a token after it; 0: there
    is none, or it is not `known` (rows,)."""
    size = ngram.shape[1]
    ends = torch.arange(size, texts.shape[1] + 1, device=texts.device)
    same = (texts.unfold(1, size, 1) == ngram[:, None]).all(-1)
    return (ends * (same & (ends < counts[:, None]) & known[:, None])).amax(1)


class DeviceModelDrafter(DeviceDrafter):
    """A smaller model with states of its own. It reads one token more than it proposes, so that its states hold every
    token that may be accepted."""

    def __init__(self, draft: DraftModel, search: DeviceSpeculation) -> None:
        theirs, self.runner, self.ahead = search.states, draft.runner, draft.ahead
        sizes = (theirs.slot_count, theirs.group, theirs.capacity, theirs.source_capacity)
        self.states = StaticStates(draft.runner.model, *sizes, tokens=draft.ahead + 1)
        self.step = DecodeStep(draft.runner.model, self.states)
        self.before = self.states.device_lengths
        self.fits = torch.ones(theirs.rows, dtype=torch.long, device=theirs.device)

    def assign(self, slots: Sequence[int], requests: Sequence[RequestState]) -> None:
        runner, device = self.runner, self.states.device
        self.states.refresh()
        some, fits = fit_requests(runner, [state.request for state in requests])
        for single in (True, False):  # there is no token to read before the last one, or there are some
            numbers = [number for number, request in enumerate(some) if (len(request.prompt) == 1) == single]
            if numbers:
                self._load([slots[n] for n in numbers], [some[n] for n in numbers], single)
        at = to_device(torch.tensor(list(slots)), device)
        fit = to_device(torch.tensor(fits, dtype=torch.long), device)
        self.fits.view(self.states.slot_count, -1)[at] = fit[:, None]

    def _load(self, slots: Sequence[int], requests: Sequence[Request], single: bool) -> None:
        runner, read = self.runner, [request.prompt[:-1] for request in requests]
        past = runner.start(requests, runner.model)
        if not single:
            runner.prefill_chunk(past, read, runner.model, runner.encode_media(requests))
        slot, count = to_device(torch.tensor([list(slots), list(map(len, read))]), self.states.device)
        self.states.load(slot, past, count)

    def propose(self, search: DeviceSpeculation) -> Proposal:
        self.before, lengths, history = self.states.device_lengths.clone(), search.row_lengths, search.token_history
        token, tokens, probs = search.last_tokens, list[Tensor](), list[Tensor]()
        for number in range(self.ahead + 1):
            logits = self.step(token).float()
            keep(self.states.layers, number, self.ahead + 1)
            if number == self.ahead:
                break
            logits = nn.functional.pad(logits, (0, search.vocab - logits.shape[1]), value=-torch.inf)  # or cut
            logits = search.allowed(logits, lengths + number)
            if search.uniforms is None:
                token = argmax(logits)
            else:
                probs.append(token_probs(logits, search.options))
                token = invert_cdf(probs[-1], search.uniforms_of(lengths + number)[:, 0])
            tokens.append(token)
            if search.options.has_penalties:
                history.append(token, lengths + number)
        counts = search.wanted() * self.fits
        if self.runner.limit is not None:  # positions of its model; the last token is not read
            room = self.runner.limit + 1 - history.prompts - lengths
            counts = torch.minimum(counts, room.clamp(min=0))
        return Proposal(torch.stack(tokens, 1), counts, torch.stack(probs, 1) if probs else None)

    def accept(self, counts: Tensor) -> None:
        accept(self.states, self.before, counts)

    def reset(self) -> None:
        self.states.device_lengths.zero_()
