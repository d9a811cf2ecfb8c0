"""Phi (Li et al. 2023): parallel sub-layers after one norm, half of each head rotated, a bias in the head."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.rope import rope_parameters, rotary
from allyouneed.interop.hf.transforms import match_head
from allyouneed.interop.hf.weight_table import Family, HfConfig


@strict_config("embd_pdrop", "max_position_embeddings")
def tree(config: ConfigReader) -> Tree:
    norm = {"kind": "layer", "eps": config["layer_norm_eps"]}
    mixer = llama.attention(
        config,
        positions=rotary(config, fraction=0.5),
        bias=True,
        qk_norm=norm if config.get("qk_layernorm") else None,
    )
    channel = {"kind": "ffn", "hidden": config["intermediate_size"], "activation": config.activation("hidden_act")}
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": config["hidden_size"],
        "dropout": config.get("resid_pdrop", 0.0),
        "norm": norm,
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": [
            {
                "repeat": config["num_hidden_layers"],
                "wiring": {"kind": "parallel", "norms": "one"},
                "mixer": mixer,
                "channel": channel,
            }
        ],
        "head": {"bias": True},
    }
    return match_head(config, found)


LINES = """
embed.tokens.weight = model.embed_tokens.weight
head.* = lm_head.*
decoder.blocks.{n}.wiring.norms.0.* = model.layers.{n}.input_layernorm.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = SELF.q_proj.* + SELF.k_proj.* + SELF.v_proj.*
decoder.blocks.{n}.sublayers.mixer.q_norm.* = SELF.q_layernorm.*
decoder.blocks.{n}.sublayers.mixer.k_norm.* = SELF.k_layernorm.*
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.dense.*
decoder.blocks.{n}.sublayers.channel.up.* = model.layers.{n}.mlp.fc1.*
decoder.blocks.{n}.sublayers.channel.down.* = model.layers.{n}.mlp.fc2.*
decoder.end.* = model.final_layernorm.*
""".replace("SELF", "model.layers.{n}.self_attn")


def hf_config(ours: ModelTree) -> HfConfig:
    width = ours.get("decoder.mixer.head_width")
    return {
        **({"head_dim": width} if width and width * ours["decoder.mixer.heads"] != ours["width"] else {}),
        "architectures": ours.architectures("PhiForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_hidden_layers": ours.depth("decoder"),
        "num_attention_heads": ours["decoder.mixer.heads"],
        "num_key_value_heads": ours.get("decoder.mixer.kv_heads") or ours["decoder.mixer.heads"],
        "intermediate_size": ours["decoder.channel.hidden"],
        "hidden_act": ours.activation("decoder.channel.activation"),
        "layer_norm_eps": ours["norm.eps"],
        "qk_layernorm": ours.get("decoder.mixer.qk_norm") is not None,
        "resid_pdrop": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
        **rope_parameters(ours, partial=True),
    }


FAMILY = Family(
    "phi", tree, LINES, llama.IGNORED_WEIGHTS, prepare=llama.PREPARE, hf_config=hf_config, finish=llama.FINISH
)
