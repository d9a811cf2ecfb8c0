"""GPT-BigCode: logits, gradients and greedy generation of Hugging Face's GPTBigCodeForCausalLM."""

import pytest
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(n_embd=24, n_layer=2, n_head=3, vocab_size=31, n_positions=40, bos_token_id=0, eos_token_id=0)
CASES = {
    "one key for all heads": {},
    "a key each, untied": dict(n_head=4, multi_query=False, tie_word_embeddings=False, n_inner=33),
    "no scale, relu": dict(n_head=2, scale_attn_weights=False, activation_function="relu"),
}


def theirs(name):
    return GPTBigCodeForCausalLM(GPTBigCodeConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("GPT-BigCode", "transformers GPTBigCodeForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("add_cross_attention", True), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = GPTBigCodeConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["gpt_bigcode"].tree(config)
