"""Memory under load: empty space in allocated blocks, prefix cache hits, and preemption when blocks run out.

    python bench/decode/pool.py                # both tables
    python bench/decode/pool.py --requests 60  # a quick look

A mixed load on a small model with random weights: prompts of 16 to 400 tokens, half of them after one of four prefixes
of 96 tokens, answers of 8 to 120 tokens; greedy, sampling and beams of four. All requests arrive at once. All lines of
both tables decode the same answers (checked). The last line of the second table has just the blocks that the largest
request can need. Waste is the mean over all steps. "each its longest" is the waste of a cache that reserves the most
each row can need; "all the longest" that of one padded batch.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from random import Random

import torch

import allyouneed as ayn
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.running_batch import RunningBatch
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.states.paged import BLOCK, BlockPool, PagedStates

VOCAB, WIDTH = 1000, 128
SIZES, SHARES = (2, 4, 8, 16, 32, 64), (1.0, 0.5, 0.25, 0.0)


def engine() -> Engine:
    torch.manual_seed(0)
    layer = {
        "wiring": "pre-norm",
        "repeat": 2,
        "mixer": {"kind": "attention", "heads": 4, "pattern": "causal", "positions": "rotary"},
        "channel": {"kind": "ffn", "hidden": 256},
    }
    model = ayn.build({"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [layer]}).eval()
    return Engine(model, 1, 2, 0, forbidden=[0, 1])


def load(count: int) -> list[tuple[Request, Decoding]]:
    dice, found = Random(0), []
    begins = [[dice.randrange(3, VOCAB) for _ in range(96)] for _ in range(4)]
    for number in range(count):
        length = dice.randrange(8, 120)
        ways = [
            Decoding(method="greedy", max_length=length, min_length=8),
            Decoding(method="sample", top_k=50, seed=number, max_length=length, min_length=8),
            Decoding(beam=4, max_length=length, min_length=8),
        ]
        begin = dice.choice(begins) if number % 2 else []
        prompt = [1, *begin, *(dice.randrange(3, VOCAB) for _ in range(dice.randrange(16, 400)))]
        found.append((Request(prompt, length, (number,)), ways[number % 3]))
    return found


@dataclass
class Found:
    waste: float
    own: float  # waste of a cache that reserves the most each row can need
    padded: float  # and of one padded batch
    hits: float
    rows: int
    preempted: int
    steps: int
    speed: float
    peak: int
    answers: list[list[int]]


def measure(model: Engine, requested: list[tuple[Request, Decoding]], blocks: int, size: int, rows: int) -> Found:
    scheduler = Scheduler(model.runner, rows=rows, budget=2048, pool=BlockPool(blocks, size))
    manager = scheduler.blocks
    assert manager is not None
    requests = [scheduler.submit(*one) for one in requested]
    wastes, owns, padded, most, peak = [], [], [], 0, 0
    begun, spent = time.perf_counter(), 0.0
    while not scheduler.idle:
        scheduler.step()
        measured_at = time.perf_counter()
        states = [batch.states for batch in scheduler.running if isinstance(batch, RunningBatch)]
        lengths = [length for one in states for length in one.lengths]
        if lengths:
            wastes.append(scheduler.waste())
            held = [t for t in scheduler.active if t.tokens or t.spec.decoding.rows > 1]
            longest = [len(t.request.prompt) + t.limit for t in held for _ in range(t.spec.decoding.rows)]
            if longest:
                owns.append(1 - min(1.0, sum(lengths) / sum(longest)))
                padded.append(1 - min(1.0, sum(lengths) / (max(longest) * len(longest))))
        assert all(isinstance(one, PagedStates) for one in states)
        most, peak = max(most, len(lengths)), max(peak, manager.pool.used)
        spent += time.perf_counter() - measured_at
    wall = time.perf_counter() - begun - spent
    answers = [(state.answer or [])[0].tokens for state in requests]
    hits = manager.prefixes.hits / max(1, manager.prefixes.prompt_tokens)
    manager.prefixes.clear()
    assert not manager.pool.used, "blocks were not released"
    decoded = sum(map(len, answers))
    mean = [sum(some) / len(some) for some in (wastes, owns, padded)]
    return Found(*mean, hits, most, scheduler.preemptions, scheduler.steps, decoded / wall, peak, answers)


def largest(model: Engine, requested: list[tuple[Request, Decoding]]) -> int:
    """Blocks that the largest request can need: with fewer it is refused."""
    scheduler = Scheduler(model.runner, pool=BlockPool(10**6))
    assert scheduler.blocks is not None
    return max(scheduler.blocks.measure(scheduler.submit(*one)) for one in requested)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64, help="decoded at once, beams counted")
    chosen = parser.parse_args()
    model, requested = engine(), load(chosen.requests)
    measure(model, requested[:20], 100_000 // BLOCK, BLOCK, chosen.rows)  # warm
    tokens = sum(len(request.prompt) for request, _ in requested)
    print(f"{len(requested)} requests, {tokens:,} prompt tokens; {chosen.rows} rows\n")
    print("tokens a block    waste   each its longest   all the longest     prefix hits   tokens/s")
    truth, needed = None, 0
    for size in SIZES:
        found = measure(model, requested, 100_000 // size, size, chosen.rows)
        truth = truth or found.answers
        assert found.answers == truth
        needed = found.peak if size == BLOCK else needed
        print(
            f"{size:>14} {found.waste:>8.1%} {found.own:>18.1%} {found.padded:>17.1%} {found.hits:>15.1%} "
            f"{found.speed:>10.0f}"
        )
    print(f"\nblocks of {BLOCK} tokens; all rows decoded at once and the cached prefixes take {needed:,}\n")
    print("blocks    share   rows at once preemptions   steps    waste     prefix hits   tokens/s")
    least = largest(model, requested)
    for share in SHARES:
        blocks = max(round(needed * share), least)
        found = measure(model, requested, blocks, BLOCK, chosen.rows)
        assert found.answers == truth
        print(
            f"{blocks:>6} {blocks / needed:>8.0%} {found.rows:>14} {found.preempted:>11} {found.steps:>7} "
            f"{found.waste:>8.1%} {found.hits:>15.1%} {found.speed:>10.0f}"
        )


if __name__ == "__main__":
    main()
