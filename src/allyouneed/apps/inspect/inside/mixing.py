"""Any token mixer as a matrix: out_i = Σ_j M_ij v_j.

    attention    M are the attention weights
    formula      M differs from channel to channel and follows from a formula (RWKV, convolutions)
    unit values  everything else that is linear in v (retention, Performer, Linformer, Infini, Mamba, S4, …): the mixer
                 runs again with v = unit vectors; a head of width d gives d columns of M at a time
    Jacobian     what is not linear in v (LSTM, GRU, …): M_ij = ‖∂out_i / ∂in_j‖, the Frobenius norm: not a share

Except for Jacobians, Σ_j M_ij v_j is compared with the recorded output: `residual`.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.execute import forward_pass
from allyouneed.apps.inspect.inside.recorder import Change, RecordedCall, Recorder, SiteEdit, Values
from allyouneed.errors import UserError
from allyouneed.nn.observe import probing
from allyouneed.nn.ops.attention.dense import repeat_kv
from allyouneed.nn.sublayer import SubLayer
from allyouneed.runtime.process import evaluation_mode

How = Literal["attention", "formula", "unit values", "jacobian"]
SHOWN = 8  # channels of a mixer whose matrix differs from channel to channel
EXACT = 4096  # directions (tokens · features) for an exact Jacobian; more are sampled
DIRECTIONS = 16  # random directions per token
ROWS = 64  # perturbed inputs at once


@dataclass(frozen=True, eq=False)
class Mixing:
    """`weights` (heads, queries, keys): of the heads, or of the channels, numbered `heads`. `residual`: the largest
    |Σ_j M_ij v_j − out_i|, relative to the largest |out_i|; None for Jacobians. `constant`: there is a part of the
    output that does not depend on v (Shaw's position values), left out of M. `half_life`: tokens, per head."""

    site: str
    how: How
    weights: Tensor
    heads: list[int]
    count: int
    residual: float | None
    channels: bool = False
    constant: bool = False
    sampled: bool = False
    half_life: list[float] | None = None

    @cached_property
    def average(self) -> Tensor:
        """(queries, keys), over the heads; magnitudes where weights may be negative."""
        return self.weights.mean(0) if self.how == "attention" else self.weights.abs().mean(0)


def mixing_sites(values: Values, calls: dict[str, RecordedCall]) -> list[str]:
    """Token mixers of a run that have a matrix, in order: whole sub-layers, or the mixers inside them."""
    inner = [name.rpartition(".")[0] for name in values if name.endswith((".weights", ".heads"))]
    found = dict.fromkeys(site for site in inner if not site.endswith(".router"))
    mixers = [site for site in calls if site.endswith((".mixer", ".cross"))]
    plain = [site for site in mixers if not any(other == site or other.startswith(f"{site}.") for other in found)]
    order = {name: n for n, name in enumerate(values)}
    return sorted([*found, *plain], key=lambda site: order.get(f"{site}.v", order.get(site, 0)))


def mixing(model: Any, recorder: Recorder, site: str, heads: Sequence[int] | None = None) -> Mixing:
    """The matrix of a token mixer, of all heads or of some."""
    values = recorder.values
    known = mixing_sites(values, recorder.calls)
    if site not in known:
        raise UserError(f"{site!r}: no token mixer of this run (allowed: {', '.join(known)})")
    part, call = _part(recorder, site), _call(recorder, site)
    lives = part.half_life(call.x) if isinstance(part, SubLayer) else None
    half_life = None if lives is None else [float(value) for value in lives.detach()]
    v, out = (values[name] if (name := f"{site}.{end}") in values else None for end in ("v", "heads"))
    if v is None or out is None:
        norms, sampled = jacobian_norms(model, call)
        return Mixing(site, "jacobian", norms[None], [0], 1, None, sampled=sampled)
    channels = v.dim() == 3
    count = v.shape[-1] if channels else out.shape[1]
    chosen = _chosen(heads, count, _spread(count, half_life) if channels else list(range(count)))
    weights, how, base = _weights(model, recorder, site, part, call, chosen)
    if channels:
        sums = torch.einsum("cij,jc->ic", weights.double(), v[0][:, chosen].double())
        wanted = out[0][:, chosen].double()
    else:
        sums, wanted = (weights @ repeat_kv(v, count)[0]).double(), out[0].double()
    if base is None and how == "attention" and _relative(sums, wanted) > 1e-4:  # a term beside the weighted sum
        base = run_part(model, call, f"{site}.v", torch.zeros_like, f"{site}.heads")[0]
    constant = base is not None and bool(base.any())
    if base is not None:
        sums = sums + (base[:, chosen] if channels else base).double()
    error = _relative(sums, wanted)
    shown = weights.float() if channels else weights[chosen].float()
    return Mixing(site, how, shown, chosen, count, error, channels, constant, half_life=half_life)


def _weights(
    model: Any, recorder: Recorder, site: str, part: Any, call: RecordedCall, chosen: list[int]
) -> tuple[Tensor, How, Tensor | None]:
    """(heads, queries, keys) or (chosen channels, queries, keys), how they were found, and the output for v = 0 if that
    was measured."""
    values = recorder.values
    v, out = values[f"{site}.v"], values[f"{site}.heads"]
    if v.dim() == 4 and f"{site}.weights" in values:
        return values[f"{site}.weights"][0].to(out.dtype), "attention", None
    if v.dim() == 3:
        offered = {name.rpartition(".")[2]: values[name] for name in values if name.rpartition(".")[0] == site}
        with torch.no_grad():
            found = part.mixing_matrix(offered, chosen)
        if found is not None:
            return found, "formula", None
    base = run_part(model, call, f"{site}.v", torch.zeros_like, f"{site}.heads")[0]
    measure = unit_channels if v.dim() == 3 else unit_matrix
    return measure(model, call, site, v, base, chosen), "unit values", base


def _part(recorder: Recorder, site: str) -> Any:
    for name in (f"{site}.v", f"{site}.weights", site):
        if name in recorder.parts:
            return recorder.parts[name]
    return None


def _call(recorder: Recorder, site: str) -> RecordedCall:
    """The call of the sub-layer that the site is in."""
    while site not in recorder.calls:
        site, _, last = site.rpartition(".")
        if not last:
            raise UserError("this run cannot be repeated; record it again")
    return recorder.calls[site]


def _chosen(heads: Sequence[int] | None, count: int, default: list[int]) -> list[int]:
    if heads is None:
        return default
    if not all(0 <= head < count for head in heads):
        raise UserError(f"head {max(heads)}: expected 0 to {count - 1}")
    return list(heads)


def _spread(count: int, half_life: list[float] | None) -> list[int]:
    """A few channels, from the shortest half-life to the longest."""
    order = list(range(count)) if half_life is None else sorted(range(count), key=lambda n: half_life[n])
    few = min(SHOWN, count)
    return [order[round(n * (count - 1) / max(few - 1, 1))] for n in range(few)]


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted.double()).abs().max() / wanted.abs().max().double().clamp(min=1e-30))


@forward_pass
def run_part(model: Any, call: RecordedCall, site: str, change: Any, wanted: str) -> Tensor:
    """Call a part again with one value changed; the value at `wanted`."""
    recorder = Recorder(model, [SiteEdit(site, change)], keep=lambda name: name == wanted)
    recorder.names.scope = list(call.scope)
    with evaluation_mode(model), torch.no_grad(), probing(recorder):
        call.part(call.x, context=call.context)
    return recorder.values[wanted]


def unit_matrix(model: Any, call: RecordedCall, site: str, v: Tensor, base: Tensor, chosen: list[int]) -> Tensor:
    """(heads, queries, keys): column j is the output for v = 1 at token j and 0 elsewhere, less that for v = 0.
    Features of a head are mixed alike, so each of them carries the unit of another token."""
    _, _, time, width = v.shape
    columns = []
    for start in range(0, time, width):
        units = torch.zeros_like(v)
        count = min(width, time - start)
        units[:, :, range(start, start + count), range(count)] = 1.0
        found = run_part(model, call, f"{site}.v", _always(units), f"{site}.heads")[0] - base
        columns.append(found[..., :count])
    return torch.cat(columns, -1)


def unit_channels(model: Any, call: RecordedCall, site: str, v: Tensor, base: Tensor, chosen: list[int]) -> Tensor:
    """(chosen, queries, keys) of a mixer whose channels are mixed each in its own way: a run for each token, whose unit
    is in all channels."""
    columns = []
    for token in range(v.shape[1]):
        units = torch.zeros_like(v)
        units[:, token] = 1.0
        found = run_part(model, call, f"{site}.v", _always(units), f"{site}.heads")[0] - base
        columns.append(found[:, chosen].T)
    return torch.stack(columns, -1)


def _always(new: Tensor) -> Change:
    return lambda value: new


@forward_pass
def jacobian_norms(model: Any, call: RecordedCall) -> tuple[Tensor, bool]:
    """‖∂out_i / ∂in_j‖ in float64, by central differences: along every feature of token j, or along random directions,
    whose mean square is that of the norm (true: sampled). Of a cross mixer: `in` is its own input."""
    if len(call.x) != 1:
        raise UserError("the Jacobian of a mixer needs a batch of one row")
    part, x = deepcopy(call.part).double().eval(), call.x.double()
    context = _double_context(call.context)
    _, time, width = x.shape
    sampled = time * width > EXACT
    if sampled:
        dice = torch.Generator().manual_seed(0)
        directions = torch.randn(DIRECTIONS, width, generator=dice, dtype=x.dtype).to(x.device)
    else:
        directions = torch.eye(width, dtype=x.dtype, device=x.device)
    step, norms = 1e-5, []
    with torch.no_grad():
        for token in range(time):
            squares = torch.zeros(time, dtype=x.dtype, device=x.device)
            for some in directions.split(ROWS):
                moved = x.expand(len(some), -1, -1).clone()
                moved[:, token] += step * some
                back = x.expand(len(some), -1, -1).clone()
                back[:, token] -= step * some
                change = (part(moved, context=context) - part(back, context=context)) / (2 * step)
                squares += change.square().sum((0, 2))
            norms.append((squares / (len(directions) if sampled else 1)).sqrt())
    return torch.stack(norms, 1).float(), sampled  # (queries, keys)


def _double_context(context: Any) -> Any:
    """The same context in float64, with nothing memoized."""
    from dataclasses import replace

    def wide(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.double()

    def wide_memory(memory: Any) -> Any:
        if memory is None:
            return None
        shared = None if memory.shared is None else tuple(part.double() for part in memory.shared)
        preceding = wide_memory(memory.preceding)
        return replace(
            memory, hidden=memory.hidden.double(), shared=shared, inputs=wide(memory.inputs), preceding=preceding
        )

    return replace(
        context,
        memory=wide_memory(context.memory),
        encoder_preceding=wide_memory(context.encoder_preceding),
        inputs=wide(context.inputs),
        memo={},
    )


def rollout(matrices: dict[str, Tensor], stacks: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    """Attention rollout (Abnar, Zuidema 2020, 4): the share of each input token in each token of a stack's output, if
    every mixer passes on half of the stream and half of what it mixes. `matrices`: by site, (queries, keys), the mean
    over heads; mixers inside one sub-layer count alike. For a decoder, shares of the target's and of the source's
    tokens (`memory`, where those are not the tokens of a stack), which sum to 1."""
    found: dict[str, dict[str, Tensor]] = {}
    for stack, blocks in stacks.items():
        mixers = []
        for site in (f"{stack}.{n}.{slot}" for n in range(blocks) for slot in ("mixer", "cross")):
            inside = [_shares(matrix) for name, matrix in matrices.items() if f"{name}.".startswith(f"{site}.")]
            inside = [matrix for matrix in inside if matrix.shape == inside[0].shape]
            mixers += [(site, torch.stack(inside).mean(0))] if inside else []
        if not mixers:
            continue
        size = len(mixers[0][1])
        shares = {stack: torch.eye(size, dtype=torch.float64)}
        for site, mixed in mixers:
            if len(mixed) != size:  # queries of several rows at once (RETRO's encoder)
                continue
            if site.endswith(".cross"):
                source = _source_of(stack)
                below = found.get(source, {}).get(source)
                fits = below is not None and mixed.shape[1] == len(below)
                seen = {source: mixed @ below} if fits and below is not None else {"memory": mixed}
            else:
                seen = {name: mixed @ share for name, share in shares.items()}
            halves = {name: share / 2 for name, share in shares.items()}
            for name, share in seen.items():
                halves[name] = halves.get(name, 0) + share / 2
            shares = halves
        found[stack] = shares
    return found


def _source_of(stack: str) -> str:
    """The stack that cross-attention reads."""
    return {"decoder": "encoder", "second": "first"}.get(stack, "")


def _shares(matrix: Tensor) -> Tensor:
    """Rows of magnitudes that sum to 1; a token that mixes in nothing stays as it is."""
    size = matrix.double().abs()
    if size.shape[0] == size.shape[1]:
        size = size + torch.diag((size.sum(-1) == 0).double())
    return size / size.sum(-1, keepdim=True).clamp(min=1e-30)
