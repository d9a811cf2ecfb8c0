"""What CTranslate2 can run: the allowed values for each path of a model's tree. Everything else is refused, all at
once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import Tree
from allyouneed.interop.hf.config_writer import canonical_tree, differences

ANY = ("*",)
ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu-tanh": "GELUTanh",
    "quick-gelu": "GELUSigmoid",
    "silu": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}

# allowed values per path; a path without a rule is refused
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
    "chosen": ("none",),
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
    "wiring.depth_dropout": ANY,
    "mixer.positions.kind": ("none", "shaw", "buckets", "rotary"),
    "mixer.positions.*": ROTARY | {"terms": ("key",), "distance|buckets|untied|bidirectional": ANY},
    "mixer.*": ATTENTION,
    "cross": (None,),
    "channel.kind": ("ffn", "glu"),
    "channel.hidden|bias": ANY,
    "channel.activation": tuple(ACTIVATIONS),
    "channel.norm": (False,),
}
ENCODER_LAYERS = {"mixer.pattern": ("full",), **LAYERS}
CROSS_DECODER_LAYERS = {
    "mixer.pattern": ("causal",),
    "cross.pattern": ("full",),
    "cross.qk_norm": (None,),
    "cross.*": {path: rule for path, rule in ATTENTION.items() if path != "qk_norm.*"},
    **LAYERS,
}
# a decoder-only stack has more options
DECODER_ONLY_LAYERS = {
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
    "copy": (False,),
    "pair": (None,),
}
MODEL = {"kind|width|vocab": ANY, "vocab.*": ANY, "linear.kind": ("dense",), "norm.*": NORM}
RULES: dict[str, Mapping[str, Any]] = {
    "encoder-decoder": {
        **MODEL,
        "embed.*": EMBED,
        "source_embed": (None,),
        "source_embed.*": EMBED,
        "context": ([],),
        "separator": (None,),
        "encoder.*": ENCODER_LAYERS,
        "decoder.*": CROSS_DECODER_LAYERS,
        "head.*": HEAD,
    },
    "decoder": {**MODEL, "embed.*": EMBED, "decoder.*": DECODER_ONLY_LAYERS, "head.*": HEAD},
    "encoder": {
        **MODEL,
        "embed.types": ANY,
        "embed.*": EMBED,
        "encoder.*": ENCODER_LAYERS,
        "generator": (None,),
        "head.kind": ("none", "pooled"),
        "head.width": (None,),
        "head.*": ANY,
    },
}
AUDIO_EMBED = {"kind": ("frames",), "mels": ANY, "positions.kind": ("sinusoidal", "learned"), "positions.*": ANY}
# the audio encoder has no options
AUDIO_FIXED = {
    "wiring.kind": ("pre-norm",),
    "wiring.final": (True,),
    "mixer.positions.kind": ("none",),
    "mixer.*": CROSS_DECODER_LAYERS["cross.*"],
    "channel.kind": ("ffn",),
    "channel.activation": ("gelu",),
}
AUDIO_ENCODER_LAYERS = {
    **AUDIO_FIXED,
    **{path: rule for path, rule in ENCODER_LAYERS.items() if path not in AUDIO_FIXED},
}
RULES["sound"] = {
    "norm.kind": ("layer",),
    **RULES["encoder-decoder"],
    "source_embed.*": AUDIO_EMBED,
    "encoder.*": AUDIO_ENCODER_LAYERS,
}
MAY_VARY: tuple[str, ...] = ("repeat", "share", "channel.hidden", "channel.bias")  # from layer to layer
MAY_VARY += tuple(f"{part}.{key}" for part in ("mixer", "cross") for key in ("bias", "scores.scale"))


def kind_of(tree: Tree) -> str:
    """CTranslate2's kind of model: an encoder-decoder over audio has its own."""
    source = tree.get("source_embed") or {}
    return "sound" if source.get("kind") == "frames" else str(tree["kind"])


def check(model: Any) -> Tree:
    """The canonical tree of a model that CTranslate2 can run; otherwise an error with everything unsupported."""
    tree = canonical_tree(model.config)
    kind = kind_of(tree)
    if kind not in RULES:
        raise UserError(f"CTranslate2 cannot run a model of kind {kind} (allowed: {', '.join(RULES)})")
    problems = list(_violations(tree, RULES[kind]))
    for side in ("encoder", "decoder"):
        if side in tree and not problems:
            problems += _stack_problems(tree, side)
    if problems:
        raise UserError("CTranslate2 cannot run this model:\n  " + "\n  ".join(dict.fromkeys(problems)))
    return tree


def _violations(node: Any, rules: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Leaves that no rule allows; where the kind of a part is unsupported, only that."""
    if isinstance(node, list):
        for number, entry in enumerate(node):
            yield from _violations(entry, rules, f"{path}[{number}]")
        return
    unsupported = list(_check_value(node["kind"], rules, "kind", path)) if "kind" in node else []
    yield from unsupported
    for key, value in () if unsupported else node.items():
        yield from _check_value(value, rules, key, path)


def _check_value(value: Any, rules: Mapping[str, Any], key: str, path: str) -> Iterator[str]:
    where = f"{path}.{key}" if path else key
    if isinstance(value, dict | list) and value:
        yield from _violations(value, _rules_under(rules, key), where)
        return
    allowed = next((rule for names, rule in rules.items() if _matches(names, key)), None)
    if allowed is None or (allowed != ANY and value not in allowed):
        only = "" if allowed is None else f" (only {', '.join(map(str, allowed))})"
        yield f"{where}: {value!r} is not supported{only}"


def _matches(names: str, key: str) -> bool:
    return any(fnmatchcase(key, name) for name in names.split("|"))


def _rules_under(rules: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The rules for the tree under a key."""
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
    """Options that CTranslate2 has once per stack or per model, where ours differ between layers."""
    first, *others = tree[side]
    for number, other in enumerate(others, 1):
        for text in differences(_without_varying(other), _without_varying(first)):
            yield f"{side}[{number}].{text}, as in the first layer"
    mixer, cross = first["mixer"], first["cross"]
    for key in ("heads", "kv_heads", "head_width") if cross else ():
        if cross[key] != mixer[key]:
            yield f"{side}[0].cross.{key}: {cross[key]!r} is not supported (only {mixer[key]!r}, as in its mixer)"
    name = "source_embed" if side == "encoder" and tree.get("source_embed") else "embed"
    kinds = tree[name]["positions"]["kind"], mixer["positions"]["kind"]
    if "none" not in kinds:
        yield f"{name}.positions: {kinds[0]!r} is not supported beside {kinds[1]!r} in attention"
    for path, norm in ((f"{name}.norm", tree[name].get("norm")), (f"{side}[0].mixer.qk_norm", mixer["qk_norm"])):
        if norm is not None and (norm["kind"], norm["eps"]) != (tree["norm"]["kind"], tree["norm"]["eps"]):
            yield f"{path}: {norm['kind']!r} with eps {norm['eps']} is not supported (only the model's own norm)"
    positions = mixer["positions"]
    if kind_of(tree) == "sound" and side == "encoder":
        for key, only in (("kv_heads", mixer["heads"]), ("head_width", tree["width"] / mixer["heads"])):
            if mixer[key] != only:
                yield f"encoder[0].mixer.{key}: {mixer[key]} is not supported in an audio encoder (only {only:g})"
    if positions["kind"] == "buckets" and positions["bidirectional"] not in (None, side == "encoder"):
        yield f"{side}[0].mixer.positions.bidirectional: {positions['bidirectional']} is not supported here"
    if positions["kind"] == "rotary" and positions["values"]:
        yield f"{side}[0].mixer.positions.values: rotated values are not supported"
    if positions["kind"] == "rotary" and positions["fraction"] < 1 and positions["scaling"]["kind"] == "yarn":
        yield f"{side}[0].mixer.positions.scaling: 'yarn' is not supported where only part of a head is rotated"


def _without_varying(layer: Tree, path: str = "") -> Tree:
    """A layer without the keys that may differ between layers."""
    found = {}
    for key, value in layer.items():
        where = f"{path}{key}"
        if where not in MAY_VARY:
            found[key] = _without_varying(value, f"{where}.") if isinstance(value, dict) else value
    return found
