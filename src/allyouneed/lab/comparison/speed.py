"""What a model costs beside its quality: seconds of an update, decoded tokens per second with much read before, bytes
of state, memory and energy. Models take turns, as the speed of a machine drifts; the best turn of each counts."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from allyouneed.nn.batch import Rows
from allyouneed.nn.mixers.attention.infini import CompressiveMemory
from allyouneed.nn.mixers.attention.lsh import HashedKeyValues
from allyouneed.nn.mixers.convolution import RecentTokens
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.states.nested import NestedStates
from allyouneed.nn.states.recurrent import Recurrent
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.runtime.cpu.executor import cpu_executor
from allyouneed.runtime.process import inference

CONTEXTS = (1024, 32768)
GIVEN = 16  # tokens that are read before the state is made to look longer
TURNS, STEPS = 3, 12
RAPL = Path("/sys/class/powercap/intel-rapl:0/energy_uj")


def machine() -> str:
    """The device that is measured, in one line."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        name = platform.processor()
    threads = torch.get_num_threads()
    return f"{name or 'CPU'}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}"


class DecodingRow:
    """A model without a source that has read `context` tokens, and decodes one row."""

    def __init__(self, model: Any, context: int) -> None:
        self.decoder = cpu_executor(model)
        device = next(model.parameters()).device
        with inference(model):
            self.states = self.decoder.start(1)
            tokens = torch.randint(
                3, model.config.vocabs.target, (1, GIVEN), generator=torch.Generator().manual_seed(0)
            )
            self.decoder.advance(Rows(tokens.to(device)), self.states)
            for layer in self.states.layers:
                for state in layer.values():
                    pretend(state, context)
        self.states.lengths = [context]
        self.tokens = torch.full((1, 1), 3, device=device)

    def turn(self, steps: int = STEPS, clock: Callable[[], float] = time.perf_counter) -> float:
        """Seconds of a step, from token to token."""
        with inference():
            began = clock()
            for _ in range(steps):
                hidden = self.decoder.advance(Rows(self.tokens), self.states)[:, -1]
                self.tokens = self.decoder.head(hidden).argmax(-1, keepdim=True)
            self.tokens.sum().item()  # waits for a GPU
        return (clock() - began) / steps


def pretend(state: Any, context: int) -> None:
    """Make the state look as if the rows had read `context` tokens: its caches are filled with random numbers."""
    held: Any = state
    if isinstance(state, NestedStates):
        for part in held.parts.values():
            pretend(part, context)
    elif isinstance(state, WindowKVCache):
        held.lengths = torch.full_like(held.lengths, context)
        held.written, held.end = held.lengths, min(context, held.first + held.ring)
        held.keys, held.values = _noise(held.keys, held.end + 1), _noise(held.values, held.end + 1)
    elif isinstance(state, KVCache):
        held.end = context
        held.drop_spare()
        held.keys, held.values = _noise(held.keys, context), _noise(held.values, context)
        if isinstance(state, HashedKeyValues):
            most = int(held.buckets.max()) + 1
            held.buckets = torch.randint(0, most, (*held.keys.shape[:3], held.buckets.shape[3])).to(held.buckets)
    elif isinstance(state, CompressiveMemory):
        held.lengths = torch.full_like(held.lengths, context)
        held.since = held.lengths // held.module.segment * held.module.segment
        held.end = min(context, held.kept)
        held.keys, held.values = torch.randn_like(held.keys), torch.randn_like(held.values)
    elif isinstance(state, Recurrent):
        held.since = context - (held.lengths - held.since)
        held.lengths = torch.full_like(held.lengths, context)
    elif isinstance(state, RecentTokens):
        held.lengths = torch.full_like(held.lengths, context)
        held.oldest = held.lengths - held.size
    else:
        raise TypeError(f"{type(state).__name__} has no length to pretend")


def _noise(cache: torch.Tensor, slots: int) -> torch.Tensor:
    """A cache like this one with `slots` slots. Random numbers repeat, because drawing them takes longer than steps."""
    rows, heads, _, width = cache.shape
    some = torch.randn(rows, heads, min(slots, 1024), width, device=cache.device, dtype=cache.dtype)
    return some.repeat(1, 1, -(-slots // some.shape[2]), 1)[:, :, :slots].contiguous()


def decoding_speeds(models: Sequence[Any], contexts: Sequence[int] = CONTEXTS) -> list[dict[str, Any]]:
    """Tokens per second by context of each model, or why there are none."""
    found: list[dict[str, Any]] = [{} for _ in models]
    for context in contexts:
        running: dict[int, DecodingRow] = {}
        for number, model in enumerate(models):
            if (reason := _cannot_decode(model, context)) is not None:
                found[number][str(context)] = reason
                continue
            try:
                running[number] = DecodingRow(model.eval(), context)
                running[number].turn(2)
            except (TypeError, NotImplementedError, RuntimeError, AttributeError) as error:  # a part of the user's
                found[number][str(context)] = f"not measured: {' '.join(str(error).split())[:200]}"
                running.pop(number, None)
        turns = [{number: one.turn() for number, one in running.items()} for _ in range(TURNS)]
        for number in running:
            found[number][str(context)] = 1 / min(turn[number] for turn in turns)
    return found


def _cannot_decode(model: Any, context: int) -> str | None:
    config = model.config
    if not config.generates or config.kind not in ("decoder", "decoder-decoder"):
        return "does not continue texts"
    if config.limit is not None and config.limit < context + TURNS * STEPS:
        return f"reads at most {config.limit:,} tokens"
    return None


class UpdateMemory:
    """Bytes that an update takes: the peak on a GPU; on a CPU, whose allocator tells no peak, weights, gradients and
    moments (four numbers a weight), and what is kept for the backward pass."""

    def __init__(self, model: Any) -> None:
        self.weights = {weight.untyped_storage().data_ptr(): weight.nbytes for weight in model.parameters()}
        self.kept: dict[int, int] = {}
        self.cuda = torch.cuda.is_available()

    def __enter__(self) -> UpdateMemory:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            self.hooks: Any = nullcontext()  # an update may be captured, which takes no hooks
        else:
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    @property
    def bytes(self) -> float:
        if self.cuda:
            return float(torch.cuda.max_memory_allocated() - self.before + 4 * sum(self.weights.values()))
        return float(4 * sum(self.weights.values()) + sum(self.kept.values()))


class Energy:
    """Joules that the device takes for a piece of work: a GPU's power by NVML, a CPU's counter if it can be read; None
    where neither tells."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.counter = _rapl() if not torch.cuda.is_available() else None

    def joules(self) -> float | None:
        if torch.cuda.is_available():
            try:
                return torch.cuda.power_draw() / 1000 * (time.perf_counter() - self.began)
            except (RuntimeError, ImportError):  # without NVML
                return None
        now = _rapl()
        return None if now is None or self.counter is None or now < self.counter else (now - self.counter) / 1e6


def _rapl() -> float | None:
    try:
        return float(RAPL.read_text())
    except (OSError, ValueError):
        return None
