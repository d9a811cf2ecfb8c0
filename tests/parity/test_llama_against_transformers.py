"""Llama: logits, gradients and greedy generation of Hugging Face's LlamaForCausalLM."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=31,
    max_position_embeddings=64,
)
LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=1000.0, factor=4.0, original_max_position_embeddings=16)
CASES = {
    "groups of queries": {},
    "one key for all, tied, odd sizes": dict(
        num_attention_heads=3, num_key_value_heads=1, head_dim=6, intermediate_size=29, tie_word_embeddings=True
    ),
    "wide heads, biases, another base": dict(
        num_key_value_heads=4,
        head_dim=10,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=500.0),
        hidden_act="gelu",
    ),
    "linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=3.0)),
    "llama3": dict(head_dim=16, rope_parameters=dict(rope_type="llama3", rope_theta=100.0, factor=8.0) | LLAMA3),
    "yarn": dict(head_dim=16, rope_parameters=YARN),
    "yarn, sharpened otherwise": dict(
        head_dim=16, rope_parameters=YARN | dict(beta_fast=8.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5)
    ),
    "yarn, by a number": dict(
        head_dim=16, rope_parameters=YARN | dict(attention_factor=1.5, truncate=False, beta_slow=0.3)
    ),
}


def theirs(name):
    return LlamaForCausalLM(LlamaConfig(**SMALL | CASES[name], bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Llama", "transformers LlamaForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_files_from_before_transformers_5_mean_the_same():
    new = LlamaConfig(**SMALL, rope_parameters=YARN).to_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    rope = {"type" if key == "rope_type" else key: value for key, value in YARN.items() if key != "rope_theta"}
    old |= {"rope_theta": YARN["rope_theta"], "rope_scaling": rope}
    assert FAMILIES["llama"].tree(old) == FAMILIES["llama"].tree(new)


def test_unsupported_settings_are_refused_by_name():
    config = LlamaConfig(**SMALL).to_dict()
    config |= {"hidden_act": "snake", "new_trick": 3, "quantization_config": {"bits": 4}, "off": False, "unset": None}
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError) as refusal:
        FAMILIES["llama"].tree(config)
    text = str(refusal.value)
    for said in ("hidden_act: 'snake'", "new_trick: 3", "quantization_config", "rope_parameters.rope_type: 'dynamic'"):
        assert said in text
    assert "off" not in text and "unset" not in text and text.startswith("llama:")


def test_missing_weights_are_named():
    config = LlamaConfig(**SMALL).to_dict()
    del config["hidden_size"]
    with pytest.raises(UserError, match="hidden_size: missing"):
        FAMILIES["llama"].tree(config)
