"""XLM: scores and gradients of Hugging Face's XLMWithLMHeadModel and its relatives, with language vectors."""

import json

import pytest
import transformers
from transformers import XLMConfig

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.load import load

CASES = {
    "small": ("XLMWithLMHeadModel", dict(emb_dim=24, n_heads=3, n_langs=3)),
    "one language, relu, untied": (
        "XLMWithLMHeadModel",
        dict(emb_dim=20, n_heads=5, gelu_activation=False, tie_word_embeddings=False),
    ),
    "sinusoids": ("XLMWithLMHeadModel", dict(emb_dim=20, n_heads=2, n_langs=2, sinusoidal_embeddings=True)),
    "body": ("XLMModel", dict(emb_dim=24, n_heads=3, n_langs=3)),
    "classes": ("XLMForSequenceClassification", dict(emb_dim=24, n_heads=3, n_langs=2, num_labels=4)),
    "tags": ("XLMForTokenClassification", dict(emb_dim=24, n_heads=3, n_langs=2, num_labels=5)),
}


def theirs(name):
    cls, options = CASES[name]
    off = dict(dropout=0.0, attention_dropout=0.0, summary_first_dropout=0.0)
    config = XLMConfig(**options, **off, n_layers=2, vocab_size=31, max_position_embeddings=12)
    return getattr(transformers, cls)(config).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, types=model.config.n_langs, types_name="langs")
    record_difference("XLM", f"transformers {CASES[name][0]}", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("key", ["causal", "asm"])
def test_other_models_of_the_family_are_refused_by_name(key, tmp_path):
    theirs("small").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: True}))
    with pytest.raises(UserError, match=key):
        load(tmp_path)
