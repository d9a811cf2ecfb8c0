"""Speculative decoding with CUDA graphs: tokens per second with and without a draft, and without graphs, in turns.

    python bench/decode/speculative_gpu.py [--rows 1 8] [--mixers attention retention] [--new 256] [--turns 3]
    python bench/decode/speculative_gpu.py --device cpu --new 16 --tiny     rehearsal

Random weights (12 layers, 768 wide, bf16, vocabulary of 50,257), tied embeddings: such a model repeats itself, and so
does any other, so that look-up and a model of two layers are nearly always right: the most that drafts can gain.
`wrong`: two layers whose embeddings are not tied, which are nearly always wrong: the most that drafts can cost.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from allyouneed.config import override, parse, preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.infer.speculative.stats import total_stats
from allyouneed.nn.models.base import Model

MIXERS = {
    "attention": "{kind: attention, heads: 12, pattern: causal, positions: rotary}",
    "grouped": "{kind: attention, heads: 12, kv_heads: 2, pattern: causal, positions: rotary}",
    "mla": "{kind: mla, heads: 12, kv_rank: 128, nope_width: 64, rope_width: 32, value_width: 64, pattern: causal}",
    "retention": "{kind: retention, heads: 12}",
    "rwkv": "{kind: rwkv}",
    "mamba": "{kind: mamba}",
}


def engine_of(mixer: str, layers: int, device: str, tiny: bool, tied: bool = True) -> Engine:
    sizes = ["width=96", "decoder[0].channel.hidden=96", "vocab=500"] if tiny else ["vocab=50257"]
    changes = [*sizes, f"decoder[0].repeat={layers}", f"decoder[0].mixer={MIXERS[mixer]}", "dropout=0"]
    changes.append(f"embed.tied={str(tied).lower()}")
    torch.manual_seed(layers)
    config = parse(Model, override(preset_tree("gpt2"), changes))  # type: ignore[type-abstract]
    model: Any = config.build().eval().to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return Engine(model, 1, 2, 0, forbidden=[0, 1, 2], limit=model.config.limit)


def measure(engine: Engine, prompts: list[list[int]], new: int, draft: Draft | None, graphs: bool) -> tuple[float, str]:
    """Tokens per second, and what became of the draft tokens."""
    decoding = Decoding(method="greedy", max_length=new, loops=None)
    engine.graphs.refused = None if graphs else "measured without"
    begin = time.perf_counter()
    found = engine.complete(prompts, decoding, draft=draft)
    count = sum(len(one.tokens) for (one,) in found)
    return count / (time.perf_counter() - begin), str(total_stats(found) or "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--mixers", nargs="*", default=["attention", "retention"], choices=list(MIXERS))
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    for mixer in given.mixers:
        engine = engine_of(mixer, 12, given.device, given.tiny)
        small, wrong = (engine_of(mixer, 2, given.device, given.tiny, tied) for tied in (True, False))
        drafts: dict[str, Draft | None] = {"none": None, "lookup": PromptLookup(7)}
        drafts |= {"2 layers": DraftModel(small.runner, 4), "wrong": DraftModel(wrong.runner, 4)}
        for rows in given.rows:
            prompts = [[1, *(5 + (7 * n + k) % 400 for k in range(15))] for n in range(rows)]
            best: dict[tuple[str, bool], tuple[float, str]] = {}
            for turn in range(given.turns + 1):  # the first captures
                for name, draft in drafts.items():
                    for graphs in (True, False):
                        if turn < 2 or graphs:
                            found = measure(engine, prompts, given.new, draft, graphs)
                            best[name, graphs] = max(best.get((name, graphs), (0.0, "")), found if turn else (0.0, ""))
            for name in drafts:
                (fast, stats), (slow, _) = best[name, True], best[name, False]
                gain = fast / best["none", True][0]
                print(f"{mixer:10s} {rows:3d} rows  draft {name:9s} {fast:9.0f} tokens/s  {gain:5.2f}x  "
                      f"without graphs {slow:9.0f}  {stats}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
