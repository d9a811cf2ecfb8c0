"""Heads of encoders, and what else a file holds (poolers, heads of another task), in both directions."""

import pytest
import torch
import transformers

import hf_models as foreign
import parity
from allyouneed.interop.families import FAMILIES, matching_families

TEXT = dict(
    hidden_size=24,
    num_attention_heads=3,
    num_hidden_layers=2,
    intermediate_size=40,
    vocab_size=31,
    max_position_embeddings=16,
    pad_token_id=1,
    num_labels=3,
)
NARROW = TEXT | dict(embedding_size=10)
IMAGE = dict(
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=5,
    intermediate_size=33,
    image_size=(6, 10),
    patch_size=(3, 2),
    num_channels=1,
    num_labels=4,
)
T5 = dict(d_model=20, num_heads=3, d_kv=11, d_ff=33, num_layers=2, num_decoder_layers=1, vocab_size=31)
BART = dict(
    d_model=20,
    encoder_attention_heads=4,
    decoder_attention_heads=5,
    encoder_ffn_dim=17,
    decoder_ffn_dim=21,
    encoder_layers=1,
    decoder_layers=2,
    vocab_size=31,
    max_position_embeddings=16,
)
WORDS = {
    "Bert": TEXT,
    "Roberta": TEXT,
    "DistilBert": dict(dim=24, n_heads=3, n_layers=2, hidden_dim=40, vocab_size=31, num_labels=3),
    "Albert": NARROW,
    "Electra": NARROW,
    "RoFormer": NARROW,
    "Longformer": TEXT | dict(attention_window=[4, 8]),
    "BigBird": TEXT | dict(block_size=2, num_random_blocks=1, sep_token_id=2),
    "XLNet": dict(d_model=24, n_head=3, n_layer=2, d_inner=40, vocab_size=31, num_labels=3),
}
KINDS = ("ForSequenceClassification", "ForTokenClassification", "Model")
# class -> config
CASES = {f"{family}{kind}": words for family, words in WORDS.items() for kind in KINDS}
# two labels: the scores of beginning and end
CASES |= {
    f"{family}ForQuestionAnswering": WORDS[family] | {"num_labels": 2}
    for family in ("Bert", "Roberta", "DistilBert", "Albert", "Electra", "RoFormer")
}
CASES |= {
    "ElectraForPreTraining": NARROW,
    "ViTModel": IMAGE,
    "DeiTModel": IMAGE,
    "DeiTForImageClassification": IMAGE,
    "T5EncoderModel": T5,
    "MT5EncoderModel": T5,
    "BartModel": BART,
}
# their config says what we would not: there is another task's head in the file
OTHERS = {"BertForPreTraining": TEXT, "AlbertForPreTraining": NARROW, "BigBirdForPreTraining": WORDS["BigBird"]}


def built(name):
    kind = getattr(transformers, name)
    theirs = kind(kind.config_class(**(CASES | OTHERS)[name])).eval()
    parity.randomise(theirs)
    return theirs


def equal(found, expected):
    return found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_files_come_back_as_they_were(name, tmp_path):
    theirs = built(name)
    config, weights = parity.saved(theirs, tmp_path)
    table = FAMILIES[config["model_type"]]
    found, written = table.write(table.convert(config, weights), config, table.unused(config, weights))
    assert found == config and equal(written, weights)


@pytest.mark.parametrize("name", [name for name in CASES if name != "BartModel"])  # we say it with a head
def test_a_model_without_its_original_config_is_exported(name, tmp_path):
    theirs = built(name)
    config, weights = parity.saved(theirs, tmp_path / "theirs")
    table = FAMILIES[config["model_type"]]
    model = table.convert(config, weights)
    found, written = table.write(model, unused=table.unused(config, weights))
    assert equal(written, weights) and found["architectures"] == config["architectures"] == [name]
    again = foreign.load(type(theirs), tmp_path / "ours", foreign.with_token_ids(found, config), written)
    assert foreign.difference(again, foreign.load(type(theirs), tmp_path / "theirs", config, weights)) == 0
    assert table in matching_families(model.config)


@pytest.mark.parametrize(
    "name", ["BertModel", "RobertaModel", "AlbertModel", "LongformerModel", "BigBirdModel", "ViTModel"]
)
def test_an_untrained_pooler_is_written_as_zeros(name, tmp_path):
    """Otherwise their class would initialise it at random each time."""
    theirs = built(name)
    config, weights = parity.saved(theirs, tmp_path / "theirs")
    table = FAMILIES[config["model_type"]]
    found, written = table.write(table.convert(config, weights))
    poolers = {key for key in written if "pooler" in key}
    assert len(poolers) == 2 and not any(written[key].any() for key in poolers)
    assert written.keys() == weights.keys()
    again = foreign.load(type(theirs), tmp_path / "ours", foreign.with_token_ids(found, config), written)
    kept = {key: tensor for key, tensor in again.state_dict().items() if "pooler" not in key}
    assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in kept.items())


def test_a_changed_number_of_labels_is_exported(tmp_path):
    """What still holds of the original config is kept."""
    theirs = built("BertForSequenceClassification")
    config, _ = parity.saved(theirs, tmp_path)
    other = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT | dict(num_labels=5)))
    model = parity.ours(other, tmp_path)
    found, written = FAMILIES["bert"].write(model, config | {"directionality": "bidi"})
    assert found["directionality"] == "bidi" and len(found["id2label"]) == len(written["classifier.weight"]) == 5
