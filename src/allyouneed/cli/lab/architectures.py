"""Commands that measure architectures and test what papers say: probe, claims."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from allyouneed.cli.lab.compare import counter, resumable
from allyouneed.cli.messages import show_notes
from allyouneed.cli.options import DeviceOption, argument, option
from allyouneed.errors import UserError

ProcessesOption = Annotated[int, option("--processes", min=1, show_default=True, help="processes that share the runs")]
WriteOption = Annotated[
    Path | None, option("--write", metavar="FOLDER", help="write the page and its picture into this folder of docs")
]


def typed_command(name: str) -> str:
    """The command as it was typed, for a page that says how it was made."""
    return shlex.join(["allyouneed", *sys.argv[1:]]) if sys.argv[1:2] == [name] else f"allyouneed {name}"


def probe(
    models: Annotated[
        list[str] | None, argument("MODEL…", "mixers, or presets and YAML files of decoders; default: all mixers")
    ] = None,
    tasks: Annotated[str | None, option("--tasks", metavar="T,T,…", help="tasks; default: all")] = None,
    *,
    output: Annotated[
        Path, option("--output", "-o", metavar="FOLDER", show_default=True, help="results of all runs")
    ] = Path("runs/probe"),
    write: WriteOption = None,
    steps: Annotated[int, option(min=1, show_default=True, help="updates of a run, at most")] = 400,
    seeds: Annotated[int, option(min=1, show_default=True, help="runs of each model at its rate")] = 1,
    rates: Annotated[
        str | None,
        option(
            "--rates",
            metavar="R,R,…",
            help="try only these learning rates; default: 0.001,0.0032,0.01, further ones if the best is at an edge",
        ),
    ] = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Train small models on tasks that separate architectures: recall, copying, parity, sorting, … Results are kept, so
    that the same command resumes. If a control does not land where theory says, nothing is printed."""
    from allyouneed.files import write_text
    from allyouneed.lab.probe import report, run, task
    from allyouneed.lab.probe.train import ENOUGH
    from allyouneed.lab.rates import RateRule
    from allyouneed.lab.statistics import require_controls
    from allyouneed.lab.store import ResultStore

    chosen = tasks.split(",") if tasks else task.names()
    for name in chosen:
        task.find(name)
    rule = RateRule() if rates is None else RateRule(_rates(rates), extensions=0)
    size = run.ProbeSize(steps=steps, seeds=seeds, rule=rule, device=_device(device))
    if write is not None and not write.is_dir():
        raise UserError(f"--write {write}: no such folder; create it first, or name the folder of your pages")
    store = ResultStore(output)
    with resumable():
        landed = run.controls(store, size)
        require_controls(landed)
        cells = run.probe(models or run.known(), chosen, store, size, processes, counter())
    print(report.table(cells))
    show_notes(list(report.notes(cells)))
    if write is not None:
        for folder in ("results", "pictures"):
            (write / folder).mkdir(exist_ok=True)
        how = (
            f"Two layers of width {run.SIZES.width}: a short convolution (not for parity and group words), the mixer, "
            "a gated FFN. Mixers have about as many weights as attention, where their keys allow it. At most "
            f"{steps} updates of {size.rows} rows, ended at {100 * ENOUGH:.1f}%; learning rates tried: "
            f"{', '.join(f'{rate:g}' for rate in rule.rates)}, the best by the loss on fresh examples; "
            f"{seeds} seed{'s' if seeds > 1 else ''}."
        )
        write_text(write / "results" / "probe.md", report.page(cells, landed, typed_command("probe"), how))
        write_text(write / "pictures" / "probe.svg", report.heat_map(cells))


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no GPU was found; use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _rates(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] <= 0:
        raise UserError(f"--rates {text}: expected numbers above 0, separated by commas: 0.001,0.0032,0.01")
    return found


def claims(
    given: Annotated[list[str] | None, argument("NAME…", "claims; default: all that this machine can run")] = None,
    *,
    output: Annotated[
        Path, option("--output", "-o", metavar="FOLDER", show_default=True, help="results of all runs")
    ] = Path("runs/claims"),
    cpu: Annotated[bool, option("--cpu", help="only those that fit a CPU, also where there is a GPU")] = False,
    list_: Annotated[bool, option("--list", help="list all claims and run none")] = False,
    tiny: Annotated[bool, option("--tiny", help="rehearse at the smallest sizes; the figures say nothing")] = False,
    write: WriteOption = None,
    processes: ProcessesOption = 1,
    device: DeviceOption = "auto",
) -> None:
    """Test what papers claim with the smallest experiments that could refute it: confirmed, refuted or inconclusive,
    with figures and intervals. Results are kept, so that the same command resumes."""
    from allyouneed.lab.claims import pages, run
    from allyouneed.lab.claims.claim import ClaimRun, Outcome, find, names, verdict
    from allyouneed.lab.store import ResultStore

    chosen = given or list(names())
    known = {name: find(name) for name in chosen}
    if list_:
        wide = max(map(len, chosen))
        for name, claim in known.items():
            print(f"{name:<{wide}}  {claim.needs if claim.measure else '–':<3}  {claim.says[0]}")
        return
    if write is not None and (tiny or not write.is_dir()):
        raise UserError(f"--write {write}: " + ("--tiny only rehearses" if tiny else "no such folder; create it first"))
    where = "cpu" if cpu else _device(device)
    with resumable():
        found = run.run_claims(chosen, ClaimRun(where, tiny), ResultStore(output), processes, counter())
    for name, claim in known.items():
        outcome = Outcome.of(found[name]["outcome"]) if name in found else None
        print(f"{name}: {pages.VERDICTS[verdict(claim, outcome)][0]}")
        if outcome is None:
            reason = claim.why_not[0] if claim.measure is None else "needs a GPU; --tiny rehearses it on a CPU"
            print(f"  {reason}")
        for figure in () if outcome is None else outcome.figures:
            range_ = f"   predicted: {pages.predicted(figure)}" if figure.predicts else ""
            print(f"  {figure.name[0]}: {pages.measured(figure)}{range_}")
    if write is not None:
        _write_claims(write, found)


def _write_claims(docs: Path, found: dict[str, Any]) -> None:
    """The pages, from these results and those that were written before."""
    from allyouneed.files import write_text
    from allyouneed.lab.claims import pages, run
    from allyouneed.lab.claims.claim import names

    for folder in ("results", "pictures", "zh"):
        (docs / folder).mkdir(exist_ok=True)
    kept = docs / "results" / "claims.json"
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    results = {name: (before | found)[name] for name in names() if name in before | found}
    write_text(kept, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    outcomes = run.outcomes(results)
    write_text(docs / "claims.md", pages.page(outcomes))
    write_text(docs / "zh" / "claims.md", pages.page(outcomes, chinese=True))
    for name, drawn in pages.pictures(outcomes).items():
        write_text(docs / "pictures" / name, drawn)
