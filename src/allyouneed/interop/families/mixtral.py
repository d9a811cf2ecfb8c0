"""Mixtral of Experts (Jiang et al. 2024): Mistral with a top-2 mixture of experts."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config("max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    config.require("router_jitter_noise", 0.0)  # theirs also perturbs the input of the experts
    channel = {
        "kind": "moe",
        "experts": config["num_local_experts"],
        "top": config["num_experts_per_tok"],
        "expert": llama.swiglu(config, bias=False),
        "router": {"normalise": True},
        "balance": config.get("router_aux_loss_coef", 0.001),
    }
    return llama.decoder(
        config, llama.layers(config, llama.attention(config, pattern=llama.window_pattern(config), bias=False), channel)
    )


EXPERTS = """
decoder.blocks.{n}.sublayers.channel.router.linear.weight = MOE.gate.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.gate_up.weight = MOE.experts.{e}.w1.weight + MOE.experts.{e}.w3.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.weight = MOE.experts.{e}.w2.weight
""".replace("MOE", "model.layers.{n}.block_sparse_moe")


def hf_config(ours: ModelTree) -> HfConfig:
    return {
        "architectures": ours.architectures("MixtralForCausalLM"),
        **llama.shared_fields(ours),
        **llama.mlp_fields(ours, "decoder.channel.expert"),
        "sliding_window": llama.sliding_window(ours),
        "num_local_experts": ours["decoder.channel.experts"],
        "num_experts_per_tok": ours["decoder.channel.top"],
        "router_aux_loss_coef": ours["decoder.channel.balance"],
    }


LINES = llama.OUTSIDE + llama.NORMS + llama.ATTENTION + EXPERTS
FAMILY = Family(
    "mixtral", tree, LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
