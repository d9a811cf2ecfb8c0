"""GPT-NeoX: logits, gradients and greedy generation of Hugging Face's GPTNeoXForCausalLM."""

import pytest
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, vocab_size=31)
CASES = {
    "a quarter turned": {},
    "one after the other, all turned": dict(
        use_parallel_residual=False,
        rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=1.0),
        hidden_act="relu",
    ),
    "tied, no biases": dict(num_attention_heads=1, tie_word_embeddings=True, attention_bias=False, layer_norm_eps=1e-3),
    "another activation, odd sizes": dict(
        hidden_size=40, num_attention_heads=5, intermediate_size=33, hidden_act="gelu_new", vocab_size=29
    ),
}


def theirs(name):
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("GPT-NeoX", "transformers GPTNeoXForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "snake"), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = GPTNeoXConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["gpt_neox"].tree(config)
