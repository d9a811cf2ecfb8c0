"""Retention: attention without softmax and with decay, which is also a recurrence.

Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large Language Models", arXiv:2307.08621, section 2;
with data-dependent decay: Sun et al. 2024, "You Only Cache Once: Decoder-Decoder Architectures for Language Models",
arXiv:2405.05254, section 3.1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.kernels import usable
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context
from allyouneed.nn.cost import Cost
from allyouneed.nn.norms import Norm, RMSNorm
from allyouneed.nn.observe import observe
from allyouneed.nn.ops.attention.dense import dense_mask
from allyouneed.nn.ops.retention import accumulator_dtype, chunkwise, continued, fold, initial_state
from allyouneed.nn.ops.unpack import unpack_rows
from allyouneed.nn.patterns.core import Causal
from allyouneed.nn.positions.relative import Heads, distances
from allyouneed.nn.positions.rotary import Rotary
from allyouneed.nn.positions.rotary_scaling import Inclusive
from allyouneed.nn.states.base import State
from allyouneed.nn.states.kv_cache import KVCache, KVState
from allyouneed.nn.states.recurrent import Carry, Recurrent, recurrent_cost
from allyouneed.nn.sublayer import Mixer, SubLayer

Size = Annotated[int, Field(gt=0)]

MAX_SUM = 5e4  # of the authors' code, which clamps the sum of absolute scores
ROTARY = Rotary(order="interleaved", scaling=Inclusive())  # Θ of eq. 5, with the angles of the authors' code


class _Retaining(Mixer):
    heads: Size
    """Number of heads, each with its own decay."""
    head_width: Size | None = None
    """Features of queries and keys per head; default: width / heads."""
    value_width: Size | None = None
    """Features of values per head; default: twice `head_width` for retention, `head_width` for gated retention."""
    head_norm: Norm = RMSNorm(weight=False)
    """Norm of each head's output: the GroupNorm of eq. 8, RMS in the authors' code."""

    @abstractmethod
    def values(self, keys: int) -> int:
        """Value width per head for this key width."""

    @abstractmethod
    def build(self, common: Common) -> RetentionModule: ...

    def sizes(self, common: Common) -> tuple[int, int]:
        """Key and value width per head."""
        keys = self.head_width or max(1, common.width // self.heads)
        return keys, self.value_width or self.values(keys)

    def features(self, common: Common) -> int:
        """Elements stored per token, so that it can be folded again."""
        return self.heads * sum(self.sizes(common))

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        keys, values = self.sizes(common)
        inner, outer, linear = self.heads * keys, self.heads * values, common.linear
        total = linear.cost(common.width, inner, False) * 2 + linear.cost(common.width, outer, False) * 2
        total += linear.cost(outer, common.width, False) + self.head_norm.cost(values)
        total += Cost(flops=4 * inner * values)  # update and read of S
        carry = inner * (values + 1)
        return total + recurrent_cost(carry, self.features(common), wide=carry)

    def problems(self, common: Common) -> list[tuple[str, str]]:
        found = []
        if self.head_width is None and common.width % self.heads:
            text = f"width {common.width} is not divisible by {self.heads} heads; set head_width or change one"
            found.append(("heads", text))
        elif (keys := self.sizes(common)[0]) % 2:
            found.append(("head_width", f"{keys} is odd; rotary features come in pairs"))
        if not self.head_norm.tokenwise:
            found.append(("head_norm", "needs a norm over one token's features; this norm uses other tokens"))
        return found


class Retention(_Retaining):
    """o_n = Σ_{m≤n} γ^{n−m} (q_n e^{inθ}) (k_m e^{imθ})† v_m, γ = 1 − 2^{−5−h} for head h; then normalised, gated by
    swish(X W_G) and projected by W_O (eq. 3, 8). Values are twice as wide as keys (section 3.1).

    o_n is divided by max(|Σ_m score_nm|, √Σ_m γ^{n−m}) (section 2.2, "retention score normalization"); the norm cancels
    this up to its eps, and it carries no gradient. `normaliser: absolute` divides by Σ_m |score_nm| instead, as the
    parallel form of the authors' code does (torchscale, multiscale_retention.py); that sum is no recurrence, so
    decoding caches keys and values.
    """

    kind: Literal["retention"] = "retention"
    normaliser: Literal["sum", "absolute"] = "sum"
    """Divide by the sum of the scores (the paper), or by that of their absolute values (the authors' parallel form)."""

    def values(self, keys: int) -> int:
        return 2 * keys

    def build(self, common: Common) -> RetentionModule:
        return (MultiScaleRetentionModule if self.normaliser == "sum" else AbsoluteRetentionModule)(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        total = super().cost(common, length, cross)
        if self.normaliser == "sum":
            return total
        inner, features = self.heads * self.sizes(common)[0], self.features(common)
        pairs = 2 * features * Causal().mean_keys(length) - 4 * inner * self.sizes(common)[1]
        return Cost(total.parameters, total.flops + pairs, state_per_token=features)


class GatedRetention(_Retaining):
    """Retention with γ_n = σ(X W_γ)^{1/τ} per token and head, τ = `temperature` (Sun et al. 2024, eq. 4, 5). Values are
    as wide as keys; scores are not normalised."""

    kind: Literal["gated-retention"] = "gated-retention"
    temperature: Annotated[float, Field(gt=0)] = 16.0
    """τ: higher keeps the decay γ closer to 1."""

    def values(self, keys: int) -> int:
        return keys

    def features(self, common: Common) -> int:
        return super().features(common) + self.heads

    def build(self, common: Common) -> RetentionModule:
        return GatedRetentionModule(self, common)

    def cost(self, common: Common, length: int, cross: bool = False) -> Cost:
        return super().cost(common, length, cross) + common.linear.cost(common.width, self.heads, False)


class RetentionModule(SubLayer):
    """Recurrent for one token, chunkwise for several."""

    unpacks = True

    def __init__(self, config: _Retaining, common: Common) -> None:
        super().__init__()
        self.heads, (self.keys, self.values) = config.heads, config.sizes(common)
        inner, outer, build = self.heads * self.keys, self.heads * self.values, common.linear.build
        self.q, self.k = build(common.width, inner, False), build(common.width, inner, False)
        self.v, self.gate = build(common.width, outer, False), build(common.width, outer, False)
        self.out = build(outer, common.width, False)
        self.norm = config.head_norm.build(self.values)
        self.rotary = ROTARY.build(Heads(self.heads, self.heads, self.keys, True), common)

    @property
    def traceable(self) -> bool:  # type: ignore[override]  # per instance, not per class
        """Only with a kernel; otherwise a loop over chunks would be unrolled."""
        return usable(next(self.parameters()))

    def prepare(self, context: Context, rows: int) -> None:
        unpack_rows(context, restarts=True)
        self.rotary.prepare(context)

    @abstractmethod
    def decay(self, x: Tensor) -> Tensor:
        """log γ per token (batch, heads, time), or (1, heads, 1) if constant; at least fp32."""

    @abstractmethod
    def normalise(self, o: Tensor, r: Tensor, context: Context) -> Tensor:
        """Input of the norm, given the score sums r (batch, heads, time)."""

    def forward(self, x: Tensor, context: Context, state: State | None = None) -> Tensor:
        q, k, v = map(self.split, (self.q(x), self.k(x) * self.keys**-0.5, self.v(x)))
        q, k, v = self.rotary.apply_positions(q, k, v, context)
        q, k, v, log = observe(self, "q", q), observe(self, "k", k), observe(self, "v", v), self.decay(x)
        heads = observe(self, "heads", self.retain(q, k, v, log, context, state).to(x.dtype))
        y = self.norm(heads, context)
        return self.out(nn.functional.silu(self.gate(x)) * y.transpose(1, 2).flatten(2))

    def retain(self, q: Tensor, k: Tensor, v: Tensor, log: Tensor, context: Context, state: State | None) -> Tensor:
        """The input of the norm, (batch, heads, time, value width)."""
        if state is None:
            o, r = self.over_sentences(q, k, v, log, context)
        else:
            assert isinstance(state, Recurrent)
            o, r = self.continue_from(state, q, k, v, log, context)
        return self.normalise(o, r, context)

    def half_life(self, x: Tensor) -> Tensor:
        """The half-life of the mean decay, where decays differ from token to token."""
        return math.log(0.5) / self.decay(x).mean((0, 2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, time, …)

    def over_sentences(self, q: Tensor, k: Tensor, v: Tensor, log: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Whole sentences; padding on the right is never attended to."""
        unpacked, like = unpack_rows(context, restarts=True), q.transpose(1, 2)

        def unpack(x: Tensor) -> Tensor:
            return unpacked.gather(x.transpose(1, 2)).transpose(1, 2)

        log = log if log.shape[-1] == 1 else unpack(log)
        o, r = chunkwise(unpack(q), unpack(k), unpack(v), log, starts=unpacked.starts)
        o, r = (unpacked.scatter(y.transpose(1, 2), like).transpose(1, 2) for y in (o, r))
        return o, r

    def continue_from(
        self, state: Recurrent, q: Tensor, k: Tensor, v: Tensor, log: Tensor, context: Context
    ) -> tuple[Tensor, Tensor]:
        """New tokens, continuing from the state."""
        inputs = torch.cat([y.transpose(1, 2).flatten(2) for y in self.pack_inputs(k, v, log)], -1)
        decays = [] if log.shape[-1] == 1 and len(log) == 1 else [log.transpose(1, 2)]  # (batch, time, heads)
        o, r = state.advance(self.run, inputs, context, q.transpose(1, 2), *decays)  # (batch, time, heads, …)
        return o.transpose(1, 2), r.transpose(1, 2)

    def run(
        self, inputs: Tensor, carry: Carry, real: Tensor | None, q: Tensor, log: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor], Carry]:
        """o and r of new tokens (batch, time, heads, …), and the carry after each row's last real one. `log`: where it
        is not constant; that of the inputs is rounded as they are."""
        sums, q, (k, v, _) = (carry[0], carry[1]), q.transpose(1, 2), self.unpack_inputs(inputs)
        if q.shape[2] == 1:
            then = self.fold(sums, inputs, real)
            s, z = (part.to(q.dtype) for part in then)
            o, r = q @ s, (q @ z[..., None])[..., 0]
        else:
            log = self.decay(inputs) if log is None else log.transpose(1, 2)
            if real is not None:
                k, log = k * real[:, None, :, None], log * real[:, None]
            o, r, then = continued(q, k, v, log, sums)
        return (o.transpose(1, 2), r.transpose(1, 2)), then

    def pack_inputs(self, k: Tensor, v: Tensor, log: Tensor) -> list[Tensor]:
        return [k, v]

    def unpack_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k, v and log γ of stored inputs."""
        k, v = inputs.split([self.heads * self.keys, self.heads * self.values], -1)
        time = inputs.shape[1]
        return self.split(k), self.split(v), self.decay(inputs).expand(-1, -1, time)

    def fold(self, carry: Carry, inputs: Tensor, real: Tensor | None) -> Carry:
        k, v, log = self.unpack_inputs(inputs)
        if real is not None:
            k, log = k * real[:, None, :, None], log * real[:, None]
        return fold((carry[0], carry[1]), k, v, log)

    def new_state(self) -> State:
        return Recurrent(lambda batch, like: initial_state(batch, self.heads, self.keys, self.values, like), self.fold)


class MultiScaleRetentionModule(RetentionModule):
    def decay(self, x: Tensor) -> Tensor:
        """The decay, in float64 up to the logarithm: γ of the slowest heads is close to 1."""
        powers = -5 - torch.arange(self.heads, dtype=torch.float64, device=x.device)
        return torch.log1p(-(2**powers)).to(accumulator_dtype(x.dtype))[None, :, None]

    def normalise(self, o: Tensor, r: Tensor, context: Context) -> Tensor:
        log = self.decay(r)
        steps = context.queries.positions[:, None] + 1  # (batch or 1, 1, time)
        mass = torch.expm1(steps * log) / torch.expm1(log)  # Σ_{m≤n} γ^{n−m}
        return o / r.detach().abs().maximum(mass.sqrt())[..., None]


class AbsoluteRetentionModule(MultiScaleRetentionModule):
    """The parallel form over all pairs: scores are divided by max(Σ_m |score_nm|, √Σ_m γ^{n−m}), at most MAX_SUM times
    the latter."""

    traceable = unpacks = False

    def retain(self, q: Tensor, k: Tensor, v: Tensor, log: Tensor, context: Context, state: State | None) -> Tensor:
        queries = keys = context.queries
        if isinstance(state, KVState):
            k, v, keys = state.append(k, v, context)
        allowed = dense_mask(Causal(), queries, keys)  # (batch or 1, 1, queries, keys)
        decay = (log[..., None] * distances(queries.positions, keys.positions)[:, None]).masked_fill(
            ~allowed, -torch.inf
        )
        fading = decay.exp()
        scores = (q @ k.transpose(-1, -2)) * fading.to(q.dtype)
        mass = fading.sum(-1, keepdim=True).clamp(min=1).sqrt()
        total = scores.detach().abs().sum(-1, keepdim=True, dtype=mass.dtype).maximum(mass).minimum(MAX_SUM * mass)
        return scores @ v / total

    def new_state(self) -> State:
        return KVCache()


class GatedRetentionModule(RetentionModule):
    def __init__(self, config: GatedRetention, common: Common) -> None:
        super().__init__(config, common)
        self.temperature = config.temperature
        self.decays = common.linear.build(common.width, config.heads, False)

    def decay(self, x: Tensor) -> Tensor:
        found: Tensor = self.decays(x)
        return nn.functional.logsigmoid(found.to(accumulator_dtype(found.dtype))).transpose(1, 2) / self.temperature

    def normalise(self, o: Tensor, r: Tensor, context: Context) -> Tensor:
        return o

    def pack_inputs(self, k: Tensor, v: Tensor, log: Tensor) -> list[Tensor]:
        return [k, v, log.to(k.dtype)[..., None]]

    def unpack_inputs(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v, log = inputs.split([self.heads * self.keys, self.heads * self.values, self.heads], -1)
        return self.split(k), self.split(v), log.to(accumulator_dtype(log.dtype)).transpose(1, 2)
