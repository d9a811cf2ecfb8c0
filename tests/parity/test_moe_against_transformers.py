"""Mixtures of experts against the blocks of transformers: random weights, converted; outputs and gradients, fp32."""

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, SwitchTransformersConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.switch_transformers import modeling_switch_transformers as switch

from allyouneed.nn.batch import Rows
from allyouneed.nn.channels.feedforward import FFN, GLU
from allyouneed.nn.channels.moe import ExpertGroups, MoE, Router
from allyouneed.nn.common import Common
from allyouneed.nn.context import Context, TokenLayout

WIDTH, HIDDEN, EXPERTS = 24, 20, 8
COMMON = Common(width=WIDTH)
closely = {"rtol": 1e-5, "atol": 1e-5}


def drawn(block, std=0.5):
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return block


def context(rows, time):
    return Context(TokenLayout.of(Rows(torch.zeros(rows, time, dtype=torch.long))), losses=[])


def gated(theirs):
    """Our names for a stack of gated experts: transformers, too, has the gate in the first half."""
    found = {}
    for number in range(EXPERTS):
        found[f"experts.{number}.gate_up.weight"] = theirs["experts.gate_up_proj"][number]
        found[f"experts.{number}.down.weight"] = theirs["experts.down_proj"][number]
    return found


def shared(theirs):
    gate_up = [theirs["shared_experts.gate_proj.weight"], theirs["shared_experts.up_proj.weight"]]
    return {
        "shared.gate_up.weight": torch.cat(gate_up),
        "shared.down.weight": theirs["shared_experts.down_proj.weight"],
    }


def compare(ours, theirs, convert, rows=3, time=17):
    """Same outputs; and the gradients of their parameters, converted as the parameters are, are ours."""
    ours.load_state_dict(convert(theirs.state_dict()))
    x = torch.randn(rows, time, WIDTH)
    left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = ours(left, context(rows, time)), theirs(right)
    torch.testing.assert_close(found, expected, **closely)
    direction = torch.randn_like(x)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(left.grad, right.grad, **closely)
    buffers = dict(theirs.named_buffers())
    wanted = convert({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None} | buffers)
    for name, parameter in ours.named_parameters():
        if parameter.grad is not None:  # an expert that was not chosen has none here and zeros there
            torch.testing.assert_close(parameter.grad, wanted[name], **closely)
        elif name in wanted:
            assert wanted[name].eq(0).all(), name


@pytest.mark.parametrize("top", [1, 2, 5])
def test_mixtral(top):
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=top
    )
    ours = MoE(experts=EXPERTS, top=top, expert=GLU(hidden=HIDDEN), router=Router(normalise=True)).build(COMMON)
    block = drawn(mixtral.MixtralSparseMoeBlock(config))
    compare(ours, block, lambda theirs: gated(theirs) | {"router.linear.weight": theirs["gate.weight"]})


def test_mixtrals_balance_loss_is_ours_times_the_number_of_choices():
    """transformers counts every choice of a token as a whole one, so that balance is `top` there and 1 here."""
    ours = drawn(MoE(experts=EXPERTS, top=3, expert=GLU(hidden=HIDDEN), balance=1.0).build(COMMON))
    x, seen = torch.randn(4, 9, WIDTH), context(4, 9)
    ours(x, seen)
    theirs = mixtral.load_balancing_loss_func((x.flatten(0, 1) @ ours.router.linear.weight.t(),), EXPERTS, 3)
    torch.testing.assert_close(3 * seen.losses[0], theirs, **closely)


def switched(theirs):
    found = {"router.linear.weight": theirs["router.classifier.weight"]}
    for number in range(EXPERTS):
        for name, other in (("up", "wi"), ("down", "wo")):
            weight = theirs.get(f"experts.expert_{number}.{other}.weight")
            if weight is not None:
                found[f"experts.{number}.{name}.weight"] = weight
    return found


@pytest.mark.parametrize("room", [1, 3, 7, 40])
def test_switch_drops_the_same_tokens(room):
    """`room` tokens for each expert; transformers counts in each row, so there is one row of 40."""
    config = SwitchTransformersConfig(
        d_model=WIDTH, d_ff=HIDDEN, num_experts=EXPERTS, expert_capacity=room, dropout_rate=0.0
    )
    capacity = None if room == 40 else room * EXPERTS / 40
    ours = MoE(experts=EXPERTS, top=1, expert=FFN(hidden=HIDDEN, bias=False), capacity=capacity).build(COMMON)
    block = drawn(switch.SwitchTransformersSparseMLP(config)).eval()
    compare(ours, block, switched, rows=1, time=40)


@pytest.mark.parametrize("room", [1, 3, 7])
def test_switch_with_its_capacity_in_every_row(room):
    config = SwitchTransformersConfig(
        d_model=WIDTH, d_ff=HIDDEN, num_experts=EXPERTS, expert_capacity=room, dropout_rate=0.0
    )
    ours = MoE(experts=EXPERTS, top=1, expert=FFN(hidden=HIDDEN, bias=False), row_capacity=room).build(COMMON)
    compare(ours, drawn(switch.SwitchTransformersSparseMLP(config)).eval(), switched, rows=3, time=21)


def test_switch_losses():
    balance, z_loss = 0.3, 0.7
    config = MoE(
        experts=EXPERTS, top=1, expert=FFN(hidden=HIDDEN), balance=balance, router=Router(z_loss=z_loss), capacity=1.0
    )
    ours, x, seen = drawn(config.build(COMMON)), torch.randn(1, 40, WIDTH), context(1, 40)
    ours(x, seen)
    logits = x @ ours.router.linear.weight.t()
    theirs = balance * switch.load_balancing_loss_func(logits.softmax(-1), logits.argmax(-1))
    torch.testing.assert_close(seen.losses, [theirs + z_loss * switch.router_z_loss_func(logits)], **closely)


@pytest.mark.parametrize("groups", [None, ExpertGroups(count=4, top=2)])
def test_deepseek_v2(groups):
    config = DeepseekV2Config(
        hidden_size=WIDTH,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=2,
        num_attention_heads=4,
        routed_scaling_factor=2.5,
        topk_method="greedy" if groups is None else "group_limited_greedy",
        n_group=4,
        topk_group=2,
    )
    router = Router(scale=2.5, groups=groups)
    ours = MoE(experts=EXPERTS, top=3, expert=GLU(hidden=HIDDEN), shared=GLU(hidden=2 * HIDDEN), router=router)
    names = lambda theirs: gated(theirs) | shared(theirs) | {"router.linear.weight": theirs["gate.weight"]}  # noqa: E731
    compare(ours.build(COMMON), drawn(DeepseekV2Moe(config)), names)


@pytest.mark.parametrize("normalise", [True, False])
def test_deepseek_v3(normalise):
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=3,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=normalise,
    )
    block = drawn(DeepseekV3MoE(config))
    block.gate.e_score_correction_bias.normal_(std=0.2)
    groups = ExpertGroups(count=4, top=2, score="two-best")
    router = Router(scores="sigmoid", normalise=normalise, scale=2.5, groups=groups, correction=0.0)
    ours = MoE(experts=EXPERTS, top=3, expert=GLU(hidden=HIDDEN), shared=GLU(hidden=HIDDEN), router=router)

    def names(theirs):
        own = {"router.linear.weight": theirs["gate.weight"]}
        return gated(theirs) | shared(theirs) | own | {"router.correction": theirs["gate.e_score_correction_bias"]}

    compare(ours.build(COMMON), block, names)
