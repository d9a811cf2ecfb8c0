"""What gpu.py measures inside server processes, and the fake steps it rehearses with. Loaded by every Python
process it starts (`environment`); patches the engine as soon as that is imported.

Environment: SERVE_PROBE: a folder; each process that steps an engine writes its totals there, twice a second.
SERVE_FAKE_STEP_MS: a decode step computes nothing and takes this long, as on a GPU: the host waits, without Python's
lock, only for the record of the run before; prefills compute nothing either. SERVE_PROFILE: a folder for profiles by
function, in CPU time.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("allyouneed.apps.serve.engine.served_model", "allyouneed.infer.cuda_graph.scheduler_slots")
totals: dict[str, float] = {}
threads: dict[str, int] = {}  # whose CPU time is measured
spans: deque[tuple[str, Any, Any]] = deque()  # on the device: what, and events at its begin and end


def environment(folder: Path, fake_step_ms: float | None, profile: bool) -> dict[str, str]:
    """The environment of processes that are to be measured."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\nimport bench.serve.probe\n")
    found = {"SERVE_PROBE": str(folder), "PYTHONPATH": os.pathsep.join([str(folder), *sys.path[1:]])}
    found |= {} if fake_step_ms is None else {"SERVE_FAKE_STEP_MS": str(fake_step_ms)}
    return dict(os.environ) | found | ({"SERVE_PROFILE": str(folder)} if profile else {})


def read_totals(folder: Path) -> dict[int, dict[str, float]]:
    """By process."""
    time.sleep(0.6)  # so that all have written them
    found = {}
    for file in folder.glob("totals-*.json"):
        found[int(file.stem.partition("-")[2])] = json.loads(file.read_text())
    return found


def timed(owner: Any, name: str, key: str, skip: Callable[..., bool] | None = None) -> None:
    """Count calls and seconds of a method."""
    function = getattr(owner, name)

    def measured(self: Any, *args: Any, **more: Any) -> Any:
        if skip is not None and skip(self, *args):
            return function(self, *args, **more)
        began = time.perf_counter()
        try:
            return function(self, *args, **more)
        finally:
            totals[key] = totals.get(key, 0.0) + time.perf_counter() - began
            totals[f"{key} calls"] = totals.get(f"{key} calls", 0) + 1

    setattr(owner, name, measured)


def patch_engine() -> None:
    from allyouneed.apps.serve.engine.delivery import Delivery
    from allyouneed.apps.serve.engine.loop import EngineLoop
    from allyouneed.infer.block_manager import BlockManager
    from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
    from allyouneed.infer.cuda_graph.prefill import InputGraph, PrefillRunner
    from allyouneed.infer.cuda_graph.runner import GraphRunner, LaunchedSteps
    from allyouneed.infer.cuda_graph.scheduler_slots import SchedulerSlots
    from allyouneed.infer.cuda_graph.slot_loader import SlotLoader
    from allyouneed.infer.model_runner import ModelRunner
    from allyouneed.infer.scheduler import Scheduler
    from allyouneed.infer.scheduling.chunked_prefill import ChunkedPrefill

    if "SERVE_FAKE_STEP_MS" in os.environ:
        fake_steps(float(os.environ["SERVE_FAKE_STEP_MS"]) / 1000)
    timed(LaunchedSteps, "wait", "wait")
    timed(GraphRunner, "launch", "launch")
    timed(GraphRunner, "collect", "collect")
    timed(Scheduler, "_admit", "admit")
    timed(ChunkedPrefill, "step", "prefill")
    timed(ModelRunner, "prefill_chunk", "plain")
    timed(PagedPrefill, "read", "read")
    timed(PagedPrefill, "run", "pass")
    timed(InputGraph, "write", "stage")
    timed(InputGraph, "launch", "replay")
    timed(BlockManager, "keep_prefixes", "keep")
    timed(SchedulerSlots, "add", "fill")
    timed(GraphRunner, "add", "load")
    timed(SlotLoader, "load", "load")
    for owner, name in (
        (PagedPrefill, "_capture"),
        (PrefillRunner, "capture"),
        (SlotLoader, "capture"),
        (GraphRunner, "__init__"),
    ):
        timed(owner, name, "capture")
    timed(EngineLoop, "_gather", "gather")
    on_device(GraphRunner, "launch", "device decode")
    on_device(ChunkedPrefill, "step", "device prefill")
    timed(EngineLoop, "_report", "report")
    timed(Delivery, "deliver", "deliver")
    step, run = Scheduler.step, EngineLoop._run
    last = [0.0]

    def measured(self: Any) -> None:
        began, cpu = time.perf_counter(), time.thread_time()
        if last[0]:
            totals["gap"] = totals.get("gap", 0.0) + began - last[0]
        step(self)
        last[0] = 0.0 if self.idle else time.perf_counter()
        totals["step"] = totals.get("step", 0.0) + time.perf_counter() - began
        totals["steps"] = totals.get("steps", 0) + 1
        totals["step cpu"] = totals.get("step cpu", 0.0) + time.thread_time() - cpu
        totals["rows"] = totals.get("rows", 0) + len(self.active)

    def watched(self: Any) -> None:
        threads["engine"] = threading.get_ident()
        if "SERVE_PROFILE" in os.environ:
            profile_call("engine thread", run, self)
        else:
            run(self)

    Scheduler.step, EngineLoop._run = measured, watched  # type: ignore[method-assign]
    time_collections()
    threads["event loop"] = threading.main_thread().ident or 0
    threading.Thread(target=write_totals, daemon=True).start()


def time_collections() -> None:
    """CPU time of collecting garbage."""
    import gc

    began = [0.0]

    def measured(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.thread_time()
        else:
            totals["gc"] = totals.get("gc", 0.0) + time.thread_time() - began[0]
            totals["gc calls"] = totals.get("gc calls", 0) + 1

    gc.callbacks.append(measured)


def on_device(owner: Any, name: str, key: str) -> None:
    """Measure how long the device takes for what a method launches, and what it waits for meanwhile."""
    import torch

    function = getattr(owner, name)

    def measured(self: Any, *args: Any) -> Any:
        if not torch.cuda.is_available():
            return function(self, *args)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            return function(self, *args)
        finally:
            end.record()
            spans.append((key, begin, end))

    setattr(owner, name, measured)


def add_spans() -> None:
    """Add the times of what the device has finished to the totals."""
    while spans and spans[0][2].query():
        key, begin, end = spans.popleft()
        totals[key] = totals.get(key, 0.0) + begin.elapsed_time(end) / 1000


def write_totals() -> None:
    file = Path(os.environ["SERVE_PROBE"]) / f"totals-{os.getpid()}.json"
    while True:
        add_spans()
        for name, thread in threads.items():
            totals[f"{name} cpu"] = time.clock_gettime(time.pthread_getcpuclockid(thread))
        new = file.with_suffix(".new")
        new.write_text(json.dumps(totals))
        new.replace(file)
        time.sleep(0.25)


def fake_steps(seconds: float) -> None:
    import torch

    from allyouneed.infer.cuda_graph.paged_prefill import PagedPrefill
    from allyouneed.infer.cuda_graph.prefill import InputGraph
    from allyouneed.infer.cuda_graph.runner import GraphRunner, GraphRunnerCache, LaunchedSteps
    from allyouneed.infer.cuda_graph.slot_loader import SlotLoader

    busy = [0.0]  # until then

    class Event:
        def __init__(self, steps: int) -> None:
            self.at = busy[0] = max(busy[0], time.perf_counter()) + steps * seconds

        def synchronize(self) -> None:
            time.sleep(max(0.0, self.at - time.perf_counter()))

    def launch(self: Any, count: int) -> LaunchedSteps:
        record = torch.randint(10, 300, self.search.record[:count].shape).float()
        self.steps += count
        run = LaunchedSteps(self.steps - count, record)
        run.copied = Event(count)  # type: ignore[assignment]
        return run

    from allyouneed.apps.serve.engine import served_model

    served_model.PREFILL_BUDGET["cpu"] = served_model.PREFILL_BUDGET["cuda"]
    served_model.ServedModel.captures = True  # type: ignore[assignment, method-assign]
    PagedPrefill.enabled = True  # type: ignore[assignment, method-assign]
    GraphRunner.launch = launch  # type: ignore[method-assign]
    GraphRunnerCache.captures = True  # type: ignore[assignment, method-assign]
    InputGraph.launch = SlotLoader.copy = lambda *_: None  # type: ignore[assignment, method-assign]


def profile_call(name: str, function: Callable[..., Any], *args: Any) -> Any:
    profile = cProfile.Profile(time.thread_time)
    try:
        return profile.runcall(function, *args)
    finally:
        with open(Path(os.environ["SERVE_PROFILE"]) / f"profile-{name}-{os.getpid()}.txt", "w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(35)


def profile_event_loops() -> None:
    import asyncio

    run = asyncio.Runner.run
    asyncio.Runner.run = lambda self, *args, **more: profile_call("event loop", lambda: run(self, *args, **more))  # type: ignore[method-assign]


def is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def watch() -> None:
    while not all(map(is_loaded, TARGETS)):
        time.sleep(0.005)
    patch_engine()


if "SERVE_PROBE" in os.environ:
    threading.Thread(target=watch, daemon=True).start()
    if "SERVE_PROFILE" in os.environ:
        profile_event_loops()
