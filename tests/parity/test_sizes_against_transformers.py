"""A preset says the model of the reference: as many parameters, and word for word what the family's table reads from
the reference's config (but for the init, which a file of weights does not need). Without the pooler, which no head for
masked words has a use for."""

import pytest
import torch
import transformers

from allyouneed.config import parse, preset_tree
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.models.base import Model

BASE = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072)
ROBERTA = dict(vocab_size=50265, type_vocab_size=1, layer_norm_eps=1e-5)
T5_BASE = dict(d_model=768, d_ff=3072, num_layers=12, num_heads=12)
TRANSLATOR = dict(encoder_layers=6, decoder_layers=6)


def heads(count, hidden):
    return dict(
        encoder_attention_heads=count, decoder_attention_heads=count, encoder_ffn_dim=hidden, decoder_ffn_dim=hidden
    )


# preset: class, what its published config says besides the class's defaults, parameters
SIZES = {
    "bert-base": ("BertForMaskedLM", {}, 109_514_298),
    "bert-large": (
        "BertForMaskedLM",
        dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
        335_174_458,
    ),
    "roberta-base": ("RobertaForMaskedLM", ROBERTA | dict(max_position_embeddings=514), 124_697_433),
    "albert-base": ("AlbertForMaskedLM", BASE, 11_221_680),
    "longformer-base": ("LongformerForMaskedLM", ROBERTA | dict(max_position_embeddings=4098), 148_711_257),
    "bigbird-base": ("BigBirdForMaskedLM", {}, 127_520_694),
    "roformer-base": ("RoFormerForMaskedLM", {}, 124_099_664),
    "xlnet-base": ("XLNetLMHeadModel", dict(d_model=768, n_layer=12, n_head=12, d_inner=3072), 116_750_336),
    "xlm-15": ("XLMWithLMHeadModel", dict(vocab_size=95000, emb_dim=1024, n_heads=8, n_langs=15), 249_071_384),
    "t5-small": ("T5ForConditionalGeneration", {}, 60_506_624),
    "t5-base": ("T5ForConditionalGeneration", T5_BASE, 222_903_552),
    "switch-base-8": (
        "SwitchTransformersForConditionalGeneration",
        dict(d_ff=3072, num_sparse_encoder_layers=6, num_sparse_decoder_layers=6),
        619_339_008,
    ),
    "bart-base": (
        "BartForConditionalGeneration",
        dict(d_model=768, attention_dropout=0.1, activation_dropout=0.1, **heads(12, 3072), **TRANSLATOR),
        139_420_416,
    ),
    "marian": (
        "MarianMTModel",
        dict(d_model=512, activation_function="swish", scale_embedding=True, **heads(8, 2048), **TRANSLATOR),
        73_886_208,
    ),
}


OWN_WORDS = {"bigbird-base"}  # its table reads what transformers computes instead of the paper's random blocks


@pytest.mark.parametrize("name", SIZES)
def test_a_preset_is_the_model_of_the_reference(name):
    kind, said, size = SIZES[name]
    reference = getattr(transformers, kind)
    config = reference.config_class(**said)
    with torch.device("meta"):
        theirs = reference(config)
        ours = parse(Model, preset_tree(name)).build()
    learned = {id(p): p.numel() for n, p in theirs.named_parameters() if p.requires_grad and ".pooler." not in n}
    assert sum(learned.values()) == sum(p.numel() for p in ours.parameters()) == ours.config.cost().parameters == size
    if name in OWN_WORDS:
        return
    read = parse(Model, FAMILIES[config.model_type].tree(config.to_dict()))
    assert read.model_copy(update={"init": ours.config.init}) == ours.config


READERS = ["bert", "roberta", "distilbert", "albert", "electra", "roformer", "longformer", "big_bird"]
WRITERS = ["bart", "mbart", "marian", "m2m_100", "pegasus", "t5", "mt5", "switch_transformers"]


@pytest.mark.parametrize("name", READERS + WRITERS)
def test_config_defaults_match_theirs(name):
    """Files of older versions contain only non-default values."""
    full = transformers.AutoConfig.for_model(name).to_dict()
    assert FAMILIES[name].tree({"model_type": name}) == FAMILIES[name].tree(full)
