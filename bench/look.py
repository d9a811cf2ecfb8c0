"""How long a click on the page takes: documents of the views on a recorded run, built in this process.

    python bench/look.py                   # 512 tokens; a click should take less than 100 ms on two cores
    python bench/look.py --tokens 4000     # maps are pooled

A random decoder (6 layers, 8 heads, width 256) reads random tokens; each click is timed five times on layers, heads and
tokens that were not shown before, after the run was recorded. The median is printed. There is no peer: BertViz and
others draw attention that is already in memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch

from allyouneed import build
from allyouneed.apps.inspect.offline import view_model
from allyouneed.apps.inspect.views import build_document
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.folder import Folder
from allyouneed.infer.predictors.registry import predictor

LAYER = {
    "repeat": 6,
    "wiring": "pre-norm",
    "mixer": {"kind": "attention", "heads": 8, "pattern": "causal"},
    "channel": {"kind": "ffn", "hidden": 1024},
}


def make(tokens: int) -> tuple[Any, str]:
    dice = Random(0)
    words = ["".join(dice.choices("etaoinshrdlu", k=4)) for _ in range(300)]
    tokenizer = train(TokenizerConfig(vocab=600), [" ".join(words)] * 2)
    torch.manual_seed(0)
    module = build(
        {
            "kind": "decoder",
            "vocab": tokenizer.size,
            "width": 256,
            "embed": {"positions": "sinusoidal"},
            "decoder": [LAYER],
        }
    ).eval()
    folder = Folder(module, Vocabularies(tokenizer, tokenizer), {"kind": "causal-lm"}, {}, max_tokens=tokens + 64)
    text = ""
    while len(tokenizer.encode(text)) < tokens - 2:
        text += dice.choice(words) + " "
    return view_model(predictor(folder)), text


def timed(click: Callable[[], Any]) -> float:
    started = time.perf_counter()
    click()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    given = parser.parse_args()
    model, text = make(given.tokens)
    target = " "

    def document(view: str, **asked: Any) -> Any:
        return build_document(view, model, text=text, target=target, **asked)

    first = timed(lambda: document("walk", position=0))
    print(f"{given.tokens} tokens, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print(f"| | ms |\n|---|---:|\n| first view: the run is recorded | {1000 * first:,.0f} |")
    clicks: dict[str, list[Callable[[], Any]]] = {
        "walk: another token": [lambda n=n: document("walk", position=n) for n in (3, 50, 100, 200, 300)],
        "mixing: another layer": [lambda n=n: document("mixing", site=f"decoder.{n}.mixer") for n in range(1, 6)],
        "mixing: another head": [lambda n=n: document("mixing", site="decoder.2.mixer", head=n) for n in range(1, 6)],
        "what if: a head is switched off": [
            lambda n=n: document("what_if", ablate=[f"decoder.3.mixer.heads[{n}]"]) for n in range(5)
        ],
        "why: blocks": [lambda n=n: document("why", answer=n, unit="block") for n in range(1)],
    }
    for name, several in clicks.items():
        print(f"| {name} | {1000 * statistics.median(timed(one) for one in several):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
