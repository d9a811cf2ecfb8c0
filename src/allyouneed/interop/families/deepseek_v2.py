"""DeepSeek-V2 (DeepSeek-AI 2024): latent attention, a few of many small experts and some that always work."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from allyouneed.interop.families import llama
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.rope import grown, rotary
from allyouneed.interop.table import Family, Theirs

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


def heads(tensor: Tensor, config: Theirs) -> Tensor:
    return tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])


def keys(tensor: Tensor, config: Theirs) -> Tensor:
    """Of each head's rows the first, which make its key; the others make its value."""
    return heads(tensor, config)[:, : config["qk_nope_head_dim"]].flatten(0, 1)


def values(tensor: Tensor, config: Theirs) -> Tensor:
    return heads(tensor, config)[:, config["qk_nope_head_dim"] :].flatten(0, 1)


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
BLOCK.mixer.k.weight = SELF.kv_b_proj.weight |keys
BLOCK.mixer.v.weight = SELF.kv_b_proj.weight |values
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
FAMILY = Family("deepseek_v2", tree, lines, llama.IGNORE, {"keys": keys, "values": values})
