"""DeepSeek-V2: logits, gradients and greedy generation of Hugging Face's DeepseekV2ForCausalLM."""

import pytest
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    moe_intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=4,
    kv_lora_rank=10,
    q_lora_rank=None,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    n_routed_experts=4,
    n_shared_experts=2,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    vocab_size=31,
    max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=16)
CASES = {
    "as the light one": {},
    "queries from a latent, groups of experts": dict(
        q_lora_rank=14,
        n_routed_experts=6,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
        routed_scaling_factor=3.0,
        rms_norm_eps=1e-3,
    ),
    "all dense, tied": dict(first_k_dense_replace=3, tie_word_embeddings=True),
    "no dense layer, one shared expert, biases": dict(
        first_k_dense_replace=0, n_shared_experts=1, num_experts_per_tok=3, attention_bias=True, q_lora_rank=9
    ),
    "yarn": dict(qk_rope_head_dim=16, rope_parameters=YARN),
    "yarn that sharpens whole scores": dict(
        qk_rope_head_dim=16, rope_parameters=YARN | dict(mscale=0.707, mscale_all_dim=0.707)
    ),
}
TEXTS = [*decoders.TEXTS, [2, 9, 14, 21, 17, 30, 22, 25], [20, 28, 19, 27, 16]]  # enough for every expert to be chosen


def theirs(name):
    model = DeepseekV2ForCausalLM(DeepseekV2Config(**SMALL | CASES[name]))
    model.set_experts_implementation("eager")  # the other one wants sizes that are multiples of 4
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    found = decoders.agree(theirs(name), tmp_path, TEXTS)
    record_difference("DeepSeek-V2", "transformers DeepseekV2ForCausalLM", *found)


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_topk_prob", True),
        ("moe_layer_freq", 2),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("num_key_value_heads", 2),
        ("new_trick", 1),
    ],
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = DeepseekV2Config(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["deepseek_v2"].tree(config)


@pytest.mark.parametrize("more", [dict(mscale=1.0), dict(), dict(mscale=0.5, attention_factor=2.0)])
def test_two_yarn_sharpenings_are_refused(more):
    rope = YARN | dict(mscale_all_dim=0.5) | more
    with pytest.raises(UserError, match="mscale"):
        FAMILIES["deepseek_v2"].tree(DeepseekV2Config(**SMALL, rope_parameters=rope).to_dict())
