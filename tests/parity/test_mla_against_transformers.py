"""Multi-head latent attention against DeepSeek-V2 of transformers, and its two forms against each other."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.nn.context import Context, TokenLayout
from allyouneed.nn.norms import RMSNorm
from attention_layers import TOLERANCE, build_mixer, differences, hidden, max_difference, randomise_module, rows

WIDTH, HEADS, RANK, NOPE, ROPE, VALUE = 24, 3, 10, 6, 4, 7
LENGTHS = [13, 7, 1]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 6, "rope_theta": 10000.0}


def deepseek(query_rank, bias, rope):
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding

    config = DeepseekV2Config(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=query_rank,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        attention_bias=bias,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    config._attn_implementation = "eager"
    return randomise_module(DeepseekV2Attention(config, 0)), DeepseekV2RotaryEmbedding(config)


def ours_like(query_rank, bias, **keys):
    sizes = {"heads": HEADS, "kv_rank": RANK, "nope_width": NOPE, "rope_width": ROPE, "value_width": VALUE}
    return {"kind": "mla", "query_rank": query_rank, "bias": bias, "pattern": "causal"} | sizes | keys


def convert_with(query_rank, bias):
    def convert(get):
        k, v = get("kv_b_proj.weight").unflatten(0, (HEADS, NOPE + VALUE)).split([NOPE, VALUE], 1)
        found = {
            "latent.weight": get("kv_a_proj_with_mqa.weight"),
            "latent_norm.weight": get("kv_a_layernorm.weight"),
            "k.weight": k.flatten(0, 1),
            "v.weight": v.flatten(0, 1),
            "out.weight": get("o_proj.weight"),
            "q.weight": get("q_proj.weight" if query_rank is None else "q_b_proj.weight"),
        }
        if query_rank is not None:
            found |= {"q_latent.weight": get("q_a_proj.weight"), "q_norm.weight": get("q_a_layernorm.weight")}
        if bias:
            found |= {"latent.bias": get("kv_a_proj_with_mqa.bias"), "out.bias": get("o_proj.bias")}
            found |= {} if query_rank is None else {"q_latent.bias": get("q_a_proj.bias")}
        return found

    return convert


def check(record_difference, query_rank, bias, rope, **keys):
    theirs, tables = deepseek(query_rank, bias, rope)
    ours = build_mixer(WIDTH, ours_like(query_rank, bias, **keys))
    _, layout, real = rows(LENGTHS, WIDTH)

    def run(x):
        return theirs(x, hidden(real, causal=True), position_embeddings=tables(x, layout.positions))[0]

    found = differences(ours, theirs, convert_with(query_rank, bias), run, LENGTHS, WIDTH)
    record_difference("MLA", "transformers DeepseekV2Attention", *found)
    assert max(found) < TOLERANCE


@pytest.mark.parametrize("query_rank", [None, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_a_deepseek_v2_attention_layer(query_rank, bias, record_difference):
    check(record_difference, query_rank, bias, {"rope_type": "default", "rope_theta": 10000.0})


def test_yarn_sharpens_the_rotated_features(record_difference):
    positions = {"kind": "rotary", "order": "interleaved", "scaling": {"kind": "yarn", "factor": 8.0, "original": 6}}
    check(record_difference, 5, False, YARN, positions=positions)


def test_yarn_sharpens_whole_scores(record_difference):
    """DeepSeek's `mscale_all_dim`: the scale of the softmax times (0.1·m·ln(factor) + 1)², cosines and sines as they
    are."""
    factor = 0.1 * 0.707 * math.log(8.0) + 1
    scaling = {"kind": "yarn", "factor": 8.0, "original": 6, "attention_factor": factor, "sharpen": "scores"}
    positions = {"kind": "rotary", "order": "interleaved", "scaling": scaling}
    check(record_difference, None, False, YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, positions=positions)


def both_forms(module, x, layout):
    context = Context(layout)
    q, both = module.project(x, context)
    return [look(q, both, context, layout) for look in (module.attend_expanded, module.attend_absorbed)]


@given(
    st.integers(1, 4), st.integers(1, 11), st.integers(1, 9), st.integers(0, 10**6), st.sampled_from(["dot", "general"])
)
def test_the_absorbed_form_is_the_plain_one(heads, rank, time, seed, scores):
    """W^UK goes into the queries, W^UV behind the weighted sum; gradients too."""
    sizes = {"heads": heads, "kv_rank": rank, "nope_width": 5, "rope_width": 2, "value_width": 3}
    module = randomise_module(
        build_mixer(8, {"kind": "mla", "pattern": "causal", "scores": scores} | sizes), seed
    ).double()
    x = torch.randn(2, time, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.double).requires_grad_()
    found = both_forms(module, x, TokenLayout(torch.arange(time)[None], start=0))
    difference = max_difference(*found)
    assert difference < 1e-12
    parameters = [x, *(p for name, p in module.named_parameters() if not name.startswith("out"))]
    one, other = (torch.autograd.grad(form.square().sum(), parameters, retain_graph=True) for form in found)
    for ours, theirs in zip(one, other, strict=True):
        assert max_difference(ours, theirs) < 1e-12


def test_the_cheaper_form_is_chosen():
    """DeepSeek-V2's own sizes: a token absorbs, a long chunk writes keys out."""
    sizes = {"heads": 128, "kv_rank": 512, "nope_width": 128, "rope_width": 64, "value_width": 128}
    with torch.device("meta"):
        module = build_mixer(512, {"kind": "mla", "pattern": "causal"} | sizes)
    assert module.should_absorb(1, 1000) and module.should_absorb(16, 100_000)
    assert not module.should_absorb(1000, 1000) and not module.should_absorb(1, 1)


def test_only_latents_are_cached():
    module = build_mixer(WIDTH, ours_like(5, False))
    state = module.new_state()
    layout = TokenLayout(torch.arange(3)[None], start=0)
    module(torch.randn(2, 3, WIDTH), Context(layout, slots=layout), state)
    assert state.bytes == 4 * 2 * 3 * (RANK + ROPE)


def test_latent_norm_options():
    assert build_mixer(WIDTH, ours_like(5, False, norm=None)).latent_norm is None
    x, layout, _ = rows(LENGTHS, WIDTH)
    one, other = (
        build_mixer(WIDTH, ours_like(5, False)),
        build_mixer(WIDTH, ours_like(5, False, norm=RMSNorm(eps=10.0))),
    )
    other.load_state_dict(one.state_dict())
    assert (one(x, Context(layout)) - other(x, Context(layout))).abs().max() > 1e-3
