"""ALBERT: scores and gradients of Hugging Face's AlbertForMaskedLM; layers share their weights."""

import pytest
from transformers import AlbertConfig, AlbertForMaskedLM

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

CASES = {
    "small": dict(hidden_size=24, embedding_size=10, num_attention_heads=3, intermediate_size=40),
    "odd, deeper, relu": dict(
        hidden_size=35,
        embedding_size=9,
        num_attention_heads=5,
        intermediate_size=19,
        num_hidden_layers=4,
        hidden_act="relu",
        type_vocab_size=3,
    ),
    "as wide inside as outside": dict(
        hidden_size=20, embedding_size=20, num_attention_heads=2, intermediate_size=33, hidden_act="gelu"
    ),
}


def theirs(name):
    options = dict(num_hidden_layers=3, vocab_size=31, max_position_embeddings=12) | CASES[name]
    return AlbertForMaskedLM(AlbertConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).eval()


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients(name, tmp_path, record_difference):
    model = theirs(name)
    outputs, gradients = trials.encoder(model, tmp_path, model.config.type_vocab_size)
    record_difference("ALBERT", "transformers AlbertForMaskedLM", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


def test_groups_and_an_untied_head_are_refused_by_name():
    config = AlbertConfig(num_hidden_groups=2, inner_group_num=3, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"(?s)num_hidden_groups: 2.*inner_group_num: 3.*tie_word_embeddings"):
        FAMILIES["albert"].tree(config.to_dict())
