"""A CTranslate2 model as a model of ours: the tree, and for each weight of ours the variables it is made of.

CTranslate2 stores options as variables beside the weights (`decoder/num_heads`). A variable that nothing here reads may
change what the model computes, so all such variables are refused, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.errors import UserError
from allyouneed.interop.ctranslate2.binary import Variables
from allyouneed.interop.ctranslate2.support import ACTIVATIONS
from allyouneed.interop.hf.config_reader import Tree
from allyouneed.nn.models.weights import named_tensors
from allyouneed.nn.positions.absolute import Sinusoidal

# CTranslate2's numbers of activations (python/ctranslate2/specs/common_spec.py)
ACTIVATION_NAMES = ("RELU", "GELUTanh", "SWISH", "GELU", "GELUSigmoid", "Tanh", "Sigmoid")
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
KINDS = {
    "TransformerSpec": ("encoder", "decoder"),
    "TransformerDecoderModelSpec": ("decoder",),
    "TransformerDecoderSpec": ("decoder",),
    "TransformerEncoderModelSpec": ("encoder",),
    "TransformerEncoderSpec": ("encoder",),
    "WhisperSpec": ("encoder", "decoder"),
}
WHISPER = "WhisperSpec"
LINEAR_SCALING, SU_SCALING, LLAMA3_SCALING = 0, 1, 2
ADD = 1  # how embeddings merge
# without effect on outputs: word alignments, other outputs of an encoder, and what older files repeat
IGNORED = (
    "alignment_layer", "alignment_heads", "pooler_dense/weight", "pooler_dense/bias", "pooler_activation",
    "alibi_use_positive_positions", "max_position_embeddings", "multi_query_attention",
)  # fmt: skip
OLD_ATTRIBUTES = (
    "num_heads", "pre_norm", "activation", "embeddings_merge", "with_source_bos", "with_source_eos", "with_target_bos",
    "unk_token", "bos_token", "eos_token", "user_decoder_start_tokens", "with_relative_position",
)  # fmt: skip
SINUSOIDS = (
    Sinusoidal(),
    *(Sinusoidal(order="halves", offset=offset) for offset in (0, 1, 2)),
    *(Sinusoidal(order="halves", closed=True, offset=offset) for offset in (0, 1, 2)),
)
GENERATED = {"kind": "sinusoidal", "order": "halves", "closed": True, "offset": 1}  # where no table is stored


class TreeReader:
    """Reads one model. `sources`: our weight -> variables, concatenated along the rows."""

    def __init__(self, variables: Variables, config: Mapping[str, Any]) -> None:
        self.variables, self.config = variables, config
        self.used, self.problems = set[str](), list[str]()
        self.sources: dict[str, list[str]] = {}
        self.factors: dict[str, float] = {}  # of our weight, where theirs is scaled
        self.norms: list[tuple[str, int]] = []  # kind and offset of each norm

    # --- variables ----------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        if name in self.variables:
            self.used.add(name)
            return True
        return False

    def number(self, name: str, default: float) -> float:
        if not self.has(name):
            return default
        found = self.variables[name]
        if found.numel() != 1:
            self.problems.append(f"{name}: expected a number, found {tuple(found.shape)}")
            return default
        return float(found.reshape(()))

    def option(self, side: str, name: str, default: float) -> int:
        """An integer of a stack; older files have one for both."""
        return int(self.number(f"{side}/{name}", self.number(name, default)))

    def take(self, ours: str, *theirs: str) -> None:
        self.sources[ours] = list(theirs)
        for name in theirs:
            self.used |= {name, f"{name}_scale"}

    def linear(self, ours: str, *theirs: str) -> bool:
        """A linear map of ours from maps of theirs; whether it has a bias."""
        self.take(f"{ours}.weight", *(f"{name}/weight" for name in theirs))
        biased = any(self.has(f"{name}/bias") for name in theirs)
        if biased:
            self.take(f"{ours}.bias", *(f"{name}/bias" for name in theirs))
        return biased

    def norm(self, ours: str, theirs: str) -> tuple[str, int]:
        self.take(f"{ours}.weight", f"{theirs}/gamma")
        kind = "layer" if self.has(f"{theirs}/beta") else "rms"
        if kind == "layer":
            self.take(f"{ours}.bias", f"{theirs}/beta")
        return kind, int(self.number(f"{theirs}/layer_norm_use_residual", 0))

    def norm_tree(self, kind: str, offset: int) -> Tree:
        eps = self.config.get("layer_norm_epsilon")
        if eps is None:
            eps = 1e-5 if kind == "layer" else 1e-6
        if not isinstance(eps, int | float) or not 0 <= eps < 1:
            self.problems.append(f"layer_norm_epsilon: {eps!r} is not a small number")
            eps = 1e-5
        return {"kind": kind, "eps": float(eps)} | ({"offset": offset} if kind == "rms" else {})

    def rows(self, name: str) -> int:
        return self._dimension(name, 0)

    def _dimension(self, name: str, axis: int) -> int:
        if name not in self.variables:
            raise UserError(f"{self.variables.path}: {name}: missing")
        shape = self.variables.shape(name)
        if len(shape) < 2:
            raise UserError(f"{self.variables.path}: {name}: {shape} is not a matrix")
        return shape[axis]

    # --- the model ----------------------------------------------------------------------------------------------------

    def read(self) -> Tree:
        spec = self.variables.spec
        if spec not in KINDS:
            raise UserError(f"{self.variables.path}: {spec} is not supported (allowed: {', '.join(KINDS)})")
        if (method := self.config.get("quantization_type")) not in (None, 0):
            raise UserError(f"{self.variables.path}: quantization_type {method} (AWQ) is not supported")
        sides = KINDS[spec]
        tree: Tree = {"kind": "encoder-decoder" if len(sides) == 2 else sides[0]}
        if "decoder" in sides:
            tree |= {"embed": self.embed("decoder", "embed") | {"tied": self.tied}, "head": self.head()}
            self.has("decoder/start_from_zero_embedding")
            tree["width"] = self._dimension("decoder/embeddings/weight", 1)
            tree["vocab"] = self.rows("decoder/embeddings/weight")
        if "encoder" in sides:
            tree |= self.audio_side() if spec == WHISPER else self.source_side(tree)
        for side in sides:
            tree[side] = self.layers(side, tree["width"], crossed=len(sides) == 2 and side == "decoder")
        kinds = dict.fromkeys(self.norms)
        if len(kinds) > 1:
            self.problems.append("norms with and without a bias in one model are not supported")
        tree["norm"] = self.norm_tree(*self.norms[0])
        self._refuse_unread()
        return tree

    def _refuse_unread(self) -> None:
        for name in self.variables:
            last = name.rpartition("/")[2]
            known = name in self.used or name in OLD_ATTRIBUTES or name.endswith("_scale")
            if not known and last not in IGNORED and not name.endswith(tuple(f"/{one}" for one in IGNORED)):
                self.problems.append(f"{name}: not supported")
        if self.problems:
            listed = "\n  ".join(dict.fromkeys(self.problems))
            raise UserError(f"{self.variables.path}: this CTranslate2 model cannot be imported\n  {listed}")

    def source_side(self, tree: Tree) -> Tree:
        name = "encoder/embeddings_0/weight" if self.has("encoder/embeddings_0/weight") else "encoder/embeddings/weight"
        if tree["kind"] == "encoder":
            return {
                "embed": self.embed("encoder", "embed") | {"tied": False},
                "width": self._dimension(name, 1),
                "vocab": self.rows(name),
                "head": {"kind": "none"},
            }
        source = self.embed("encoder", "source_embed")
        one = self.variables.resolve(name) == self.variables.resolve("decoder/embeddings/weight")
        found: Tree = {} if one else {"vocab": {"source": self.rows(name), "target": tree["vocab"]}}
        computed = source["positions"]["kind"] != "learned" and source["norm"] is None
        if not computed or {**source, "tied": 0} != {**tree["embed"], "tied": 0}:
            found["source_embed"] = source
        return found

    def audio_side(self) -> Tree:
        """Whisper's encoder."""
        for number, ours in ((1, "first"), (2, "second")):
            for kind in ("weight", "bias"):
                self.take(f"source_embed.{ours}.{kind}", f"encoder/conv{number}/{kind}")
        width = self._dimension("decoder/embeddings/weight", 1)
        positions = self.positions("encoder", "source_embed", width)
        mels = self._dimension("encoder/conv1/weight", 1)
        return {"source_embed": {"kind": "frames", "mels": mels, "positions": positions}}

    def embed(self, side: str, ours: str) -> Tree:
        first = "embeddings_0" if f"{side}/embeddings_0/weight" in self.variables else "embeddings"
        self.take(f"{ours}.tokens.weight", f"{side}/{first}/weight")
        width = self._dimension(f"{side}/{first}/weight", 1)
        scaled = self._scaled(side, first, width)
        tree: Tree = {"scale": "sqrt-width" if scaled else "none", "norm": None}
        if self.has(f"{side}/embeddings_1/weight"):
            merge = self.option(side, "embeddings_merge", 0)
            if merge != ADD or (side == "encoder" and "decoder/embeddings/weight" in self.variables):
                self.problems.append(f"{side}/embeddings_1: source factors are not supported")
            tree["types"] = self.rows(f"{side}/embeddings_1/weight")
            self.take(f"{ours}.types.weight", f"{side}/embeddings_1/weight")
            self.factors[f"{ours}.types.weight"] = width**0.5 if scaled else 1.0  # CTranslate2 scales these too
        self.has(f"{side}/embeddings_merge")
        if self.has(f"{side}/layernorm_embedding/gamma"):
            tree["norm"] = self.norm_tree(*self.norm(f"{ours}.norm", f"{side}/layernorm_embedding"))
        tree["positions"] = self.positions(side, ours, width)
        return tree

    def _scaled(self, side: str, first: str, width: int) -> bool:
        """Whether embeddings are multiplied by √width: a flag, or the factor itself."""
        names = (f"{side}/scale_embeddings", f"{side}/{first}/multiply_by_sqrt_depth")
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            return True
        value, root = self.number(name, 1.0), width**0.5
        if self.variables[name].dtype == torch.int8:
            return bool(value)
        if abs(value - 1) > 1e-6 and abs(value - root) > 1e-3 * root:
            self.problems.append(f"{name}: {value:g} is not supported (only 1 and √width, {root:g})")
        return abs(value - 1) > 1e-6

    def positions(self, side: str, ours: str, width: int) -> Tree:
        name = f"{side}/position_encodings/encodings"
        attention = f"{side}/layer_0/self_attention/"
        relative = ("rotary_dim", "relative_attention_bias", "relative_position_keys")
        if any(f"{attention}{key}" in self.variables for key in relative) or self.option(side, "alibi", 0):
            return {"kind": "none"}
        if not self.has(name):
            return GENERATED
        table = self.variables.weight(name)
        if table.dim() != 2 or table.shape[1] != width:
            self.problems.append(f"{name}: {tuple(table.shape)}, but the width is {width}")
        elif not table.any():
            return {"kind": "none"}
        elif (found := recognise_sinusoids(table)) is not None:
            return found
        self.take(f"{ours}.positions.weight", name)
        return {"kind": "learned", "length": len(table)}

    def head(self) -> Tree:
        name = "decoder/projection/weight"
        found: Tree = {"bias": self.linear("head", "decoder/projection")}
        scale, root = self.number("decoder/scale_outputs", 1.0), self._dimension(name, 1) ** -0.5
        if abs(scale - 1) > 1e-6:
            found["scale"] = "inverse-sqrt-width"
            if abs(scale - root) > 1e-4 * root:
                self.problems.append(f"decoder/scale_outputs: {scale:g} is not supported (only 1/√width, {root:g})")
        if cap := self.number("decoder/final_logit_softcapping", 0.0):
            found["soft_cap"] = cap
        for key in ("sliding_window", "scale_alibi"):
            if self.option("decoder", key, 0):
                self.problems.append(f"decoder/{key}: not supported")
        return found

    @property
    def tied(self) -> bool:
        names = ("decoder/projection/weight", "decoder/embeddings/weight")
        return len({self.variables.resolve(name) for name in names}) == 1

    @property
    def starts_at_zero(self) -> bool:
        """Marian: the first decoder input is a vector of zeros, not a token."""
        return bool(self.option("decoder", "start_from_zero_embedding", 0))

    # --- layers -------------------------------------------------------------------------------------------------------

    def layers(self, side: str, width: int, crossed: bool) -> list[Tree]:
        parts = {name.split("/")[1] for name in self.variables if name.startswith(f"{side}/layer_")}
        depth = len({part for part in parts if part[6:].isdigit()})
        if not depth or any(f"layer_{number}" not in parts for number in range(depth)):
            raise UserError(f"{self.variables.path}: {side}: no layers, or not numbered from 0")
        pre = bool(self.option(side, "pre_norm", 1))
        final = self.has(f"{side}/layer_norm/gamma")
        if final:
            self.norms.append(self.norm(f"{side}.end", f"{side}/layer_norm"))
        found = [self.layer(side, number, width, crossed, pre, final) for number in range(depth)]
        for one in found:
            if one["mixer"]["positions"]["kind"] == "buckets":
                one["mixer"]["positions"]["untied"] = self.untied
        return [one | {"repeat": len(list(run))} for one, run in groupby(found)]

    def layer(self, side: str, number: int, width: int, crossed: bool, pre: bool, final: bool) -> Tree:
        theirs, ours = f"{side}/layer_{number}", f"{side}.blocks.{number}"
        heads = self.option(side, "num_heads", 8)
        tree: Tree = {"wiring": self.wiring(theirs, ours, crossed, pre, final)}
        pattern = "causal" if side == "decoder" else "full"
        tree["mixer"] = self.attention(f"{theirs}/self_attention", f"{ours}.sublayers.mixer", heads, width, False)
        tree["mixer"] |= {"pattern": pattern}
        if self.option(side, "alibi", 0):
            tree["mixer"]["positions"] = {"kind": "alibi"}
        if crossed:
            tree["cross"] = self.attention(f"{theirs}/attention", f"{ours}.sublayers.cross", heads, width, True)
        tree["channel"] = self.channel(f"{theirs}/ffn", f"{ours}.sublayers.channel", side)
        if abs(self.number(f"{theirs}/layer_scalar", 1.0) - 1) > 1e-6:
            self.problems.append(f"{theirs}/layer_scalar: not supported")
        return tree

    def wiring(self, theirs: str, ours: str, crossed: bool, pre: bool, final: bool) -> Tree:
        plain = ["self_attention/layer_norm", *(["attention/layer_norm"] if crossed else []), "ffn/layer_norm"]
        sandwich = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        tree: Tree
        if self.has(f"{theirs}/shared_layer_norm/gamma"):
            tree, names = {"kind": "parallel", "norms": "one"}, ["shared_layer_norm"]
        elif self.has(f"{theirs}/pre_feedforward_layer_norm/gamma"):
            tree, names = {"kind": "sandwich"}, [f"{name}_layer_norm" for name in sandwich]
        elif self.has(f"{theirs}/input_layer_norm/gamma"):
            tree, names = {"kind": "parallel", "norms": "each"}, [f"{name}_layer_norm" for name in sandwich[:2]]
        else:
            tree, names = {"kind": "pre-norm", "final": final} if pre else {"kind": "post-norm"}, plain
        if final != pre and tree["kind"] != "pre-norm":
            self.problems.append(
                f"{theirs.split('/')[0]}/layer_norm: not supported {'beside' if final else 'missing after'} such layers"
            )
        for number, name in enumerate(names):
            self.norms.append(self.norm(f"{ours}.wiring.norms.{number}", f"{theirs}/{name}"))
        return tree

    def attention(self, theirs: str, ours: str, heads: int, width: int, cross: bool) -> Tree:
        head_width = int(self.number(f"{theirs}/head_dim", width // max(1, heads)))
        kv_heads = 1 if self.number(f"{theirs}/multi_query", 0) else int(self.number(f"{theirs}/num_heads_kv", heads))
        tree: Tree = {"kind": "attention", "heads": heads}
        tree |= {} if kv_heads == heads else {"kv_heads": kv_heads}
        tree |= {} if head_width * heads == width else {"head_width": head_width}
        if cross:
            q, kv = self.linear(f"{ours}.q", f"{theirs}/linear_0"), self.linear(f"{ours}.kv", f"{theirs}/linear_1")
            out = self.linear(f"{ours}.out", f"{theirs}/linear_2")
        else:
            q = kv = self.linear(f"{ours}.qkv", f"{theirs}/linear_0")
            out = self.linear(f"{ours}.out", f"{theirs}/linear_1")
        tree["bias"] = q if q == kv == out else {"q": q, "k": kv, "v": kv, "out": out}
        scale = self.number(f"{theirs}/queries_scale", head_width**-0.5)
        if abs(scale - head_width**-0.5) > 1e-6 * scale:
            tree["scores"] = {"kind": "scaled-dot", "scale": scale}
        if self.has(f"{theirs}/q_norm/gamma"):
            tree["qk_norm"] = self.norm_tree(*self.norm(f"{ours}.q_norm", f"{theirs}/q_norm"))
            self.norm(f"{ours}.k_norm", f"{theirs}/k_norm")
        if self.number(f"{theirs}/sliding_window", 0):
            self.problems.append(f"{theirs}/sliding_window: not supported")
        if not cross:
            tree["positions"] = self.relative(theirs, ours, head_width)
        return tree

    def relative(self, theirs: str, ours: str, head_width: int) -> Tree:
        if self.has(f"{theirs}/relative_position_keys"):
            table, values = f"{theirs}/relative_position_keys", f"{theirs}/relative_position_values"
            self.take(f"{ours}.relative.keys_table.weight", table)
            self.take(f"{ours}.relative.values_table.weight", values)
            used = self.has(values) and bool(self.variables.weight(values).any())
            return {"kind": "shaw", "distance": (self.rows(table) - 1) // 2, "values": used}
        if self.has(f"{theirs}/relative_attention_bias"):
            table = f"{theirs}/relative_attention_bias"
            first = table.replace(f"/layer_{theirs.split('layer_')[1].split('/')[0]}/", "/layer_0/")
            self.take(f"{ours}.relative.table.weight", table)
            distance = int(self.number(f"{theirs}/relative_attention_max_distance", 128))
            tree = {"kind": "buckets", "buckets": self.rows(table), "distance": distance}
            self.untied |= self.variables.resolve(table) != self.variables.resolve(first)
            return tree
        if (rotated := int(self.number(f"{theirs}/rotary_dim", -1))) >= 0:
            return self.rotary(theirs, head_width, rotated or head_width)
        return {"kind": "none"}

    untied = False  # a table of biases per layer

    def rotary(self, theirs: str, head_width: int, rotated: int) -> Tree:
        tree: Tree = {
            "kind": "rotary",
            "base": self.number(f"{theirs}/rotary_base", 10000.0),
            "order": "interleaved" if self.number(f"{theirs}/rotary_interleave", 1) else "halves",
            "fraction": 1.0 if rotated == head_width else rotated / head_width + 1e-9,  # rounded down when used
        }
        scaling = int(self.number(f"{theirs}/rotary_scaling_type", -1))
        factor = self.number(f"{theirs}/rotary_scaling_factor", 1.0)
        original = int(self.number(f"{theirs}/original_max_position_embeddings", 0))
        names = [f"{theirs}/rotary_scaling_{length}_factor" for length in ("long", "short")]
        if scaling == LINEAR_SCALING:
            tree["scaling"] = {"kind": "linear", "factor": factor}
        elif scaling == SU_SCALING and all(self.has(name) for name in names):
            long, short = (self.variables.weight(name).float() for name in names)
            if long.shape != short.shape or not bool(torch.isclose(long, short, rtol=1e-6).all()):
                self.problems.append(f"{names[0]}: other factors for long texts than for short ones are not supported")
            elif bool((long - long[0]).abs().max() < 1e-6):
                tree["scaling"] = {"kind": "linear", "factor": float(long[0])}
            else:
                tree["scaling"] = {"kind": "factors", "factors": long.flatten().tolist()}
        elif scaling == LLAMA3_SCALING:
            low, high = (self.number(f"{theirs}/rotary_{name}_freq_factor", default) for name, default in FREQUENCIES)
            tree["scaling"] = {"kind": "llama3", "factor": factor, "original": original, "low": low, "high": high}
        elif scaling != -1:
            self.problems.append(f"{theirs}/rotary_scaling_type: {scaling} is not supported")
        return tree

    def channel(self, theirs: str, ours: str, side: str) -> Tree:
        speech = side == "encoder" and self.variables.spec == WHISPER  # has no options
        number = ACTIVATION_NAMES.index("GELU") if speech else self.option(side, "activation", 0)
        name = ACTIVATION_NAMES[number] if 0 <= number < len(ACTIVATION_NAMES) else ""
        if name not in OUR_ACTIVATIONS:
            self.problems.append(f"{side}/activation: {number} is not supported")
        gated = self.has(f"{theirs}/linear_0_noact/weight")
        first = f"{theirs}/linear_0"
        biased = (
            self.linear(f"{ours}.gate_up", first, f"{theirs}/linear_0_noact")
            if gated
            else self.linear(f"{ours}.up", first)
        )
        last = self.linear(f"{ours}.down", f"{theirs}/linear_1")
        if last != biased:
            self.problems.append(f"{theirs}: a bias in one of its linear maps only is not supported")
        activation = OUR_ACTIVATIONS.get(name, "relu")
        hidden = self.rows(f"{first}/weight")
        return {"kind": "glu" if gated else "ffn", "hidden": hidden, "activation": activation, "bias": biased}

    # --- weights ------------------------------------------------------------------------------------------------------

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's weights by our names. Missing ones are left out, for the caller to report."""
        found = {}
        for name, tensor in named_tensors(model).items():
            sources = self.sources.get(name, [])
            present = [self.variables.weight(one) for one in sources if one in self.variables]
            if len(present) == len(sources) and sources:
                found[name] = torch.cat(present) if len(present) > 1 else present[0]
                found[name] = found[name] * self.factors[name] if name in self.factors else found[name]
            if name in found and found[name].dim() == 3 and tensor.dim() == 2:
                found[name] = found[name].flatten(1)
        return found


FREQUENCIES = (("low", 1.0), ("high", 4.0))


def recognise_sinusoids(table: Tensor) -> Tree | None:
    """The sinusoids that this table holds, so that longer texts work too; None for any other table."""
    tolerance = 1e-5 if table.dtype == torch.float32 else 4 * torch.finfo(table.dtype).eps
    for config in SINUSOIDS:
        found = config.build(table.shape[1])(torch.arange(len(table)))
        if bool((found - table.float()).abs().max() <= tolerance):
            return config.model_dump()
    return None
