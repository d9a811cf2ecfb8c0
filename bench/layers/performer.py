"""Approximation error of a Performer against softmax attention, by its number of features.

    python bench/layers/performer.py [--write]

Random queries, keys and values of one head, and positive random features, orthogonal or independent (Choromanski
et al. 2021, 4.2 compares the same). The error is ‖found − exact‖ / ‖exact‖, averaged over draws. `--write` writes
the table to docs/results/performer.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from allyouneed.config import parse
from allyouneed.nn.common import Common
from allyouneed.nn.mixers.performer import Performer, PerformerModule, orthogonal_features

FEATURES, PAGE = (16, 64, 256, 1024, 4096), Path(__file__).parents[2] / "docs/results/performer.md"


class Trial(NamedTuple):
    name: str
    deviation: float  # of queries and keys
    orthogonal: bool = True
    past: bool = False


TRIALS = (
    Trial("0.25", 0.25),
    Trial("0.5", 0.5),
    Trial("1", 1.0),
    Trial("0.5, drawn one by one", 0.5, orthogonal=False),
    Trial("0.5, past only", 0.5, past=True),
)


def module(features: int, width: int, orthogonal: bool) -> PerformerModule:
    built = Performer(heads=1, features=features, sees="around").build(parse(Common, {"width": width}))
    assert isinstance(built, PerformerModule)
    omega = orthogonal_features(features, width) if orthogonal else torch.randn(features, width)
    built.bits.copy_(omega.view(torch.int32))
    return built


def found_by(performer: PerformerModule, q: Tensor, k: Tensor, v: Tensor, past: bool) -> Tensor:
    if past:
        return performer.attend_causal(q, k, v, None, performer.begin(len(q), q))[0]
    both = performer.queries(q) @ performer.sum_features(k, v, None)
    return both[..., :-1] / both[..., -1:]


def error(features: int, trial: Trial, length: int, width: int, draws: int) -> float:
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        q, k = (torch.randn(1, 1, length, width) * trial.deviation for _ in range(2))
        v = torch.randn(1, 1, length, width)
        exact = sdpa(q, k, v, is_causal=trial.past)
        difference = found_by(module(features, width, trial.orthogonal), q, k, v, trial.past) - exact
        found.append((difference.norm() / exact.norm()).item())
    return sum(found) / draws


def table(length: int, width: int, draws: int) -> str:
    lines = [f"| features | {' | '.join(trial.name for trial in TRIALS)} |", "|---:|" + "---:|" * len(TRIALS)]
    print("\n".join(lines))
    for features in FEATURES:
        cells = [f"{error(features, trial, length, width, draws):.3f}" for trial in TRIALS]
        lines.append(f"| {features:,} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def page(rows: str, length: int, width: int, draws: int) -> str:
    return f"""# Performer: approximation error against softmax attention

```sh
python bench/layers/performer.py --write
```

One head of width {width}, {length:,} tokens, normal values, normal queries and keys with the standard deviation in
the column header. The error is ‖approximate − exact‖ / ‖exact‖, averaged over {draws} draws. Features are positive
and orthogonal (Choromanski et al. 2021, eq. 5-7 and 2.4) unless the column says otherwise; "causal" uses prefix sums.

{rows}

The error decreases roughly with the inverse square root of the number of features once it is small. The number needed
depends on how peaked attention is: the variance of one feature grows as exp(‖q + k‖²/√width) (lemma 2), so a standard
deviation of 0.5 is easy and 1 is out of reach. A model trained as a Performer need not approximate softmax; one that
inherits softmax attention's weights must.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(PAGE.parents[2])}")
    given = parser.parse_args()
    with torch.no_grad():
        rows = table(given.length, given.width, given.draws)
    if given.write:
        PAGE.write_text(page(rows, given.length, given.width, given.draws), encoding="utf-8")


if __name__ == "__main__":
    main()
