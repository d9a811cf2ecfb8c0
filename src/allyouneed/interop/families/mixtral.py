"""Mixtral of Experts (Jiang et al. 2024): Mistral whose channel mixer is two of several experts."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    config.only("router_jitter_noise", 0.0)  # theirs shakes what the experts see too
    channel = {
        "kind": "moe",
        "experts": config["num_local_experts"],
        "top": config["num_experts_per_tok"],
        "expert": llama.swiglu(config, bias=False),
        "router": {"normalise": True},
        "balance": config.get("router_aux_loss_coef", 0.001),
    }
    return llama.decoder(
        config, llama.layers(config, llama.attention(config, pattern=llama.windowed(config), bias=False), channel)
    )


EXPERTS = """
decoder.blocks.{n}.sublayers.channel.router.linear.weight = MOE.gate.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.gate_up.weight = MOE.experts.{e}.w1.weight + MOE.experts.{e}.w3.weight
decoder.blocks.{n}.sublayers.channel.experts.{e}.down.weight = MOE.experts.{e}.w2.weight
""".replace("MOE", "model.layers.{n}.block_sparse_moe")


def back(said: Said) -> Theirs:
    return {
        "architectures": said.writer("MixtralForCausalLM"),
        **llama.sizes(said),
        **llama.gated(said, "decoder.channel.expert"),
        "sliding_window": llama.window(said),
        "num_local_experts": said["decoder.channel.experts"],
        "num_experts_per_tok": said["decoder.channel.top"],
        "router_aux_loss_coef": said["decoder.channel.balance"],
    }


LINES = llama.OUTSIDE + llama.NORMS + llama.ATTENTION + EXPERTS
FAMILY = Family("mixtral", tree, LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
