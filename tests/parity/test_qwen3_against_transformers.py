"""Qwen3: logits, gradients and greedy generation of Hugging Face's Qwen3ForCausalLM."""

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

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
)
CASES = {
    "groups of queries": {},
    "biases, tied": dict(attention_bias=True, tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1),
    "a window from layer 1 on": dict(use_sliding_window=True, sliding_window=3, max_window_layers=1, rms_norm_eps=1e-3),
    "another activation, odd sizes": dict(hidden_act="relu", intermediate_size=7, head_dim=6, vocab_size=29),
}


def theirs(name):
    return Qwen3ForCausalLM(Qwen3Config(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Qwen3", "transformers Qwen3ForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "snake"), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = Qwen3Config(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["qwen3"].tree(config)
