"""The command that measures the speed of a model."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import FILES, DeviceOption, JsonOption, argument, option
from allyouneed.cli.text.streams import progress, read_lines
from allyouneed.errors import UserError
from allyouneed.errors.extras import EXTRAS, require
from allyouneed.files.system import usable_cores

if TYPE_CHECKING:
    from allyouneed.lab.benchmark import Peer, Turns, Workload

LIBRARIES = {"hf": "transformers", "ctranslate2": "ctranslate2"}
NAMES = {"first": "first token, ms", "reading": "a prompt read, tokens/s"}


def bench(
    model: Annotated[Path, argument("MODEL", "a model folder: ours, Hugging Face's or translator")],
    *,
    rows: Annotated[str, option(metavar="N,N,…", show_default=True, help="batch sizes")] = "1,8,32",
    beam: Annotated[int, option(min=1, show_default=True, help="beam width, for encoder-decoders")] = 4,
    length: Annotated[int, option(min=1, show_default=True, help="tokens of each prompt and of each output")] = 32,
    compare: Annotated[
        list[str] | None, option("--compare", metavar="int8|bf16", help="also measure this precision; repeatable")
    ] = None,
    against: Annotated[
        list[str] | None,
        option(
            "--against", metavar="hf|ctranslate2", help="also measure this library with the same weights; repeatable"
        ),
    ] = None,
    turns: Annotated[int, option(min=1, show_default=True, help="runs; the fastest counts")] = 5,
    threads: Annotated[int | None, option(min=1, help="threads per process; default: all cores")] = None,
    data: Annotated[
        Path | None,
        option("--data", panel=FILES, metavar="FILE", help="prompts, one per line, instead of random tokens"),
    ] = None,
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure the speed of a model, as stored and quantized, and next to other libraries.

    All do the same work: the same weights, the same tokens, the same number of new tokens. Each runs in a process of
    its own, which is stopped while another is measured.
    """
    from allyouneed.interop.load import load as load_folder
    from allyouneed.interop.load import resolve_device
    from allyouneed.lab.benchmark import PeerProcess, Turns, make_workload

    counts = _batch_sizes(rows)
    for name in against or []:
        if name not in LIBRARIES:
            raise UserError(f"--against {name}: expected {' or '.join(LIBRARIES)}")
        if name in EXTRAS:
            require(name, f"--against {name}")
        elif importlib.util.find_spec(LIBRARIES[name]) is None:
            raise UserError(f"--against {name} needs {LIBRARIES[name]}: pip install {LIBRARIES[name]}")
    for precision in compare or []:
        if precision not in ("int8", "bf16"):
            raise UserError(f"--compare {precision}: expected int8 or bf16")
    texts = None if data is None else [line for line in islice(read_lines(data), 4 * max(counts)) if line.strip()]
    folder = load_folder(model)
    load = make_workload(folder, counts, beam, length, texts)
    load = replace(load, device=resolve_device(device, model), threads=threads or usable_cores())
    if against and not load.generates:
        raise UserError("--against is for models that generate text; remove it")
    with ExitStack() as stack:
        peers = _peers(folder, model, compare or [], against or [], stack)
        del folder
        found = Turns([])
        stack.callback(found.end)
        for peer in progress(iter(peers), len(peers), "loading"):
            found.workers.append(PeerProcess(peer, load))
        for _ in progress(found.take(turns), found.count * (turns + 1), "measuring"):
            pass
    if as_json:
        print(json.dumps(_tree(found, load), ensure_ascii=False))
    else:
        print(_table(found, load, peers))


def _batch_sizes(rows: str) -> list[int]:
    try:
        counts = [int(number) for number in rows.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--rows {rows}: expected numbers from 1, separated by commas: 1,8,32")
    return counts


def _peers(folder: Any, path: Path, compare: Sequence[str], against: Sequence[str], stack: ExitStack) -> list[Peer]:
    from allyouneed.interop.export import writer
    from allyouneed.lab.benchmark import Peer
    from allyouneed.nn.models.precision import stored_as

    stored = stored_as(folder.model)
    if stored is not None and compare:
        raise UserError(f"{path}: is stored as {stored} already; --compare needs the original model")
    found = [Peer("ours", "as it is", str(path)), *(Peer("ours", precision, str(path)) for precision in compare)]
    for name in against:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="allyouneed-bench-")))
        show_notes(writer(name)(folder, out))
        if name == "hf":
            precision = "bf16" if "bf16" in compare else "float32"
        else:
            precision = "int8" if "int8" in (*compare, stored) else "float32"
        found.append(Peer(name, precision, str(out)))
    return found


def _figures(found: Turns, load: Workload) -> dict[str, dict[str, float]]:
    """Figures by measurement, then by peer."""
    figures: dict[str, dict[str, float]] = {}
    for worker in found.workers:
        for name, value in worker.figures.items():
            if name != "ceiling":
                figures.setdefault(name, {})[worker.peer.name] = value
    for (peer, job), seconds in found.best.items():
        value = 1000 * seconds if job == "first" else load.work(job) / seconds
        figures.setdefault(_row_name(job, load), {})[peer] = value
    for worker in found.workers:
        best = found.best.get((worker.peer.name, job := f"greedy {min(load.rows)}"))
        if best is not None and "ceiling" in worker.figures:
            ceiling = min(load.rows) * worker.figures["ceiling"]
            figures.setdefault(f"ceiling, {min(load.rows)} at a time: weights are read", {})[worker.peer.name] = ceiling
            share = 100 * load.work(job) / best / ceiling
            figures.setdefault("share of that ceiling, %", {})[worker.peer.name] = share
    return figures


def _row_name(job: str, load: Workload) -> str:
    if job in NAMES:
        return NAMES[job]
    kind, count = job.split(" ")
    what = {"greedy": "greedy, ", "beam": f"beam {load.beam}, "}.get(kind, "")
    return f"{what}{count} at a time, {load.unit}/s"


def _ratios(found: Turns, load: Workload) -> dict[str, dict[str, float]]:
    """Speed-ups: ours quantized over ours as stored; ours over each other library at the same precision."""
    names = [worker.peer.name for worker in found.workers if worker.peer.kind == "ours"]
    ratios: dict[str, dict[str, float]] = {}
    for worker in found.workers[1:]:
        one, other = (worker.peer.name, names[0])
        if worker.peer.kind != "ours":
            one, other = (worker.peer.precision if worker.peer.precision in names else names[0]), worker.peer.name
        for job in worker.jobs:
            if (one, job) in found.best and (other, job) in found.best:
                ratio = found.best[other, job] / found.best[one, job]
                ratios.setdefault(f"{one} / {other}", {})[_row_name(job, load)] = ratio
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
    work = f"{load.length} new tokens each" if load.generates else f"{load.unit} read"
    lines = [f"{work}; {load.device}, {load.threads} thread{'s' if load.threads > 1 else ''}", ""]
    lines.append(" " * first + "".join(f"  {head:>{width}}" for head, width in zip(heads, wide, strict=True)))
    for name, values in figures.items():
        cells = [f"{values[peer]:,.1f}" if peer in values else "" for peer in names]
        cells += [f"{ratio[name]:.2f}x" if name in ratio else "" for ratio in ratios.values()]
        line = f"{name:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(cells, wide, strict=True))
        lines.append(line.rstrip())
    return "\n".join(lines)
