"""A model of ours as a spec of CTranslate2's: what a spec can say (`RULES`), and where its weights come from (`LAYER`).

CTranslate2 has one Transformer with switches, not a class for each model, and so has this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.interop.reader import Tree
from allyouneed.interop.said import differences, meaning
from allyouneed.nn.relative import RelativeModule
from allyouneed.nn.rotary_scaling import trained

ANY = ("*",)
PLACES = "position_encodings"
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu-tanh": "GELUTanh",
    "quick-gelu": "GELUSigmoid",
    "silu": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}

# what may stand at each path of a model's tree; what no rule names cannot be said
NORM = {"kind": ("layer", "rms"), "weight|eps|bias|offset": ANY}
EMBED = {
    "kind": ("tokens",),
    "positions.kind": ("none", "sinusoidal", "learned"),
    "positions.*": ANY,
    "scale": ANY,
    "tied": ANY,
    "types": (None,),
    "norm": (None,),
    "norm.*": NORM,
    "inner": (None,),
    "asks": (False,),
}
ATTENTION = {
    "kind": ("attention",),
    "heads|kv_heads|head_width": ANY,
    "positions.kind": ("none",),
    "scores.kind": ("scaled-dot",),
    "scores.scale": ANY,
    "soft_cap": (None,),
    "qk_norm": (None,),
    "qk_norm.*": {"weight": (True,), **NORM},
    "sub_norm": (None,),
    "bias.*": ANY,
    "cache": ("keys",),
}
ROTARY = {"base|order|fraction|values": ANY, "scaling.*": ANY, "xpos": (None,)}
LAYERS = {
    "repeat|share": ANY,
    "coordinates.kind": ("none",),
    "halt": (None,),
    "wiring.kind": ("post-norm", "pre-norm"),
    "wiring.final": ANY,
    "wiring.layer_scale": (None,),
    "mixer.positions.kind": ("none", "shaw", "buckets", "rotary"),
    "mixer.positions.*": ROTARY | {"distance|buckets|untied|bidirectional": ANY},
    "mixer.*": ATTENTION,
    "cross": (None,),
    "channel.kind": ("ffn", "glu"),
    "channel.hidden|bias": ANY,
    "channel.activation": tuple(ACTIVATIONS),
    "channel.norm": (False,),
}
READS = {"mixer.pattern": ("full",), **LAYERS}
CROSSES = {
    "mixer.pattern": ("causal",),
    "cross.pattern": ("full",),
    "cross.qk_norm": (None,),
    "cross.*": {path: rule for path, rule in ATTENTION.items() if path != "qk_norm.*"},
    **LAYERS,
}
# a stack that is alone has more ways
WRITES = {
    "wiring.kind": ("post-norm", "pre-norm", "sandwich", "parallel"),
    "wiring.norms": ANY,
    "mixer.pattern": ("causal",),
    "mixer.positions.kind": ("none", "buckets", "rotary", "alibi"),
    "mixer.positions.octaves": (8.0,),
    "mixer.positions.symmetric": (False,),
    **{path: rule for path, rule in LAYERS.items() if path not in ("wiring.kind", "mixer.positions.kind")},
}
HEAD = {
    "kind": ("vocabulary",),
    "bias|scale|soft_cap": ANY,
    "transform": (None,),
    "maxout": (None,),
}
MODEL = {"kind|width|vocab": ANY, "vocab.*": ANY, "linear.kind": ("dense",), "norm.*": NORM}
RULES: dict[str, Mapping[str, Any]] = {
    "encoder-decoder": {
        **MODEL,
        "embed.*": EMBED,
        "source_embed": (None,),
        "source_embed.*": EMBED,
        "encoder.*": READS,
        "decoder.*": CROSSES,
        "head.*": HEAD,
    },
    "decoder": {**MODEL, "embed.*": EMBED, "decoder.*": WRITES, "head.*": HEAD},
    "encoder": {
        **MODEL,
        "embed.types": ANY,
        "embed.*": EMBED,
        "encoder.*": READS,
        "head.kind": ("none", "pooled"),
        "head.width": (None,),
        "head.*": ANY,
    },
}
VARIES = ("repeat", "share", "channel.hidden", "channel.bias")  # from layer to layer
VARIES += tuple(f"{part}.{key}" for part in ("mixer", "cross") for key in ("bias", "scores.scale"))

# theirs: the first of ours that is there; joined by `+`, `[n]` one of two halves
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
# where the norms of a layer go, in the order of ours
EACH = ("self_attention/layer_norm", "ffn/layer_norm")
NORMS = {
    "post-norm": EACH,
    "pre-norm": EACH,
    "sandwich": (
        "input_layer_norm",
        "post_attention_layer_norm",
        "pre_feedforward_layer_norm",
        "post_feedforward_layer_norm",
    ),
    "parallel one": ("shared_layer_norm",),
    "parallel each": ("input_layer_norm", "post_attention_layer_norm"),
}


def checked(model: Any) -> Tree:
    """The tree of a model that CTranslate2 can run, or everything that it cannot do, by name."""
    tree = meaning(model.config)
    kind = tree["kind"]
    if kind not in RULES:
        raise UserError(f"a model of kind {kind} cannot be said to CTranslate2, only {', '.join(RULES)}")
    problems = list(_refused(tree, RULES[kind]))
    for side in ("encoder", "decoder"):
        if side in tree and not problems:
            problems += _stack_problems(tree, side)
    if problems:
        raise UserError("CTranslate2 cannot run this model:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return tree


def _refused(node: Any, rules: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Leaves that no rule allows; where the kind of a part is not known, only that."""
    if isinstance(node, list):
        for number, entry in enumerate(node):
            yield from _refused(entry, rules, f"{path}[{number}]")
        return
    strange = list(_asked(node["kind"], rules, "kind", path)) if "kind" in node else []
    yield from strange
    for key, value in () if strange else node.items():
        yield from _asked(value, rules, key, path)


def _asked(value: Any, rules: Mapping[str, Any], key: str, path: str) -> Iterator[str]:
    where = f"{path}.{key}" if path else key
    if isinstance(value, dict | list) and value:
        yield from _refused(value, _inside(rules, key), where)
        return
    allowed = next((rule for names, rule in rules.items() if _names(names, key)), None)
    if allowed is None or (allowed != ANY and value not in allowed):
        only = "" if allowed is None else f" (only {', '.join(map(str, allowed))})"
        yield f"{where}: {value!r} cannot be said{only}"


def _names(names: str, key: str) -> bool:
    return any(fnmatchcase(key, name) for name in names.split("|"))


def _inside(rules: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The rules of what stands under a key."""
    found: dict[str, Any] = {}
    for names, rule in rules.items():
        first, _, rest = names.partition(".")
        if first != key and first != "*":
            continue
        if rest == "*" and isinstance(rule, Mapping):
            found = {**found, **{name: each for name, each in rule.items() if name not in found}}
        elif rest:
            found.setdefault(rest, rule)
        elif rule == ANY and first == "*":
            found.setdefault("*", ANY)
    return found


def _stack_problems(tree: Tree, side: str) -> Iterator[str]:
    """What is said once for a whole stack, or for the whole model, and is not the same everywhere."""
    first, *others = tree[side]
    for number, other in enumerate(others, 1):
        for text in differences(_without(other), _without(first)):
            yield f"{side}[{number}].{text}, as in the layers before it"
    mixer, cross = first["mixer"], first["cross"]
    for key in ("heads", "kv_heads", "head_width") if cross else ():
        if cross[key] != mixer[key]:
            yield f"{side}[0].cross.{key}: {cross[key]!r} cannot be said (only {mixer[key]!r}, as of its mixer)"
    name = "source_embed" if side == "encoder" and tree.get("source_embed") else "embed"
    kinds = tree[name]["positions"]["kind"], mixer["positions"]["kind"]
    if "none" not in kinds:
        yield f"{name}.positions: {kinds[0]!r} cannot be said beside {kinds[1]!r} in attention"
    for path, norm in ((f"{name}.norm", tree[name]["norm"]), (f"{side}[0].mixer.qk_norm", mixer["qk_norm"])):
        if norm is not None and (norm["kind"], norm["eps"]) != (tree["norm"]["kind"], tree["norm"]["eps"]):
            yield f"{path}: {norm['kind']!r} with eps {norm['eps']} cannot be said (only the model's own norm)"
    positions = mixer["positions"]
    if positions["kind"] == "buckets" and positions["bidirectional"] not in (None, side == "encoder"):
        yield f"{side}[0].mixer.positions.bidirectional: {positions['bidirectional']} cannot be said here"
    if positions["kind"] == "rotary" and positions["values"]:
        yield f"{side}[0].mixer.positions.values: values that turn cannot be said"
    if positions["kind"] == "rotary" and positions["fraction"] < 1 and positions["scaling"]["kind"] == "yarn":
        yield f"{side}[0].mixer.positions.scaling: 'yarn' cannot be said where only a part of a head turns"


def _without(layer: Tree, path: str = "") -> Tree:
    """A layer less what may differ between layers."""
    found = {}
    for key, value in layer.items():
        where = f"{path}{key}"
        if where not in VARIES:
            found[key] = _without(value, f"{where}.") if isinstance(value, dict) else value
    return found


# --- switches ---------------------------------------------------------------------------------------------------------


def switches(tree: Tree, side: str) -> dict[str, Any]:
    """What the constructor of a stack of theirs is told."""
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
        "layernorm_embedding": embed["norm"] is not None,
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
            "rotary_dim": 0,  # all; what is a part is told with the weights
            "rotary_interleave": positions["order"] == "interleaved",
            "rotary_base": positions["base"],
        }
        if positions["scaling"]["kind"] != "none":  # any frequencies are plain ones times a factor for each
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


def fill_stack(spec: Any, stack: Any, embed: Any, places: int) -> None:
    """An encoder or a decoder of theirs from ours and the embedding before it."""
    spec.scale_embeddings = embed.scale != 1.0
    tokens, *types = spec.embeddings if isinstance(spec.embeddings, list) else [spec.embeddings]
    tokens.weight = embed.tokens.weight.detach()
    for table in types:
        table.weight = embed.types.weight.detach() / embed.scale  # they scale these as well
    if type(stack.blocks[0].sublayers["mixer"].relative) is RelativeModule:
        spec.position_encodings.encodings = _places(embed, places)
    elif hasattr(spec, PLACES):
        delattr(spec, PLACES)  # attention knows them
    for name, norm in (("layernorm_embedding", embed.norm), ("layer_norm", stack.end)):
        if norm is not None:
            _put(spec, name, [_Part.of(norm, embed.tokens.weight[0])])
    for layer, block in zip(spec.layer, stack.blocks, strict=True):
        fill_layer(layer, block, embed.tokens.weight[0])


def fill_layer(spec: Any, block: Any, vector: Tensor) -> None:
    """`vector`: some features of a token, for norms that have no weights."""
    for theirs, choices in LAYER.items():
        found = (_parts(block.sublayers, text) for text in choices)
        if parts := next((each for each in found if each), None):
            _put(spec, theirs, parts)
    wiring = block.wiring.config
    names = NORMS[f"parallel {wiring.norms}" if wiring.kind == "parallel" else wiring.kind]
    if len(block.sublayers) == 3:
        names = (names[0], "attention/layer_norm", names[1])
    for name, norm in zip(names, block.wiring.norms, strict=True):
        _put(spec, name, [_Part.of(norm, vector)])
    _fill_scores(spec.self_attention, block.sublayers["mixer"])
    if "cross" in block.sublayers:
        _fill_scores(spec.attention, block.sublayers["cross"])
        for name in ("q_norm", "k_norm"):  # theirs says them for both and then forgets those of the source
            spec.attention.__dict__.pop(name, None)


def _fill_scores(spec: Any, attention: Any) -> None:
    """What is multiplied with scores, and what is known of distances."""
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
        slower = (trained(config.base, relative.width) / relative.frequencies).float()  # type: ignore[union-attr]
        spec.rotary_scaling_long_factor = spec.rotary_scaling_short_factor = slower
        magnitude = config.scaling.magnitude  # type: ignore[union-attr]
    spec.queries_scale = float(attention.scores.scale * relative.sharpness * magnitude**2)


def _places(embed: Any, count: int) -> Tensor:
    """A vector for each place; zeros where none are added."""
    like = embed.tokens.weight
    count = count if embed.limit is None else embed.limit
    found = embed.positions(torch.arange(count, device=like.device)[None])
    if found is None:
        return torch.zeros(count, like.shape[1], dtype=like.dtype)
    return found[0].detach().to(like.dtype)


@dataclass(frozen=True)
class _Part:
    weight: Tensor
    bias: Tensor | None
    offset: int | None  # only RMS norms have one

    @classmethod
    def of(cls, module: Any, vector: Tensor | None = None) -> _Part:
        weight, bias = module.weight, getattr(module, "bias", None)
        if weight is None and vector is not None:
            weight = torch.ones_like(vector)
        return cls(weight.detach(), None if bias is None else bias.detach(), getattr(module, "offset", None))

    def half(self, number: int) -> _Part:
        return _Part(self.weight.chunk(2)[number], None if self.bias is None else self.bias.chunk(2)[number], None)


def _parts(modules: Any, text: str) -> list[_Part] | None:
    """Those of ours that a text names; None where one of them is not there."""
    found = []
    for name in text.split(" + "):
        name, _, half = name.partition("[")
        place, _, inner = name.partition(".")
        module: Any = dict(modules.items()).get(place)
        for step in inner.split("."):
            module = getattr(module, step, None)
        if module is None:
            return None
        found.append(_Part.of(module).half(int(half[0])) if half else _Part.of(module))
    return found


def _put(root: Any, path: str, parts: list[_Part]) -> None:
    """A linear map, a norm, or a table that is a variable itself."""
    from ctranslate2.specs import common_spec, model_spec

    scope, _, name = path.rpartition("/")
    spec, owner, first = model_spec.index_spec(root, path), model_spec.index_spec(root, scope), parts[0]
    if isinstance(spec, common_spec.LinearSpec):
        spec.weight = torch.cat([part.weight for part in parts]) if len(parts) > 1 else first.weight
        if any(part.bias is not None for part in parts):  # of joined maps some may have none
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
