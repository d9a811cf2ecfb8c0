"""Which kernels a decode step runs and how long they take, of mixers in the skeleton of family_speed/gpu.py on a GPU.

    python bench/decode/step_profile.py gau,performer --rows 64
    python bench/decode/step_profile.py attention,bitnet-packed --rows 1

The steps of a captured graph, by torch's profiler: launches per step, microseconds per launch and per step. A kernel
that begins before the one in front of it has ended (programmatic dependent launch) waits inside, so that the times of
kernels can add up to more than the step takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.infer.engine import Engine
from allyouneed.lab.mixer_sizes import SkeletonSizes, variants
from bench.family_speed.gpu import Bench, decode, reported, time_steps


def profile_steps(bench: Bench, name: str, rows: int, most: int) -> None:
    model = bench.build(variants(bench.sizes)[name])
    engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
    decode(bench, engine, rows)
    runner = next(reversed(engine.graphs.kept.values()))
    context = bench.sizes.given + bench.sizes.new // 2
    step = time_steps(bench, runner, context, 0.1)
    runs = 16
    with profile(activities=[ProfilerActivity.CUDA]) as seen, torch.inference_mode():
        for _ in range(runs // 8):
            runner.states.device_lengths.fill_(context)
            runner.launch(8)
        torch.cuda.synchronize()
    kernels = [e for e in seen.key_averages() if e.self_device_time_total and e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    print(f"\n{name}, {rows} rows: {1e6 * step:.0f} us per step")
    for e in kernels[:most]:
        each = e.self_device_time_total / e.count
        print(
            f"  {e.self_device_time_total / runs:8.1f} us  {e.count / runs:6.1f} x {each:6.2f}  {e.key[:100]}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", help="names of models, separated by commas")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--most", type=int, default=14, help="kernels to print")
    given = parser.parse_args()
    bench = Bench(torch.device("cuda"), SkeletonSizes(), 600)
    for name in given.names.split(","):
        with reported(bench, name):
            profile_steps(bench, name, given.rows, given.most)
    return int(any("failed" in found for found in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
