"""Mistral: logits, gradients and greedy generation of Hugging Face's MistralForCausalLM, beyond the window too."""

import pytest
from transformers import MistralConfig, MistralForCausalLM

import decoders

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=31,
    max_position_embeddings=64,
    head_dim=None,
)
CASES = {
    "window of 4": dict(sliding_window=4),
    "window of 2, tied, wide heads": dict(sliding_window=2, tie_word_embeddings=True, head_dim=10),
    "no window, odd sizes": dict(
        sliding_window=None, num_attention_heads=3, num_key_value_heads=1, intermediate_size=7
    ),
    "another activation, another base": dict(
        hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=77.0)
    ),
}


def theirs(name):
    return MistralForCausalLM(MistralConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Mistral", "transformers MistralForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)
