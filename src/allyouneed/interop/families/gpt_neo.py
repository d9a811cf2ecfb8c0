"""GPT-Neo (Black et al. 2021): GPT-2 whose scores are not divided by anything, every other layer seeing a window."""

from __future__ import annotations

from itertools import groupby

from allyouneed.interop.families import gpt2, llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained, headed, own_head, prefixed, unprefixed
from allyouneed.interop.hf.weight_table import Family, Theirs

KINDS = {"global": "causal", "local": "causal & window({})"}


def patterns(config: Reader) -> list[tuple[str, int]]:
    """Which pattern so many layers in a row have."""
    said = config.get("attention_types") or [[["global", "local"], config["num_layers"] // 2]]
    kinds = config.get("attention_layers") or [kind for turn, times in said for _ in range(times) for kind in turn]
    window, unknown = config.get("window_size", 256), sorted(set(kinds) - set(KINDS))
    config.problems.extend(f"attention_types: {kind!r} is not known here ({', '.join(KINDS)} are)" for kind in unknown)
    if len(kinds) != config["num_layers"]:
        config.problems.append(f"attention_types: {len(kinds)} layers where num_layers is {config['num_layers']}")
    words = [KINDS.get(kind, "causal").format(window) for kind in kinds]
    return [(word, len(list(run))) for word, run in groupby(words)]


@reading(*gpt2.HARMLESS, "classifier_dropout", "embed_dropout")
def tree(config: Reader) -> Tree:
    width = config["hidden_size"]
    mixer = {
        "kind": "attention",
        "heads": config["num_heads"],
        "scores": "dot",
        "bias": {"q": False, "k": False, "v": False},
        "dropout": config.get("attention_dropout", 0.0),
    }
    channel = {
        "kind": "ffn",
        "hidden": config.get("intermediate_size") or 4 * width,
        "activation": config.activation("activation_function"),
    }
    found = {
        "kind": "decoder",
        "vocab": config["vocab_size"],
        "width": width,
        "dropout": config.get("resid_dropout", 0.0),
        "norm": {"kind": "layer", "eps": config.get("layer_norm_epsilon", 1e-5)},
        "init": {"kind": "normal", "std": config.get("initializer_range", 0.02)},
        "embed": {
            "positions": {"kind": "learned", "length": config["max_position_embeddings"]},
            "scale": "none",
            "tied": config.get("tie_word_embeddings", True),
        },
        "decoder": [
            {"repeat": count, "wiring": "pre-norm", "mixer": mixer | {"pattern": pattern}, "channel": channel}
            for pattern, count in patterns(config)
        ],
    }
    return headed(config, found)


def back(said: Said) -> Theirs:
    plain = [layer.get("mixer.pattern") == "causal" for layer in said.layers("decoder")]
    runs = [("global" if kind else "local", len(list(run))) for kind, run in groupby(plain)]
    return {
        "architectures": said.writer("GPTNeoForCausalLM"),
        "vocab_size": said["vocab"],
        "hidden_size": said["width"],
        "num_layers": len(plain),
        "attention_types": [[[kind], count] for kind, count in runs],
        "window_size": llama.window(said) or 256,
        "num_heads": said["decoder.mixer.heads"],
        "intermediate_size": said["decoder.channel.hidden"],
        "activation_function": said.activation("decoder.channel.activation"),
        "max_position_embeddings": said["embed.positions.length"],
        "layer_norm_epsilon": said["norm.eps"],
        "resid_dropout": said["dropout"],
        "embed_dropout": said["dropout"],
        "attention_dropout": said.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": said["embed.tied"],
    }


LINES = """
embed.tokens.weight = transformer.wte.weight
embed.positions.weight = transformer.wpe.weight
head.weight = lm_head.weight
decoder.blocks.{n}.wiring.norms.0.* = LAYER.ln_1.*
decoder.blocks.{n}.wiring.norms.1.* = LAYER.ln_2.*
decoder.blocks.{n}.sublayers.mixer.qkv.weight = SELF.q_proj.weight + SELF.k_proj.weight + SELF.v_proj.weight
decoder.blocks.{n}.sublayers.mixer.out.* = SELF.out_proj.*
decoder.blocks.{n}.sublayers.channel.up.* = LAYER.mlp.c_fc.*
decoder.blocks.{n}.sublayers.channel.down.* = LAYER.mlp.c_proj.*
decoder.end.* = transformer.ln_f.*
""".replace("SELF", "LAYER.attn.attention").replace("LAYER", "transformer.h.{n}")
IGNORE = ["lm_head.weight", "*.attention.bias", "*.attention.masked_bias"]
FAMILY = Family(
    "gpt_neo",
    tree,
    LINES,
    IGNORE,
    before=chained(prefixed("transformer."), own_head("lm_head.weight", "transformer.wte.weight")),
    back=back,
    after=unprefixed("transformer."),
)
