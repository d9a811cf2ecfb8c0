"""GPT-Neo: logits, gradients and greedy generation of Hugging Face's GPTNeoForCausalLM, past its window too."""

import pytest
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    num_layers=2,
    num_heads=3,
    vocab_size=31,
    max_position_embeddings=40,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    bos_token_id=0,
    eos_token_id=0,
)
CASES = {
    "all and a window in turn": {},
    "two windows, then all, odd sizes, relu, untied": dict(
        hidden_size=20,
        num_heads=4,
        num_layers=3,
        attention_types=[[["local"], 2], [["global"], 1]],
        window_size=3,
        intermediate_size=33,
        activation_function="relu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
    "no window": dict(attention_types=[[["global"], 2]], num_heads=1),
}


def theirs(name):
    return GPTNeoForCausalLM(GPTNeoConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("GPT-Neo", "transformers GPTNeoForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_files_without_the_prefix(tmp_path):
    decoders.reads_without_prefix(theirs("no window"), tmp_path, "transformer.")


@pytest.mark.parametrize(
    ("key", "value"), [("activation_function", "snake"), ("attention_layers", ["global", "far"]), ("new_trick", 1)]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = GPTNeoConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key.replace("_layers", "_types")):
        FAMILIES["gpt_neo"].tree(config)


def test_incomplete_layer_lists_are_refused():
    config = GPTNeoConfig(**SMALL).to_dict() | {"num_layers": 5}
    with pytest.raises(UserError, match="attention_types: 2 layers, but num_layers is 5"):
        FAMILIES["gpt_neo"].tree(config)
