"""GPT-J: logits, gradients and greedy generation of Hugging Face's GPTJForCausalLM."""

import pytest
from transformers import GPTJConfig, GPTJForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    n_embd=24, n_layer=2, n_head=3, vocab_size=31, n_positions=40, rotary_dim=4, bos_token_id=0, eos_token_id=0
)
CASES = {
    "half turned": {},
    "all turned, tied": dict(rotary_dim=8, tie_word_embeddings=True, n_inner=33),
    "a plane turned, relu": dict(n_head=4, rotary_dim=2, activation_function="relu", layer_norm_epsilon=1e-3),
    "odd sizes": dict(n_embd=18, rotary_dim=2, n_inner=7, vocab_size=29, activation_function="silu"),
}


def theirs(name):
    return GPTJForCausalLM(GPTJConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("GPT-J", "transformers GPTJForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("activation_function", "snake"), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = GPTJConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["gptj"].tree(config)
