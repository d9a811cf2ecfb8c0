"""BitNet b1.58 (Ma et al. 2024), as Microsoft released it (Ma et al. 2025, "BitNet b1.58 2B4T"): a Llama with
ternary weights and a norm before the output projection of attention and feed-forward layer; without a
`quantization_config` its weights are dense."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.interop.families import llama
from allyouneed.interop.hf.config_reader import ConfigReader
from allyouneed.interop.hf.config_table import Conversion, Line
from allyouneed.interop.hf.config_writer import OMITTED
from allyouneed.interop.hf.transforms import chain
from allyouneed.interop.hf.weight_table import HfConfig, Weights

FIELDS = llama.FIELDS + """
linear = quantization_config |ternary
decoder.mixer.sub_norm: {kind: rms}
decoder.mixer.sub_norm.eps <- rms_norm_eps
decoder.channel: {kind: glu, norm: true}
decoder.channel.bias: false
"""  # fmt: skip
ONLINE = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}


def ternary(config: ConfigReader, line: Line) -> str:
    """Latent weights are quantized on the fly (`online`), ternary weights are stored (`offline`); a config without a
    mode comes with latent weights."""
    if not config.get(line.key):
        return "dense"  # their class then has ordinary linear maps
    quantization = config.nested(line.key)
    quantization.require("quant_method", "bitnet")
    quantization.require("linear_class", "autobitlinear", "bitlinear")
    quantization.require("quantization_mode", "online", "offline")
    quantization.get("modules_to_not_convert")  # the head, which is not ternary in ours either
    if not quantization.require("use_rms_norm", False):  # one norm each for queries, keys and values
        quantization.get("rms_norm_eps")
    return "bit"


TERNARY = Conversion(ternary, lambda ours, line: ONLINE if ours.get("linear.kind") == "bit" else OMITTED)
NORMS = """
decoder.blocks.{n}.sublayers.mixer.sub_norm.weight = model.layers.{n}.self_attn.attn_sub_norm.weight
decoder.blocks.{n}.sublayers.channel.norm.weight = model.layers.{n}.mlp.ffn_sub_norm.weight
"""


def unpack_ternary(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Ternary weights, packed four rows to a byte, as latent weights that round to them with the stored scale."""
    quantization = config.get("quantization_config") or {}
    found = dict(weights)
    for name in _ternary_names(weights):
        ternary = _unpack_rows(weights[name]) if weights[name].dtype == torch.uint8 else weights[name].float()
        found[name] = _latent_weights(ternary, weights[f"{name}_scale"].float(), quantization)
    return config, found


def pack_ternary(config: HfConfig, weights: Weights) -> tuple[HfConfig, Weights]:
    """Inverse of `unpack_ternary`; weights trained further are written as latent weights, in `online` mode."""
    quantization, found = config.get("quantization_config") or {}, dict(weights)
    for name in _ternary_names(weights):
        ternary = weights[name].sign()
        if not _latent_weights(ternary, weights[f"{name}_scale"].float(), quantization).equal(weights[name]):
            names = [f"{one}_scale" for one in _ternary_names(weights)]
            return {**config, "quantization_config": ONLINE}, {key: w for key, w in weights.items() if key not in names}
        found[name] = _pack_rows(ternary)
    return config, found


def _ternary_names(weights: Weights) -> list[str]:
    return [name.removesuffix("_scale") for name in weights if name.endswith(".weight_scale")]


def _latent_weights(ternary: Tensor, scale: Tensor, quantization: HfConfig) -> Tensor:
    step = scale if quantization.get("linear_class") == "autobitlinear" else 1 / scale
    return ternary * (step / ternary.abs().mean().clamp(min=1e-5))


def _unpack_rows(pack_ternary: Tensor) -> Tensor:
    """Byte i of a column packs rows i, i + n, i + 2n, i + 3n, where n is the number of bytes, as w + 1."""
    return torch.cat([(pack_ternary >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1


def _pack_rows(ternary: Tensor) -> Tensor:
    """Inverse of `_unpack_rows`."""
    parts = zip((ternary + 1).to(torch.uint8).chunk(4), (0, 2, 4, 6), strict=True)
    return torch.stack([part << shift for part, shift in parts]).sum(0, dtype=torch.uint8)


FAMILY = llama.family(
    "bitnet",
    "BitNetForCausalLM",
    FIELDS,
    llama.LINES + NORMS,
    {"ternary": TERNARY},
    prepare=chain(llama.FAMILY.prepare, unpack_ternary),
    preserve=("*.weight_scale",),
    finish=chain(pack_ternary, llama.FAMILY.finish),
)
