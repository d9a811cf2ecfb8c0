"""Device, precision and compilation of training. Applied from outside; model files know nothing of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from allyouneed.errors import UserError
from allyouneed.kernels import usable
from allyouneed.nn.context import Context
from allyouneed.nn.embed.tokens import EmbedModule
from allyouneed.nn.models.block import Block
from allyouneed.nn.models.stack import Stack
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.positions.rotary import RotaryModule
from allyouneed.runtime.float8 import check_device, use_float8
from allyouneed.runtime.process import allow_tf32, run_eagerly
from allyouneed.training.recipe.recipe import Recipe

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Backend:
    device: torch.device
    bf16: bool
    compiled: bool
    summary: str  # the choices and their reasons, in one line
    fp8: bool = False  # products of linear maps with 8-bit factors; the others in bf16

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """bf16 matrix products if chosen; weights, norms, sums and the optimiser stay in fp32. On a GPU, cuDNN
        attention has priority: it is the fastest where it applies."""
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16))
            if self.cuda:
                stack.enter_context(sdpa_kernel(KERNELS, set_priority=True))
            yield

    def compile_model(self, model: nn.Module, fusions: Collection[str] | None = None) -> None:
        """Compile traceable blocks, and the traceable parts of the others. Identical layers share one compiled graph.
        `fusions`: of the backward pass (runtime/cuda/fused_backward.py), and `products` (products.py); default: all.
        With `fp8`, linear maps are swapped before."""
        if self.fp8:
            use_float8(model)
        if self.cuda and self.bf16:
            allow_tf32()
        for module in model.modules():
            for name in getattr(module, "uncompiled", ()) if self.compiled else ():
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
            if isinstance(module, RotaryModule):  # otherwise every forward pass copies them to the device
                module.frequencies = module.frequencies.to(self.device)
        if not self.compiled:
            return
        if usable(torch.empty(0, device=self.device)):
            from allyouneed.runtime.cuda.fused_backward import FUSIONS, fuse_backward  # registers operators, 0.2 s
            from allyouneed.runtime.cuda.products import use_fast_products

            if self.bf16 and (fusions is None or "products" in fusions):
                use_fast_products(model)
            fuse_backward(model, FUSIONS if fusions is None else fusions)
        for module in model.modules():
            if isinstance(module, EmbedModule) and self.cuda and self.bf16:
                module.register_forward_hook(_in_bf16)
            if isinstance(module, Stack):
                module.plans_ahead = True
                if module.end is not None:
                    module.end.compile(dynamic=False)
            if isinstance(module, Block):
                _compile_block(module)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run validation eagerly: it has many shapes, and compiling each costs more than it saves."""
        if not self.compiled:
            yield
            return
        with run_eagerly():
            yield


def _compile_block(block: Block) -> None:
    """Compile a block as a whole if it is traceable, except for batches whose rows are rearranged (nn/ops/unpack.py):
    these run its other parts compiled."""
    parts: list[Any] = list(block.sublayers.values())
    unpacks = any(part.unpacks for part in parts)
    for part in parts if unpacks or not block.traceable else []:
        if part.traceable and not part.unpacks:
            part.compile(dynamic=False)
    if not block.traceable:
        return
    block.compile(dynamic=False)
    whole: Any = block._compiled_call_impl

    def call(stream: Any, context: Context, states: Any = None) -> Any:
        eager = unpacks and unpack_rows(context, restarts=True).tokens is not None
        losses = context.losses
        if losses is not None:  # the length of the list is part of a graph: each block starts with an empty one
            context.losses = []
        found = (block._call_impl if eager else whole)(stream, context=context, states=states)
        if losses is not None:
            losses += context.losses or []
            context.losses = losses
        return found

    block._compiled_call_impl = call


def _in_bf16(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    """Keep the residual stream in bf16, which halves the memory traffic between sub-layers; norms and sums compute in
    fp32."""
    return found.to(torch.bfloat16) if torch.is_autocast_enabled("cuda") else found


def choose_backend(recipe: Recipe) -> Backend:
    device = _device(recipe.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    fast = device.type == "cuda" or cpu_supports_bf16()
    bf16 = fast if recipe.precision == "auto" else recipe.precision != "fp32"
    fp8 = recipe.precision == "fp8"
    if fp8:
        check_device(device)
    if recipe.precision != "auto":
        reason = "emulated: the same results, slower than bf16" if fp8 and device.type == "cpu" else "set by the recipe"
    elif device.type == "cuda":
        reason = "the GPU's matrix units"
    else:
        reason = "the CPU has bf16 instructions" if fast else "the CPU has no bf16 instructions"
    compiled = recipe.compile in ("on", "blocks") or (recipe.compile == "auto" and device.type == "cuda")
    precision = "fp8" if fp8 else "bf16" if bf16 else "fp32"
    words = f"{name}; {precision} ({reason}); {'compiled' if compiled else 'not compiled'}"
    return Backend(device, bf16, compiled, words, fp8)


def _device(wanted: str) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError("device: cuda, but torch finds no CUDA GPU; use device: auto or cpu")
    return torch.device("cuda", torch.cuda.current_device())


def cpu_supports_bf16() -> bool:
    """Whether the CPU has bf16 matrix instructions; emulated bf16 is slower than fp32."""
    flags = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            flags = next((set(line.split()) for line in file if line.startswith(("flags", "Features"))), set())
    except OSError:
        pass
    return bool(flags & {"avx512_bf16", "amx_bf16"})
