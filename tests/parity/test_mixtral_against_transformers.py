"""Mixtral: logits, gradients and greedy generation of Hugging Face's MixtralForCausalLM."""

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=31,
    max_position_embeddings=64,
)
CASES = {
    "2 of 4": {},
    "3 of 5, window, tied, wide heads": dict(
        num_local_experts=5, num_experts_per_tok=3, sliding_window=3, tie_word_embeddings=True, head_dim=10
    ),
    "2 of 3, odd sizes": dict(num_local_experts=3, intermediate_size=11, num_attention_heads=3, num_key_value_heads=1),
    "another activation": dict(hidden_act="relu", rms_norm_eps=1e-3),
}
TEXTS = [*decoders.TEXTS, [2, 9, 14, 21, 17, 30, 22, 25], [20, 28, 19, 27, 16]]  # enough for every expert to be chosen


def theirs(name):
    model = MixtralForCausalLM(MixtralConfig(**SMALL | CASES[name]))
    model.set_experts_implementation("eager")  # the other one wants sizes that are multiples of 4
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("Mixtral", "transformers MixtralForCausalLM", *decoders.agree(theirs(name), tmp_path, TEXTS))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_jitter_that_experts_see_is_refused():
    with pytest.raises(UserError, match=r"router_jitter_noise: 0\.1"):
        FAMILIES["mixtral"].tree(MixtralConfig(**SMALL, router_jitter_noise=0.1).to_dict())
