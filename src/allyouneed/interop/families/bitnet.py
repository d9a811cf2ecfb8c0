"""BitNet b1.58 (Ma et al. 2024), as Microsoft released it (Ma et al. 2025, "BitNet b1.58 2B4T"): a Llama of ternary
maps, with a norm before the last map of attention and feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import Reader, Tree, reading
from allyouneed.interop.hf.config_writer import Said
from allyouneed.interop.hf.transforms import chained
from allyouneed.interop.hf.weight_table import Family, Theirs, Weights


@reading("max_position_embeddings")
def tree(config: Reader) -> Tree:
    norm = {"kind": "rms", "eps": config["rms_norm_eps"]}
    layers = llama.layers(config, llama.attention(config, sub_norm=norm), llama.swiglu(config, bias=False, norm=True))
    check(config.inside("quantization_config"))
    return llama.decoder(config, layers, linear="bit")


def check(config: Reader) -> None:
    """Files with latent weights say that these are to be rounded on the way (`online`), files with ternary ones that
    they were (`offline`); a config that says nothing comes with latent weights."""
    config.only("quant_method", "bitnet")
    config.only("linear_class", "autobitlinear", "bitlinear")
    config.only("quantization_mode", "online", "offline")
    config.get("modules_to_not_convert")  # the head, which is not ternary here either
    if not config.only("use_rms_norm", False):  # queries, keys and values would have one each
        config.get("rms_norm_eps")
    config.finish()


NORMS = """
decoder.blocks.{n}.sublayers.mixer.sub_norm.weight = model.layers.{n}.self_attn.attn_sub_norm.weight
decoder.blocks.{n}.sublayers.channel.norm.weight = model.layers.{n}.mlp.ffn_sub_norm.weight
"""


def latent(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """Ternary weights, four rows in a byte, as the smallest weights that round to them in steps of the given size."""
    said = config.get("quantization_config") or {}
    found = dict(weights)
    for name in _scaled(weights):
        ternary = _rows(weights[name]) if weights[name].dtype == torch.uint8 else weights[name].float()
        found[name] = _smallest(ternary, weights[f"{name}_scale"].float(), said)
    return config, found


def packed(config: Theirs, weights: Weights) -> tuple[Theirs, Weights]:
    """The way back of `latent`: ternary again where nothing has changed since, else latent weights, and said to be."""
    said, found = config.get("quantization_config") or {}, dict(weights)
    for name in _scaled(weights):
        ternary = weights[name].sign()
        if not _smallest(ternary, weights[f"{name}_scale"].float(), said).equal(weights[name]):
            names = [f"{one}_scale" for one in _scaled(weights)]
            return {**config, "quantization_config": ONLINE}, {key: w for key, w in weights.items() if key not in names}
        found[name] = _bytes(ternary)
    return config, found


ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def _scaled(weights: Weights) -> list[str]:
    return [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]


def _smallest(ternary: Tensor, scale: Tensor, said: Theirs) -> Tensor:
    step = scale if said.get("linear_class") == "autobitlinear" else 1 / scale
    return ternary * (step / ternary.abs().mean().clamp(min=1e-5))


def _rows(packed: Tensor) -> Tensor:
    """Byte i of a column holds its weights i, i + n, i + 2n, i + 3n, n being the number of bytes, as w + 1."""
    return torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1


def _bytes(ternary: Tensor) -> Tensor:
    """The way back of `_rows`."""
    parts = zip((ternary + 1).to(torch.uint8).chunk(4), (0, 2, 4, 6), strict=True)
    return torch.stack([part << shift for part, shift in parts]).sum(0, dtype=torch.uint8)


def back(said: Said) -> Theirs:
    names = {"architectures": said.writer("BitNetForCausalLM"), "quantization_config": ONLINE}
    return {**names, **llama.sizes(said), **llama.gated(said), "attention_bias": said.flag("decoder.mixer.bias")}


FAMILY = Family(
    "bitnet",
    tree,
    llama.LINES + NORMS,
    llama.IGNORE,
    {},
    chained(llama.BEFORE, latent),
    ("*.weight_scale",),
    back,
    chained(packed, llama.AFTER),
)
