"""BERT: scores and gradients of Hugging Face's BertForMaskedLM, with both kinds of text."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import parity
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
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


class RelativeSelfAttention(nn.Module):
    """BertSelfAttention of transformers 4 with relative positions, which version 5 no longer reads: modeling_bert.py of
    4.57, `position_embedding_type`."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.kind, self.most = (
            config.num_attention_heads,
            config.position_embedding_type,
            config.max_position_embeddings,
        )
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.distance_embedding = nn.Embedding(2 * self.most - 1, config.hidden_size // self.heads)

    def forward(self, hidden_states, attention_mask=None, **_):
        q, k, v = (
            part(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores, place = q @ k.transpose(-1, -2), torch.arange(q.shape[2])
        embedding = self.distance_embedding(place[:, None] - place[None, :] + self.most - 1)
        scores = scores + torch.einsum("bhld,lrd->bhlr", q, embedding)
        if self.kind == "relative_key_query":
            scores = scores + torch.einsum("bhrd,lrd->bhlr", k, embedding)
        scores = scores / q.shape[-1] ** 0.5
        if attention_mask is not None:
            mask = attention_mask if attention_mask.dtype != torch.bool else torch.where(attention_mask, 0.0, -1e9)
            scores = scores + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), None


@pytest.mark.parametrize("kind", ["relative_key", "relative_key_query"])
def test_relative_positions(kind, tmp_path, record_difference):
    model = BertForMaskedLM(BertConfig(**CASES["small"], **NO_DROPOUT, position_embedding_type=kind)).eval()
    for layer in model.bert.encoder.layer:
        layer.attention.self = RelativeSelfAttention(model.config)
    model.bert.embeddings.position_embeddings.weight.data.zero_()  # version 4 does not add them
    model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
    outputs, gradients = trials.encoder(model, tmp_path, 2)
    record_difference("Shaw positions", "transformers 4 BertSelfAttention, written out", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE
    config, weights = parity.saved(model, tmp_path)
    ours = FAMILIES["bert"].convert(config, weights)
    written, back = FAMILIES["bert"].write(ours, None, FAMILIES["bert"].unused(config, weights))
    assert written["position_embedding_type"] == kind and all(back[name].equal(weights[name]) for name in weights)


def test_old_names_of_norms_are_understood(tmp_path):
    model = theirs("small")
    parity.randomise(model)
    config, weights = parity.saved(model, tmp_path)
    old = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): w for n, w in weights.items()}
    assert set(old) != set(weights)
    found = FAMILIES["bert"].convert(config, old)
    assert torch.equal(found.embed.norm.bias, weights["bert.embeddings.LayerNorm.bias"])


def test_unsupported_settings_are_refused_by_name():
    config = BertConfig(is_decoder=True, hidden_act="laplace", tie_word_embeddings=False).to_dict()
    config["position_embedding_type"] = "relative_query"
    named = r"(?s)position_embedding_type: 'relative_query'.*hidden_act: 'laplace'.*is_decoder: True"
    with pytest.raises(UserError, match=named):
        FAMILIES["bert"].tree(config)
