"""GPT-Neo (Black et al. 2021): GPT-2 with unscaled scores and a local window in every other layer."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import ModelTree
from allyouneed.interop.hf.decoders import MODEL, decoder_family

PATTERNS = {"global": "causal", "local": "causal & window({})"}
FIELDS = MODEL + """
dropout = resid_dropout ?? 0.0
dropout -> embed_dropout
embed: {scale: none, positions: {kind: learned}}
embed.positions.length = max_position_embeddings
decoder.repeat = num_layers
decoder.mixer: {kind: attention, scores: dot, bias: {q: false, k: false, v: false}}
decoder.mixer.heads = num_heads
decoder[*].mixer.pattern = attention_types, attention_layers, window_size |patterns
decoder.channel.hidden = intermediate_size or 4 * hidden_size
decoder.channel.activation = activation_function |activation
head.kind = architectures |decoder GPTNeoForCausalLM
ignore embd_pdrop, n_ctx, reorder_and_upcast_attn, summary_*, classifier_dropout, embed_dropout
"""  # fmt: skip


def patterns(config: ConfigReader, line: Line) -> list[str]:
    types = config.get("attention_types") or [[["global", "local"], config["num_layers"] // 2]]
    kinds = config.get("attention_layers") or [kind for turn, times in types for _ in range(times) for kind in turn]
    window, unknown = config.get("window_size", 256), sorted(set(kinds) - set(PATTERNS))
    config.problems.extend(
        f"attention_types: {kind!r} is not supported (allowed: {', '.join(PATTERNS)})" for kind in unknown
    )
    if len(kinds) != config["num_layers"]:
        config.problems.append(f"attention_types: {len(kinds)} layers, but num_layers is {config['num_layers']}")
    return [PATTERNS.get(kind, "causal").format(window) for kind in kinds]


def attention_types(ours: ModelTree, line: Line) -> dict[str, Any]:
    plain = [layer.get("mixer.pattern") == "causal" for layer in ours.layers("decoder")]
    runs = [[["global" if kind else "local"], len(list(run))] for kind, run in groupby(plain)]
    return {"attention_types": runs, "window_size": ours.window() or 256}


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
TOKENS = "transformer.wte.weight"
IGNORED = ("*.attention.bias", "*.attention.masked_bias")
FAMILY = decoder_family(
    "gpt_neo", FIELDS, LINES, TOKENS, {"patterns": Conversion(patterns, attention_types)}, ignore=IGNORED
)
