"""Mistral 7B (Jiang et al. 2023): Llama that sees a window of the past."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    mixer = llama.attention(config, pattern=llama.windowed(config), bias=False)
    return llama.decoder(config, llama.layers(config, mixer, llama.swiglu(config, bias=False)))


FAMILY = Family("mistral", tree, llama.LINES, llama.IGNORE)
