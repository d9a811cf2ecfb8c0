"""Our model as a CTranslate2 spec: constructor options (`switches`) and the source of each weight (`LAYER`).

CTranslate2 has one configurable Transformer, not a class per model, so one mapping covers all models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from allyouneed.interop.ctranslate2.support import ACTIVATIONS
from allyouneed.interop.hf.config_reader import Tree
from allyouneed.nn.positions.relative import RelativeModule
from allyouneed.nn.positions.rotary_scaling import base_frequencies

POSITIONS = "position_encodings"

# theirs: the first of ours that exists; `+` concatenates, `[n]` is one of two halves
LAYER = {
    "self_attention/linear_0": ("mixer.qkv", "mixer.q + mixer.k + mixer.v"),
    "self_attention/linear_1": ("mixer.out",),
    "self_attention/q_norm": ("mixer.q_norm",),
    "self_attention/k_norm": ("mixer.k_norm",),
    "self_attention/relative_attention_bias": ("mixer.relative.table",),
    "self_attention/relative_position_keys": ("mixer.relative.keys_table",),
    "self_attention/relative_position_values": ("mixer.relative.values_table",),
    "attention/linear_0": ("cross.q",),
    "attention/linear_1": ("cross.kv", "cross.k + cross.v"),
    "attention/linear_2": ("cross.out",),
    "ffn/linear_0": ("channel.up", "channel.gate_up[0]"),
    "ffn/linear_0_noact": ("channel.gate_up[1]",),
    "ffn/linear_1": ("channel.down",),
}
# names of a layer's norms, in our order
TWO_NORMS = ("self_attention/layer_norm", "ffn/layer_norm")
NORMS = {
    "post-norm": TWO_NORMS,
    "pre-norm": TWO_NORMS,
    "sandwich": (
        "input_layer_norm",
        "post_attention_layer_norm",
        "pre_feedforward_layer_norm",
        "post_feedforward_layer_norm",
    ),
    "parallel one": ("shared_layer_norm",),
    "parallel each": ("input_layer_norm", "post_attention_layer_norm"),
}


# --- switches ---------------------------------------------------------------------------------------------------------


def switches(tree: Tree, side: str) -> dict[str, Any]:
    """Constructor options of a CTranslate2 stack."""
    from ctranslate2.specs import attention_spec, common_spec

    layer = tree[side][0]
    mixer, channel, wiring = layer["mixer"], layer["channel"], layer["wiring"]
    positions = mixer["positions"]
    embed = (tree.get("source_embed") if side == "encoder" else None) or tree["embed"]
    found = {
        "num_layers": sum(entry["repeat"] for entry in tree[side]),
        "num_heads": mixer["heads"],
        "pre_norm": wiring["kind"] != "post-norm",
        "no_final_norm": not wiring.get("final", True),
        "activation": common_spec.Activation[ACTIVATIONS[channel["activation"]]],
        "layernorm_embedding": embed.get("norm") is not None,
        "relative_position": positions["kind"] == "shaw",
        "relative_attention_bias": positions["kind"] == "buckets",
        "ffn_glu": channel["kind"] == "glu",
        "rms_norm": tree["norm"]["kind"] == "rms",
        "qk_norm": mixer["qk_norm"] is not None,
    }
    if mixer["kv_heads"] != mixer["heads"]:
        found["num_heads_kv"] = mixer["kv_heads"]
    if mixer["head_width"] * mixer["heads"] != tree["width"]:
        found["head_dim"] = mixer["head_width"]
    if positions["kind"] == "rotary":
        found |= {
            "rotary_dim": 0,  # whole heads; a fraction is set with the weights
            "rotary_interleave": positions["order"] == "interleaved",
            "rotary_base": positions["base"],
        }
        if positions["scaling"]["kind"] != "none":  # any scaling is one factor per frequency
            found["rotary_scaling_type"] = attention_spec.RotaryScalingType.Su
    if side == "decoder":
        found |= {
            "with_encoder_attention": layer["cross"] is not None,
            "alibi": positions["kind"] == "alibi",
            "parallel_residual": wiring["kind"] == "parallel",
            "shared_layer_norm": wiring.get("norms") == "one",
        }
    if wiring["kind"] == "sandwich":
        found["pre_post_layer_norm"] = True
    return found


# --- weights ----------------------------------------------------------------------------------------------------------


def fill_stack(spec: Any, stack: Any, embed: Any, positions: int) -> None:
    """Fill an encoder or decoder spec from our stack and its embedding."""
    spec.scale_embeddings = embed.scale != 1.0
    tokens, *types = spec.embeddings if isinstance(spec.embeddings, list) else [spec.embeddings]
    tokens.weight = embed.tokens.weight.detach()
    for table in types:
        table.weight = embed.types.weight.detach() / embed.scale  # CTranslate2 scales these too
    if type(stack.blocks[0].sublayers["mixer"].relative) is RelativeModule:
        spec.position_encodings.encodings = _position_table(embed, embed.tokens.weight, positions)
    elif hasattr(spec, POSITIONS):
        delattr(spec, POSITIONS)  # positions are handled in attention
    if embed.norm is not None:
        _assign(spec, "layernorm_embedding", [_Weights.of(embed.norm, embed.tokens.weight[0])])
    fill_layers(spec, stack, embed.tokens.weight[0])


def fill_audio_encoder(spec: Any, stack: Any, embed: Any, positions: int) -> None:
    """Fill Whisper's encoder."""
    for theirs, ours in ((spec.conv1, embed.first), (spec.conv2, embed.second)):
        theirs.weight, theirs.bias = ours.weight.detach(), ours.bias.detach()
    spec.position_encodings.encodings = _position_table(embed, embed.second.weight[0].T, positions)
    fill_layers(spec, stack, embed.second.bias)


def fill_layers(spec: Any, stack: Any, vector: Tensor) -> None:
    """`vector`: a tensor of the model's width, for norms without weights."""
    if stack.end is not None:
        _assign(spec, "layer_norm", [_Weights.of(stack.end, vector)])
    for layer, block in zip(spec.layer, stack.blocks, strict=True):
        fill_layer(layer, block, vector)


def fill_layer(spec: Any, block: Any, vector: Tensor) -> None:
    for theirs, choices in LAYER.items():
        found = (_find_weights(block.sublayers, text) for text in choices)
        if parts := next((each for each in found if each), None):
            _assign(spec, theirs, parts)
    wiring = block.wiring.config
    names = NORMS[f"parallel {wiring.norms}" if wiring.kind == "parallel" else wiring.kind]
    if len(block.sublayers) == 3:
        names = (names[0], "attention/layer_norm", names[1])
    for name, norm in zip(names, block.wiring.norms, strict=True):
        _assign(spec, name, [_Weights.of(norm, vector)])
    _fill_scores(spec.self_attention, block.sublayers["mixer"])
    if "cross" in block.sublayers:
        _fill_scores(spec.attention, block.sublayers["cross"])
        for name in ("q_norm", "k_norm"):  # the spec declares them for cross-attention too, which does not apply them
            spec.attention.__dict__.pop(name, None)


def _fill_scores(spec: Any, attention: Any) -> None:
    """The scale of the scores, and relative positions."""
    import numpy

    relative, magnitude = attention.relative, 1.0
    config = getattr(relative, "config", None)
    if hasattr(spec, "relative_attention_max_distance"):
        spec.relative_attention_max_distance = numpy.int32(config.distance)  # type: ignore[union-attr]
    if hasattr(spec, "relative_position_values") and spec.relative_position_values is None:
        spec.relative_position_values = torch.zeros_like(spec.relative_position_keys)
    if hasattr(spec, "rotary_dim") and relative.width != attention.head_width:
        spec.rotary_dim = numpy.int32(relative.width)
    if hasattr(spec, "rotary_scaling_long_factor"):
        factors = (base_frequencies(config.base, relative.width) / relative.frequencies).float()  # type: ignore[union-attr]
        spec.rotary_scaling_long_factor = spec.rotary_scaling_short_factor = factors
        magnitude = config.scaling.magnitude  # type: ignore[union-attr]
    spec.queries_scale = float(attention.scores.scale * relative.score_scale * magnitude**2)


def _position_table(embed: Any, like: Tensor, count: int) -> Tensor:
    """The position table (count, width of `like`); zeros where no positions are added."""
    count = count if embed.limit is None else embed.limit
    found = embed.positions(torch.arange(count, device=like.device)[None])
    if found is None:
        return torch.zeros(count, like.shape[1], dtype=like.dtype)
    return found[0].detach().to(like.dtype)


@dataclass(frozen=True)
class _Weights:
    weight: Tensor
    bias: Tensor | None
    offset: int | None  # RMS norms only

    @classmethod
    def of(cls, module: Any, vector: Tensor | None = None) -> _Weights:
        weight, bias = module.weight, getattr(module, "bias", None)
        if weight is None and vector is not None:
            weight = torch.ones_like(vector)
        return cls(weight.detach(), None if bias is None else bias.detach(), getattr(module, "offset", None))

    def half(self, number: int) -> _Weights:
        return _Weights(self.weight.chunk(2)[number], None if self.bias is None else self.bias.chunk(2)[number], None)


def _find_weights(modules: Any, text: str) -> list[_Weights] | None:
    """The weights that `text` names; None where one of them does not exist."""
    found = []
    for name in text.split(" + "):
        name, _, half = name.partition("[")
        sublayer, _, inner = name.partition(".")
        module: Any = dict(modules.items()).get(sublayer)
        for step in inner.split("."):
            module = getattr(module, step, None)
        if module is None:
            return None
        found.append(_Weights.of(module).half(int(half[0])) if half else _Weights.of(module))
    return found


def _assign(root: Any, path: str, parts: list[_Weights]) -> None:
    """Assign a linear map, a norm, or a plain variable."""
    from ctranslate2.specs import common_spec, model_spec

    scope, _, name = path.rpartition("/")
    spec, owner, first = model_spec.index_spec(root, path), model_spec.index_spec(root, scope), parts[0]
    if isinstance(spec, common_spec.LinearSpec):
        spec.weight = torch.cat([part.weight for part in parts]) if len(parts) > 1 else first.weight
        if any(part.bias is not None for part in parts):  # some of the concatenated maps may have none
            biases = [part.weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
            spec.bias = torch.cat(biases)
    elif isinstance(spec, common_spec.LayerNormSpec):
        norm = common_spec.LayerNormSpec(rms_norm=first.offset is not None)
        norm.gamma = first.weight + (first.offset or 0)
        if first.offset is None:
            norm.beta = torch.zeros_like(first.weight) if first.bias is None else first.bias
        setattr(owner, name, norm)
    else:
        setattr(owner, name, first.weight)
