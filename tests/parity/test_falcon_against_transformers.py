"""Falcon: logits, gradients and greedy generation of Hugging Face's FalconForCausalLM."""

import pytest
from transformers import FalconConfig, FalconForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=31)
CASES = {
    "one key for all heads (7B)": {},
    "groups of heads, two norms (40B)": dict(new_decoder_architecture=True, num_kv_heads=2),
    "groups of heads, one norm": dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "a key each, one after the other, biases, untied": dict(
        multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False, ffn_hidden_size=33
    ),
    "a key each, both at once": dict(multi_query=False, num_attention_heads=3, activation="relu"),
}


def theirs(name):
    return FalconForCausalLM(FalconConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Falcon", "transformers FalconForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("alibi", True), ("num_ln_in_parallel_attn", 2), ("activation", "snake"), ("new_trick", 1)]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = FalconConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["falcon"].tree(config)
