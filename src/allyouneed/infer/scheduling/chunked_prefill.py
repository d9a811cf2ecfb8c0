"""Chunked prefill: sources are encoded together and prompts are read a chunk per step, as far as the scheduler's budget
goes. A request whose prompt has been read gets its first token at once and joins a running batch, or a slot of the
captured graphs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from allyouneed.infer.decoding.base import DecodingSpec, RequestState
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.prefill import PrefillBatch, share_rows
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.infer.scheduling import SchedulerProtocol
from allyouneed.nn.states.base import States
from allyouneed.nn.states.paged import PagedStates

if TYPE_CHECKING:
    from allyouneed.infer.block_manager import BlockManager
    from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
    from allyouneed.infer.cuda_graph.scheduler_slots import SchedulerSlots

ReadPrompt = tuple[int, RequestState]  # a request whose prompt has been read, and its row in the prefill batch


class ChunkedPrefill:
    """`batches`: prompts that are being read. `whole`: prompts are read whole (offline). `captured`: reads chunks as
    captured graphs."""

    def __init__(
        self,
        scheduler: SchedulerProtocol,
        runner: ModelRunner,
        whole: bool = False,
        blocks: BlockManager | None = None,
        slots: SchedulerSlots | None = None,
        captured: PagedPrefill | None = None,
    ) -> None:
        self.scheduler, self.runner, self.whole = scheduler, runner, whole
        self.blocks, self.slots, self.captured = blocks, slots, captured
        self.batches: list[PrefillBatch] = []

    def start(self, requests: list[RequestState]) -> None:
        """Encode sources together; no prompt token is read yet, but for cached prefixes."""
        if len({state.request.source is None for state in requests}) > 1:  # the model takes one, or it does not
            for kind in (True, False):
                self.start([state for state in requests if (state.request.source is None) is kind])
            return
        try:
            model, rows = self.runner.decoder, share_rows(requests)
            distinct = [row[0].request for row in rows]
            states, media = self.runner.start(distinct, model), self.runner.encode_media(distinct)
            if self.blocks is not None:
                states = self.blocks.start(states, [row[0] for row in rows])
            self.batches.append(PrefillBatch(model, states, rows, list(states.lengths), media))
        except Exception as error:
            self.scheduler.fail(requests, error)

    def step(self) -> None:
        """Read a chunk of every unread prompt; all chunks together are no larger than the budget."""
        share = max(1, self.scheduler.budget // len(self.batches))
        for batch in list(self.batches):
            rows = batch.rows
            try:
                batch.drop_cancelled()
                if batch.rows:
                    self.scheduler.with_blocks(partial(self._read_chunk, batch, max(1, share // len(batch.rows))))
            except Exception as error:  # its requests that no running batch has taken over have failed
                self.batches.remove(batch)
                self.scheduler.fail_unheld([state for row in rows for state in row], error)
        self.batches = [batch for batch in self.batches if batch.rows]

    def _read_chunk(self, batch: PrefillBatch, size: int) -> None:
        runner, prompts = self.runner, batch.prompts
        # chunks change the last bits, and cut tokens that attend to each other apart
        if self.whole or runner.bidirectional_prompt or runner.exact:
            size = max(map(len, prompts))
        chunks = [prompt[at : at + size] for prompt, at in zip(prompts, batch.read, strict=True)]
        if self.blocks is not None:
            self.blocks.make_room(batch.states, list(map(len, chunks)))
        last = None
        if self.captured is not None and not batch.media and isinstance(batch.states, PagedStates):
            last = self.captured.read(batch.states, chunks)
        if last is None:  # captured graphs cannot read this batch
            last = runner.prefill_chunk(batch.states, chunks, batch.model, batch.media)
        batch.read = [at + len(chunk) for at, chunk in zip(batch.read, chunks, strict=True)]
        left = list[int]()
        done: dict[int, list[ReadPrompt]] = {}  # a running batch needs equally many rows for each request
        for n, row in enumerate(batch.rows):
            if batch.read[n] < len(prompts[n]):
                left.append(n)
                continue
            for state in row:  # in exact mode each runs alone
                done.setdefault(len(done) if runner.exact else state.spec.rows, []).append((n, state))
        for _, some in sorted(done.items()):
            try:
                self._decode(batch, some, last)
            except Exception as error:
                self._fail_read(some, error)
        batch.keep(left)

    def _fail_read(self, some: list[ReadPrompt], error: Exception) -> None:
        """Fail the requests that have not begun to decode."""
        here = {state for running in self.scheduler.running for state in running.requests}
        here |= set(self.slots.requests) if self.slots is not None else set()
        self.scheduler.fail([state for _, state in some if state not in here], error)

    def _decode(self, batch: PrefillBatch, some: list[ReadPrompt], last: Tensor) -> None:
        """Decode the first token of these requests, whose prompts have been read, and let them join the others."""
        if self.slots is not None:
            given, some = some, self.slots.add(batch.states, some)
            if self.blocks is not None:
                plain = set(some)
                self.blocks.hold_prefixes(batch.states, [one for one in given if one not in plain])
        if not some:
            return
        if self.blocks is not None:
            self.blocks.keep_prefixes(batch.states, some)
        groups: dict[DecodingSpec, tuple[list[int], list[RequestState]]] = {}
        kinds: dict[int, DecodingSpec] = {}  # by identity: requests of one call share their specification
        for row, state in some:
            if id(state.spec) not in kinds:
                kinds[id(state.spec)] = state.spec.batch_key
            rows, requests = groups.setdefault(kinds[id(state.spec)], ([], []))
            rows.append(row)
            requests.append(state)
        for kind in list(groups):
            if kind.draft is None:
                continue
            from allyouneed.infer.speculative.decode import SpeculativeDecoder

            rows, requests = groups.pop(kind)
            try:
                speculation = SpeculativeDecoder(batch.model, *self._take(batch, rows, last), requests)
                if speculation.active:
                    self.scheduler.running.append(speculation)
            except Exception as error:
                self.scheduler.fail(requests, error)
        if groups:
            taken, chosen = list[int](), list[tuple[DecodingSpec, list[RequestState]]]()
            for kind, (rows, requests) in groups.items():
                taken += rows
                chosen.append((kind, requests))
            states, last = self._take(batch, taken, last)
            running = RunningBatch(batch.model, states, chosen, self.runner.limit)
            running.append_tokens(last)
            if running.active:
                running.states.ungroup()
                self.scheduler.join(running)

    def _take(self, batch: PrefillBatch, rows: list[int], last: Tensor) -> tuple[States, Tensor]:
        """States and last hidden states of these rows, one for each request: the batch's own if they are all of it and
        no other request needs them, else copies."""
        batch.handed_over = rows == list(range(sum(map(len, batch.rows))))
        return (batch.states, last) if batch.handed_over else (batch.states.copy_rows(rows), last[rows])
