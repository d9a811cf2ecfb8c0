"""BLOOM: logits, gradients and greedy generation of Hugging Face's BloomForCausalLM."""

import pytest
from transformers import BloomConfig, BloomForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(hidden_size=24, n_layer=2, n_head=4, vocab_size=31)
CASES = {
    "4 heads": {},
    "6 heads, whose slopes are no power of 2": dict(n_head=6, n_layer=3),
    "3 heads, untied": dict(n_head=3, tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    "7 heads, odd sizes": dict(hidden_size=21, n_head=7, vocab_size=29),
}


def theirs(name):
    return BloomForCausalLM(BloomConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("BLOOM", "transformers BloomForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


def test_files_without_the_prefix(tmp_path):
    decoders.reads_without_prefix(theirs("4 heads"), tmp_path, "transformer.")


@pytest.mark.parametrize(("key", "value"), [("apply_residual_connection_post_layernorm", True), ("new_trick", 1)])
def test_unsupported_settings_are_refused_by_name(key, value):
    config = BloomConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["bloom"].tree(config)


def test_files_of_the_authors_mean_the_same():
    """Their training code wrote other names, and what it did to be quick."""
    new = BloomConfig(**SMALL).to_dict()
    names = {"hidden_size": "n_embed", "n_head": "num_attention_heads"}
    old = {names.get(key, key): value for key, value in new.items()}
    old |= {"seq_length": 2048, "offset_alibi": 100, "skip_bias_add": True, "masked_softmax_fusion": True}
    assert FAMILIES["bloom"].tree(old) == FAMILIES["bloom"].tree(new)
