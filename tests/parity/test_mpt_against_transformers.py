"""MPT: logits, gradients and greedy generation of Hugging Face's MptForCausalLM."""

import pytest
from transformers import MptConfig, MptForCausalLM

import decoders
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(d_model=24, n_layers=2, n_heads=4, vocab_size=31, max_seq_len=64)
CASES = {
    "4 heads": {},
    "6 heads, whose slopes are no power of 2": dict(n_heads=6, n_layers=3),
    "another scale, untied": dict(n_heads=3, tie_word_embeddings=False, attn_config=dict(softmax_scale=0.3)),
    "7 heads, odd sizes, narrower": dict(d_model=21, n_heads=7, expansion_ratio=3, vocab_size=29),
}


def theirs(name):
    return MptForCausalLM(MptConfig(**SMALL | CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference("MPT", "transformers MptForCausalLM", *decoders.agree(theirs(name), tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_greedy_continuations(name, tmp_path):
    decoders.continues_alike(theirs(name), tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("no_bias", False), ("logit_scale", 2.0), ("attn_config", {"clip_qkv": 6}), ("attn_config", {"alibi": False})],
)
def test_unsupported_settings_are_refused_by_name(key, value):
    config = MptConfig(**SMALL).to_dict() | {key: value}
    with pytest.raises(UserError, match=key):
        FAMILIES["mpt"].tree(config)
