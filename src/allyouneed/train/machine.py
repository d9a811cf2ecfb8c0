"""Where and how the arithmetic is done: device, precision, compilation. The model knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from allyouneed.errors import UserError
from allyouneed.nn.sublayer import SubLayer
from allyouneed.train.recipe import Recipe


@dataclass(frozen=True)
class Machine:
    device: torch.device
    bf16: bool
    compiled: bool
    why: str  # what was chosen and why, in one line

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[None]:
        """Matrix products in bf16 where chosen; weights, norms, sums and the optimiser stay in fp32."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16)

    def speed_up(self, model: nn.Module) -> None:
        """Compile the sub-layers that look at nothing but their input. One compiled graph serves all layers."""
        if self.cuda and self.bf16:
            torch.set_float32_matmul_precision("high")
        if not self.compiled:
            return
        for module in model.modules():
            if isinstance(module, SubLayer) and type(module).__module__.endswith(".feedforward"):
                module.compile(dynamic=False)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Validation sees many shapes; compiling each would cost more than it saves."""
        if not self.compiled:
            yield
            return
        with torch.compiler.set_stance("force_eager"):
            yield


def choose(recipe: Recipe) -> Machine:
    device = _device(recipe.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    fast = device.type == "cuda" or fast_bf16_on_cpu()
    bf16 = fast if recipe.precision == "auto" else recipe.precision == "bf16"
    if recipe.precision != "auto":
        reason = "asked for"
    elif device.type == "cuda":
        reason = "the GPU's matrix units"
    else:
        reason = "the CPU has bf16 instructions" if fast else "the CPU has no bf16 instructions"
    compiled = recipe.compile == "on" or (recipe.compile == "auto" and device.type == "cuda")
    words = f"{name}; {'bf16' if bf16 else 'fp32'} ({reason}); {'compiled' if compiled else 'not compiled'}"
    return Machine(device, bf16, compiled, words)


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device: cuda is asked for, but torch finds no CUDA GPU; use device: auto or cpu")
    return torch.device("cuda", torch.cuda.current_device())


def fast_bf16_on_cpu() -> bool:
    """Whether bf16 matrix products have instructions of their own here; emulated, they are slower than fp32."""
    flags = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())
    except OSError:
        pass
    return bool(flags & {"avx512_bf16", "amx_bf16"})
