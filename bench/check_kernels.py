"""Our Triton kernels against the plain definitions in double precision: outputs, states, gradients, on odd sizes.

    python bench/check_kernels.py                                   on a GPU
    TRITON_INTERPRET=1 python bench/check_kernels.py --device cpu   anywhere, by Triton's interpreter

A figure is ‖found − exact‖ / ‖exact‖. Exit code 1 when one is too large.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from allyouneed.kernels.retention import retention
from allyouneed.kernels.wkv import wkv
from allyouneed.nn import retain
from allyouneed.nn.wkv import LEAST, nothing, prefixes, weighted

LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# batch, heads, time, keys, values
RETENTIONS = [(2, 3, 1, 4, 5), (2, 1, 7, 16, 20), (1, 2, 63, 60, 100), (1, 1, 500, 20, 70)]
LARGE_RETENTIONS = [(2, 3, 500, 60, 100), (1, 8, 5000, 64, 64), (2, 4, 2000, 256, 432), (1, 2, 33000, 128, 128)]
SUMS = [(2, 1, 5), (3, 7, 70), (2, 63, 10)]  # batch, time, features
LARGE_SUMS = [(3, 500, 100), (1, 4096, 512), (16, 1000, 768), (1, 65536, 64)]

Sizes = Sequence[int]


class Check:
    def __init__(self, device: str) -> None:
        self.device, self.wrong = device, 0

    def leaf(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(self.device, dtype).requires_grad_()

    def report(self, name: str, found: Sequence[Tensor], exact: Sequence[Tensor], limit: float) -> None:
        errors = []
        for own, other in zip(found, exact, strict=True):
            own, other = own.detach().double(), other.detach()
            errors.append(float((own - other).norm() / other.norm().clamp(min=1e-9)))
        good = all(error <= limit for error in errors)
        self.wrong += not good
        print(f"{name:62s} {' '.join(f'{e:.1e}' for e in errors)}  {'ok' if good else 'DIFFERS'}", flush=True)

    def retention(self, sizes: Sizes, dtype: torch.dtype, steady: bool, begun: bool) -> None:
        batch, heads, time, keys, values = sizes
        torch.manual_seed(time)
        turned = [torch.randn(batch, time, heads, width).transpose(1, 2) for width in (keys, keys, values)]
        given = [x.to(dtype).to(self.device) for x in turned]
        steps = torch.arange(heads)[None, :, None] / 1.0 if steady else 2 * torch.randn(batch, heads, time)
        log = torch.nn.functional.logsigmoid(3 + steps).to(self.device)
        begin = (torch.randn(batch, heads, keys, values), torch.randn(batch, heads, keys)) if begun else None
        noise = torch.randn(batch, heads, time, values), torch.randn(batch, heads, keys, values)
        g, g_end = (x.double().to(self.device) for x in noise)

        def run(dtypes: tuple[torch.dtype, torch.dtype], plain: bool) -> list[Tensor]:
            q, k, v = (self.leaf(x, dtypes[0]) for x in given)
            decay = log.to(dtypes[1]).requires_grad_(not steady)
            sums = None if begin is None else (self.leaf(begin[0], dtypes[1]), begin[1].to(self.device, dtypes[1]))
            if plain:
                o, r = retain.chunkwise(q, k, v, decay, sums)
                s, z = retain.fold(
                    sums or retain.nothing(batch, heads, keys, values, q), k, v, decay.expand(batch, heads, time)
                )
            else:
                o, r, (s, z) = retention(q, k, v, decay, sums)
            leaves = [x for x in (q, k, v, decay, *(sums or ())) if x.requires_grad]
            loss = (o.double() * g).sum() + (s.double() * g_end).sum()
            return [o, r, s, z, *torch.autograd.grad(loss, leaves)]

        found, exact = run((dtype, torch.float32), False), run((torch.float64, torch.float64), True)
        kind = f"{'steady' if steady else 'gated'}{', begun' if begun else ''}"
        self.report(f"retention {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])

    def wkv(self, sizes: Sizes, dtype: torch.dtype, ragged: bool, begun: bool) -> None:
        batch, time, features = sizes
        torch.manual_seed(time)
        k, v = (torch.randn(batch, time, features).to(dtype) for _ in range(2))
        w, u = torch.linspace(-6, 3, features) + 0.1 * torch.randn(features), torch.randn(features)
        m, a, b = nothing(batch, features, k)
        if begun:
            m, a, b = (x[:, -1] for x in prefixes((m, a, b), *torch.randn(2, batch, 3, features), w.exp()))
        lengths = (torch.randint(0, time + 1, (batch,)) if ragged else torch.full((batch,), time)).to(self.device)
        inside = (torch.arange(time, device=self.device) < lengths[:, None])[..., None]
        noise = torch.randn(batch, time, features), torch.randn(batch, features), torch.randn(batch, features)
        g, g_a, g_b = (x.double().to(self.device) for x in noise)

        def run(dtypes: tuple[torch.dtype, torch.dtype], plain: bool) -> list[Tensor]:
            leaves = [self.leaf(x, dtypes[0]) for x in (k, v)] + [self.leaf(x, dtypes[1]) for x in (w, u, a, b)]
            past = (m.to(self.device, dtypes[1]), leaves[4], leaves[5])
            if plain:
                sums = prefixes(past, leaves[0], leaves[1], leaves[2].exp())
                y = weighted(sums, leaves[0], leaves[1], leaves[3]) * inside
                at = lengths[:, None, None].expand(-1, 1, features)
                then = [x.gather(1, at)[:, 0] for x in sums]
            else:
                told = lengths if ragged else None
                y, ends = wkv(past, leaves[0], leaves[1], leaves[2].exp(), leaves[3], told, LEAST)
                then = list(ends)
            loss = (y.double() * g).sum() + (then[1].double() * g_a).sum() + (then[2].double() * g_b).sum()
            return [y, *then, *torch.autograd.grad(loss, leaves)]

        found, exact = run((dtype, torch.float32), False), run((torch.float64, torch.float64), True)
        kind = f"{'ragged' if ragged else 'whole'}{', begun' if begun else ''}"
        self.report(f"wkv {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    check, cuda = Check(device), device == "cuda"
    print("o, r, S, z, gradients of q, k, v (and log, S before)")
    for sizes in RETENTIONS + (LARGE_RETENTIONS if cuda else []):
        for steady, begun in ((False, True), (True, False)):
            # the interpreter multiplies no bfloat16
            for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
                check.retention(sizes, dtype, steady, begun)
    if cuda:
        check.retention(LARGE_RETENTIONS[0], torch.float16, False, True)
    print("wkv, m, a, b, gradients of k, v, w, u, a before, b before")
    for sizes in SUMS + (LARGE_SUMS if cuda else []):
        for ragged, begun in ((True, True), (False, False)):
            for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
                check.wkv(sizes, dtype, ragged, begun)
    return int(check.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
