"""Phi: logits, gradients and greedy generation of Hugging Face's PhiForCausalLM."""

import pytest
from transformers import PhiConfig, PhiForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, vocab_size=31)
CASES = {
    "half turned": {},
    "normalised queries and keys": dict(qk_layernorm=True, num_attention_heads=6, num_key_value_heads=2),
    "tied, all turned": dict(
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=1.0),
        hidden_act="relu",
        layer_norm_eps=1e-3,
    ),
    "wide heads": dict(head_dim=12, num_key_value_heads=1, hidden_act="gelu"),
}


def theirs(name):
    return PhiForCausalLM(PhiConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Phi", "transformers PhiForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "snake"), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = PhiConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["phi"].tree(config)
