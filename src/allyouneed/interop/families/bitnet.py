"""BitNet b1.58 (Ma et al. 2024), as Microsoft released it (Ma et al. 2025, "BitNet b1.58 2B4T"): a Llama of ternary
maps, with a norm before the last map of attention and feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from allyouneed.interop.families import llama
from allyouneed.interop.reader import Reader, Tree, reading
from allyouneed.interop.table import Family, Theirs, Weights


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
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(".weight_scale")}
    for name in set(weights) - set(found):
        key, scale = name.removesuffix("_scale"), weights[name].float()
        ternary = _rows(weights[key]) if weights[key].dtype == torch.uint8 else weights[key].float()
        step = scale if said.get("linear_class") == "autobitlinear" else 1 / scale
        found[key] = ternary * (step / ternary.abs().mean().clamp(min=1e-5))
    return config, found


def _rows(packed: Tensor) -> Tensor:
    """Byte i of a column holds its weights i, i + n, i + 2n, i + 3n, n being the number of bytes, as w + 1."""
    return torch.cat([(packed >> shift) & 3 for shift in (0, 2, 4, 6)]).float() - 1


FAMILY = Family("bitnet", tree, llama.LINES + NORMS, llama.IGNORE, before=latent)
