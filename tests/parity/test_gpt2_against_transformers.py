"""GPT-2: logits, gradients and greedy generation of Hugging Face's GPT2LMHeadModel."""

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

import decoders

CASES = {
    "small": dict(n_embd=24, n_head=3, n_layer=2, vocab_size=31, n_positions=40),
    "odd, relu, untied": dict(
        n_embd=20,
        n_head=4,
        n_layer=3,
        vocab_size=29,
        n_positions=33,
        n_inner=33,
        activation_function="relu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "each layer its scale": dict(
        n_embd=18,
        n_head=2,
        n_layer=3,
        vocab_size=37,
        n_positions=24,
        scale_attn_by_inverse_layer_idx=True,
        reorder_and_upcast_attn=True,
    ),
    "no scale": dict(n_embd=16, n_head=4, n_layer=2, vocab_size=23, n_positions=30, scale_attn_weights=False),
}


def theirs(name):
    return GPT2LMHeadModel(GPT2Config(**CASES[name], bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("GPT-2", "transformers GPT2LMHeadModel", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_files_without_the_prefix(tmp_path):
    decoders.reads_without_prefix(theirs("small"), tmp_path, "transformer.")
