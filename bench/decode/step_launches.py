"""What a decode step launches in every layer, of every mixer in the skeleton of family_speed/gpu.py: our kernels, and
operators of torch.

    python bench/decode/step_launches.py                                         on a GPU
    TRITON_INTERPRET=1 python bench/decode/step_launches.py --device cpu         anywhere, as a GPU would launch them
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.lab.mixer_sizes import TINY, variants
from allyouneed.nn.linear.ternary import pack_model
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.attention import decode
from allyouneed.runtime.cuda import kernels, mixer_kernels, state_space_kernels
from allyouneed.runtime.cuda.decode_step import DecodeStep
from allyouneed.runtime.cuda.static_cache import StaticStates


class Launches(NamedTuple):
    """Kernels of ours, and operators that launch something."""

    kernels: int
    operators: int

    def minus(self, other: Launches, times: int = 1) -> Launches:
        return Launches(*(a - times * b for a, b in zip(self, other, strict=True)))


class Counter(TorchDispatchMode):
    """Counts launches inside."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.operators = 0
        self.inside = False  # a kernel: the interpreter runs operators, which no GPU does

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        allocates = name in ("empty", "new_empty", "empty_like", "_unsafe_view")
        self.operators += not (self.inside or func.is_view or allocates)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Counter:
        usual = self.usual = KernelInterface.__getitem__

        def counted(kernel: Any, grid: Any) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                self.kernels, self.inside = self.kernels + 1, True
                usual(kernel, grid)(*args, **kwargs)
                self.inside = False

            return launch

        KernelInterface.__getitem__ = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        KernelInterface.__getitem__ = self.usual


def launches(name: str, layers: int, device: str) -> Launches:
    torch.manual_seed(0)
    keys = variants(replace(TINY, layers=layers))[name]
    model: Any = parse(Model, keys).build().eval()  # type: ignore[type-abstract]
    model = pack_model(model) if keys.get("linear") == "bit" else model
    model = model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    step, tokens = DecodeStep(model, StaticStates(model, 2, 1, 64, 0)), torch.tensor([4, 5], device=device)
    with torch.no_grad():
        step(tokens)
        with Counter() as counter:
            step(tokens)
    return Launches(counter.kernels, counter.operators)


def launch_as_on_a_gpu() -> None:
    """The interpreter runs our kernels on a CPU, in single precision."""
    patched: Any
    for patched in (kernels, mixer_kernels, decode):
        patched.usable = lambda x: x.dtype is torch.float32
    for patched in (kernels, mixer_kernels, state_space_kernels):
        patched.is_narrow = lambda x, weight: True
    from bench.check.interpreter import prepare_interpreter

    prepare_interpreter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", help="names of models, separated by commas")
    given = parser.parse_args()
    if given.device == "cpu":
        launch_as_on_a_gpu()
    print("| model | kernels per layer | operators per layer | once per step |")
    print("|" + "---|" * 4)
    for name in given.only.split(",") if given.only else variants(TINY):
        two, four = (launches(name, layers, given.device) for layers in (2, 4))
        layer = Launches(*(n // 2 for n in four.minus(two)))
        once = two.minus(layer, 2)
        print(f"| {name} | {' | '.join(map(str, layer))} | {once.kernels} + {once.operators} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
