"""GPT-NeoX (Black et al. 2022), and Pythia: parallel sub-layers, a quarter of each head rotated."""

from __future__ import annotations

from allyouneed.interop.hf.config_table import ConfigTable, Conversion
from allyouneed.interop.hf.decoders import MODEL
from allyouneed.interop.hf.rope import rope_parameters, rotary
from allyouneed.interop.hf.transforms import chain, grouped_qkv, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

FIELDS = MODEL + """
dropout = hidden_dropout ?? 0.0
norm.eps = layer_norm_eps
embed.tied = tie_word_embeddings ?? false
decoder.wiring = use_parallel_residual ?? true |{true: {kind: parallel, norms: each}, false: pre-norm}
decoder.mixer.heads = num_attention_heads
decoder.mixer.bias = attention_bias ?? true |flag
decoder.mixer.positions = rope_parameters, rope_scaling, rope_theta, partial_rotary_factor, rotary_pct, rotary_emb_base,
    max_position_embeddings |rotary
decoder.channel.hidden = intermediate_size
decoder.channel.activation = hidden_act |activation
head.kind = architectures |decoder GPTNeoXForCausalLM
ignore classifier_dropout, max_position_embeddings
"""  # fmt: skip
ROTARY = Conversion(
    lambda config, line: rotary(
        config, fraction=config.get("rotary_pct", 0.25), base=config.get("rotary_emb_base", 10000)
    ),
    lambda ours, line: rope_parameters(ours, partial=True),
)
LINES = """
embed.tokens.weight = gpt_neox.embed_in.weight
head.weight = embed_out.weight
decoder.blocks.{n}.wiring.norms.0.* = gpt_neox.layers.{n}.input_layernorm.*
decoder.blocks.{n}.wiring.norms.1.* = gpt_neox.layers.{n}.post_attention_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = gpt_neox.layers.{n}.attention.query_key_value.* |apart
decoder.blocks.{n}.sublayers.mixer.out.* = gpt_neox.layers.{n}.attention.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = gpt_neox.layers.{n}.mlp.dense_h_to_4h.*
decoder.blocks.{n}.sublayers.channel.down.* = gpt_neox.layers.{n}.mlp.dense_4h_to_h.*
decoder.end.* = gpt_neox.final_layer_norm.*
"""


def normalize_names(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """The head has two names in use; files of a headless model omit the prefix."""
    prefix = "" if any(name.startswith("gpt_neox.") for name in weights) else "gpt_neox."
    return config, {
        "embed_out.weight" if name.endswith(("lm_head.weight", "embed_out.weight")) else prefix + name: tensor
        for name, tensor in weights.items()
    }


FAMILY = Family(
    "gpt_neox",
    ConfigTable(FIELDS, {"rotary": ROTARY}),
    LINES,
    ignore=["embed_out.weight", "*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"],
    transforms={"apart": grouped_qkv(lambda config: (config["num_attention_heads"], config["num_attention_heads"]))},
    prepare=chain(normalize_names, untie_head("embed_out.weight", "gpt_neox.embed_in.weight")),
    finish=remove_prefix("gpt_neox."),
)
