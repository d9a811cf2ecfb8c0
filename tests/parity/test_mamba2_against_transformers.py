"""Mamba-2: logits, gradients, single steps and greedy generation of Hugging Face's Mamba2ForCausalLM."""

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import decoders
import parity
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

SMALL = dict(hidden_size=20, num_hidden_layers=2, vocab_size=31, state_size=6, num_heads=4, head_dim=10, n_groups=2)
CASES = {
    "as published": {},
    "tied": dict(tie_word_embeddings=True),
    "other sizes": dict(expand=3, head_dim=15, n_groups=1, conv_kernel=3, use_bias=True, use_conv_bias=False),
}


def theirs(name, **other):
    return Mamba2ForCausalLM(Mamba2Config(**SMALL | dict(chunk_size=64) | CASES[name] | other))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference(
        "Mamba-2", "transformers Mamba2ForCausalLM", *decoders.agree(theirs(name, use_cache=False), tmp_path)
    )


def test_a_text_of_several_chunks(tmp_path, record_difference):
    """The text has an odd length, and their chunks have another size."""
    other = theirs("as published", use_cache=False, chunk_size=50).eval()
    parity.randomise(other)
    model = parity.ours(other, tmp_path)
    tokens = torch.randint(1, 31, (2, 163), generator=torch.Generator().manual_seed(3))
    found, expected = model.logits(Batch(Rows(tokens))), other(input_ids=tokens).logits
    outputs = parity.difference(found, expected)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected) / 163
    gradients = parity.gradient_difference(model, other, tmp_path, (found * weight).sum(), (expected * weight).sum())
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE, (outputs, gradients)
    record_difference("Mamba-2", "transformers Mamba2ForCausalLM", outputs, gradients)


def test_greedy_continuations(tmp_path):
    decoders.continues_alike(theirs("as published"), tmp_path)


def test_a_limit_of_the_time_step_is_refused():
    with pytest.raises(UserError, match="time_step_limit"):
        FAMILIES["mamba2"].tree(Mamba2Config(**SMALL, time_step_limit=(0.0, 1.0)).to_dict())
