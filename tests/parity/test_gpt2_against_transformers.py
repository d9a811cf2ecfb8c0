"""GPT-2: logits, gradients and greedy generation of Hugging Face's GPT2LMHeadModel."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import judge
from allyouneed.nn.batch import Batch, Rows

CASES = {
    "small": dict(n_embd=24, n_head=3, n_layer=2, vocab_size=31, n_positions=16),
    "odd, relu, untied": dict(
        n_embd=20,
        n_head=4,
        n_layer=3,
        vocab_size=29,
        n_positions=12,
        n_inner=33,
        activation_function="relu",
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-3,
    ),
}
TEXTS = [[1, 5, 7, 9, 3, 2, 11], [4, 4, 8], [12]]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients(name, tmp_path, record_difference):
    theirs = GPT2LMHeadModel(GPT2Config(**CASES[name], resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).eval()
    judge.randomise(theirs)
    model = judge.ours(theirs, tmp_path)
    rows = Rows.of(TEXTS)
    real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    expected = theirs(input_ids=rows.tokens, attention_mask=real.long()).logits[real]
    found = model.logits(Batch(rows))[real]
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    worst = judge.difference(found, expected)
    losses = (found * weight).sum(), (expected * weight).sum()
    gradients = judge.gradient_difference(model, theirs, tmp_path, *losses)
    record_difference("GPT-2", "transformers GPT2LMHeadModel", worst, gradients)
    assert worst < judge.TOLERANCE and gradients < judge.TOLERANCE
