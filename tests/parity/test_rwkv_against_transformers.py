"""RWKV-4: logits, gradients and greedy generation of Hugging Face's RwkvForCausalLM.

Their blocks halve the stream every few layers in evaluation (`rescale_every`), which is switched off, and so is their
state where gradients are asked for (it is written in place, and its size is the model's width); their single steps are
wrong for more than one text at once, so their `generate` is asked text by text.
"""

import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

import decoders
import parity
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

SMALL = dict(hidden_size=24, num_hidden_layers=3, vocab_size=31, rescale_every=0)
CASES = {
    "as published": {},
    "tied": dict(tie_word_embeddings=True),
    "wider sums": dict(attention_hidden_size=40, intermediate_size=36),
}


def theirs(name, **other):
    return RwkvForCausalLM(RwkvConfig(**SMALL | CASES[name] | other))


@pytest.mark.parametrize("name", CASES)
def test_logits_gradients_and_steps(name, tmp_path, record_difference):
    record_difference(
        "RWKV-4", "transformers RwkvForCausalLM", *decoders.agree(theirs(name, use_cache=False), tmp_path)
    )


@pytest.mark.parametrize("time", [63, 100])
def test_long_texts_with_fast_and_slow_decay(time, tmp_path, record_difference):
    other = theirs("wider sums", use_cache=False).eval()
    parity.randomise(other)
    with torch.no_grad():
        for block in other.rwkv.blocks:
            block.attention.time_decay.copy_(torch.linspace(-6, 3, 40))
            block.attention.time_first.sub_(1)
            block.attention.key.weight.mul_(4)
    model = parity.ours(other, tmp_path)
    tokens = torch.randint(1, 31, (3, time), generator=torch.Generator().manual_seed(time))
    found, expected = model.logits(Batch(Rows(tokens))), other(input_ids=tokens).logits
    outputs = max(
        parity.difference(found, expected), parity.difference(decoders.stepwise(model, Rows(tokens)), expected)
    )
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected) / time
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = parity.gradient_difference(model, other, tmp_path, *losses)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE, (outputs, gradients)
    record_difference("RWKV-4", "transformers RwkvForCausalLM", outputs, gradients)


@pytest.mark.parametrize("prompt", decoders.TEXTS)
def test_greedy_continuations(prompt, tmp_path):
    decoders.continues_alike(theirs("as published"), tmp_path, [prompt])


def test_another_epsilon_is_refused():
    with pytest.raises(UserError, match="layer_norm_epsilon"):
        FAMILIES["rwkv"].tree(RwkvConfig(**SMALL, layer_norm_epsilon=1e-3).to_dict())
