"""The command that measures how fast a model is."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allyouneed.cli.options import FILES, DeviceOption, JsonOption, option
from allyouneed.cli.streams import lines, progress
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.lab.benchmark import Peer, Turns, Workload

PROGRAMS = {"hf": "transformers", "ctranslate2": "ctranslate2"}
NAMES = {"first": "first token, ms", "reading": "a prompt read, tokens/s"}


def bench(
    model: Annotated[Path, typer.Argument(metavar="FOLDER", help="a model folder: ours, or a Hugging Face folder")],
    *,
    rows: Annotated[str, option(metavar="N,N,…", show_default=True, help="so many texts at a time")] = "1,8,32",
    beam: Annotated[
        int, option(min=1, show_default=True, help="width of the beam search, for models that read a source")
    ] = 4,
    length: Annotated[int, option(min=1, show_default=True, help="so many tokens are read, and so many written")] = 32,
    compare: Annotated[
        list[str] | None, option("--compare", metavar="int8|bf16", help="measure it so too; repeatable")
    ] = None,
    against: Annotated[
        list[str] | None,
        option("--against", metavar="hf|ctranslate2", help="and what these make of the same weights; repeatable"),
    ] = None,
    turns: Annotated[int, option(min=1, show_default=True, help="the best of so many turns counts")] = 5,
    threads: Annotated[int | None, option(min=1, help="for each; as many as there are processors")] = None,
    data: Annotated[
        Path | None, option("--data", panel=FILES, metavar="FILE", help="texts to read, a line each, not random tokens")
    ] = None,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure how fast a model writes (or reads), as it is, in fewer bits, and beside other people's programs.

    All do the same work: the same weights, the same tokens, as many written as asked for. Each lives in a process of
    its own that stands still while another has its turn.
    """
    from allyouneed.interop.load import load as opened
    from allyouneed.lab.benchmark import Turns, Worker, make_workload

    counts = _numbers(rows)
    for name in against or []:
        if name not in PROGRAMS:
            raise UserError(f"--against {name}: it may be {' or '.join(PROGRAMS)}")
        if importlib.util.find_spec(PROGRAMS[name]) is None:
            raise UserError(f"--against {name}: {PROGRAMS[name]} is not installed")
    for manner in compare or []:
        if manner not in ("int8", "bf16"):
            raise UserError(f"--compare {manner}: it may be int8 or bf16")
    texts = None if data is None else [line for line in islice(lines(data), 4 * max(counts)) if line.strip()]
    folder = opened(model)
    load = make_workload(folder, counts, beam, length, texts)
    given = {"device": device, "threads": threads or _processors()}
    load = type(load)(**vars(load) | given)
    if against and not load.generates:
        raise UserError("--against is for models that write; leave it out")
    with ExitStack() as stack:
        peers = _peers(folder, model, compare or [], against or [], stack)
        del folder
        found = Turns([])
        stack.callback(found.end)
        for peer in progress(iter(peers), len(peers), "loading"):
            found.workers.append(Worker(peer, load))
        for _ in progress(found.take(turns), found.count * (turns + 1), "measuring"):
            pass
    if as_json:
        print(json.dumps(_tree(found, load), ensure_ascii=False))
    else:
        print(_table(found, load, peers))


def _processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numbers(rows: str) -> list[int]:
    try:
        counts = [int(number) for number in rows.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--rows {rows}: numbers from 1, with commas between them: 1,8,32")
    return counts


def _peers(folder: Any, path: Path, compare: Sequence[str], against: Sequence[str], stack: ExitStack) -> list[Peer]:
    from allyouneed.interop.export import writer
    from allyouneed.lab.benchmark import Peer
    from allyouneed.nn.models.precision import stored_as

    stored = stored_as(folder.model)
    if stored is not None and compare:
        raise UserError(f"{path}: is stored as {stored} already; --compare begins with the model it was made of")
    found = [Peer("ours", "as it is", str(path)), *(Peer("ours", manner, str(path)) for manner in compare)]
    for name in against:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allyouneed-bench-")))
        for note in writer(name)(folder, out):
            print(f"note: {note}", file=sys.stderr)
        if name == "hf":
            manner = "bf16" if "bf16" in compare else "float32"
        else:
            manner = "int8" if "int8" in (*compare, stored) else "float32"
        found.append(Peer(name, manner, str(out)))
    return found


def _figures(found: Turns, load: Workload) -> dict[str, dict[str, float]]:
    """By what was measured and who."""
    shown: dict[str, dict[str, float]] = {}
    for worker in found.workers:
        for name, value in worker.figures.items():
            if name != "ceiling":
                shown.setdefault(name, {})[worker.peer.name] = value
    for (peer, job), seconds in found.best.items():
        value = 1000 * seconds if job == "first" else load.work(job) / seconds
        shown.setdefault(_named(job, load), {})[peer] = value
    for worker in found.workers:
        best = found.best.get((worker.peer.name, job := f"greedy {min(load.rows)}"))
        if best is not None and "ceiling" in worker.figures:
            most = min(load.rows) * worker.figures["ceiling"]
            shown.setdefault(f"ceiling, {min(load.rows)} at a time: weights are read", {})[worker.peer.name] = most
            share = 100 * load.work(job) / best / most
            shown.setdefault("share of that ceiling, %", {})[worker.peer.name] = share
    return shown


def _named(job: str, load: Workload) -> str:
    if job in NAMES:
        return NAMES[job]
    kind, count = job.split(" ")
    what = {"greedy": "greedy, ", "beam": f"beam {load.beam}, "}.get(kind, "")
    return f"{what}{count} at a time, {load.unit}/s"


def _ratios(found: Turns, load: Workload) -> dict[str, dict[str, float]]:
    """How many times as fast: ours in fewer bits as it is; ours as each of the others, the one with the same bits."""
    names = [worker.peer.name for worker in found.workers if worker.peer.kind == "ours"]
    ratios: dict[str, dict[str, float]] = {}
    for worker in found.workers[1:]:
        one, other = (worker.peer.name, names[0])
        if worker.peer.kind != "ours":
            one, other = (worker.peer.precision if worker.peer.precision in names else names[0]), worker.peer.name
        for job in worker.jobs:
            if (one, job) in found.best and (other, job) in found.best:
                ratio = found.best[other, job] / found.best[one, job]
                ratios.setdefault(f"{one} / {other}", {})[_named(job, load)] = ratio
    return ratios


def _tree(found: Turns, load: Workload) -> dict[str, Any]:
    about = {"device": load.device, "threads": load.threads, "length": load.length, "rows": list(load.rows)}
    return {"load": about, "measured": _figures(found, load), "ratios": _ratios(found, load)}


def _table(found: Turns, load: Workload, peers: Sequence[Peer]) -> str:
    figures, names = _figures(found, load), [peer.name for peer in peers]
    ratios = _ratios(found, load)
    heads = [*names, *ratios]
    wide = [max(10, len(head)) for head in heads]
    first = max(map(len, figures))
    said = f"{load.length} tokens written each" if load.generates else f"{load.unit} read"
    shown = [f"{said}; {load.device}, {load.threads} thread{'s' if load.threads > 1 else ''}", ""]
    shown.append(" " * first + "".join(f"  {head:>{width}}" for head, width in zip(heads, wide, strict=True)))
    for name, values in figures.items():
        cells = [f"{values[peer]:,.1f}" if peer in values else "" for peer in names]
        cells += [f"{ratio[name]:.2f}x" if name in ratio else "" for ratio in ratios.values()]
        line = f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, wide, strict=True))
        shown.append(line.rstrip())
    return "\n".join(shown)
