"""Phi (Li et al. 2023): both sub-layers at once behind one norm, half of each head turned, a bias on the output."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import rotary, turned
from allyouneed.interop.hf.transforms import headed
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading("embd_pdrop", "max_position_embeddings")
def tree(config: Reader) -> Tree:
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
    return headed(config, found)


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


def back(said: Said) -> Theirs:
    width = said.get("decoder.mixer.head_width")
    return {
        **({"head_dim": width} if width and width * said["decoder.mixer.heads"] != said["width"] else {}),
        "architectures": said.writer("PhiForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_hidden_layers": said.depth("decoder"),
        "num_attention_heads": said["decoder.mixer.heads"],
        "num_key_value_heads": said.get("decoder.mixer.kv_heads") or said["decoder.mixer.heads"],
        "intermediate_size": said["decoder.channel.hidden"],
        "hidden_act": said.activation("decoder.channel.activation"),
        "layer_norm_eps": said["norm.eps"],
        "qk_layernorm": said.get("decoder.mixer.qk_norm") is not None,
        "resid_pdrop": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
        **turned(said, partly=True),
    }


FAMILY = Family("phi", tree, LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
