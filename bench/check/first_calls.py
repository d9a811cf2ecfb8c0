"""The first answers of a process on a GPU: are they those of the CPU, and of later calls?

    python bench/check/first_calls.py                       # every mixer, each in a process of its own
    python bench/check/first_calls.py lstm,gru --at-once 4
    python bench/check/first_calls.py --device cpu          # rehearsal

Each process opens a model folder in fp32 and samples the continuations of four prompts of unequal length, four times:
with few tokens, which are decoded without CUDA graphs at first (`plain`), and with many, for which graphs are captured
in the first call (`captured`). Warnings and weights that move in a call count as wrong: captured graphs read weights
where they were.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE, STDOUT, run
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.folder import Folder
from allyouneed.infer.cuda_graph.shape import weight_addresses
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.lab.mixer_sizes import TINY, variants
from allyouneed.nn.models.base import Model

PROMPTS = [[1, 5, 6, 7, 8, 9], [1, 9], [1, *range(3, 14)], [1, 20, 21, 22]]
TOKENS = {"plain": 12, "captured": 40}  # of each text
CALLS = 4
SIZES = replace(TINY, given=max(map(len, PROMPTS)), new=max(TOKENS.values()))


def answers(engine: Engine, tokens: int) -> list[list[int]]:
    decoding = Decoding(method="sample", min_length=tokens, max_length=tokens, seed=3)
    return [found[0].tokens for found in engine.complete(PROMPTS, decoding)]


def check(name: str, kind: str, device: str) -> str:
    """What is wrong, or nothing."""
    torch.manual_seed(0)
    model: Any = parse(Model, variants(SIZES)[name]).build().eval()  # type: ignore[type-abstract]
    with tempfile.TemporaryDirectory() as folder:
        Folder(model, None, {"kind": "causal-lm"}).save(folder + "/model")
        here, there = (Folder.load(folder + "/model", on).model for on in ("cpu", device))
    expected = answers(Engine(here, 1, 2, 0), TOKENS[kind])
    engine, wrong = Engine(there, 1, 2, 0), list[str]()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for call in range(CALLS):
            before = weight_addresses(there)
            found = answers(engine, TOKENS[kind])
            if (same := sum(a == b for a, b in zip(found, expected, strict=True))) < len(expected):
                wrong.append(f"call {call + 1}: {same} of {len(expected)} texts are those of the CPU")
            if weight_addresses(there) != before:
                wrong.append(f"call {call + 1} moves weights")
    wrong += sorted({f"{Path(one.filename).name}:{one.lineno}: {str(one.message)[:90]}" for one in heard})
    return "; ".join(wrong)


def mixers() -> list[str]:
    """All of them, those first whose weights torch moves on a GPU."""
    return sorted(variants(SIZES), key=lambda name: name not in ("lstm", "gru"))


def check_all(names: list[str], device: str, at_once: int, late: Callable[[], bool] = lambda: False) -> bool:
    """Whether all are right, each in a process of its own; none is started once it is `late`."""

    def checked(job: tuple[str, str]) -> bool | None:
        if late():
            return None
        command = [sys.executable, __file__, job[0], "--kind", job[1], "--device", device]
        found = run(command, stdout=PIPE, stderr=STDOUT, text=True, check=False)
        last = (found.stdout.strip().splitlines() or ["no answer"])[-1]
        if found.returncode:
            print(last if "DIFFERS" in last else f"{job[0]}, {job[1]}: FAILED: {last}", flush=True)
        return found.returncode == 0

    with ThreadPoolExecutor(at_once) as pool:
        good = list(pool.map(checked, [(name, kind) for name in names for kind in TOKENS]))
    skipped = f", no time left for {good.count(None)}" if None in good else ""
    print(
        f"first calls: {len(good)} processes{skipped}, {good.count(False)} wrong  {'DIFFERS' * (False in good) or 'ok'}"
    )
    return False not in good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="?", help="mixers, separated by commas; default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--kind", choices=TOKENS, help="check one mixer in this process")
    given = parser.parse_args()
    names = given.names.split(",") if given.names else mixers()
    if given.kind:
        wrong = check(names[0], given.kind, given.device)
        print(f"{names[0]}, {given.kind}: {'DIFFERS: ' + wrong if wrong else 'ok'}")
        return bool(wrong)
    return not check_all(names, given.device, given.at_once)


if __name__ == "__main__":
    sys.exit(main())
