"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, a few of many small experts and some that always work."""

from __future__ import annotations

import math
from typing import Any

import torch

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import grown, rotary, turned
from allyouneed.interop.hf.transforms import chained
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights

HARMLESS = ("ep_size", "head_dim", "max_position_embeddings", "qk_head_dim", "seq_aux")


def positions(config: Reader) -> Tree:
    """Their YaRN sharpens whole scores, not what is turned."""
    found = rotary(config, order="interleaved")
    said: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    everywhere = said.get("mscale_all_dim")
    if found["scaling"]["kind"] != "yarn" or not everywhere:
        return found
    if said.get("mscale") != everywhere or said.get("attention_factor"):
        config.problems.append("mscale: only the same as mscale_all_dim is known here, without attention_factor")
    sharpened = {"attention_factor": grown(said["factor"], everywhere), "sharpen": "scores"}
    return found | {"scaling": found["scaling"] | sharpened}


def attention(config: Reader) -> Tree:
    config.only("num_key_value_heads", config["num_attention_heads"])
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


def experts(config: Reader) -> Tree:
    config.only("moe_layer_freq", 1)
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    hidden, shared = config["moe_intermediate_size"], config.get("n_shared_experts")
    groups = {"count": config.get("n_group"), "top": config.get("topk_group")}
    limited = config.only("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    return {
        "kind": "moe",
        "experts": config["n_routed_experts"],
        "top": config["num_experts_per_tok"],
        "expert": llama.swiglu(config, hidden, bias=False),
        "shared": llama.swiglu(config, hidden * shared) if shared else None,
        "balance": config.get("aux_loss_alpha", 0.001),
        "router": {"scale": config.get("routed_scaling_factor", 1.0), "groups": groups if limited else None},
    }


@reading(*HARMLESS)
def tree(config: Reader) -> Tree:
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


def apart(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Of each head's rows the first make its key and the others its value; ours are two matrices."""
    found, heads = dict(weights), config["num_attention_heads"]
    for name in [name for name in weights if name.endswith(FUSED)]:
        tensor = found.pop(name)
        rows = tensor.reshape(heads, -1, tensor.shape[-1])  # (heads, key and value, rank)
        parts = rows[:, : config["qk_nope_head_dim"]], rows[:, config["qk_nope_head_dim"] :]
        found |= {name.replace(FUSED, end): part.flatten(0, 1) for end, part in zip((KEYS, VALUES), parts, strict=True)}
    return config, found


def together(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """The way back of `apart`."""
    found, heads = dict(weights), config["num_attention_heads"]
    for name in [name for name in weights if name.endswith(KEYS)]:
        parts = [found.pop(name.replace(KEYS, end)).unflatten(0, (heads, -1)) for end in (KEYS, VALUES)]
        found[name.replace(KEYS, FUSED)] = torch.cat(parts, 1).flatten(0, 1)
    return config, found


def lines(config: Theirs) -> str:
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


def sharpened(rope: Tree, said: Said) -> Tree:
    """The way back of `positions`: a scale that YaRN sharpens by."""
    if said.get("decoder.mixer.positions.scaling.sharpen") != "scores":
        return rope
    found = {key: value for key, value in rope.items() if key != "attention_factor"}
    scale = (rope["attention_factor"] - 1) / (0.1 * math.log(rope["factor"]))
    return found | {"mscale": scale, "mscale_all_dim": scale}


def back(said: Said) -> Theirs:
    """Of the two kinds of layers one may be missing; then its sizes are not used."""
    layers = said.layers("decoder")
    dense = next((n for n, layer in enumerate(layers) if layer.get("channel.kind") == "moe"), len(layers))
    plain, sparse = layers[0], layers[-1]
    activation = plain.activation("channel.activation") if dense else sparse.activation("channel.expert.activation")
    expert = sparse.get("channel.expert.hidden") or sparse["channel.hidden"]
    shared = sparse["channel.shared.hidden"] if dense < len(layers) else expert
    groups = sparse.get("channel.router.groups", {})
    rope = turned(said)
    return {
        "architectures": said.writer("DeepseekV2ForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": len(layers),
        "num_attention_heads": said["decoder.mixer.heads"],
        "num_key_value_heads": said["decoder.mixer.heads"],
        "kv_lora_rank": said["decoder.mixer.kv_rank"],
        "q_lora_rank": said.get("decoder.mixer.query_rank"),
        "qk_nope_head_dim": said["decoder.mixer.nope_width"],
        "qk_rope_head_dim": said["decoder.mixer.rope_width"],
        "v_head_dim": said["decoder.mixer.value_width"],
        "attention_bias": said.flag("decoder.mixer.bias"),
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
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
        "rms_norm_eps": said["norm.eps"],
        "tie_word_embeddings": said["embed.tied"],
        **rope,
        "rope_parameters": sharpened(rope["rope_parameters"], said),
    }


FAMILY = Family(
    "deepseek_v2",
    tree,
    lines,
    llama.IGNORE,
    before=chained(llama.BEFORE, apart),
    back=back,
    after=chained(together, llama.AFTER),
)
