"""Qwen2: logits, gradients and greedy generation of Hugging Face's Qwen2ForCausalLM."""

import pytest
from transformers import Qwen2Config, Qwen2ForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=31,
    max_position_embeddings=64,
)
CASES = {
    "groups of queries": {},
    "tied, odd sizes": dict(
        tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1, intermediate_size=7
    ),
    "a window from layer 1 on": dict(use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "a window in one layer": dict(
        use_sliding_window=True,
        sliding_window=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "wide heads, another activation": dict(head_dim=10, hidden_act="gelu", rms_norm_eps=1e-3),
}


def theirs(name):
    return Qwen2ForCausalLM(Qwen2Config(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Qwen2", "transformers Qwen2ForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_files_without_layer_types_mean_the_same():
    config = Qwen2Config(**SMALL | CASES["a window from layer 1 on"]).to_dict()
    old = {key: value for key, value in config.items() if key != "layer_types"}
    assert FAMILIES["qwen2"].tree(old) == FAMILIES["qwen2"].tree(config)


def test_an_unknown_kind_of_layer_is_refused():
    config = Qwen2Config(**SMALL).to_dict() | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}
    with pytest.raises(UserError, match="layer_types: 'chunked_attention'"):
        FAMILIES["qwen2"].tree(config)
