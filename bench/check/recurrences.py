"""Retention and WKV of RWKV against the plain definitions in double precision; a part of kernels.py."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.kernels.triton.retention import retention
from allyouneed.kernels.triton.wkv import wkv
from allyouneed.nn.ops import retention as retain
from allyouneed.nn.ops.unpack import first_tokens
from allyouneed.nn.ops.wkv import LEAST, initial_state, prefix_states, wkv_output
from bench.check.report import LIMITS, Check, Sizes, random_starts

# batch, heads, time, keys, values
RETENTIONS = [(2, 3, 1, 4, 5), (2, 1, 7, 16, 20), (1, 2, 63, 60, 100), (1, 1, 500, 20, 70)]
LARGE_RETENTIONS = [(2, 3, 500, 60, 100), (1, 8, 5000, 64, 64), (2, 4, 2000, 256, 432), (1, 2, 33000, 128, 128)]
SUMS = [(2, 1, 5), (3, 7, 70), (2, 63, 10)]  # batch, time, features
LARGE_SUMS = [(3, 500, 100), (1, 4096, 512), (16, 1000, 768), (1, 65536, 64)]


def of_last(starts: Tensor) -> Tensor:
    """(batch, time) bool: tokens of the sentence that a packed row ends with."""
    return torch.arange(starts.shape[1], device=starts.device) >= starts[:, -1:]


def check_retention(
    check: Check, sizes: Sizes, dtype: torch.dtype, steady: bool, begun: bool, packed: bool = False
) -> None:
    batch, heads, time, keys, values = sizes
    torch.manual_seed(time)
    starts = random_starts(batch, time, check.device) if packed else None
    turned = [torch.randn(batch, time, heads, width).transpose(1, 2) for width in (keys, keys, values)]
    given = [x.to(dtype).to(check.device) for x in turned]
    steps = torch.arange(heads)[None, :, None] / 1.0 if steady else 2 * torch.randn(batch, heads, time)
    log = torch.nn.functional.logsigmoid(3 + steps).to(check.device)
    begin = (torch.randn(batch, heads, keys, values), torch.randn(batch, heads, keys)) if begun else None
    noise = torch.randn(batch, heads, time, values), torch.randn(batch, heads, keys, values)
    g, g_end = (x.double().to(check.device) for x in noise)

    def run(dtypes: tuple[torch.dtype, torch.dtype], plain: bool) -> list[Tensor]:
        q, k, v = (check.leaf(x, dtypes[0]) for x in given)
        decay = log.to(dtypes[1]).requires_grad_(not steady)
        sums = None if begin is None else (check.leaf(begin[0], dtypes[1]), begin[1].to(check.device, dtypes[1]))
        if plain:
            o, r = retain.chunkwise(q, k, v, decay, sums, starts)
            s, z = retain.fold(
                sums or retain.initial_state(batch, heads, keys, values, q),
                k if starts is None else k * of_last(starts)[:, None, :, None],
                v,
                decay.expand(batch, heads, time),
            )
        else:
            o, r, (s, z) = retention(q, k, v, decay, sums, starts)
        leaves = [x for x in (q, k, v, decay, *(sums or ())) if x.requires_grad]
        loss = (o.double() * g).sum() + (s.double() * g_end).sum()
        return [o, r, s, z, *torch.autograd.grad(loss, leaves)]

    found, exact = run((dtype, torch.float32), False), run((torch.float64, torch.float64), True)
    kind = f"{'steady' if steady else 'gated'}{', begun' if begun else ''}{', packed' if packed else ''}"
    check.report(f"retention {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])


def check_wkv(check: Check, sizes: Sizes, dtype: torch.dtype, ragged: bool, begun: bool, packed: bool = False) -> None:
    batch, time, features = sizes
    torch.manual_seed(time)
    starts = random_starts(batch, time, check.device) if packed else None
    first = None if starts is None else first_tokens(starts)
    k, v = (torch.randn(batch, time, features).to(dtype) for _ in range(2))
    w, u = torch.linspace(-6, 3, features) + 0.1 * torch.randn(features), torch.randn(features)
    m, a, b = initial_state(batch, features, k)
    if begun:
        m, a, b = (x[:, -1] for x in prefix_states((m, a, b), *torch.randn(2, batch, 3, features), w.exp()))
    lengths = (torch.randint(0, time + 1, (batch,)) if ragged else torch.full((batch,), time)).to(check.device)
    inside = (torch.arange(time, device=check.device) < lengths[:, None])[..., None]
    noise = torch.randn(batch, time, features), torch.randn(batch, features), torch.randn(batch, features)
    g, g_a, g_b = (x.double().to(check.device) for x in noise)

    def run(dtypes: tuple[torch.dtype, torch.dtype], plain: bool) -> list[Tensor]:
        leaves = [check.leaf(x, dtypes[0]) for x in (k, v)] + [check.leaf(x, dtypes[1]) for x in (w, u, a, b)]
        past = (m.to(check.device, dtypes[1]), leaves[4], leaves[5])
        if plain:
            sums = prefix_states(past, leaves[0], leaves[1], leaves[2].exp(), first)
            y = wkv_output(sums, leaves[0], leaves[1], leaves[3], first) * inside
            at = lengths[:, None, None].expand(-1, 1, features)
            then = [x.gather(1, at)[:, 0] for x in sums]
        else:
            limits = lengths if ragged else None
            y, ends = wkv(past, leaves[0], leaves[1], leaves[2].exp(), leaves[3], limits, LEAST, starts)
            then = list(ends)
        loss = (y.double() * g).sum() + (then[1].double() * g_a).sum() + (then[2].double() * g_b).sum()
        return [y, *then, *torch.autograd.grad(loss, leaves)]

    found, exact = run((dtype, torch.float32), False), run((torch.float64, torch.float64), True)
    kind = f"{'ragged' if ragged else 'whole'}{', begun' if begun else ''}{', packed' if packed else ''}"
    check.report(f"wkv {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])


def sums(check: Check, cuda: bool) -> None:
    print("o, r, S, z, gradients of q, k, v (and log, S before)")
    for sizes in RETENTIONS + (LARGE_RETENTIONS if cuda else []):
        for steady, begun in ((False, True), (True, False)):
            # the interpreter multiplies no bfloat16
            for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
                check_retention(check, sizes, dtype, steady, begun)
                if sizes[2] > 1:  # the decay of a single token has no gradient
                    check_retention(check, sizes, dtype, steady, False, packed=True)
    if cuda:
        check_retention(check, LARGE_RETENTIONS[0], torch.float16, False, True)
    print("wkv, m, a, b, gradients of k, v, w, u, a before, b before")
    for sizes in SUMS + (LARGE_SUMS if cuda else []):
        for ragged, begun in ((True, True), (False, False)):
            for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
                check_wkv(check, sizes, dtype, ragged, begun)
        check_wkv(check, sizes, torch.float32, False, False, packed=True)
        if cuda:
            check_wkv(check, sizes, torch.bfloat16, False, False, packed=True)
