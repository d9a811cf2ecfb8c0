"""Mixture of experts against a plain per-token definition."""

import itertools
import math
from collections import Counter
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Rows
from allyouneed.nn.channels import moe as mixture
from allyouneed.nn.channels.feedforward import FFN, GLU
from allyouneed.nn.channels.moe import ExpertGroups, MoE, Router
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.cost import Cost
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.sublayer import Channel, SubLayer
from any_part import tree

WIDTH = 7
COMMON = Common(width=WIDTH)
SMALL = FFN(hidden=5, activation="gelu")


def module(seed=0, **keys):
    torch.manual_seed(seed)
    built = MoE(**({"experts": 6, "expert": SMALL} | keys)).build(COMMON).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter)
    return built


def batch(*lengths, seed=0):
    """Random rows, padded on the right with large numbers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.full((len(lengths), max(lengths), WIDTH), 50.0, dtype=torch.float64)
    for row, length in enumerate(lengths):
        x[row, :length] = torch.randn(length, WIDTH, dtype=torch.float64, generator=generator)
    layout = TokenLayout.of(Rows(torch.zeros(x.shape[:2], dtype=torch.long), lengths=torch.tensor(lengths)))
    return x.requires_grad_(), Context(layout, losses=[])


def plainly(built, x, context):
    """The definition. Returns the output, the unweighted auxiliary loss, and the mean squared logsumexp."""
    moe, router = built, built.router.config
    out = torch.zeros_like(x)
    tokens = [(row, at) for row, at in itertools.product(*map(range, x.shape[:2])) if context.queries.real[row, at]]
    number, top = len(moe.experts), moe.router.top
    room = math.inf if moe.capacity is None else math.ceil(moe.capacity * len(tokens) / number)
    chosen, shares, logsums, choices = [0] * number, [], [], []
    for row, at in tokens:
        logits = moe.router.linear.weight @ x[row, at]
        logits = logits if moe.router.linear.bias is None else logits + moe.router.linear.bias
        scores = logits.exp() / logits.exp().sum() if router.scores == "softmax" else 1 / (1 + (-logits).exp())
        rating = dict(enumerate((scores if moe.router.correction is None else scores + moe.router.correction).tolist()))
        if router.groups is not None:
            size, many = number // router.groups.count, {"best": 1, "two-best": 2}[router.groups.score]
            groups = [range(first, first + size) for first in range(0, number, size)]
            groups.sort(key=lambda group: -sum(sorted((rating[i] for i in group), reverse=True)[:many]))
            rating = {i: rating[i] for group in groups[: router.groups.top] for i in group}
        best = sorted(rating, key=lambda i: -rating[i])[:top]
        total = sum(scores[i] for i in best) if router.normalise else 1.0
        choices.append([(i, router.scale * scores[i] / total) for i in best])
        shares.append(scores / scores.sum())
        logsums.append(logits.exp().sum().log() ** 2)
    taken = Counter()
    for choice in range(top):
        for (row, at), wanted in zip(tokens, choices, strict=True):
            i, weight = wanted[choice]
            chosen[i] += 1
            taken[i] += 1
            taken[row, i] += 1
            if taken[i] <= room and taken[row, i] <= (moe.row_capacity or math.inf):
                said = moe.experts[i](x[row, at][None, None], context)[0, 0]
                out[row, at] = out[row, at] + weight * said
    if moe.shared is not None:
        out = out + moe.shared(x, context)
    fractions = torch.tensor(chosen, dtype=x.dtype) / (len(tokens) * top)
    loss = number * (fractions * torch.stack(shares).mean(0)).sum()
    return out, loss, torch.stack(logsums).mean()


VARIANTS = {
    "switch": {"top": 1, "capacity": 1.25},
    "tight": {"top": 2, "capacity": 0.4},
    "by rows": {"top": 2, "row_capacity": 2},
    "mixtral": {"top": 2, "expert": GLU(hidden=5), "router": Router(normalise=True)},
    "deepseek-v2": {
        "top": 3,
        "expert": GLU(hidden=3),
        "shared": GLU(hidden=6),
        "router": Router(scale=2.5, groups=ExpertGroups(count=3, top=2)),
    },
    "deepseek-v3": {
        "top": 2,
        "shared": FFN(hidden=4),
        "router": Router(
            scores="sigmoid",
            normalise=True,
            scale=1.7,
            correction=0.0,
            groups=ExpertGroups(count=2, top=1, score="two-best"),
        ),
    },
    "biased": {"router": Router(bias=True, scores="sigmoid")},
    "all": {"experts": 3, "top": 3},
    "one": {"experts": 1, "top": 1},
}


@pytest.mark.parametrize("lengths", [(1,), (5, 0, 3), (13, 7)], ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_losses_and_gradients_match_the_definition(name, lengths):
    built = module(**VARIANTS[name], balance=1.0)
    if built.router.correction is not None:
        built.router.correction.copy_(torch.tensor([0.3, -0.2, 0.0, 0.5, -0.4, 0.1]))
    x, context = batch(*lengths)
    real = context.queries.real
    parameters = [x, *built.parameters()]
    found, (expected, balance, _) = built(x, context), plainly(built, x, context)
    torch.testing.assert_close(found[real], expected[real], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(context.losses, [balance], rtol=1e-10, atol=1e-10)
    for one, other in ((found[real].sin().sum(), expected[real].sin().sum()), (context.losses[0], balance)):
        found_gradients = torch.autograd.grad(one, parameters, allow_unused=True, retain_graph=True)
        expected_gradients = torch.autograd.grad(other, parameters, allow_unused=True, retain_graph=True)
        for left, right in zip(found_gradients, expected_gradients, strict=True):
            left, right = (torch.zeros(1) if side is None else side for side in (left, right))
            torch.testing.assert_close(*torch.broadcast_tensors(left.double(), right.double()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_all_experts_at_once_match_the_definition(name, monkeypatch):
    """The form for GPUs: it keeps padding and choices beyond the capacity, with weight 0."""
    built, (x, context) = module(**VARIANTS[name], balance=1.0), batch(13, 0, 7)
    real, parameters = context.queries.real, [x, *built.parameters()]
    expected = [built(x, context), *context.losses]
    context.losses.clear()
    monkeypatch.setattr(mixture, "usable", lambda x: True)
    monkeypatch.setattr(built, "run_each", None)
    found = [built(x, context), *context.losses]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert found[0][~real].eq(0).all() or built.shared is not None
    for one, other in zip(found, expected, strict=True):
        pairs = [
            torch.autograd.grad(y.sin().sum(), parameters, allow_unused=True, retain_graph=True) for y in (one, other)
        ]
        for left, right in zip(*pairs, strict=True):
            left, right = (torch.zeros_like(x[0, 0, 0]) if side is None else side for side in (left, right))
            torch.testing.assert_close(*torch.broadcast_tensors(left, right), rtol=1e-10, atol=1e-10)


def test_normed_and_nested_experts_run_one_by_one(monkeypatch):
    assert module().grouped_maps() is not None and not module().traceable
    monkeypatch.setattr(mixture, "usable", lambda x: True)
    assert module().traceable and not module(expert=FFN(hidden=5, norm=True)).traceable
    assert module(expert=FFN(hidden=5, norm=True)).grouped_maps() is None
    assert module(expert=MoE(experts=2, expert=SMALL)).grouped_maps() is None


@settings(max_examples=30)
@given(
    st.integers(1, 9).flatmap(lambda experts: st.tuples(st.just(experts), st.integers(1, experts))),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    st.one_of(st.none(), st.floats(0.05, 0.95)),
    st.integers(0, 99),
)
def test_any_sizes_match_the_definition(sizes, lengths, capacity, seed):
    experts, top = sizes
    built = module(seed, experts=experts, top=top, capacity=capacity)
    x, context = batch(*lengths, seed=seed)
    real = context.queries.real
    torch.testing.assert_close(built(x, context)[real], plainly(built, x, context)[0][real], rtol=1e-10, atol=1e-10)


# --- promises ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_capacity_results_are_independent_of_the_batch(name):
    keys = VARIANTS[name] | {"capacity": None, "row_capacity": None}
    assert MoE(**({"experts": 6, "expert": SMALL} | keys)).batch_independent
    built = module(**keys).eval()
    x, context = batch(6, 3)
    batched = built(x, context)
    for row, at in ((0, 0), (0, 5), (1, 2)):
        lonely = built(x[row : row + 1, at : at + 1], Context(TokenLayout.of(Rows.of([[0]]))))
        torch.testing.assert_close(lonely[0, 0], batched[row, at], rtol=1e-12, atol=1e-12)


def test_with_a_capacity_it_declares_batch_dependence():
    config = MoE(experts=2, top=1, expert=SMALL, capacity=1.0)
    assert not config.batch_independent and not MoE(experts=2, top=1, expert=SMALL, row_capacity=1).batch_independent
    assert not MoE(experts=2, expert=config).batch_independent
    assert not MoE(experts=2, expert=SMALL, shared=config).batch_independent


def test_tokens_beyond_the_capacity_skip_their_experts():
    built = module(experts=2, top=1, capacity=1.0, shared=SMALL)
    torch.nn.init.zeros_(built.router.linear.weight)
    built.router.linear.weight.data[1, 0] = 1000.0  # every token with a positive first feature goes to expert 1
    x, context = batch(4)
    x.data[..., 0].abs_()
    routed = built(x, context) - built.shared(x, context)
    assert routed[0, :2].abs().min() > 0 and routed[0, 2:].abs().max() < 1e-12


def test_padding_is_not_routed_and_not_in_the_loss():
    built = module(experts=2, top=1, capacity=1.0)
    (x, context), (alone, lonely) = batch(3, 5), batch(3, 5)
    alone = torch.cat([alone[0, :3], alone[1]])[None]
    lonely = Context(TokenLayout.of(Rows.of([[0] * 8])), losses=[])
    found, expected = built(x, context), built(alone, lonely)
    torch.testing.assert_close(torch.cat([found[0, :3], found[1]]), expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(context.losses, lonely.losses, rtol=1e-12, atol=1e-12)
    assert found[0, 3:].eq(0).all()


def test_rows_of_padding_only_are_finite():
    built = module()
    x, _ = batch(3)
    layout = TokenLayout.of(Rows(torch.zeros(1, 3, dtype=torch.long), lengths=torch.tensor([0])))
    empty = Context(layout, losses=[])
    assert built(x, empty).eq(0).all() and not empty.losses


def test_the_balance_loss_is_training_only_and_one_at_perfect_balance():
    built = module(balance=0.5)
    x, context = batch(5)
    built.eval()(x, context)
    assert context.losses == []
    built.train()(x, Context(context.queries))  # no losses are collected
    torch.nn.init.zeros_(built.router.linear.weight)
    built(x, context)
    assert context.losses[0].item() == pytest.approx(0.5) and context.losses[0].shape == ()


def test_z_loss_matches_st_moe():
    built = module(balance=0.3, router=Router(z_loss=0.7))
    x, context = batch(5, 2)
    built(x, context)
    _, balance, logsums = plainly(built, x, context)
    assert context.losses[0].item() == pytest.approx((0.3 * balance + 0.7 * logsums).item())


def test_nested_mixtures_collect_all_losses():
    built = module(experts=2, top=2, expert=MoE(experts=2, top=1, expert=SMALL))
    x, context = batch(4, 2)
    built(x, context)
    assert len(context.losses) == 3


def test_jitter_applies_in_training_only():
    built, still = module(router=Router(jitter=0.3)), module()
    x, context = batch(30)
    torch.testing.assert_close(built.eval()(x, context), still(x, context), rtol=0, atol=0)
    torch.manual_seed(0)
    logits = built.train().router(x[0]).logits
    difference = (logits - still.router(x[0]).logits).abs().max()
    assert 0 < difference < 0.3 * (x[0].abs() @ built.router.linear.weight.abs().t()).max()


def test_the_correction_favours_underused_experts():
    built = module(experts=3, top=1, router=Router(correction=0.25, bias=True))
    torch.nn.init.zeros_(built.router.linear.weight)
    built.router.linear.bias.data = torch.tensor([2.0, 1.0, 0.0]).double()
    x, context = batch(6)
    built.eval()(x, context)
    assert built.router.correction.tolist() == [0, 0, 0]
    built.train()(x, context)
    assert built.router.correction.tolist() == [-0.25, 0.25, 0.25]
    first = built.router(x[0]).weights
    torch.testing.assert_close(first, built.router(x[0]).logits.softmax(-1)[:, 1:2], rtol=1e-12, atol=0)
    assert "router.correction" in built.state_dict()


def test_the_router_keeps_its_precision_under_autocast():
    built = module().float()
    x, context = batch(20)
    exact = built.router(x[0].float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert built(x.float(), context).dtype == torch.float32
        found = built.router(x[0].float())
    assert torch.equal(found.experts, exact.experts) and torch.equal(found.weights, exact.weights)
    assert built.bfloat16()(x.bfloat16(), context).dtype == torch.bfloat16


class SegmentMemory(Channel):
    """A channel that keeps something of earlier tokens."""

    kind: Literal["remembering"] = "remembering"
    width: int = WIDTH

    def build(self, common):
        return RememberingModule()

    def cost(self, common):
        return Cost()

    def outputs(self, common):
        return self.width


del Channel.registry["remembering"]  # no other test shall meet it


class RememberingModule(SubLayer):
    def forward(self, x, context, state=None):
        return x if state is None else x * 2

    def new_state(self):
        return KVCache()


def test_stateful_channels_can_be_shared_but_not_experts():
    built, alone = module(shared=SegmentMemory()), module()
    x, context = batch(3)
    state = built.new_state()
    assert isinstance(state, KVCache) and alone.new_state() is None
    torch.testing.assert_close(built(x, context, state), alone(x, context) + 2 * x, rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match="leave their rows"):
        module(expert=SegmentMemory())


def test_an_expert_of_another_width_is_refused():
    found = MoE(experts=2, expert=SMALL, shared=SegmentMemory(width=3)).problems(COMMON)
    assert found == [("shared", "outputs 3 features; it must output the width 7")]


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_cost_counts_all_parameters_and_active_flops(name):
    config = MoE(**({"experts": 6, "expert": SMALL} | VARIANTS[name] | {"capacity": None, "row_capacity": None}))
    built, (x, context) = config.build(COMMON).eval(), batch(11, 11)
    assert config.cost(COMMON).parameters == sum(parameter.numel() for parameter in built.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(x.float(), context)
    assert counter.get_total_flops() == pytest.approx(22 * config.cost(COMMON).flops)


def test_unused_experts_are_not_called():
    built, (x, context) = module(experts=50, top=1), batch(3)
    called = []
    for number, expert in enumerate(built.experts):
        expert.register_forward_hook(lambda *_, number=number: called.append(number))
    built(x, context)
    assert sorted(called) == sorted(set(called)) and len(called) <= 3


# --- what cannot be ---------------------------------------------------------------------------------------------------

IMPOSSIBLE = {
    "top": ({"experts": 2, "top": 3}, "3 exceeds the number of experts (2)"),
    "router.normalise": ({"top": 1, "router": {"normalise": True}}, "gets no gradient"),
    "row_capacity": ({"capacity": 1.0, "row_capacity": 3}, "set one"),
    "capacity": ({"experts": 4, "capacity": 4.0}, "set null"),
    "router.groups.count": ({"experts": 7, "router": {"groups": {"count": 2, "top": 1}}}, "into 2 groups"),
    "router.groups.top": ({"experts": 6, "top": 3, "router": {"groups": {"count": 3, "top": 1}}}, "fewer than top (3)"),
    "router.groups.score": (
        {"experts": 6, "router": {"groups": {"count": 6, "top": 4, "score": "two-best"}}},
        "at least 2 experts",
    ),
}


@pytest.mark.parametrize("path", IMPOSSIBLE)
def test_invalid_configs_are_refused_by_path(path):
    keys, reason = IMPOSSIBLE[path]
    channel = {"kind": "moe", "experts": 6, "expert": {"kind": "ffn", "hidden": 5}} | keys
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(channel=channel))
    assert any(f"channel.{path}: " in line and reason in line for line in caught.value.problems)


def test_problems_of_experts_are_named_too():
    inner = {"kind": "moe", "experts": 1, "top": 2, "expert": {"kind": "ffn", "hidden": 5}}
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree(channel={"kind": "moe", "experts": 6, "expert": inner, "shared": inner}))
    said = "\n".join(caught.value.problems)
    assert "channel.expert.top: " in said and "channel.shared.top: " in said
