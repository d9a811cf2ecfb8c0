"""What the first calls of a process cost on a GPU: the first answer, a prompt of a length not seen before, the first
streamed token. Each model has two fresh processes: one with empty folders for compiled kernels, one that finds them.

    python bench/decode/first_call.py                            # attention with 1 and 64 rows, retention with 1
    python bench/decode/first_call.py attention:1 gru:64         # mixers of family_speed/sizes.py, and rows
    python bench/decode/first_call.py --device cpu --tiny        # rehearsal
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.models.base import Model
from bench.family_speed.sizes import TINY, Sizes, variants

JOBS = ("attention:1", "attention:64", "retention:1")
LENGTHS = (50, 100, 37, 70, 39, 200, 150)  # of prompts; the first calls have 24 tokens


def measure(job: str, device: str, tiny: bool) -> dict[str, Any]:
    """Milliseconds, in this process."""
    found: dict[str, Any] = {}
    (mixer, rows), new = job.split(":"), 8 if tiny else 64
    start = time.perf_counter()
    with torch.device(device):
        model: Any = parse(Model, variants(TINY if tiny else Sizes())[mixer]).build()  # type: ignore[type-abstract]
    engine = Engine(model.to(torch.bfloat16 if device == "cuda" else torch.float32).eval(), 1, 2, 0, budget=1 << 16)
    found["build"] = 1e3 * (time.perf_counter() - start)
    decoding = Decoding(method="greedy", min_length=new, max_length=new)

    def call(length: int) -> float:
        start = time.perf_counter()
        engine.complete([[1, *(5 + n % 50 for n in range(length - 1))]] * int(rows), decoding)
        return 1e3 * (time.perf_counter() - start)

    found["first"], found["second"] = call(24), call(24)
    found["usual"] = min(call(24) for _ in range(4))
    more = {length: call(length) - min(call(length) for _ in range(3)) for length in LENGTHS}
    found["more at a new length"] = {length: round(value, 1) for length, value in more.items()}
    start = time.perf_counter()
    pieces = engine.stream([1, 7, 8, 9, 10, 11], decoding)
    next(pieces)
    found["first streamed"] = 1e3 * (time.perf_counter() - start)
    list(pieces)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", help=f"mixer:rows; default: {' '.join(JOBS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.child, given.device, given.tiny)))
        return
    print("milliseconds", flush=True)
    for job in given.jobs or JOBS:
        with tempfile.TemporaryDirectory() as folder:
            around = {"TRITON_CACHE_DIR": folder + "/triton", "TORCHINDUCTOR_CACHE_DIR": folder + "/inductor"}
            for state in ("cold", "warm"):
                command = [sys.executable, __file__, "--child", job, "--device", given.device]
                command += ["--tiny"] * given.tiny
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | around, check=False)
                if done.returncode:
                    print(f"{job} {state}: FAILED", flush=True)
                    continue
                values = json.loads(done.stdout.splitlines()[-1]).items()
                shown = [f"{name} {value if isinstance(value, dict) else round(value)}" for name, value in values]
                print(f"{job} {state}: {'  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
