"""Claims are run once: results are kept by the code of the claim, and what has run is read back."""

from __future__ import annotations

import ast
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allyouneed.files import checksum
from allyouneed.lab.claims.claim import ClaimRun, Outcome, find, names
from allyouneed.lab.store import Experiment, Result, ResultStore, versions

PACKAGE = Path(__file__).parents[2]


def source(name: str) -> str:
    """Checksum of a claim's code, without its description and its layout."""
    path = PACKAGE.parent / Path(*names()[name].split(".")).with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kept = [
        node for node in tree.body if not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CLAIM")
    ]
    return checksum({"code": [ast.unparse(node) for node in kept]})[:16]


def experiment(name: str, run: ClaimRun) -> Experiment:
    return {"claim": name, "source": source(name), "device": run.device, "tiny": run.tiny, **versions()}


def run_one(one: Experiment) -> Result:
    claim = find(one["claim"])
    assert claim.measure is not None
    torch.manual_seed(0)
    began = time.process_time()
    outcome = claim.measure(ClaimRun(one["device"], one["tiny"]))
    return {"outcome": outcome.tree(), "seconds": round(time.process_time() - began, 1)}


def run_claims(
    chosen: Sequence[str],
    run: ClaimRun,
    store: ResultStore,
    processes: int = 1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Any]]:
    """What each found, as it is written to docs/results/claims.json."""
    able = [
        name
        for name in chosen
        if (claim := find(name)).measure is not None and (run.tiny or claim.needs == "cpu" or run.device == "cuda")
    ]
    found = store.run([experiment(name, run) for name in able], partial(run_one), processes, report)
    where = {"source": "", "torch": torch.__version__.split("+")[0], "device": run.device}
    return {name: one | where | {"source": source(name)} for name, one in zip(able, found, strict=True)}


def outcomes(results: dict[str, dict[str, Any]]) -> dict[str, Outcome]:
    return {name: Outcome.of(one["outcome"]) for name, one in results.items() if name in names()}
