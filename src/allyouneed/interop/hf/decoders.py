"""What the families of decoders share: the first lines of their tables, and the names in files without a head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from allyouneed.interop.hf.config_table import ConfigTable, Conversion
from allyouneed.interop.hf.transforms import add_prefix, chain, remove_prefix, untie_head
from allyouneed.interop.hf.weight_table import Family, HfConfig

MODEL = """
kind: decoder
vocab = vocab_size
width = hidden_size
norm: {kind: layer}
norm.eps = layer_norm_epsilon ?? 1.0e-5
init: {kind: normal}
init.std <- initializer_range ?? 0.02
embed: {scale: none}
embed.tied = tie_word_embeddings ?? true
decoder.repeat = num_hidden_layers
decoder.wiring: pre-norm
decoder.mixer: {kind: attention, pattern: causal}
decoder.mixer.dropout = attention_dropout ?? 0.0
decoder.channel: {kind: ffn}
"""


def decoder_family(
    name: str,
    fields: str,
    lines: str | Callable[[HfConfig], str],
    tokens: str,
    conversions: Mapping[str, Conversion] | None = None,
    head: str = "lm_head.weight",
    ignore: tuple[str, ...] = (),
    **other: Any,
) -> Family:
    """`tokens` and `head`: their names of both matrices. Files without the head omit the first part of the names."""
    prefix = tokens.partition(".")[0] + "."
    steps = {
        "prepare": chain(add_prefix(prefix, head.removesuffix("weight")), untie_head(head, tokens)),
        "finish": remove_prefix(prefix),
    }
    return Family(name, ConfigTable(fields, conversions or {}), lines, (head, *ignore), **(steps | other))
