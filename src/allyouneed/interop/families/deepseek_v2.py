"""DeepSeek-V2 (DeepSeek-AI 2024): multi-head latent attention, top-k of many small experts plus shared experts."""

from __future__ import annotations

import math
from typing import Any

import torch

from allyouneed.errors import UserError
from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary, yarn_scale
from allyouneed.interop.hf.transforms import chain
from allyouneed.interop.hf.weight_table import HfConfig, Weights

FIELDS = llama.MODEL + """
decoder.mixer: {kind: mla, pattern: causal}
decoder.mixer.heads = num_attention_heads, num_key_value_heads |heads
decoder.mixer.kv_rank = kv_lora_rank
decoder.mixer.query_rank = q_lora_rank ?? null
decoder.mixer.nope_width = qk_nope_head_dim
decoder.mixer.rope_width = qk_rope_head_dim
decoder.mixer.value_width = v_head_dim
decoder.mixer.bias = attention_bias ?? false |flag
decoder.mixer.dropout = attention_dropout ?? 0.0
decoder.mixer.positions = rope_parameters, rope_scaling, rope_theta, max_position_embeddings |positions
moe_layer_freq in [1]
scoring_func in [softmax]
norm_topk_prob in [false]
decoder[*].channel.kind = first_k_dense_replace ?? 0 |dense_layers
decoder.channel<glu>.hidden = intermediate_size
decoder.channel<glu>.activation = hidden_act |activation gelu_pytorch_tanh
decoder.channel<glu>.bias = mlp_bias ?? false
decoder.channel<moe>: {expert: {kind: glu, bias: false}}
decoder.channel<moe>.experts = n_routed_experts
decoder.channel<moe>.top = num_experts_per_tok
decoder.channel<moe>.expert.hidden = moe_intermediate_size
decoder.channel<moe>.expert.activation = hidden_act |activation gelu_pytorch_tanh
decoder.channel<moe>.shared = n_shared_experts, mlp_bias |shared
decoder.channel<moe>.balance = aux_loss_alpha ?? 0.001
decoder.channel<moe>.router.scale = routed_scaling_factor ?? 1.0
decoder.channel<moe>.router.groups = topk_method, n_group, topk_group |groups
ignore ep_size, head_dim, qk_head_dim, seq_aux
"""  # fmt: skip


def heads(config: ConfigReader, line: Line) -> int:
    count: int = config["num_attention_heads"]
    config.require("num_key_value_heads", count)
    return count


def positions(config: ConfigReader, line: Line) -> Tree:
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


def write_positions(ours: ModelTree, line: Line) -> Tree:
    found = rope_parameters(ours)
    if ours.get("decoder.mixer.positions.scaling.sharpen") != "scores":
        return found
    rope: Tree = dict(found["rope_parameters"])
    scale = (rope.pop("attention_factor") - 1) / (0.1 * math.log(rope["factor"]))
    return found | {"rope_parameters": rope | {"mscale": scale, "mscale_all_dim": scale}}


def read_kinds(config: ConfigReader, line: Line) -> list[str]:
    dense, layers = config[line.key], config["num_hidden_layers"]
    if not (type(dense) is int and type(layers) is int):
        raise UserError(f"{line.key} and num_hidden_layers: expected integers, not {dense!r} and {layers!r}")
    return ["glu" if number < dense else "moe" for number in range(layers)]


def write_dense(ours: ModelTree, line: Line) -> int:
    layers = ours.layers("decoder")
    return next((n for n, layer in enumerate(layers) if layer.get("channel.kind") == "moe"), len(layers))


def read_shared(config: ConfigReader, line: Line) -> Tree | None:
    """The shared experts are one wide one."""
    if not (count := config.get("n_shared_experts")):
        return None
    hidden = config["moe_intermediate_size"] * count
    activation, bias = config.activation("hidden_act"), config["mlp_bias"]
    return {"kind": "glu", "hidden": hidden, "activation": activation, "bias": bias}


def write_shared(ours: ModelTree, line: Line) -> Tree:
    hidden, bias = ours[f"{line.path}.hidden"], ours.get(f"{line.path}.bias")
    return {
        "n_shared_experts": hidden // ours["decoder.channel<moe>.expert.hidden"],
        "mlp_bias": bool(bias or ours.get("decoder.channel<glu>.bias")),
    }


def read_groups(config: ConfigReader, line: Line) -> Tree | None:
    groups = {"count": config.get("n_group"), "top": config.get("topk_group")}
    limited = config.require("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return groups if limited else None


def write_groups(ours: ModelTree, line: Line) -> Tree:
    groups = ours.get(line.path) or {}
    method = "group_limited_greedy" if groups else "greedy"
    return {"topk_method": method, "n_group": groups.get("count"), "topk_group": groups.get("top")}


CONVERSIONS = {
    "dense_layers": Conversion(read_kinds, write_dense),
    "groups": Conversion(read_groups, write_groups),
    "heads": Conversion(heads, lambda ours, line: dict.fromkeys(line.keys, ours[line.path])),
    "positions": Conversion(positions, write_positions),
    "shared": Conversion(read_shared, write_shared),
}
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


FAMILY = llama.family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    FIELDS,
    lines,
    CONVERSIONS,
    prepare=chain(llama.FAMILY.prepare, split_kv),
    finish=chain(merge_kv, llama.FAMILY.finish),
)
