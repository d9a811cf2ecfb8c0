"""Mistral 7B (Jiang et al. 2023): Llama that sees a window of the past."""

from __future__ import annotations

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.weight_table import Family, Theirs


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    mixer = llama.attention(config, pattern=llama.windowed(config), bias=False)
    return llama.decoder(config, llama.layers(config, mixer, llama.swiglu(config, bias=False)))


def back(said: Said) -> Theirs:
    window = {"sliding_window": llama.window(said)}
    return {"architectures": said.writer("MistralForCausalLM"), **llama.sizes(said), **llama.gated(said), **window}


FAMILY = Family("mistral", tree, llama.LINES, llama.IGNORE, before=llama.BEFORE, back=back, after=llama.AFTER)
