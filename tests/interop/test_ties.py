"""A config may call a head tied while the file has another matrix for it: then it is not, here and in transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_bart_against_transformers import sizes
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    MarianConfig,
    MarianMTModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetLMHeadModel,
)

import parity
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.batch import Batch, Rows

TEXT = dict(
    hidden_size=24,
    num_attention_heads=3,
    num_hidden_layers=1,
    intermediate_size=40,
    vocab_size=31,
    max_position_embeddings=16,
)
BART = sizes(d_model=24, heads=(3, 2), hidden=(40, 40), layers=(1, 1))
T5 = T5Config(d_model=24, num_heads=3, d_kv=8, d_ff=40, num_layers=1, vocab_size=31)
XLNET = XLNetConfig(d_model=24, n_head=3, n_layer=1, d_inner=40, vocab_size=31, use_mems_eval=False)
# class -> (a config that says tied, the head's matrix in a file)
CASES = {
    BertForMaskedLM: (BertConfig(**TEXT), "cls.predictions.decoder.weight"),
    RobertaForMaskedLM: (RobertaConfig(**TEXT), "lm_head.decoder.weight"),
    ElectraForMaskedLM: (ElectraConfig(**TEXT, embedding_size=24), "generator_lm_head.weight"),
    DistilBertForMaskedLM: (
        DistilBertConfig(dim=24, n_heads=3, n_layers=1, hidden_dim=40, vocab_size=31),
        "vocab_projector.weight",
    ),
    XLNetLMHeadModel: (XLNET, "lm_loss.weight"),
    T5ForConditionalGeneration: (T5, "lm_head.weight"),
    BartForConditionalGeneration: (BartConfig(**BART), "lm_head.weight"),
    MarianMTModel: (MarianConfig(**BART, pad_token_id=1), "lm_head.weight"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_file_with_its_own_head_overrides_a_tied_config(kind, tmp_path):
    config, head = CASES[kind]
    model = kind(config).eval()
    parity.randomise(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    weights[head] = torch.randn(31, 24, generator=torch.Generator().manual_seed(2))
    save_file(weights, file, metadata={"format": "pt"})
    theirs = kind.from_pretrained(tmp_path).eval()
    said = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    table = FAMILIES[said["model_type"]]
    ours = table.convert(said, weights)
    assert said.get("tie_word_embeddings", True) and not ours.config.embed.tied
    source, target = Rows(torch.tensor([[5, 6, 7, 8]])), Rows(torch.tensor([[9, 3, 4]]))
    with torch.no_grad():
        if config.is_encoder_decoder:
            expected = theirs(input_ids=source.tokens, decoder_input_ids=target.tokens).logits
            found = ours.logits(Batch(target, source))
        else:
            found, expected = ours.logits(Batch(source)), theirs(input_ids=source.tokens).logits
    assert parity.difference(found, expected) < parity.TOLERANCE
    again, written = table.write(ours, said, table.unused(said, weights))
    assert written.keys() >= weights.keys() and all(written[name].equal(tensor) for name, tensor in weights.items())
    assert not table.convert(again, written).config.embed.tied
