"""StarCoder and SantaCoder (Li et al. 2023; Ben Allal et al. 2023): GPT-2 with one key for all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from allyouneed.interop.families import gpt2
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.shapes import prefixed, ungrouped
from allyouneed.interop.table import Family

# how to be quick in half precision; the number of keys is what multi_query says
HARMLESS = ("*softmax_in_fp32", "max_*", "num_key_value_heads", "pad_key_length", "pre_*", "validate_runner_input")


@reading(*gpt2.HARMLESS, *HARMLESS)
def tree(config: Reader) -> Tree:
    heads = 1 if config.get("multi_query", True) else config["n_head"]
    return gpt2.decoder(config, [(gpt2.attention(config, kv_heads=heads), config["n_layer"])])


def apart(tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Without multi-query attention each head's query, key and value stand together."""
    return tensor if config.get("multi_query", True) else ungrouped(tensor, config["n_head"], config["n_head"])


LINES = gpt2.LINES.replace(" |T", "").replace("attn.c_attn.weight", "attn.c_attn.weight |apart")
LINES = LINES.replace("attn.c_attn.bias", "attn.c_attn.bias |apart")
FAMILY = Family("gpt_bigcode", tree, LINES, gpt2.IGNORE, {"apart": apart}, prefixed("transformer."))
