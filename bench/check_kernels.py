"""Our Triton kernels against the plain definitions in double precision: outputs, states, gradients, on odd sizes. Those
of decoding have no gradients, but leave keys and values where they belong.

    python bench/check_kernels.py                                   on a GPU
    TRITON_INTERPRET=1 python bench/check_kernels.py --device cpu   anywhere, by Triton's interpreter

A figure is ‖found − exact‖ / ‖exact‖. Exit code 1 when one is too large.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from allyouneed.kernels.triton import cross_entropy as crossentropy
from allyouneed.kernels.triton import small_batch_linear as narrow
from allyouneed.kernels.triton import topk as likeliest
from allyouneed.kernels.triton.add_norm import add_norm
from allyouneed.kernels.triton.copy_blocks import copy_blocks
from allyouneed.kernels.triton.decode_attention import SplitConfig, decode_attention
from allyouneed.kernels.triton.retention import retention
from allyouneed.kernels.triton.wkv import wkv
from allyouneed.nn.activations import ACTIVATIONS as ACTIVATION
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.ops import cross_entropy as chunked
from allyouneed.nn.ops import retention as retain
from allyouneed.nn.ops.unpack import first_tokens
from allyouneed.nn.ops.wkv import LEAST, initial_state, prefix_states, wkv_output
from allyouneed.runtime.cuda import bias_gradients
from allyouneed.runtime.cuda.bias_gradients import ACTIVATIONS as FUSED
from check_attention import performers, tiled_attentions
from check_deferred import deferred
from check_dilated import dilated
from check_experts import experts
from check_gated import gated_units
from check_state_spaces import random_starts, state_spaces
from check_ternary import ternary
from interpreter import prepare_interpreter

LIMITS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# batch, heads, time, keys, values
RETENTIONS = [(2, 3, 1, 4, 5), (2, 1, 7, 16, 20), (1, 2, 63, 60, 100), (1, 1, 500, 20, 70)]
LARGE_RETENTIONS = [(2, 3, 500, 60, 100), (1, 8, 5000, 64, 64), (2, 4, 2000, 256, 432), (1, 2, 33000, 128, 128)]
SUMS = [(2, 1, 5), (3, 7, 70), (2, 63, 10)]  # batch, time, features
LARGE_SUMS = [(3, 500, 100), (1, 4096, 512), (16, 1000, 768), (1, 65536, 64)]

# rows, heads, kv heads, width, positions, tokens per block (kernels/triton/decode_attention.py), splits of the keys
LOOKS = [(3, 4, 4, 8, 20, 0, 1), (3, 8, 2, 10, 130, 0, 2), (5, 8, 2, 64, 200, 1, 3), (4, 2, 2, 16, 90, 8, 2)]
LARGE_LOOKS = [
    (64, 32, 4, 64, 500, 0, 1),
    (1, 32, 4, 64, 4000, 0, 16),
    (256, 8, 8, 64, 60, 1, 1),
    (7, 6, 2, 80, 300, 8, 3),
]
# rows, outputs, inputs, gated, activation, parts
MAPS = [
    (1, 20, 48, False, "relu", 1),
    (1, 20, 96, False, "", 2),
    (5, 20, 40, True, "silu", 1),
    (70, 33, 100, False, "", 3),
    (1, 20, 48, True, "glu", 1),
    (5, 20, 40, True, "glu", 1),
]
LARGE_MAPS = [(1, 5632, 2048, True, "silu", 1), (64, 2048, 5632, False, "", 4), (7, 50257, 768, False, "gelu", 1),
              (300, 512, 2048, False, "", 2), (33, 2048, 512, False, "gelu-tanh", 1)]  # fmt: skip
# rows, width of the logits, of which are scores
ENTROPIES = [(1, 37, 37), (7, 37, 37), (3, 64, 50), (2, 16000, 16000), (5, 50304, 50304), (4, 50304, 50257)]
LARGE_ENTROPIES = [(1000, 16000, 16000), (700, 50304, 50257), (33, 250112, 250100)]
# tokens, vocab, width of the whole, from vectors to gradients
HEADS = [(9, 37, 8), (300, 50, 16), (5, 1001, 12)]
LARGE_HEADS = [(9000, 50257, 768)]
# batch, time, width, and that as heads of this width, of which keys and values have fewer
BIASES = [(2, 7, 24, 4), (3, 90, 60, 20), (1, 300, 512, 64)]
LARGE_BIASES = [(5, 1000, 768, 64), (3, 501, 520, 40)]
ACTIVATIONS = {"": lambda x: x, **{name: ACTIVATION[name] for name in ("relu", "silu", "gelu", "gelu-tanh")}}

Sizes = Sequence[int]


def of_last(starts: Tensor) -> Tensor:
    """(batch, time) bool: tokens of the sentence that a packed row ends with."""
    return torch.arange(starts.shape[1], device=starts.device) >= starts[:, -1:]


class Check:
    def __init__(self, device: str, models: Sequence[str] = ()) -> None:
        """`models`: those of the decode steps that are checked; none: all."""
        self.device, self.wrong, self.models = device, 0, models

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

    def retention(self, sizes: Sizes, dtype: torch.dtype, steady: bool, begun: bool, packed: bool = False) -> None:
        batch, heads, time, keys, values = sizes
        torch.manual_seed(time)
        starts = random_starts(batch, time, self.device) if packed else None
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
        self.report(f"retention {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])

    def wkv(self, sizes: Sizes, dtype: torch.dtype, ragged: bool, begun: bool, packed: bool = False) -> None:
        batch, time, features = sizes
        torch.manual_seed(time)
        starts = random_starts(batch, time, self.device) if packed else None
        first = None if starts is None else first_tokens(starts)
        k, v = (torch.randn(batch, time, features).to(dtype) for _ in range(2))
        w, u = torch.linspace(-6, 3, features) + 0.1 * torch.randn(features), torch.randn(features)
        m, a, b = initial_state(batch, features, k)
        if begun:
            m, a, b = (x[:, -1] for x in prefix_states((m, a, b), *torch.randn(2, batch, 3, features), w.exp()))
        lengths = (torch.randint(0, time + 1, (batch,)) if ragged else torch.full((batch,), time)).to(self.device)
        inside = (torch.arange(time, device=self.device) < lengths[:, None])[..., None]
        noise = torch.randn(batch, time, features), torch.randn(batch, features), torch.randn(batch, features)
        g, g_a, g_b = (x.double().to(self.device) for x in noise)

        def run(dtypes: tuple[torch.dtype, torch.dtype], plain: bool) -> list[Tensor]:
            leaves = [self.leaf(x, dtypes[0]) for x in (k, v)] + [self.leaf(x, dtypes[1]) for x in (w, u, a, b)]
            past = (m.to(self.device, dtypes[1]), leaves[4], leaves[5])
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
        self.report(f"wkv {tuple(sizes)} {str(dtype)[6:]} {kind}", found, exact, LIMITS[dtype])

    def look(self, sizes: Sizes, dtype: torch.dtype, new: bool, turned: bool) -> None:
        """One query a row over keys that lie where the rows' tables say; what is stored on the way counts as well."""
        rows, heads, kv, width, places, every, shares = sizes
        torch.manual_seed(places)
        slots, blocks = (places, rows) if every <= 1 else (every, rows * (places // every + 1))
        keys, values = torch.randn(2, blocks, kv, slots, width).to(self.device, dtype)
        seen = torch.randint(0, places - 1, (rows,))
        if every == 1:  # rows that share their pasts are of one length
            seen[:] = places - 5
            table = torch.randint(0, rows, (rows, places))
            table[:, places - 5] = torch.arange(rows)
        else:
            table = torch.randperm(blocks).view(rows, -1)
        parts = torch.randn(2, rows, heads + 2 * kv, width).to(self.device)  # that are still to be added up
        q, k, v = parts.split([heads, kv, kv], 2)
        angle = torch.randn(places, width // 2, dtype=torch.double)
        turns = torch.cat((angle.cos(), angle.sin()), -1).to(self.device)
        at = torch.arange(places)
        block = table[:, :1].expand(-1, places) if every == 0 else table[:, at // every]
        spot = at % slots
        whole = [cache[block.to(self.device), :, spot.to(self.device)].double() for cache in (keys, values)]
        exact = self.looked(q.double().sum(0), k.double().sum(0), v.double().sum(0), *whole, seen, turns, new, turned)
        given_table = (table.int().to(self.device), seen.to(self.device), width**-0.5, every)
        own = turns[seen.to(self.device)].float() if turned else None
        out = decode_attention(q, keys, values, *given_table, (k, v) if new else None, own,
                   cut=SplitConfig(shares, 32, 4))  # fmt: skip
        mine = [cache[block.to(self.device), :, spot.to(self.device)] for cache in (keys, values)]
        kind = f"{'new' if new else 'kept'}{', turned' if turned else ''}"
        self.report(f"look {tuple(sizes)} {str(dtype)[6:]} {kind}", [out, *mine], exact, LIMITS[dtype])

    def looked(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, seen: Tensor, turns: Tensor, new: bool,
        turned: bool,
    ) -> list[Tensor]:  # fmt: skip
        """The definition: keys and values (rows, places, heads, width)."""
        rows, seen = torch.arange(len(seen), device=self.device), seen.to(self.device)
        if turned:
            cos, sin = turns[seen][:, None].chunk(2, -1)
            q, k = (torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
        if new:
            keys[rows, seen], values[rows, seen] = k, v
        group = q.shape[1] // keys.shape[2]
        wide = [x.repeat_interleave(group, 2) for x in (keys, values)]
        scores = torch.einsum("rhw,rphw->rhp", q, wide[0]) * q.shape[-1] ** -0.5
        hidden = torch.arange(keys.shape[1], device=self.device) >= (seen + new)[:, None]
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1).nan_to_num()
        return [torch.einsum("rhp,rphw->rhw", weights, wide[1]), keys, values]

    def copied(self, rows: int, heads: int, size: int, width: int, capacity: int, dtype: torch.dtype) -> None:
        """Rows of a paged cache, the last without tokens, into a cache whose rows are in one piece."""
        torch.manual_seed(rows)
        entries = -(-capacity // size)
        storage = torch.randn(rows * entries + 1, heads, size, width).to(self.device, dtype)
        table = 1 + torch.randperm(rows * entries).view(rows, entries).to(self.device)
        slots, counts = torch.randperm(2 * rows)[:rows].to(self.device), torch.randint(1, capacity + 1, (rows,))
        counts[-1] = 0
        target = torch.zeros(2 * rows, heads, capacity, width, dtype=dtype, device=self.device)
        exact = target.double()
        copy_blocks(storage, table, target, slots, counts.to(self.device))
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            whole = storage[table[row]].transpose(0, 1).flatten(1, 2)[:, :count]
            target[slot, :, count:], exact[slot, :, :count] = 0, whole.double()
        name = f"copied blocks ({rows}, {heads}, {size}, {width}, {capacity}) {str(dtype)[6:]}"
        self.report(name, [target], [exact], LIMITS[dtype])

    def narrow(self, sizes: tuple[int, int, int, bool, str, int], dtype: torch.dtype) -> None:
        rows, outputs, inputs, gated, activation, parts = sizes
        torch.manual_seed(rows)
        shapes = ((rows, inputs), (outputs * (1 + gated), inputs), (outputs * (1 + gated),))
        x, weight, bias = (torch.randn(shape).to(self.device, dtype) for shape in shapes)
        tile = narrow.tile_config(rows, outputs, inputs, gated, parts > 1)._replace(parts=parts)
        tile = tile if self.device == "cuda" else tile._replace(inputs=16, outputs=16)
        out = narrow.linear(x, weight, bias, activation, gated, parts > 1, tile)
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        act, gate = ACTIVATIONS.get(activation, lambda x: x), torch.sigmoid if activation == "glu" else lambda x: x
        exact = act(exact[:, :outputs]) * gate(exact[:, outputs:]) if gated else act(exact)
        self.report(f"linear {sizes} {str(dtype)[6:]}", [out.sum(0) if parts > 1 else out], [exact], LIMITS[dtype])

    def norm(self, rows: int, width: int, centre: bool, parts: int, dtype: torch.dtype) -> None:
        torch.manual_seed(width)
        x, weight, bias = (torch.randn(*shape).to(self.device, dtype) for shape in ((rows, width), (width,), (width,)))
        more = torch.randn(parts, rows, width, device=self.device)
        found = add_norm(x, more, weight, bias if centre else None, 1e-5, centre, offset=0.0 if centre else 1.0)
        total = (x.double() + more.double().sum(0)).to(dtype).double()
        if centre:
            exact = torch.nn.functional.layer_norm(total, (width,), weight.double(), bias.double())
        else:
            exact = torch.nn.functional.rms_norm(total, (width,), weight.double() + 1, 1e-5)
        name = f"{'layer' if centre else 'rms'} norm of a sum ({rows}, {width}, {parts} parts) {str(dtype)[6:]}"
        self.report(name, found, [total, exact], LIMITS[dtype])

    def turned(self, sizes: Sizes, dtype: torch.dtype, interleaved: bool) -> None:
        from allyouneed.kernels.triton.rotary import rotate

        batch, heads, time, width = sizes
        x = torch.randn(batch, time, 3 * heads * width, device=self.device, dtype=dtype)[..., : heads * width]
        x = x.unflatten(-1, (heads, width)).transpose(1, 2)  # as queries lie among keys and values
        table = torch.randn(2, batch if batch % 2 else 1, 1, time, width // 2, device=self.device)
        (cos, sin), wide = table.double(), x.double()
        a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
        pair = a * cos - b * sin, b * cos + a * sin
        exact = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        name = f"turned {sizes} {str(dtype)[6:]} {'in turns' if interleaved else 'halves'}"
        self.report(name, [rotate(x, table, interleaved)], [exact], LIMITS[dtype])

    def gated(self, rows: int, hidden: int, activation: str, dtype: torch.dtype) -> None:
        from allyouneed.kernels.triton.glu import gated

        both = torch.randn(rows, 2, 2 * hidden, device=self.device, dtype=dtype)
        gate, up = both.double().chunk(2, -1)
        exact = ACTIVATIONS[activation](gate) * up
        name = f"gated ({rows}, {hidden}) {str(dtype)[6:]} {activation}"
        self.report(name, [gated(both, activation)], [exact], LIMITS[dtype])

    def begun(self, rows: int, width: int, turn: int, dtype: torch.dtype) -> None:
        from allyouneed.kernels.triton.embed_step import embed_step

        vectors, positions = torch.randn(2, 50, width, device=self.device, dtype=dtype)
        turns = torch.randn(50, turn, device=self.device) if turn else None
        tokens, lengths = torch.randint(0, 50, (2, rows), device=self.device)
        table, before, at = torch.full((rows, 50), -1, device=self.device), lengths.clone(), lengths.clamp(max=30)
        table = table.int()
        x, places, turned = embed_step(tokens, lengths, 30, vectors, 3.0, positions, turns, table)
        exact = [vectors[tokens].double() * 3 + positions[at].double(), at.double(), (before + 1).double()]
        found = [x, places, lengths]
        if turns is not None and turned is not None:
            exact, found = [*exact, turns[at].double()], [*found, turned]
        own = torch.arange(rows, device=self.device)
        new = torch.full_like(table, -1).scatter_(1, at[:, None], own[:, None].int())
        name = f"begun ({rows}, {width}, {turn}) {str(dtype)[6:]}"
        self.report(name, [*found, table], [*exact, new.double()], LIMITS[dtype])

    def likeliest(self, rows: int, vocab: int, dtype: torch.dtype) -> None:
        torch.manual_seed(vocab)
        scores = (torch.randperm(rows * vocab).view(rows, vocab) / vocab).to(self.device)  # no two are equal
        scores = scores.to(dtype) if dtype == torch.float32 else scores
        bans = torch.zeros(2, vocab, device=self.device)
        bans[:, 3], bans[1, vocab // 2 :] = -torch.inf, -torch.inf
        ages = torch.arange(rows, device=self.device) % 7
        allowed = (scores + bans[(ages < 3).long()]).double()
        mass = scores.double().logsumexp(-1, keepdim=True)
        best, tokens = allowed.topk(4)
        newest, record = torch.zeros_like(ages), torch.zeros(8, 2, rows, device=self.device)
        older = ages.clone()
        likeliest.argmax_step(scores, bans, older, 3, newest, record, torch.full((1,), 5, device=self.device))
        found = [newest, record[5, 1], older, *likeliest.topk(scores, bans, ages, 3, 4)]
        exact = [tokens[:, 0].double(), best[:, 0] - mass[:, 0], (ages + 1).double(), best, tokens.double(), mass]
        self.report(f"likeliest ({rows}, {vocab})", found, exact, LIMITS[torch.float32])

    def entropy(self, sizes: Sizes, dtype: torch.dtype, smoothing: float, cap: float | None, biased: bool) -> None:
        rows, width, vocab = sizes
        torch.manual_seed(rows)
        logits = 4 * torch.randn(rows, width)
        logits[:1] *= 60  # where e to the power of a score over the label's overflows
        logits = logits.to(self.device, dtype)
        bias = torch.randn(vocab, device=self.device) if biased else None
        labels = torch.randint(0, vocab, (rows,), device=self.device)
        labels[2::5] = IGNORE
        labels[-1] = vocab - 1
        exact = logits[:, :vocab].double().requires_grad_()
        scores = exact if bias is None else exact + bias.double()
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        options = {"ignore_index": IGNORE, "reduction": "none"}
        losses = cross_entropy(scores, labels, label_smoothing=smoothing, **options)
        (slope,) = torch.autograd.grad(losses.sum(), [exact])
        slope = torch.nn.functional.pad(slope, (0, width - vocab))
        found = torch.full((2, rows), torch.nan, device=self.device)
        quiet = logits.clone()
        crossentropy.cross_entropy_rows(quiet, labels, IGNORE, bias, smoothing, cap, vocab, *found, gradient=False)
        assert torch.equal(quiet, logits), "logits are written over though no gradient is asked for"
        alone = found.clone()
        crossentropy.cross_entropy_rows(logits, labels, IGNORE, bias, smoothing, cap, vocab, *found.fill_(torch.nan))
        assert torch.equal(found, alone) and not logits[labels == IGNORE].any() and not logits[:, vocab:].any()
        plain = cross_entropy(scores, labels, **options)
        kind = f"{smoothing or ''} {'capped ' if cap else ''}{'biased' if biased else ''}"
        name = f"cross-entropy {tuple(sizes)} {str(dtype)[6:]} {kind}"
        self.report(name, found, [losses, plain], LIMITS[torch.float32])
        self.report(f"{name}, gradient", [logits], [slope], LIMITS[dtype])

    def head(self, sizes: Sizes, dtype: torch.dtype, smoothing: float, biased: bool) -> None:
        """Of vectors, through all chunks."""
        tokens, vocab, width = sizes
        torch.manual_seed(tokens)
        given = [torch.randn(tokens, width), torch.randn(vocab, width) / width**0.5, torch.randn(vocab)]
        given = [x.to(dtype) for x in given[: 2 + biased]]
        labels = torch.randint(0, vocab, (tokens,), device=self.device)
        labels[1::7] = IGNORE
        exact = [self.leaf(x, torch.float64) for x in given]
        scores = torch.nn.functional.linear(*exact)
        wanted = [cross_entropy(scores, labels, label_smoothing=e, reduction="sum") for e in (smoothing, 0.0)]
        wanted += torch.autograd.grad(wanted[0] * 0.5, exact)
        own = [self.leaf(x, dtype) for x in given]
        found = list(chunked.linear_cross_entropy(own[0], own[1], labels, smoothing, *own[2:]))
        found += torch.autograd.grad(found[0] * 0.5, own)
        self.report(f"head {tuple(sizes)} {str(dtype)[6:]} {smoothing or ''}", found, wanted, LIMITS[dtype])

    def slope(self, sizes: Sizes, dtype: torch.dtype, kind: str) -> None:
        torch.manual_seed(sizes[1])
        x, gradient = (3 * torch.randn(2, *sizes[:3])).to(self.device, dtype)
        found, sums = bias_gradients.activation_backward(gradient, x, kind)
        exact = gradient.double() * FUSED[kind].derivative(x.double())
        name = f"slope {tuple(sizes[:3])} {str(dtype)[6:]} {kind}"
        self.report(name, [found, sums.sum(0)], [exact, exact.sum((0, 1))], LIMITS[dtype])

    def side_by_side(self, sizes: Sizes, dtype: torch.dtype, ordered: bool) -> None:
        """`ordered`: token after token, as queries lie where nothing has moved them."""
        batch, time, width, head = sizes
        torch.manual_seed(time)
        shapes = [(batch, heads, time, head) for heads in (width // head, 1, 2)]
        parts = [torch.randn(shape).to(self.device, dtype) for shape in shapes]
        if ordered:
            parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
        found, sums = bias_gradients.merge_heads(parts)
        exact = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1)
        assert torch.equal(found, exact), "parts are not laid side by side"
        self.report(f"side by side {sizes} {str(dtype)[6:]}", [sums.sum(0)], [exact.double().sum((0, 1))], 1e-5)

    def unnormed(self, sizes: Sizes, dtype: torch.dtype) -> None:
        torch.manual_seed(sizes[1])
        given = [torch.randn(sizes[:3]).to(self.device, dtype) for _ in range(3)]
        weight = torch.randn(sizes[2], device=self.device)
        gradient, passing, x = (one.double() for one in given)
        x.requires_grad_()
        scale, shift = weight.double().requires_grad_(), torch.zeros_like(weight, dtype=torch.double).requires_grad_()
        normal, mean, rate = torch.native_layer_norm(x, sizes[2:3], scale, shift, 1e-5)
        exact = torch.autograd.grad((normal * gradient).sum() + (x * passing).sum(), [x, scale, shift])
        found, sums = bias_gradients.layer_norm_backward(*given, weight, mean.detach().float(), rate.detach().float())
        name = f"norm, backwards {tuple(sizes[:3])} {str(dtype)[6:]}"
        self.report(name, [found, *sums.sum(1)], [*exact, passing.sum((0, 1))], LIMITS[dtype])

    def added(self, sizes: Sizes, dtype: torch.dtype, dropout: bool) -> None:
        torch.manual_seed(sizes[1])
        given = [torch.randn(sizes[:3]).to(self.device, dtype) for _ in range(3)]
        kept = torch.rand(sizes[:3], device=self.device) > 0.3 if dropout else None
        weight = torch.randn(sizes[2], device=self.device)
        gradient, second, x = (one.double() for one in given)
        x.requires_grad_()
        scale, shift = weight.double().requires_grad_(), torch.zeros_like(weight, dtype=torch.double).requires_grad_()
        normal, mean, rate = torch.native_layer_norm(x, sizes[2:3], scale, shift, 1e-5)
        above = gradient + second if dropout else gradient
        exact = list(torch.autograd.grad((normal * above).sum(), [x, scale, shift]))
        behind = exact[0] if kept is None else exact[0] * kept * 1.5
        seed = torch.tensor([sizes[1]], device=self.device) if dropout else None
        out, total, stays, *stats = bias_gradients.add_norm(
            given[0], given[1], weight, seed, 0.3 if dropout else 0.0, weight, weight, 1e-5
        )
        if dropout:
            assert 0.65 < stays.double().mean() < 0.75 or stays.numel() < 5000, "another share is kept"
        branch = (second + weight.double()) * (stays.double() / 0.7 if dropout else 1.0)
        normed = torch.native_layer_norm((gradient + branch).to(dtype).double(), sizes[2:3], scale, scale, 1e-5)
        self.report(f"norm of a sum {tuple(sizes[:3])} {str(dtype)[6:]}{' dropout' if dropout else ''}",
                    [out, total, *stats], [normed[0], gradient + branch, *normed[1:]], LIMITS[dtype])  # fmt: skip
        found, of_y, sums = bias_gradients.add_norm_backward(
            given[0], given[1] if dropout else None, given[2], kept, 1.5, weight, mean.detach().float(),
            rate.detach().float(),
        )  # fmt: skip
        name = f"norm of a sum, backwards {tuple(sizes[:3])} {str(dtype)[6:]}{' dropout' if dropout else ''}"
        grads, wanted = ([found, of_y], [exact[0], behind]) if dropout else ([found], [exact[0]])
        self.report(name, [*grads, *sums.sum(1)], [*wanted, *exact[1:], behind.sum((0, 1))], LIMITS[dtype])


def rows(check: Check, cuda: bool) -> None:
    """Packed rows in one tile: what is seen, and the gradients of q, k, v."""
    from allyouneed.nn.ops.attention import short_rows

    print("packed rows: what is seen, gradients of q, k, v")
    sizes = [(2, 4, 2, 20, 33, 16, 32), (1, 2, 2, 7, 7, 64, 16), (1, 4, 2, 100, 70, 16, 16), (2, 4, 2, 70, 70, 16, 16)]
    for batch, heads, own, queries, keys, width, values in [*sizes, *([(192, 8, 8, 128, 128, 64, 64)] if cuda else [])]:
        for causal in (False, True):
            torch.manual_seed(queries)
            dtype = torch.bfloat16 if cuda else torch.float16  # the interpreter multiplies no bfloat16
            shapes = (heads, queries, width), (own, keys, width), (own, keys, values), (heads, queries, values)
            given = [torch.randn(batch, h, t, w).to(check.device, dtype) for h, t, w in shapes]
            marks = [torch.arange(t, device=check.device, dtype=torch.int32).expand(batch, t) for t in (queries, keys)]
            both = [((mark + 5) // 6 % 5).contiguous() for mark in marks] + [(mark % 6).contiguous() for mark in marks]
            exact = [x.cpu().double().requires_grad_() for x in given[:3]]
            marks = [x.cpu() for x in both]
            wanted, _ = short_rows.attend(*exact, *marks, causal, width**-0.5)
            slopes = torch.autograd.grad((wanted * given[3].cpu().double()).sum(), exact)
            usual = short_rows.usable
            if not cuda:
                short_rows.usable = lambda x: True
            found, lse = short_rows.attend(*given[:3], *both, causal, width**-0.5)
            grads = list(short_rows.attend_backward(given[3], *given[:3], *both, causal, width**-0.5, lse))
            if queries == keys and width == values:  # side by side, and their sums
                qkv = torch.cat([x.transpose(1, 2).flatten(2) for x in given[:3]], -1)
                grads += short_rows.attend_qkv_backward(
                    given[3], qkv, [heads, own, own], both[0], both[2], causal, width**-0.5, lse
                )
                packed = torch.cat([x.transpose(1, 2).flatten(2) for x in slopes], -1)
                slopes = *slopes, packed, packed.sum((0, 1))
                grads[-1] = grads[-1].sum(0)
            short_rows.usable = usual
            name = f"rows {(batch, heads, own, queries, keys, width, values)}{' causal' if causal else ''}"
            check.report(name, [x.cpu() for x in (found, *grads)], [wanted.detach(), *slopes], LIMITS[torch.bfloat16])


def sums(check: Check, cuda: bool) -> None:
    print("o, r, S, z, gradients of q, k, v (and log, S before)")
    for sizes in RETENTIONS + (LARGE_RETENTIONS if cuda else []):
        for steady, begun in ((False, True), (True, False)):
            # the interpreter multiplies no bfloat16
            for dtype in (torch.float32, torch.bfloat16 if cuda else torch.float16):
                check.retention(sizes, dtype, steady, begun)
                if sizes[2] > 1:  # the decay of a single token has no gradient
                    check.retention(sizes, dtype, steady, False, packed=True)
    if cuda:
        check.retention(LARGE_RETENTIONS[0], torch.float16, False, True)
    print("wkv, m, a, b, gradients of k, v, w, u, a before, b before")
    for sizes in SUMS + (LARGE_SUMS if cuda else []):
        for ragged, begun in ((True, True), (False, False)):
            for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
                check.wkv(sizes, dtype, ragged, begun)
        check.wkv(sizes, torch.float32, False, False, packed=True)
        if cuda:
            check.wkv(sizes, torch.bfloat16, False, False, packed=True)


def decoding(check: Check, cuda: bool) -> None:
    half = torch.bfloat16 if cuda else torch.float16
    print("what is seen, keys and values afterwards")
    for sizes in LOOKS + (LARGE_LOOKS if cuda else []):
        for dtype in (torch.float32, half):
            for new, turned in ((True, True), (True, False), (False, False)):
                check.look(sizes, dtype, new, turned)
    for copied in ((3, 2, 4, 10, 30), (5, 1, 8, 16, 64), *(((256, 4, 8, 64, 512),) if cuda else ())):
        for dtype in (torch.float32, half):
            check.copied(*copied, dtype)
    print("linear maps, norms, likeliest tokens")
    for one in MAPS + (LARGE_MAPS if cuda else []):
        check.narrow(one, half)
    for rows, width, centre, parts in ((4, 24, True, 3), (1, 2048, False, 2), (64, 512, True, 4)):
        for dtype in (torch.float32, half):
            check.norm(rows, width, centre, parts, dtype)
    for sizes in ((2, 3, 5, 8), (3, 5, 33, 20), *(((64, 32, 127, 64),) if cuda else ())):
        for dtype in (torch.float32, half):
            check.turned(sizes, dtype, False)
            check.turned(sizes, dtype, True)
    for rows, width, turn in ((5, 24, 10), (3, 100, 0), *(((64, 2048, 64),) if cuda else ())):
        for dtype in (torch.float32, half):
            check.begun(rows, width, turn, dtype)
    for activation in ("relu", "silu", "gelu-tanh", *(("gelu",) if cuda else ())):  # erf is not interpreted
        check.gated(3, 40 if cuda else 1100, activation, half)
        check.gated(5, 5632 if cuda else 6, activation, torch.float32)
    for rows, vocab in ((5, 100), (3, 5000), *(((64, 50257),) if cuda else ())):
        check.likeliest(rows, vocab, torch.float32)


def entropies(check: Check, cuda: bool) -> None:
    print("losses, plain losses; gradient by the logits; a whole head with gradients of vectors, weights and bias")
    for sizes in ENTROPIES + (LARGE_ENTROPIES if cuda else []):
        for smoothing, cap, biased in ((0.0, None, False), (0.1, None, False), (0.1, 5.0, True), (0.0, 30.0, False)):
            for dtype in (torch.float32, torch.bfloat16):
                check.entropy(sizes, dtype, smoothing, cap, biased)
    if not cuda:
        chunked.usable = lambda x: True  # type: ignore[assignment]
        chunked._rows = lambda device, tokens, vocab: 128
    for sizes in HEADS + (LARGE_HEADS if cuda else []):
        for smoothing, biased in ((0.0, False), (0.1, True)):
            for dtype in (torch.float32, torch.bfloat16):
                check.head(sizes, dtype, smoothing, biased)


def slopes(check: Check, cuda: bool) -> None:
    print("gradients, and their sums over tokens")
    if not cuda:  # through the operators, which refuse results that share memory
        bias_gradients.usable = lambda x: True
    for sizes in BIASES + (LARGE_BIASES if cuda else []):
        for dtype in (torch.float32, torch.bfloat16):
            for kind in FUSED:
                check.slope(sizes, dtype, kind)
            check.unnormed(sizes, dtype)
            for dropout in (True, False):
                check.added(sizes, dtype, dropout)
            for ordered in (True, False):
                check.side_by_side(sizes, dtype, ordered)


# a decode step of a model of each kind
HEADS_OF = {"heads": 2}
LATENT = {"kv_rank": 20, "nope_width": 8, "rope_width": 6, "value_width": 10, "pattern": "causal"}
PAST = {"size": 3, "sees": "past"}
MIXERS: dict[str, dict[str, object]] = {
    "retention": HEADS_OF | {"value_width": 10, "head_norm": {"kind": "rms"}},
    "gated-retention": HEADS_OF,
    "rwkv": {"hidden": 40},
    "mla": {"heads": 18} | LATENT,
    "mla with a latent of queries": {"kind": "mla", "heads": 3, "query_rank": 7} | LATENT | {"kv_rank": 70},
    "performer": HEADS_OF | {"features": 20},
    "infini": HEADS_OF | {"segment": 3, "positions": "rotary"},
    "lstm": {},
    "gru": {"bias": False},
    "mamba": {"bias": True},
    "mixed-chunk": {"chunk": 3, "key_width": 6},
    "mixed-chunk without positions": {"kind": "mixed-chunk", "chunk": 2, "key_width": 40, "positions": "bias"},
    "mixed-chunk of one length": {"kind": "mixed-chunk", "chunk": 5, "hidden": 10, "positions": "rotary", "length": 7},
    "gau": {"pattern": "causal", "key_width": 6},
    "gau of one length": {"kind": "gau", "pattern": "causal", "hidden": 10, "positions": "bias", "length": 7},
    "mamba2": {"heads": 4, "groups": 2, "state": 10},
    "s4": {"state": 6},
    "S4D": {"kind": "s4", "matrix": "diagonal", "state": 10},
    "convolution": PAST,
    "separable convolution": {"kind": "convolution", "separable": True, "activation": "relu"} | PAST,
    "lightweight-convolution": {"heads": 3} | PAST,
    "dynamic-convolution": {"heads": 3} | PAST,
    "lsra": HEADS_OF | {"size": 3, "pattern": "causal"},
    "mssa": HEADS_OF | {"pattern": "causal"},
    "longnet": HEADS_OF | {"segments": [4, 40], "dilations": [2, 3]},
    "longnet in a ring": HEADS_OF | {"kind": "longnet", "segments": [2, 6], "dilations": [1, 3], "positions": "rotary"},
    "longnet of a long segment": {"kind": "longnet", "heads": 3, "segments": [3, 400], "dilations": [2, 3]},
    "lsh": HEADS_OF | {"buckets": 4},
    "lsh of six buckets": {"kind": "lsh", "heads": 3, "head_width": 5, "buckets": 6, "rounds": 3, "whole": 3},
    "lsh of one bucket": HEADS_OF | {"kind": "lsh", "buckets": 1},
    "synthesizer": HEADS_OF | {"pattern": "causal", "length": 90},
    "tensorized": {"pattern": "causal", "length": 45, "rank": 20},
    "ALiBi": {"kind": "attention", "heads": 4, "kv_heads": 2, "pattern": "causal", "positions": "alibi"},
    "T5": {"kind": "attention", "heads": 2, "pattern": "causal & (window(2) | strided(3))", "positions": "buckets"},
    "a ring": {"kind": "attention", "heads": 2, "pattern": "causal & window(3)", "positions": "rotary"},
    "a ring with ALiBi": {"kind": "attention", "heads": 2, "pattern": "causal & window(4)", "positions": "alibi"},
    "a ring and first tokens": {"kind": "attention", "heads": 2, "pattern": "causal & (window(3) | global(1))"},
    "Shaw": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": {"kind": "shaw", "distance": 2}},
    "Shaw with shared keys": {
        "kind": "attention",
        "heads": 4,
        "kv_heads": 2,
        "pattern": "causal",
        "positions": {"kind": "shaw", "distance": 3, "values": False},
    },
    "a ring with Shaw": {
        "kind": "attention",
        "heads": 2,
        "pattern": "causal & window(4)",
        "positions": {"kind": "shaw", "distance": 2},
    },
    "Transformer-XL": {"kind": "attention", "heads": 2, "pattern": "causal", "positions": "transformer-xl"},
    "a ring with Transformer-XL": {
        "kind": "attention",
        "heads": 2,
        "pattern": "causal & window(3)",
        "positions": {"kind": "transformer-xl", "clamp": 1},
    },
    "branches": {
        "left": {"kind": "attention", "heads": 2, "pattern": "causal"},
        "right": {"kind": "convolution"} | PAST,
    },
}
# channels and linear maps, with attention
EXPERT = {"kind": "glu", "hidden": 20}
OTHERS: dict[str, dict[str, object]] = {
    "experts": {"channel": {"kind": "moe", "experts": 5, "top": 2, "expert": EXPERT, "shared": EXPERT}},
    "a capacity": {"channel": {"kind": "moe", "experts": 3, "top": 1, "expert": EXPERT, "row_capacity": 1}},
    "ternary weights": {"linear": "bit", "channel": EXPERT},
    "normed ternary weights": {"linear": {"kind": "bit", "norm": {"kind": "rms"}}, "channel": EXPERT},
}


def models() -> dict[str, dict[str, Any]]:
    """By name."""
    found: dict[str, dict[str, Any]] = {}
    for kind, keys in (MIXERS | OTHERS).items():
        mixer = {"kind": kind} | keys if kind in MIXERS else {"kind": "attention", "pattern": "causal"} | HEADS_OF
        channel = {"kind": "rwkv-channel" if kind == "rwkv" else "ffn", "hidden": 48}
        more = keys if kind in OTHERS else {}
        layer = {"repeat": 2, "wiring": "pre-norm", "mixer": mixer, "channel": more.get("channel", channel)}
        found[kind] = {"kind": "decoder", "vocab": 50, "width": 24, "linear": more.get("linear", "dense")}
        found[kind]["decoder"] = [layer]
    return found


def mixers(check: Check, cuda: bool) -> None:
    """Decode steps by kernels against the parts in double precision: logits of all steps."""
    import allyouneed as ayn
    from allyouneed.nn.linear.ternary import pack_model
    from allyouneed.nn.ops.attention import decode
    from allyouneed.runtime.cuda import kernels, mixer_kernels
    from allyouneed.runtime.cuda.decode_step import DecodeStep
    from allyouneed.runtime.cuda.static_cache import StaticStates

    patched: Any

    def run(model: torch.nn.Module, rows: int, group: int, steps: int) -> Tensor:
        found: list[Tensor] = []
        states = StaticStates(model, rows // group, group, 140, 0)
        step = DecodeStep(model, states)
        for number in range(steps):
            tokens = (torch.arange(rows, device=states.device) * 7 + number) % 50
            found.append(step(tokens).double().cpu())
            states.reorder(states.row_ids // group * group + (states.row_ids + number) % 3 % group)
        return torch.stack(found)

    print("decode steps of mixers")
    usual = mixer_kernels.usable
    for kind, keys in models().items():
        if check.models and kind not in check.models:
            continue
        torch.manual_seed(1)
        model = ayn.build(keys).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        model = model if keys["linear"] == "dense" else pack_model(model)
        for rows, group in ((1, 1), (5, 5)) if cuda else ((3, 3),):
            for dtype in (torch.float32, torch.bfloat16) if cuda else (torch.float32,):
                # several tiles and splits of the keys; what rounds or chooses experts differs too soon
                steps = 40 if cuda and dtype is torch.float32 and kind in MIXERS else 4
                with torch.no_grad():
                    exact = run(model.cpu().double(), rows, group, steps)
                    if not cuda:
                        for patched in (mixer_kernels, decode, kernels):
                            patched.usable = lambda x: x.dtype is torch.float32
                    model = model.to(check.device, dtype)
                    found = run(model, rows, group, steps)
                    mixer_kernels.usable = decode.usable = kernels.usable = usual
                text = f"{kind}, {rows} rows of {group} {str(dtype)[6:]}"
                check.report(text, [found], [exact], 3 * LIMITS[dtype])


JOBS = {
    "sums": sums,
    "rows": rows,
    "state-spaces": state_spaces,
    "experts": experts,
    "ternary": ternary,
    "decoding": decoding,
    "mixers": mixers,
    "deferred": deferred,
    "dilated": dilated,
    "entropies": entropies,
    "slopes": slopes,
    "attention": tiled_attentions,
    "performer": performers,
    "gated": gated_units,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--only", choices=list(JOBS), help="recurrent mixers; Mamba; decoding; cross-entropy; backward passes"
    )
    parser.add_argument("--models", default="", help="names of models whose decode steps to check, by commas")
    given = parser.parse_args()
    if given.device == "cpu":
        prepare_interpreter()
    check = Check(given.device, [name for name in given.models.split(",") if name])
    for name, job in JOBS.items():
        if given.only in (None, name):
            job(check, given.device == "cuda")
    return int(check.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
