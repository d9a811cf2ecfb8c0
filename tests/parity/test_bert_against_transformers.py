"""BERT: scores and gradients of Hugging Face's BertForMaskedLM, with both kinds of text."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import parity as judge
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
CASES = {
    "small": dict(
        hidden_size=24,
        num_attention_heads=3,
        num_hidden_layers=2,
        intermediate_size=40,
        vocab_size=31,
        max_position_embeddings=16,
    ),
    "odd, relu, untied, three kinds of text": dict(
        hidden_size=20,
        num_attention_heads=5,
        num_hidden_layers=3,
        intermediate_size=33,
        vocab_size=29,
        max_position_embeddings=9,
        hidden_act="relu",
        type_vocab_size=3,
        layer_norm_eps=1e-3,
        tie_word_embeddings=False,
    ),
    "tanh-gelu, one kind of text": dict(
        hidden_size=36,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=17,
        vocab_size=43,
        max_position_embeddings=12,
        hidden_act="gelu_new",
        type_vocab_size=1,
    ),
}


def theirs(name):
    return BertForMaskedLM(BertConfig(**CASES[name], **NO_DROPOUT)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size)
    record_difference("BERT", "transformers BertForMaskedLM", outputs, gradients)
    assert outputs < judge.TOLERANCE and gradients < judge.TOLERANCE


def test_old_names_of_norms_are_understood(tmp_path):
    model = theirs("small")
    judge.randomise(model)
    config, weights = judge.saved(model, tmp_path)
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): w for n, w in weights.items()}
    assert set(old) != set(weights)
    found = FAMILIES["bert"].convert(config, old)
    assert torch.equal(found.embed.norm.bias, weights["bert.embeddings.LayerNorm.bias"])


def test_unsupported_settings_are_refused_by_name():
    config = BertConfig(is_decoder=True, hidden_act="laplace", tie_word_embeddings=False).to_dict()
    config["position_embedding_type"] = "relative_key"
    named = r"(?s)position_embedding_type: 'relative_key'.*hidden_act: 'laplace'.*is_decoder: True"
    with pytest.raises(UserError, match=named):
        FAMILIES["bert"].tree(config)
