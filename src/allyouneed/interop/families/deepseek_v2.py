"""DeepSeek-V2 (DeepSeek-AI 2024): multi-head latent attention, top-k of many small experts plus shared experts."""

from __future__ import annotations

import math
from typing import Any

import torch

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary, yarn_scale
from allyouneed.interop.hf.transforms import chain
from allyouneed.interop.hf.weight_table import Family, HfConfig, Weights

IGNORED_KEYS = ("ep_size", "head_dim", "max_position_embeddings", "qk_head_dim", "seq_aux")


def positions(config: ConfigReader) -> Tree:
    """With `mscale_all_dim`, YaRN scales the whole scores, not only the rotated part."""
    found = rotary(config, order="interleaved")
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scale_all = rope.get("mscale_all_dim")
    if found["scaling"]["kind"] != "yarn" or not scale_all:
        return found
    if rope.get("mscale") != scale_all or rope.get("attention_factor"):
        config.problems.append("mscale: only supported equal to mscale_all_dim, without attention_factor")
    factor = {"attention_factor": yarn_scale(rope["factor"], scale_all), "sharpen": "scores"}
    return found | {"scaling": found["scaling"] | factor}


def attention(config: ConfigReader) -> Tree:
    config.require("num_key_value_heads", config["num_attention_heads"])
    return {
        "kind": "mla",
        "heads": config["num_attention_heads"],
        "kv_rank": config["kv_lora_rank"],
        "query_rank": config.get("q_lora_rank"),
        "nope_width": config["qk_nope_head_dim"],
        "rope_width": config["qk_rope_head_dim"],
        "value_width": config["v_head_dim"],
        "pattern": "causal",
        "positions": positions(config),
        "bias": config.get("attention_bias", False),
        "dropout": config.get("attention_dropout", 0.0),
    }


def experts(config: ConfigReader) -> Tree:
    config.require("moe_layer_freq", 1)
    config.require("scoring_func", "softmax")
    config.require("norm_topk_prob", False)
    hidden, shared = config["moe_intermediate_size"], config.get("n_shared_experts")
    groups = {"count": config.get("n_group"), "top": config.get("topk_group")}
    limited = config.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return {
        "kind": "moe",
        "experts": config["n_routed_experts"],
        "top": config["num_experts_per_tok"],
        "expert": llama.swiglu(config, hidden, bias=False),
        "shared": llama.swiglu(config, hidden * shared) if shared else None,
        "balance": config.get("aux_loss_alpha", 0.001),
        "router": {"scale": config.get("routed_scaling_factor", 1.0), "groups": groups if limited else None},
    }


@strict_config(*IGNORED_KEYS)
def tree(config: ConfigReader) -> Tree:
    mixer, dense = attention(config), config.get("first_k_dense_replace", 0)
    sparse = config["num_hidden_layers"] - dense
    counted = [(dense, llama.swiglu(config)), (sparse, experts(config))]
    layers = [
        {"repeat": count, "wiring": "pre-norm", "mixer": mixer, "channel": channel}
        for count, channel in counted
        if count > 0
    ]
    return llama.decoder(config, layers)


FUSED, KEYS, VALUES = "self_attn.kv_b_proj.weight", "self_attn.keys.weight", "self_attn.values.weight"


def split_kv(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Split the fused key-value projection, whose rows are key then value per head, into two matrices."""
    found, heads = dict(weights), config["num_attention_heads"]
    for name in [name for name in weights if name.endswith(FUSED)]:
        tensor = found.pop(name)
        rows = tensor.reshape(heads, -1, tensor.shape[-1])  # (heads, key and value, rank)
        parts = rows[:, : config["qk_nope_head_dim"]], rows[:, config["qk_nope_head_dim"] :]
        found |= {name.replace(FUSED, end): part.flatten(0, 1) for end, part in zip((KEYS, VALUES), parts, strict=True)}
    return config, found


def merge_kv(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Inverse of `split_kv`."""
    found, heads = dict(weights), config["num_attention_heads"]
    for name in [name for name in weights if name.endswith(KEYS)]:
        parts = [found.pop(name.replace(KEYS, end)).unflatten(0, (heads, -1)) for end in (KEYS, VALUES)]
        found[name.replace(KEYS, FUSED)] = torch.cat(parts, 1).flatten(0, 1)
    return config, found


def lines(config: HfConfig) -> str:
    return LINES.replace("QUERY", "q_proj" if config.get("q_lora_rank") is None else "q_b_proj")


LINES = (
    llama.OUTSIDE
    + llama.NORMS
    + llama.CHANNEL
    + """
BLOCK.mixer.q_latent.* = SELF.q_a_proj.*
BLOCK.mixer.q_norm.weight = SELF.q_a_layernorm.weight
BLOCK.mixer.q.weight = SELF.QUERY.weight
BLOCK.mixer.latent.* = SELF.kv_a_proj_with_mqa.*
BLOCK.mixer.latent_norm.weight = SELF.kv_a_layernorm.weight
BLOCK.mixer.k.weight = SELF.keys.weight
BLOCK.mixer.v.weight = SELF.values.weight
BLOCK.mixer.out.* = SELF.o_proj.*
BLOCK.channel.router.linear.weight = MLP.gate.weight
BLOCK.channel.experts.{e}.gate_up.weight = MLP.experts.{e}.gate_proj.weight + MLP.experts.{e}.up_proj.weight
BLOCK.channel.experts.{e}.down.weight = MLP.experts.{e}.down_proj.weight
BLOCK.channel.shared.gate_up.* = MLP.shared_experts.gate_proj.* + MLP.shared_experts.up_proj.*
BLOCK.channel.shared.down.* = MLP.shared_experts.down_proj.*
""".replace("BLOCK", "decoder.blocks.{n}.sublayers")
    .replace("SELF", "model.layers.{n}.self_attn")
    .replace("MLP", "model.layers.{n}.mlp")
)


def mscale_fields(rope: Tree, ours: ModelTree) -> Tree:
    """Inverse of `positions`: `mscale` from the attention factor."""
    if ours.get("decoder.mixer.positions.scaling.sharpen") != "scores":
        return rope
    found = {key: value for key, value in rope.items() if key != "attention_factor"}
    scale = (rope["attention_factor"] - 1) / (0.1 * math.log(rope["factor"]))
    return found | {"mscale": scale, "mscale_all_dim": scale}


def hf_config(ours: ModelTree) -> HfConfig:
    """A model may have only dense or only sparse layers; the sizes of the missing kind have no effect."""
    layers = ours.layers("decoder")
    dense = next((n for n, layer in enumerate(layers) if layer.get("channel.kind") == "moe"), len(layers))
    plain, sparse = layers[0], layers[-1]
    activation = plain.activation("channel.activation") if dense else sparse.activation("channel.expert.activation")
    expert = sparse.get("channel.expert.hidden") or sparse["channel.hidden"]
    shared = sparse["channel.shared.hidden"] if dense < len(layers) else expert
    groups = sparse.get("channel.router.groups", {})
    rope = rope_parameters(ours)
    return {
        "architectures": ours.architectures("DeepseekV2ForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": len(layers),
        "num_attention_heads": ours["decoder.mixer.heads"],
        "num_key_value_heads": ours["decoder.mixer.heads"],
        "kv_lora_rank": ours["decoder.mixer.kv_rank"],
        "q_lora_rank": ours.get("decoder.mixer.query_rank"),
        "qk_nope_head_dim": ours["decoder.mixer.nope_width"],
        "qk_rope_head_dim": ours["decoder.mixer.rope_width"],
        "v_head_dim": ours["decoder.mixer.value_width"],
        "attention_bias": ours.flag("decoder.mixer.bias"),
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "hidden_act": activation,
        "intermediate_size": plain.get("channel.hidden") or expert,
        "mlp_bias": bool(plain.get("channel.bias") or sparse.get("channel.shared.bias")),
        "first_k_dense_replace": dense,
        "moe_intermediate_size": expert,
        "n_routed_experts": sparse.get("channel.experts", 1),
        "num_experts_per_tok": sparse.get("channel.top", 1),
        "n_shared_experts": shared // expert,
        "routed_scaling_factor": sparse.get("channel.router.scale", 1.0),
        "topk_method": "group_limited_greedy" if groups else "greedy",
        "n_group": groups.get("count"),
        "topk_group": groups.get("top"),
        "aux_loss_alpha": sparse.get("channel.balance", 0.0),
        "rms_norm_eps": ours["norm.eps"],
        "tie_word_embeddings": ours["embed.tied"],
        **rope,
        "rope_parameters": mscale_fields(rope["rope_parameters"], ours),
    }


FAMILY = Family(
    "deepseek_v2",
    tree,
    lines,
    llama.IGNORED_WEIGHTS,
    prepare=chain(llama.PREPARE, split_kv),
    hf_config=hf_config,
    finish=chain(merge_kv, llama.FINISH),
)
