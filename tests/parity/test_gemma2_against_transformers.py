"""Gemma 2: logits, gradients and greedy generation of Hugging Face's Gemma2ForCausalLM."""

import pytest
from transformers import Gemma2Config, Gemma2ForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    vocab_size=31,
    sliding_window=3,
    attn_implementation="eager",
)
CASES = {
    "capped": dict(attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=7),
    "not capped, biases, untied": dict(
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attention_bias=True,
        tie_word_embeddings=False,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "another activation, one key for all": dict(hidden_activation="relu", num_key_value_heads=1, num_attention_heads=3),
}


def theirs(name):
    return Gemma2ForCausalLM(Gemma2Config(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Gemma 2", "transformers Gemma2ForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("use_bidirectional_attention", True), ("hidden_activation", "snake"), ("new_trick", 1)]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = Gemma2Config(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["gemma2"].tree(config)


def test_files_without_layer_types_mean_the_same():
    config = Gemma2Config(**SMALL).to_dict()
    old = {key: value for key, value in config.items() if key != "layer_types"}
    assert FAMILIES["gemma2"].tree(old) == FAMILIES["gemma2"].tree(config)
