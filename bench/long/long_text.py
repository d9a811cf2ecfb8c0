"""One long text read in pieces, through sliding windows and with segment recurrence (Dai et al. 2019, figures 1 and 2).

    python bench/long/long_text.py text.txt[.gz] --minutes 1.5

A small byte-level decoder (pattern `causal & window(w)`, Transformer-XL positions) is trained on the first nine tenths
of the text, on segments with memory of the previous ones, then evaluated on the first `--judged` bytes of the rest. The
receptive field of a token is 1 + layers · (w − 1) bytes: sliding windows of that length cover it, and so does the
recurrence, which computes each byte once. The ratio compares the seconds of both in this run.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from allyouneed.config import parse
from allyouneed.metrics.perplexity import pieces, receptive_field, recurrent, sliding
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.decoder import Decoder
from allyouneed.nn.models.segment_recurrence import run_segments

ROWS = 16


def read(path: Path) -> Tensor:
    given = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return torch.frombuffer(bytearray(given), dtype=torch.uint8).long()


def config_of(layers: int, width: int, window: int) -> Decoder:
    mixer = {"kind": "attention", "heads": 4, "pattern": f"causal & window({window})", "positions": "transformer-xl"}
    layer = {
        "repeat": layers,
        "wiring": "pre-norm",
        "mixer": mixer | {"bias": False, "cache": "hidden"},
        "channel": {"kind": "ffn", "hidden": 4 * width},
    }
    config = parse(Model, {"kind": "decoder", "vocab": 256, "width": width, "decoder": [layer]})  # type: ignore[type-abstract]
    assert isinstance(config, Decoder)
    return config


def train(model: Any, text: Tensor, segment: int, minutes: float) -> None:
    """Read the text from `ROWS` starting points in parallel; earlier segments stay in memory and are not recomputed."""
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    long = (len(text) - 1) // ROWS
    read, targets = (text[shift : shift + ROWS * long].view(ROWS, long) for shift in (0, 1))
    begun, step, losses = time.monotonic(), 0, []
    while True:
        for span, hidden in run_segments(model, read, segment, model.start(ROWS)):
            labels = targets[:, span]
            loss = model.head.loss(hidden, labels, 0.0)[0] / labels.numel()
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimiser.step()
            step, losses = step + 1, [*losses[-49:], loss.item()]
            gone = time.monotonic() - begun
            if gone > 60 * minutes:
                mean = sum(losses) / len(losses)
                print(f"trained {step} segments in {gone:.0f} s, loss of the last {len(losses)}: {mean:.3f}")
                return


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("text", type=Path)
    options.add_argument("--minutes", type=float, default=1.5)
    options.add_argument("--judged", type=int, default=4000, help="bytes to predict")
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--window", type=int, default=32)
    options.add_argument("--segment", type=int, default=64)
    given = options.parse_args()
    torch.manual_seed(0)
    text, config = read(given.text), config_of(given.layers, given.width, given.window)
    model, cut = config.build(), len(text) * 9 // 10
    field = int(receptive_field(config))
    print(
        f"{given.text.name}: {len(text):,} bytes; {config.cost().parameters:,} parameters, a token knows {field} bytes"
    )
    train(model, text[:cut], given.segment, given.minutes)
    judged = text[cut : cut + given.judged + 1]
    modes = {
        f"pieces of {given.segment}": lambda: pieces(model, judged, given.segment),
        f"pieces of {field}": lambda: pieces(model, judged, field),
        f"sliding windows of {given.segment}": lambda: sliding(model, judged, given.segment),
        f"sliding windows of {field}": lambda: sliding(model, judged, field),
        f"recurrent, segments of {given.segment}": lambda: recurrent(model, judged, given.segment),
    }
    found, seconds = {}, {}
    print(f"\n{'mode':<32}{'nats':>9}{'perplexity':>12}{'computed':>12}{'seconds':>10}")
    for name, mode in modes.items():
        begun = time.monotonic()
        found[name] = mode()
        seconds[name] = time.monotonic() - begun
        loss = found[name]
        print(f"{name:<32}{loss.mean:>9.5f}{loss.perplexity:>12.4f}{loss.computed:>12,}{seconds[name]:>10.2f}")
    whole, steps = list(modes)[3], list(modes)[4]
    print(
        f"\nrecurrent and {whole} differ by {abs(found[whole].mean - found[steps].mean):.1e} nats a byte; the windows "
        f"compute {found[whole].computed / found[steps].computed:.0f} times as many tokens and take "
        f"{seconds[whole] / seconds[steps]:.0f} times as long"
    )


if __name__ == "__main__":
    main()
