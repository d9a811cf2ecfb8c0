"""Every activation name of theirs has the same meaning here and is exported as a name with the same meaning."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_models as foreign
import parity
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.hf.config_reader import ACTIVATIONS
from allyouneed.nn.batch import Batch, Rows

LLAMA = dict(hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, vocab_size=17)
GPT2 = dict(n_embd=12, n_head=2, n_layer=1, vocab_size=17, n_positions=9)


@pytest.mark.parametrize("word", ACTIVATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_activation_names_round_trip(word, family, tmp_path):
    if family == "llama":
        theirs = LlamaForCausalLM(LlamaConfig(**LLAMA, hidden_act=word)).eval()
    else:
        theirs = GPT2LMHeadModel(GPT2Config(**GPT2, activation_function=word)).eval()
    parity.randomise(theirs)
    model, tokens = parity.ours(theirs, tmp_path / "theirs"), torch.tensor([[3, 5, 16, 1, 9, 4, 2]])
    expected = theirs(input_ids=tokens).logits
    assert parity.difference(model.logits(Batch(Rows(tokens))), expected) < parity.TOLERANCE
    again = foreign.load(type(theirs), tmp_path / "ours", *FAMILIES[family].write(model))
    assert parity.difference(again(input_ids=tokens).logits, expected) < parity.TOLERANCE
