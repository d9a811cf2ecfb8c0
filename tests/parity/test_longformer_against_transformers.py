"""Longformer: scores and gradients of Hugging Face's LongformerForMaskedLM, with and without global tokens."""

import pytest
import torch
from transformers import LongformerConfig, LongformerForMaskedLM, LongformerForSequenceClassification

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

CASES = {
    "small": dict(hidden_size=24, num_attention_heads=3, intermediate_size=40, attention_window=4),
    "odd, windows of each layer's own, relu, untied": dict(
        hidden_size=35,
        num_attention_heads=5,
        intermediate_size=19,
        attention_window=[4, 8, 8],
        num_hidden_layers=3,
        hidden_act="relu",
        tie_word_embeddings=False,
        type_vocab_size=1,
    ),
}
LENGTHS = (13, 9, 1, 6)
DICE = torch.Generator().manual_seed(0)
TEXTS = [torch.randint(3, 31, (length,), generator=DICE).tolist() for length in LENGTHS]
CHOSEN = {
    "none": None,
    "the first": torch.arange(LENGTHS[0])[None].expand(4, -1) == 0,
    "some, unlike in each row": torch.rand(4, LENGTHS[0], generator=DICE) < torch.tensor([[0.3], [0.5], [0.0], [0.1]]),
}


def config(name):
    options = dict(num_hidden_layers=2, vocab_size=31, max_position_embeddings=40) | CASES[name]
    return LongformerConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def theirs(name):
    return LongformerForMaskedLM(config(name)).eval()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chosen", CHOSEN)
def test_scores_and_gradients(name, chosen, tmp_path, record_difference):
    model = theirs(name)
    marks = CHOSEN[chosen]
    if marks is not None:  # a token of padding is never global
        marks = marks & (torch.arange(LENGTHS[0])[None] < torch.tensor(LENGTHS)[:, None])
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size, TEXTS, marks)
    record_difference("Longformer", "transformers LongformerForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_classes(tmp_path, record_difference):
    model = LongformerForSequenceClassification(config("small")).eval()
    outputs, gradients = trials.encoder(model, tmp_path, 1, TEXTS, CHOSEN["the first"])
    record_difference("Longformer", "transformers LongformerForSequenceClassification", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_mismatches_are_refused_by_name():
    said = LongformerConfig(attention_window=[4, 4]).to_dict() | {"attention_mode": "tvm"}
    with pytest.raises(UserError, match=r"(?s)attention_mode: 'tvm'.*attention_window: 2 windows for 12 layers"):
        FAMILIES["longformer"].tree(said)
