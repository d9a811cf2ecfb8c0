"""The kernels of state spaces against the plain definitions in double precision; a part of kernels.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from allyouneed.kernels.triton import selective_scan as scan
from allyouneed.kernels.triton.short_convolution import short_convolution
from allyouneed.nn.ops import ssd
from allyouneed.nn.ops.selective_scan import selective_ssm
from bench.check.report import LIMITS, Check, random_starts

SCANS = [(2, 1, 5, 3, False), (3, 30, 33, 16, True), (1, 21, 7, 20, False)]  # batch, time, features, states, ragged
LARGE_SCANS = [(2, 500, 100, 16, True), (1, 16000, 96, 16, False), (8, 2048, 1536, 16, False), (1, 1500, 64, 40, True)]
CONVOLUTIONS = [(2, 2, 70, 4), (1, 150, 20, 3), (2, 20, 5, 1)]  # batch, time, features, taps
LARGE_CONVOLUTIONS = [(3, 5000, 700, 4)]
DUALS = [(2, 6, 2, 70, 5, 20), (1, 4, 1, 33, 128, 16)]  # batch, heads, groups, time, states, head width
LARGE_DUALS = [(2, 24, 1, 3000, 128, 64)]

Given = dict[str, Tensor]


def compare(
    check: Check, name: str, given: Given, exact: Sequence[str], dtype: torch.dtype,
    found: Callable[[Given], Sequence[Tensor]], plain: Callable[[Given], Sequence[Tensor]],
) -> None:  # fmt: skip
    """Outputs and the gradients of all that is given; those named in `exact` are single precision in any case."""
    runs = []
    for run, own in ((found, True), (plain, False)):
        leaves = {
            key: x.to(dtype if key not in exact else torch.float32).to(
                check.device, None if own else torch.float64
            ).requires_grad_()
            for key, x in given.items()
        }  # fmt: skip
        outputs = run(leaves)
        torch.manual_seed(0)
        loss = sum((y.double() * torch.randn(y.shape).to(check.device)).sum() for y in outputs)
        runs.append([*outputs, *torch.autograd.grad(loss, list(leaves.values()))])
    check.report(f"{name} {str(dtype)[6:]}", *runs, LIMITS[dtype])


def scanning(check: Check, sizes: tuple[int, int, int, int, bool], dtype: torch.dtype, packed: bool = False) -> None:
    batch, time, features, states, ragged = sizes
    torch.manual_seed(time)
    starts = random_starts(batch, time, check.device) if packed else None
    given = {"x": torch.randn(batch, time, features), "steps": torch.randn(batch, time, features) - 3}
    given |= {"b": torch.randn(batch, time, states), "c": torch.randn(batch, time, states)}
    given |= {"bias": torch.randn(features), "a": -4 * torch.rand(states, features), "skip": torch.randn(features)}
    given["state"] = torch.randn(batch, states, features)
    lengths = torch.randint(0, time + 1, (batch,)).to(check.device) if ragged and not packed else None
    real = None if lengths is None else torch.arange(time, device=check.device) < lengths[:, None]

    def masked(y: Tensor, state: Tensor) -> list[Tensor]:
        return [y if real is None else y * real[..., None], state]

    order = ("x", "steps", "bias", "a", "b", "c", "skip", "state")
    compare(
        check, f"selective scan {sizes}{' packed' if packed else ''}", given, ("bias", "a", "skip", "state"), dtype,
        lambda found: masked(*scan.selective_scan(*(found[key] for key in order), lengths, starts)),
        lambda exact: masked(*selective_ssm(*(exact[key] for key in order), real, starts)),
    )  # fmt: skip


def convolving(check: Check, sizes: tuple[int, int, int, int], dtype: torch.dtype, packed: bool = False) -> None:
    batch, time, features, taps = sizes
    torch.manual_seed(time)
    starts = random_starts(batch, time, check.device) if packed else None
    given = {"x": torch.randn(batch, time, 2 * features), "before": torch.randn(batch, taps - 1, features)}
    given |= {"taps": torch.randn(features, taps), "bias": torch.randn(features)}

    def plain(exact: Given) -> list[Tensor]:
        seen = torch.cat((exact["before"], exact["x"][..., :features]), 1)
        if starts is not None:
            windows, at = (
                seen.unfold(1, taps, 1),
                torch.arange(time, device=check.device),
            )  # (batch, time, features, taps)
            inside = at[:, None] + torch.arange(1 - taps, 1, device=check.device) >= starts[..., None]
            return [silu((windows * inside[:, :, None] * exact["taps"]).sum(-1) + exact["bias"])]
        seen = seen.transpose(1, 2)
        return [silu(conv1d(seen, exact["taps"][:, None], exact["bias"], groups=features)).transpose(1, 2)]

    def ours(found: Given) -> list[Tensor]:
        given = (found["x"][..., :features], found["before"], found["taps"], found["bias"])
        return [short_convolution(*given, starts)]

    name = f"short convolution {sizes}{' packed' if packed else ''}"
    compare(check, name, given, ("taps", "bias"), dtype, ours, plain)


def duality(check: Check, sizes: tuple[int, int, int, int, int, int], dtype: torch.dtype, packed: bool = False) -> None:
    """Mamba-2 by retention's kernel. The state after packed rows means nothing."""
    batch, heads, groups, time, states, width = sizes
    torch.manual_seed(time)
    starts = random_starts(batch, time, check.device) if packed else None
    given = {"x": torch.randn(batch, time, heads, width), "log": -torch.randn(batch, heads, time).exp() / 3}
    given |= {"b": torch.randn(batch, groups, time, states), "c": torch.randn(batch, groups, time, states)}
    given["state"] = torch.randn(batch, heads, states, width)

    def run(form: Callable[..., tuple[Tensor, Tensor]], found: Given) -> list[Tensor]:
        y, h = form(found["x"].transpose(1, 2), *(found[key] for key in ("log", "b", "c", "state")), starts)
        return [y, h] if starts is None else [y]

    compare(
        check, f"state-space duality {sizes}{' packed' if packed else ''}", given, ("log", "state"), dtype,
        lambda found: run(ssd.by_kernel, found), lambda exact: run(ssd.chunked, exact),
    )  # fmt: skip


def state_spaces(check: Check, cuda: bool) -> None:
    print("y, the last state, gradients of x, steps, B, C, bias, A, D, the first state")
    if not cuda:
        scan.SHORTEST = 8  # several segments in short texts
    dtypes = (torch.float32, torch.bfloat16) if cuda else (torch.float32,)
    for dtype in dtypes:
        for sizes in SCANS + (LARGE_SCANS if cuda else []):
            scanning(check, sizes, dtype)
            scanning(check, sizes, dtype, packed=True)
    print("y, gradients of x, the inputs before, taps, bias")
    for dtype in dtypes:
        for some in CONVOLUTIONS + (LARGE_CONVOLUTIONS if cuda else []):
            convolving(check, some, dtype)
            convolving(check, some, dtype, packed=True)
    print("y, the last state, gradients of x, log, B, C, the first state")
    for dtype in dtypes:
        for more in DUALS + (LARGE_DUALS if cuda else []):
            duality(check, more, dtype)
            duality(check, more, dtype, packed=True)
