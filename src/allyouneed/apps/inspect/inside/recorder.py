"""The probe that records the values of one forward pass by name and applies changes to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from allyouneed.apps.inspect.inside.execute import forward_pass
from allyouneed.apps.inspect.inside.sites import SiteNames, join_stream, split_stream
from allyouneed.errors import UserError, near
from allyouneed.nn.batch import Batch
from allyouneed.nn.observe import MakeValue, probing
from allyouneed.runtime.process import evaluation_mode

Change = Callable[[Tensor], Tensor]
KEPT = 1 << 26  # bytes of values computed on request that are kept, besides the latest


@dataclass
class SiteEdit:
    """A change of the value at a site. `skip`: a block that is left out passes its input on."""

    site: str
    change: Change
    skip: bool = False
    reached: bool = False
    changed: bool = False

    def apply(self, value: Tensor) -> Tensor:
        self.reached = True
        new = self.change(value)
        if new.shape != value.shape:
            raise UserError(f"{self.site}: has shape {tuple(value.shape)}, its replacement {tuple(new.shape)}")
        new = new.to(value.device, value.dtype)
        self.changed = self.changed or not torch.equal(new, value)
        return new


class RecordedCall(NamedTuple):
    """How a part was called, so that it can be called again. `scope`: the blocks that were running."""

    part: Any
    x: Any
    context: Any
    scope: list[tuple[str, int]]


class Values(Mapping[str, Tensor]):
    """Recorded values by name, in the order in which they were computed. Some are computed when they are first read."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor | MakeValue] = {}
        self._made: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._values:
            raise UserError(f"no value named {name!r}{near(name, self._values)}; `names` lists them")
        found = self._values[name]
        if isinstance(found, Tensor):
            return found
        if name not in self._made:
            with torch.no_grad():
                value = found()
            while self._made and sum(one.nbytes for one in self._made.values()) + value.nbytes > KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[name] = value
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def add(self, name: str, value: Tensor | MakeValue) -> None:
        at, base = 0, name
        while name in self._values:
            at += 1
            name = f"{base}@{at}"
        self._values[name] = value

    @property
    def bytes(self) -> int:
        """Bytes of the stored values; tensors that share memory count once."""
        stored = {value.data_ptr(): value.nbytes for value in self._values.values() if isinstance(value, Tensor)}
        return sum(stored.values()) + sum(value.nbytes for value in self._made.values())

    def is_stored(self, name: str) -> bool:
        """Recorded, not computed on request."""
        return isinstance(self._values[name], Tensor)


class Recorder:
    """Records values whose name `keep` accepts (default: all), and applies `edits`."""

    def __init__(
        self, model: nn.Module, edits: Iterable[SiteEdit] = (), keep: Callable[[str], bool] | None = None
    ) -> None:
        self.names = SiteNames(model)
        self.edits: dict[str, list[SiteEdit]] = {}
        for edit in edits:
            self.edits.setdefault(edit.site, []).append(edit)
        self.keep, self.values = keep, Values()
        self.parts: dict[str, nn.Module] = {}  # the module that offered a value
        self.calls: dict[str, RecordedCall] = {}
        self.streams: dict[str, Any] = {}  # before the first block of a stack and after every block
        self.inputs: list[list[Tensor]] = []  # streams before the running blocks, for blocks that are left out

    def observe(self, part: Any, name: str, value: Any) -> Any:
        site = self.names.of(part, name)
        if site is None or not isinstance(value, Tensor):
            return value
        self.parts.setdefault(site, part)
        return self._record(site, value)

    def offer(self, part: Any, name: str, make: MakeValue) -> Tensor | None:
        site = self.names.of(part, name)
        if site is None:
            return None
        self.parts.setdefault(site, part)
        if site in self.edits:
            return self._record(site, make())
        if self.keep is None or self.keep(site):
            self.values.add(site, make)
        return None

    def show(self, part: Any, name: str, make: MakeValue) -> None:
        site = self.names.of(part, name)
        if site is None:
            return
        if site in self.edits:
            raise UserError(f"{site}: follows from other values and cannot be changed; change one of those")
        self.parts.setdefault(site, part)
        if self.keep is None or self.keep(site):
            self.values.add(site, make)

    def call(self, part: Any, x: Any, context: Any) -> None:
        if self.keep is None and (site := self.names.site_of(part)) is not None:
            self.calls.setdefault(site, RecordedCall(part, x, context, list(self.names.scope)))

    def enter_block(self, stack: Any, number: int, stream: Any) -> Any:
        block = self.names.block(stack, number)
        self.names.scope.append(block)
        site = f"{block[0]}.{block[1]}.in"
        stream = self._record_stream(site, stream, self.inputs.append)
        if self.keep is None and number == 0:
            self.streams[site] = stream
        return stream

    def leave_block(self, stack: Any, number: int, stream: Any) -> Any:
        stack_name, number = self.names.scope.pop()
        site, before = f"{stack_name}.{number}", self.inputs.pop()
        if any(edit.skip for edit in self.edits.get(site, ())):
            for edit in self.edits[site]:
                edit.reached = edit.changed = True
            stream = join_stream(stream, before)
        stream = self._record_stream(site, stream)
        if self.keep is None:
            self.streams[site] = stream
        return stream

    def rename(self, part: Any, name: str) -> None:
        self.names.renamed[id(part)] = name

    def _record_stream(self, site: str, stream: Any, then: Callable[[list[Tensor]], None] | None = None) -> Any:
        names = (site if n == 0 else f"{site}.{n + 1}" for n in range(8))
        values = [self._record(name, value) for name, value in zip(names, split_stream(stream), strict=False)]
        if then is not None:
            then(values)
        return join_stream(stream, values)

    def _record(self, site: str, value: Tensor) -> Tensor:
        for edit in self.edits.get(site, ()):
            value = value if edit.skip else edit.apply(value)
        if self.keep is None or self.keep(site):
            self.values.add(site, value.detach())
        return value

    def check(self) -> None:
        """Refuse changes that had no effect."""
        for site, edits in self.edits.items():
            for edit in edits:
                if not edit.reached:
                    raise UserError(f"{site}: no such value in this run, so nothing was changed; `names` lists them")
                if not edit.changed:
                    raise UserError(f"{site}: the change left every number as it was")


@forward_pass
def run_recorded(
    model: Any, batch: Batch, edits: Iterable[SiteEdit] = (), keep: Callable[[str], bool] | None = None
) -> tuple[Tensor, Recorder]:
    """The output of the head, and what was recorded on the way."""
    recorder = Recorder(model, edits, keep)
    with evaluation_mode(model), torch.no_grad(), probing(recorder):
        logits: Tensor = model.logits(batch)
    return logits, recorder
