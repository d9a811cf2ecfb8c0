"""Switch Transformer (Fedus et al. 2022): T5 in which some channels are a mixture of experts, each token using one."""

from __future__ import annotations

from collections.abc import Iterator

from allyouneed.interop.families.t5 import (
    DEFAULTS,
    HARMLESS,
    IGNORE,
    LINES,
    SPARE,
    completed,
    depths,
    tree_with,
    undone,
    words,
)
from allyouneed.interop.hf.config_reader import ACTIVATIONS, Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family

OTHERS = {
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


def layers(config: Reader, count: int, sparse: int) -> list[Tree]:
    """Every so-manyth layer has experts, as their code counts it (which takes the second one where none is wanted)."""
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
    """Of each layer, whether it is one of so many `sparse` ones."""
    step = count // sparse if sparse else count
    return (step == 1 or n % step == 1 for n in range(count))


# padding never takes an expert's place here
@reading(*HARMLESS, "encoder_sparse_step", "decoder_sparse_step", "router_ignore_padding_tokens")
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    config.only("router_dtype", "float32")
    config.only("router_type", "tokens_masked")
    config.only("num_selected_experts", 1)
    config.only("feed_forward_proj", "relu")
    encoder, decoder = depths(config)
    return tree_with(
        config,
        layers(config, encoder, config["num_sparse_encoder_layers"]),
        layers(config, decoder, config["num_sparse_decoder_layers"]),
        config.get("scale_decoder_outputs", config["tie_word_embeddings"]),
    )


def back(said: Said) -> Tree:
    found = words(said, "SwitchTransformersForConditionalGeneration")
    for side in ("encoder", "decoder"):
        layers = said.layers(side)
        which = [layer["channel.kind"] == "moe" for layer in layers]
        counts = [n for n in range(len(which) + 1) if list(with_experts(len(which), n)) == which]
        if not counts:
            said.problems.append(
                f"{side}: experts in layers {[n for n, has in enumerate(which) if has]} cannot be said"
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
            "dense_act_fn": experts.word("channel.expert.activation", ACTIVATIONS),
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
    IGNORE,
    before=completed,
    spare=SPARE,
    back=back,
    after=undone,
)
