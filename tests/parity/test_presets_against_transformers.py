"""A preset is the model that transformers builds from the reference's own config, word for word and as large."""

import pytest
import torch
import transformers

from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.interop.families import FAMILIES
from allyouneed.nn.models.base import Model

LLAMA = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000)
MISTRAL = LLAMA | dict(num_key_value_heads=8, intermediate_size=14336, rms_norm_eps=1e-5)
# preset -> (their class, the reference's config, parameters as the literature counts them)
REFERENCES = {
    "gpt2": ("GPT2LMHeadModel", dict(), 124_439_808),
    "gpt2-medium": ("GPT2LMHeadModel", dict(n_embd=1024, n_layer=24, n_head=16), 354_823_168),
    "gpt2-large": ("GPT2LMHeadModel", dict(n_embd=1280, n_layer=36, n_head=20), 774_030_080),
    "gpt2-xl": ("GPT2LMHeadModel", dict(n_embd=1600, n_layer=48, n_head=25), 1_557_611_200),
    "llama-7b": ("LlamaForCausalLM", LLAMA | dict(intermediate_size=11008), 6_738_415_616),
    "llama-15m": (
        "LlamaForCausalLM",
        dict(
            hidden_size=288,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=6,
            vocab_size=32000,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        ),
        15_191_712,
    ),
    "mistral-7b": ("MistralForCausalLM", MISTRAL, 7_241_732_096),
    "mixtral-8x7b": ("MixtralForCausalLM", MISTRAL, 46_702_792_704),
    "deepseek-v2-lite": (
        "DeepseekV2ForCausalLM",
        dict(
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            num_hidden_layers=27,
            num_attention_heads=16,
            q_lora_rank=None,
            num_experts_per_tok=6,
            first_k_dense_replace=1,
        ),
        15_706_484_224,
    ),
    "rwkv-4-169m": ("RwkvForCausalLM", dict(hidden_size=768, num_hidden_layers=12), 169_342_464),
    "mamba-130m": ("MambaForCausalLM", dict(num_hidden_layers=24), 129_135_360),
    "mamba2-130m": (
        "Mamba2ForCausalLM",
        dict(
            hidden_size=768,
            num_hidden_layers=24,
            num_heads=24,
            n_groups=1,
            vocab_size=50288,
            tie_word_embeddings=True,
        ),
        128_989_632,
    ),
    "bitnet-b1.58-2b": (
        "BitNetForCausalLM",
        dict(tie_word_embeddings=True, quantization_config=dict(quant_method="bitnet", linear_class="autobitlinear")),
        2_412_820_480,
    ),
    "bloom-560m": ("BloomForCausalLM", dict(hidden_size=1024, n_layer=24, n_head=16), 559_214_592),
}


def meant(tree, width):
    """The tree without what only training looks at, and with the sizes that follow from others."""
    if isinstance(tree, list):
        return [meant(value, width) for value in tree]
    if not isinstance(tree, dict):
        return tree
    found = {key: meant(value, width) for key, value in tree.items() if key not in ("init", "balance")}
    if tree.get("kind") == "attention":
        found["head_width"] = tree["head_width"] or width // tree["heads"]
        found["kv_heads"] = tree["kv_heads"] or tree["heads"]
    return found


@pytest.mark.parametrize("name", REFERENCES)
def test_parts(name):
    architecture, sizes, _ = REFERENCES[name]
    config = getattr(transformers, architecture).config_class(**sizes).to_dict()
    theirs = parse(Model, FAMILIES[config["model_type"]].tree(config))
    ours = parse(Model, preset_tree(name))
    assert meant(tree_of(ours), ours.width) == meant(tree_of(theirs), theirs.width)


@pytest.mark.parametrize("name", REFERENCES)
def test_parameters(name):
    architecture, sizes, counted = REFERENCES[name]
    theirs = getattr(transformers, architecture)
    with torch.device("meta"):
        expected = theirs(theirs.config_class(**sizes))
    assert parse(Model, preset_tree(name)).cost().parameters == expected.num_parameters() == counted
