"""What becomes of memory when many ask at once: blocks that hold nothing, beginnings that are read once, and who waits
when there are too few blocks.

    python bench/pool.py                # both tables
    python bench/pool.py --requests 60  # a quick look

A mixed load on a small model with random weights: prompts of 16 to 400 tokens, half of them after one of four
beginnings of 96, answers of 8 to 120 tokens; greedy, sampled and by beams of four. Everyone comes at once. The answers
are the same in all lines of both tables (checked). The last line of the second has just the blocks that the largest
request can come to need. Waste is the mean over all steps. "each its longest" is the waste of
a cache that reserves for every row what it may come to need; "all the longest" that of one padded batch.
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
    own: float  # waste of a cache that reserves what each may come to need
    padded: float  # and of one that has the longest's room for all
    hits: float
    rows: int
    preempted: int
    steps: int
    speed: float
    peak: int
    answers: list[list[int]]


def measure(model: Engine, asked: list[tuple[Request, Decoding]], blocks: int, size: int, rows: int) -> Found:
    scheduler = Scheduler(model, rows=rows, budget=2048, pool=BlockPool(blocks, size))
    manager = scheduler.blocks
    assert manager is not None
    requests = [scheduler.submit(*one) for one in asked]
    wastes, owns, padded, most, peak = [], [], [], 0, 0
    begun, spent = time.perf_counter(), 0.0
    while not scheduler.idle:
        scheduler.step()
        looked = time.perf_counter()
        states = [batch.states for batch in scheduler.running if isinstance(batch, RunningBatch)]
        written = [length for one in states for length in one.lengths]
        if written:
            wastes.append(scheduler.waste())
            held = [t for t in scheduler.active if t.tokens or t.spec.decoding.rows > 1]
            longest = [len(t.request.prompt) + t.limit for t in held for _ in range(t.spec.decoding.rows)]
            if longest:
                owns.append(1 - min(1.0, sum(written) / sum(longest)))
                padded.append(1 - min(1.0, sum(written) / (max(longest) * len(longest))))
        assert all(isinstance(one, PagedStates) for one in states)
        most, peak = max(most, len(written)), max(peak, manager.pool.used)
        spent += time.perf_counter() - looked
    wall = time.perf_counter() - begun - spent
    answers = [(state.answer or [])[0].tokens for state in requests]
    hits = manager.prefixes.hits / max(1, manager.prefixes.prompt_tokens)
    manager.prefixes.clear()
    assert not manager.pool.used, "every block comes back"
    said = sum(map(len, answers))
    mean = [sum(some) / len(some) for some in (wastes, owns, padded)]
    return Found(*mean, hits, most, scheduler.preemptions, scheduler.steps, said / wall, peak, answers)


def largest(model: Engine, asked: list[tuple[Request, Decoding]]) -> int:
    """Blocks that the largest request can come to need: with fewer it is refused."""
    scheduler = Scheduler(model, pool=BlockPool(10**6))
    assert scheduler.blocks is not None
    return max(scheduler.blocks.most(scheduler.submit(*one)) for one in asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rows", type=int, default=64, help="written at once, beams counted")
    chosen = parser.parse_args()
    model, asked = engine(), load(chosen.requests)
    measure(model, asked[:20], 100_000 // BLOCK, BLOCK, chosen.rows)  # warm
    print(f"{len(asked)} requests, {sum(len(r.prompt) for r, _ in asked):,} tokens of prompts; {chosen.rows} rows\n")
    print("tokens a block    waste   each its longest   all the longest   prompts known   tokens/s")
    truth, needed = None, 0
    for size in SIZES:
        found = measure(model, asked, 100_000 // size, size, chosen.rows)
        truth = truth or found.answers
        assert found.answers == truth
        needed = found.peak if size == BLOCK else needed
        print(
            f"{size:>14} {found.waste:>8.1%} {found.own:>18.1%} {found.padded:>17.1%} {found.hits:>15.1%} "
            f"{found.speed:>10.0f}"
        )
    print(
        f"\nblocks of {BLOCK} tokens; everyone who is written at once, with what is kept for later, takes {needed:,}\n"
    )
    print("blocks    share   rows at once   put aside   steps    waste   prompts known   tokens/s")
    least = largest(model, asked)
    for share in SHARES:
        blocks = max(round(needed * share), least)
        found = measure(model, asked, blocks, BLOCK, chosen.rows)
        assert found.answers == truth
        print(
            f"{blocks:>6} {blocks / needed:>8.0%} {found.rows:>14} {found.preempted:>11} {found.steps:>7} "
            f"{found.waste:>8.1%} {found.hits:>15.1%} {found.speed:>10.0f}"
        )


if __name__ == "__main__":
    main()
