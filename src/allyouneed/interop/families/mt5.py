"""mT5 (Xue et al. 2021): T5 1.1 for many languages; the input of its head is never scaled."""

from __future__ import annotations

from functools import partial

from allyouneed.interop.families.t5 import (
    DEFAULTS,
    IGNORED_KEYS,
    IGNORED_WEIGHTS,
    LINES,
    PRESERVED_WEIGHTS,
    build_tree,
    channel,
    depths,
    finish,
    hf_config,
    is_encoder_only,
    prepare,
    without_decoder,
)
from allyouneed.interop.hf.config_reader import ConfigReader, Tree, strict_config
from allyouneed.interop.hf.weight_table import Family

OWN_DEFAULTS = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}


@strict_config(*IGNORED_KEYS, "scale_decoder_outputs")
def tree(config: ConfigReader) -> Tree:
    config.set_defaults(DEFAULTS | OWN_DEFAULTS)
    encoder, decoder = ([{"repeat": count, "channel": channel(config)}] for count in depths(config))
    found = build_tree(config, encoder, decoder, scaled=False)
    return without_decoder(found) if is_encoder_only(config) else found


FAMILY = Family(
    "mt5",
    tree,
    LINES.replace("FFN", "DenseReluDense"),
    IGNORED_WEIGHTS,
    prepare=prepare,
    preserve=PRESERVED_WEIGHTS,
    hf_config=partial(hf_config, name="MT5"),
    finish=finish,
)
