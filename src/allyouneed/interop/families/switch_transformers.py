"""Switch Transformer (Fedus et al. 2022): T5 with a top-1 mixture of experts in some layers."""

from __future__ import annotations

from collections.abc import Iterator

from allyouneed.interop.families.t5 import (
    DEFAULTS,
    IGNORED_KEYS,
    IGNORED_WEIGHTS,
    LINES,
    PRESERVED_WEIGHTS,
    build_tree,
    config_fields,
    depths,
    finish,
    prepare,
)
from allyouneed.interop.hf.config_reader import ACTIVATIONS, ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {
    "d_model": 768,
    "num_layers": 12,
    "num_sparse_encoder_layers": 3,
    "num_sparse_decoder_layers": 3,
    "num_heads": 12,
    "num_experts": 8,
    "expert_capacity": 64,
    "router_bias": False,
    "router_jitter_noise": 0.01,
    "router_z_loss_coef": 0.001,
    "router_aux_loss_coef": 0.001,
    "dense_act_fn": "relu",
}


def layers(config: ConfigReader, count: int, sparse: int) -> list[Tree]:
    """Every n-th layer has experts, counted as in their code (which puts them in the second layer where none is
    wanted)."""
    dense = {
        "kind": "ffn",
        "hidden": config["d_ff"],
        "activation": config.activation("dense_act_fn"),
        "bias": False,
        "dropout": config["dropout_rate"],
    }
    experts = {
        "kind": "moe",
        "experts": config["num_experts"],
        "top": 1,
        "expert": dense,
        "row_capacity": config["expert_capacity"],
        "balance": config["router_aux_loss_coef"],
        "router": {
            "bias": config["router_bias"],
            "jitter": config["router_jitter_noise"],
            "z_loss": config["router_z_loss_coef"],
        },
    }
    return [{"channel": experts if has else dense} for has in with_experts(count, sparse)]


def with_experts(count: int, sparse: int) -> Iterator[bool]:
    """For each layer, whether it is one of the `sparse` ones."""
    step = count // sparse if sparse else count
    return (step == 1 or n % step == 1 for n in range(count))


# padding never takes expert capacity in ours
@strict_config(*IGNORED_KEYS, "encoder_sparse_step", "decoder_sparse_step", "router_ignore_padding_tokens")
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS | OWN_DEFAULTS)
    config.require("router_dtype", "float32")
    config.require("router_type", "tokens_masked")
    config.require("num_selected_experts", 1)
    config.require("feed_forward_proj", "relu")
    encoder, decoder = depths(config)
    return build_tree(
        config,
        layers(config, encoder, config["num_sparse_encoder_layers"]),
        layers(config, decoder, config["num_sparse_decoder_layers"]),
        config.get("scale_decoder_outputs", config["tie_word_embeddings"]),
    )


def hf_config(ours: ModelTree) -> Tree:
    found = config_fields(ours, "SwitchTransformersForConditionalGeneration")
    for side in ("encoder", "decoder"):
        layers = ours.layers(side)
        which = [layer["channel.kind"] == "moe" for layer in layers]
        counts = [n for n in range(len(which) + 1) if list(with_experts(len(which), n)) == which]
        if not counts:
            ours.problems.append(
                f"{side}: experts in layers {[n for n, has in enumerate(which) if has]} cannot be ours"
            )
        experts = next((layer for layer, has in zip(layers, which, strict=True) if has), None)
        if experts is None or not counts:
            continue
        found |= {
            f"num_sparse_{side}_layers": max(counts),
            "d_ff": experts["channel.expert.hidden"],
            "num_experts": experts["channel.experts"],
            "expert_capacity": experts["channel.row_capacity"],
            "router_bias": experts.get("channel.router.bias", False),
            "router_jitter_noise": experts.get("channel.router.jitter", 0.0),
            "router_z_loss_coef": experts.get("channel.router.z_loss", 0.0),
            "router_aux_loss_coef": experts.get("channel.balance", 0.0),
            "dense_act_fn": experts.hf_name("channel.expert.activation", ACTIVATIONS),
        }
    return found


EXPERTS = """
encoder.blocks.{n}.sublayers.channel.router.linear.* = encoder.block.{n}.layer.1.mlp.router.classifier.*
encoder.blocks.{n}.sublayers.channel.experts.{e}.up.* = encoder.block.{n}.layer.1.mlp.experts.expert_{e}.wi.*
encoder.blocks.{n}.sublayers.channel.experts.{e}.down.* = encoder.block.{n}.layer.1.mlp.experts.expert_{e}.wo.*
decoder.blocks.{n}.sublayers.channel.router.linear.* = decoder.block.{n}.layer.2.mlp.router.classifier.*
decoder.blocks.{n}.sublayers.channel.experts.{e}.up.* = decoder.block.{n}.layer.2.mlp.experts.expert_{e}.wi.*
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.* = decoder.block.{n}.layer.2.mlp.experts.expert_{e}.wo.*
"""
FAMILY = Family(
    "switch_transformers",
    tree,
    LINES.replace("FFN", "mlp") + EXPERTS,
    IGNORED_WEIGHTS,
    prepare=prepare,
    preserve=PRESERVED_WEIGHTS,
    hf_config=hf_config,
    finish=finish,
)
