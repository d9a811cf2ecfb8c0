"""mT5 (Xue et al. 2021): T5 1.1 for many languages; what goes into its head is never scaled."""

from __future__ import annotations

from functools import partial

from allyouneed.interop.families.t5 import (
    DEFAULTS,
    HARMLESS,
    IGNORE,
    LINES,
    SPARE,
    back,
    channel,
    completed,
    depths,
    reads_only,
    tree_with,
    undone,
    without_decoder,
)
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.weight_table import Family

OTHERS = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"}


@reading(*HARMLESS, "scale_decoder_outputs")
def tree(config: Reader) -> Tree:
    config.suppose(DEFAULTS | OTHERS)
    encoder, decoder = ([{"repeat": count, "channel": channel(config)}] for count in depths(config))
    found = tree_with(config, encoder, decoder, scaled=False)
    return without_decoder(found) if reads_only(config) else found


FAMILY = Family(
    "mt5",
    tree,
    LINES.replace("FFN", "DenseReluDense"),
    IGNORE,
    before=completed,
    spare=SPARE,
    back=partial(back, name="MT5"),
    after=undone,
)
