"""Gemma: logits, gradients and greedy generation of Hugging Face's GemmaForCausalLM."""

import pytest
from transformers import GemmaConfig, GemmaForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=10,
    vocab_size=31,
)
CASES = {
    "one key for all heads": {},
    "a key each, biases, untied": dict(num_key_value_heads=3, attention_bias=True, tie_word_embeddings=False),
    "relu": dict(hidden_act="relu", num_attention_heads=4, num_key_value_heads=2),
}


def theirs(name):
    return GemmaForCausalLM(GemmaConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Gemma", "transformers GemmaForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("use_bidirectional_attention", True), ("hidden_act", "snake"), ("new_trick", 1)]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = GemmaConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["gemma"].tree(config)


def test_the_second_activation_key_is_used():
    config = GemmaConfig(**SMALL).to_dict() | {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}
    assert FAMILIES["gemma"].tree(config) == FAMILIES["gemma"].tree(GemmaConfig(**SMALL).to_dict())
