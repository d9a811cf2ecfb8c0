"""BitNet's linear map: weight bytes and speed of packed ternary weights, dense weights and on-the-fly quantization.

    python bench/layers/bitnet.py [--write]

The maps of BitNet b1.58 2B4T's feed-forward layer, 2560 → 6912 and back. Each kind cycles through as many copies as
exceed the caches, as in a model; the kinds alternate in the same run. On a GPU a graph of all copies is replayed, so
that launches cost nothing. First, packed maps are checked against unpacked ones, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from allyouneed.nn.linear.bitlinear import Bit, BitLinear
from allyouneed.nn.linear.ternary import PackedBitLinear

SHAPES, TOKENS, TURNS = [(2560, 6912), (6912, 2560)], (1, 16, 256), 7
PAGE = Path(__file__).parents[2] / "docs/results/bitnet.md"
HEAD = """# BitNet b1.58: packed ternary weights

```sh
python bench/layers/bitnet.py --write
```

One linear map of BitNet b1.58 2B4T's feed-forward layer, in milliseconds per call: the minimum of seven turns, the most
robust figure on a shared machine, and the median. *Packed* is `nn/linear/ternary.py`: 2 bits per weight, int8
activations, integer accumulation, activation rounding included; *rounding* is `nn/linear/bitlinear.py`, the training
path, which gives the same values from full-precision weights. Ratios divide the minimum times of the dense map by those
of the packed one.
"""


def bytes_of(layer: nn.Module) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in layer.state_dict().values())


def kinds(inputs: int, outputs: int, device: str) -> dict[str, tuple[nn.Module, torch.dtype]]:
    """Name: a map, and the precision of its input."""
    trained = Bit().build(inputs, outputs, False)
    assert isinstance(trained, BitLinear)
    half = torch.bfloat16
    found = {
        "dense fp32": (nn.Linear(inputs, outputs, bias=False), torch.float32),
        "dense bf16": (nn.Linear(inputs, outputs, bias=False).to(half), half),
        "rounding": (trained, torch.float32 if device == "cpu" else half),
        "packed": (PackedBitLinear(trained), torch.float32 if device == "cpu" else half),
    }
    return {name: (layer.to(device, dtype), dtype) for name, (layer, dtype) in found.items()}


def copies(layer: nn.Module, room: int) -> list[nn.Module]:
    return [deepcopy(layer) for _ in range(max(1, -(-room // bytes_of(layer))))]


def once(layers: list[nn.Module], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def prepared(layers: list[nn.Module], x: Tensor) -> Callable[[], float]:
    """A function that runs every copy once and returns milliseconds per copy."""
    once(layers, x)
    if not x.is_cuda:

        def timed() -> float:
            start = time.perf_counter()
            once(layers, x)
            return (time.perf_counter() - start) * 1e3 / len(layers)

        return timed
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        once(layers, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        once(layers, x)
    graph.replay()

    def replayed() -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        for _ in range(5):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / len(layers) / 5

    return replayed


@torch.no_grad()
def check(device: str) -> int:
    """Compare maps of odd sizes bit for bit; returns how many."""
    done = 0
    for inputs, outputs in [(1, 1), (7, 63), (258, 70), *SHAPES]:
        trained = Bit().build(inputs, (outputs, 2), True).to(device)
        assert isinstance(trained, BitLinear)
        light = PackedBitLinear(trained)
        for tokens in (1, 3, 16, 17, 64, 100, 256):
            x = torch.randn(tokens, inputs, device=device) * 10 ** torch.randn(tokens, 1, device=device)
            expected, found = trained(x), light(x)
            if not found.equal(expected):
                far = float((found - expected).abs().max() / expected.abs().max())
                raise SystemExit(f"{inputs} → {outputs}, {tokens} tokens: not equal, {far:.1e} apart")
            done += 1
    return done


@torch.no_grad()
def measure(device: str) -> list[str]:
    room = 128 * 2**20 if device == "cpu" else 320 * 2**20  # exceeds any cache
    lines = ["| map | tokens | dense fp32 | dense bf16 | rounding | packed | fp32 / packed | bf16 / packed |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    sizes = []
    for inputs, outputs in SHAPES:
        layers = kinds(inputs, outputs, device)
        held = {name: bytes_of(layer) for name, (layer, _) in layers.items()}
        full, half, light = (held[name] / 1e6 for name in ("dense fp32", "dense bf16", "packed"))
        shares = f"{full / light:.1f} and {half / light:.1f} times less"
        sizes.append(
            f"{inputs} → {outputs}: {full:.1f} MB of weights in fp32, {half:.1f} in bf16, {light:.2f} packed: {shares}."
        )
        many = {name: (copies(layer, room), dtype) for name, (layer, dtype) in layers.items()}
        for tokens in TOKENS:
            x = torch.randn(tokens, inputs, device=device)
            runs = {name: prepared(layers, x.to(dtype)) for name, (layers, dtype) in many.items()}
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(TURNS):
                for name, run in runs.items():
                    times[name].append(run())
            cells = [f"{min(found):.3g} ({statistics.median(found):.3g})" for found in times.values()]
            ratios = [f"{min(times[name]) / min(times['packed']):.2f}" for name in ("dense fp32", "dense bf16")]
            lines.append(f"| {inputs} → {outputs} | {tokens} | " + " | ".join([*cells, *ratios]) + " |")
            print(lines[-1], flush=True)
    return [*sizes, "", *lines]


def write(title: str, lines: list[str]) -> None:
    """Replace the section of this device and keep the others."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else HEAD
    sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]}
    sections[title] = "\n".join(lines)
    body = "".join(f"\n## {name}\n\n{section}\n" for name, section in sorted(sections.items()))
    PAGE.write_text(HEAD + body, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the results to {PAGE.name}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = options.device
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    checked = check(device)
    print(
        f"{name}, torch {torch.__version__}: {checked} packed maps equal to the rounding ones, bit for bit", flush=True
    )
    before = os.getloadavg()[0]
    found = measure(device)
    about = f"torch {torch.__version__}; {checked} packed maps of odd sizes equal to the rounding ones, bit for bit."
    if device == "cpu":
        about += f" Load of the machine ({os.cpu_count()} cores) before {before:.1f}, after {os.getloadavg()[0]:.1f}."
    print("\n".join(found[: len(SHAPES)]))
    if options.write:
        write(name, [about, "", *found])


if __name__ == "__main__":
    main()
