"""OPT: logits, gradients and greedy generation of Hugging Face's OPTForCausalLM."""

import pytest
from transformers import OPTConfig, OPTForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    word_embed_proj_dim=24,
    num_hidden_layers=2,
    num_attention_heads=3,
    ffn_dim=40,
    vocab_size=31,
    max_position_embeddings=40,
    pad_token_id=0,  # whose vector gets no gradient
)
CASES = {
    "norms before": {},
    "norms after, untied": dict(do_layer_norm_before=False, tie_word_embeddings=False, activation_function="gelu"),
    "no biases, no last norm": dict(enable_bias=False, layer_norm_elementwise_affine=False, num_attention_heads=4),
    "no last norm": dict(_remove_final_layer_norm=True, num_hidden_layers=3),
}


def theirs(name):
    return OPTForCausalLM(OPTConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("OPT", "transformers OPTForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("word_embed_proj_dim", 12), ("activation_function", "snake"), ("new_trick", 1)]
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = OPTConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["opt"].tree(config)


def test_files_without_the_prefix(tmp_path):
    decoders.reads_without_prefix(theirs("norms before"), tmp_path, "model.")
