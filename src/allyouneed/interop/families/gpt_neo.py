"""GPT-Neo (Black et al. 2021): GPT-2 with unscaled scores and a local window in every other layer."""

from __future__ import annotations

from itertools import groupby

from allyouneed.interop.families import gpt2, llama
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.transforms import match_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

PATTERNS = {"global": "causal", "local": "causal & window({})"}


def layer_patterns(config: ConfigReader) -> list[tuple[str, int]]:
    """(pattern, number of consecutive layers)."""
    types = config.get("attention_types") or [[["global", "local"], config["num_layers"] // 2]]
    kinds = config.get("attention_layers") or [kind for turn, times in types for _ in range(times) for kind in turn]
    window, unknown = config.get("window_size", 256), sorted(set(kinds) - set(PATTERNS))
    config.problems.extend(
        f"attention_types: {kind!r} is not supported (allowed: {', '.join(PATTERNS)})" for kind in unknown
    )
    if len(kinds) != config["num_layers"]:
        config.problems.append(f"attention_types: {len(kinds)} layers, but num_layers is {config['num_layers']}")
    texts = [PATTERNS.get(kind, "causal").format(window) for kind in kinds]
    return [(text, len(list(run))) for text, run in groupby(texts)]


@strict_config(*gpt2.IGNORED_KEYS, "classifier_dropout", "embed_dropout")
def tree(config: ConfigReader) -> Tree:
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
            for pattern, count in layer_patterns(config)
        ],
    }
    return match_head(config, found)


def hf_config(ours: ModelTree) -> HfConfig:
    plain = [layer.get("mixer.pattern") == "causal" for layer in ours.layers("decoder")]
    runs = [("global" if kind else "local", len(list(run))) for kind, run in groupby(plain)]
    return {
        "architectures": ours.architectures("GPTNeoForCausalLM"),
        "vocab_size": ours["vocab"],
        "hidden_size": ours["width"],
        "num_layers": len(plain),
        "attention_types": [[[kind], count] for kind, count in runs],
        "window_size": llama.sliding_window(ours) or 256,
        "num_heads": ours["decoder.mixer.heads"],
        "intermediate_size": ours["decoder.channel.hidden"],
        "activation_function": ours.activation("decoder.channel.activation"),
        "max_position_embeddings": ours["embed.positions.length"],
        "layer_norm_epsilon": ours["norm.eps"],
        "resid_dropout": ours["dropout"],
        "embed_dropout": ours["dropout"],
        "attention_dropout": ours.get("decoder.mixer.dropout", 0.0),
        "tie_word_embeddings": ours["embed.tied"],
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
IGNORED_WEIGHTS = ["lm_head.weight", "*.attention.bias", "*.attention.masked_bias"]
FAMILY = Family(
    "gpt_neo",
    tree,
    LINES,
    IGNORED_WEIGHTS,
    prepare=gpt2.PREPARE,
    hf_config=hf_config,
    finish=gpt2.FINISH,
)
