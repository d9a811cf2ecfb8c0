"""Encoder heads (sentence classes, token tags, none), as in transformers' classes."""

import pytest
import transformers

import parity
import trials
from allyouneed.errors import UserError
from allyouneed.interop.families import FAMILIES

SMALL = dict(
    hidden_size=24,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=40,
    vocab_size=31,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
NAMES = {"Bert": "BERT", "Roberta": "RoBERTa", "DistilBert": "DistilBERT", "Albert": "ALBERT", "Electra": "ELECTRA"}
FAMILY_WORDS = {
    "Bert": SMALL,
    "Roberta": SMALL | dict(pad_token_id=1),
    "DistilBert": dict(dim=24, n_heads=3, n_layers=2, hidden_dim=40, vocab_size=31, max_position_embeddings=16),
    "Albert": SMALL | dict(embedding_size=10),
    "Electra": SMALL | dict(embedding_size=10, hidden_act="relu"),
    "RoFormer": SMALL | dict(embedding_size=10, hidden_act="relu"),
    "BigBird": SMALL | dict(hidden_act="relu", attention_type="original_full", sep_token_id=2),
    "Longformer": SMALL | dict(attention_window=4, pad_token_id=1),
}
KINDS = ("ForSequenceClassification", "ForTokenClassification", "Model")
CASES = [(family, kind) for family in FAMILY_WORDS for kind in KINDS] + [("Electra", "ForPreTraining")]


@pytest.mark.parametrize(("family", "kind"), CASES, ids="".join)
def test_scores_and_gradients(family, kind, tmp_path, record_difference):
    config = getattr(transformers, f"{family}Config")(**FAMILY_WORDS[family], num_labels=3)
    theirs = getattr(transformers, f"{family}{kind}")(config).eval()
    outputs, gradients = trials.encoder(theirs, tmp_path)
    record_difference(NAMES.get(family, family), f"transformers {family}{kind}", outputs, gradients)
    assert outputs < parity.TOLERANCE and gradients < parity.TOLERANCE


@pytest.mark.parametrize("name", ["BertForMultipleChoice", "BertLMHeadModel"])
def test_another_task_is_refused_by_name(name):
    with pytest.raises(UserError, match=f"architectures: '{name}'.*ForMaskedLM"):
        FAMILIES["bert"].tree(transformers.BertConfig(architectures=[name]).to_dict())
