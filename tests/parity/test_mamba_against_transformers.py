"""Mamba: logits, gradients, single steps and greedy generation of Hugging Face's MambaForCausalLM."""

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

import decoders
import parity
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

SMALL = dict(hidden_size=20, num_hidden_layers=2, vocab_size=31, state_size=5)
CASES = {
    "as published": {},
    "untied": dict(tie_word_embeddings=False),
    "other sizes": dict(expand=3, time_step_rank=7, conv_kernel=3, use_bias=True, use_conv_bias=False),
}


def theirs(name, **other):
    return MambaForCausalLM(MambaConfig(**SMALL | CASES[name] | other))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference(
        "Mamba", "transformers MambaForCausalLM", *decoders.agree(theirs(name, use_cache=False), tmp_path)
    )


def test_a_text_of_several_segments(tmp_path, record_difference):
    """Longer than the segments in which the scan is computed and recomputed."""
    other = theirs("as published", use_cache=False).eval()
    parity.randomise(other)
    model = parity.ours(other, tmp_path)
    tokens = torch.randint(1, 31, (2, 300), generator=torch.Generator().manual_seed(3))
    found, expected = model.logits(Batch(Rows(tokens))), other(input_ids=tokens).logits
    outputs = parity.difference(found, expected)
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected) / 300
    gradients = parity.gradient_difference(model, other, tmp_path, (found * weight).sum(), (expected * weight).sum())
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE, (outputs, gradients)
    record_difference("Mamba", "transformers MambaForCausalLM", outputs, gradients)


def test_greedy_continuations(tmp_path):
    decoders.continues_alike(theirs("as published"), tmp_path)


def test_files_without_the_prefix(tmp_path):
    decoders.reads_without_prefix(theirs("as published"), tmp_path, "backbone.")


def test_another_activation_is_refused():
    with pytest.raises(UserError, match="hidden_act"):
        FAMILIES["mamba"].tree(MambaConfig(**SMALL, hidden_act="gelu").to_dict())
