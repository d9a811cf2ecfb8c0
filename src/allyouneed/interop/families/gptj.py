"""GPT-J (Wang, Komatsuzaki 2021): both sub-layers at once behind one norm, neighbouring features turned."""

from __future__ import annotations

from allyouneed.interop.families import gpt2
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.rope import USUAL
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading(*gpt2.HARMLESS, "n_positions", "rotary", "scale_attn_weights")
def tree(config: Reader) -> Tree:
    width, heads = config["n_embd"], config["n_head"]
    turned = config.get("rotary_dim") or width // heads
    positions = {"kind": "rotary", "order": "interleaved", "fraction": turned / (width // heads)}
    drop = config.get("attn_pdrop", 0.0)
    mixer = {"kind": "attention", "heads": heads, "pattern": "causal", "bias": False, "dropout": drop}
    hidden, activation = config.get("n_inner") or 4 * width, config.activation("activation_function")
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("resid_pdrop", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {"scale": "none", "tied": config.get("tie_word_embeddings", False)},
        "decoder": [
            {
                "repeat": config["n_layer"],
                "wiring": {"kind": "parallel", "norms": "one"},
                "mixer": mixer | {"positions": positions},
                "channel": {"kind": "ffn", "hidden": hidden, "activation": activation},
            }
        ],
        "head": {"bias": True},
    }
    return headed(config, found)


LINES = """
embed.tokens.weight = transformer.wte.weight
head.* = lm_head.*
decoder.blocks.{n}.wiring.norms.0.* = LAYER.ln_1.*
decoder.blocks.{n}.sublayers.mixer.qkv.* = LAYER.attn.q_proj.* + LAYER.attn.k_proj.* + LAYER.attn.v_proj.*
decoder.blocks.{n}.sublayers.mixer.out.* = LAYER.attn.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.mlp.fc_in.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.mlp.fc_out.*
decoder.end.* = transformer.ln_f.*
""".replace("LAYER", "transformer.h.{n}")


def back(said: Said) -> Theirs:
    turned = said["decoder.mixer.positions.fraction"] * (said["width"] // said["decoder.mixer.heads"])
    names = {"architectures": said.writer("GPTJForCausalLM"), "n_positions": USUAL, "rotary_dim": round(turned)}
    return {**names, **gpt2.sizes(said)}


FAMILY = Family(
    "gptj",
    tree,
    LINES,
    gpt2.IGNORE,
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.wte.weight")),
    back=back,
    after=unprefixed("transformer."),
)
