"""What CTranslate2 can run: for each path of a model's tree the values it has a word for. Whatever no rule names is
refused, all of it at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from allyouneed.errors import UserError
from allyouneed.interop.hf.config_reader import Tree
from allyouneed.interop.hf.config_writer import differences, meaning

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
SOUND = {"kind": ("frames",), "mels": ANY, "positions.kind": ("sinusoidal", "learned"), "positions.*": ANY}
# an encoder of sounds has no switches at all
FIXED = {
    "wiring.kind": ("pre-norm",),
    "wiring.final": (True,),
    "mixer.positions.kind": ("none",),
    "mixer.*": CROSSES["cross.*"],
    "channel.kind": ("ffn",),
    "channel.activation": ("gelu",),
}
HEARS = {**FIXED, **{path: rule for path, rule in READS.items() if path not in FIXED}}
RULES["sound"] = {
    "norm.kind": ("layer",),
    **RULES["encoder-decoder"],
    "source_embed.*": SOUND,
    "encoder.*": HEARS,
}
VARIES: tuple[str, ...] = ("repeat", "share", "channel.hidden", "channel.bias")  # from layer to layer
VARIES += tuple(f"{part}.{key}" for part in ("mixer", "cross") for key in ("bias", "scores.scale"))


def kind_of(tree: Tree) -> str:
    """What it is to CTranslate2: an encoder-decoder that reads sound is not one that reads text."""
    source = tree.get("source_embed") or {}
    return "sound" if source.get("kind") == "frames" else str(tree["kind"])


def checked(model: Any) -> Tree:
    """The tree of a model that CTranslate2 can run, or everything that it cannot do, by name."""
    tree = meaning(model.config)
    kind = kind_of(tree)
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
    for path, norm in ((f"{name}.norm", tree[name].get("norm")), (f"{side}[0].mixer.qk_norm", mixer["qk_norm"])):
        if norm is not None and (norm["kind"], norm["eps"]) != (tree["norm"]["kind"], tree["norm"]["eps"]):
            yield f"{path}: {norm['kind']!r} with eps {norm['eps']} cannot be said (only the model's own norm)"
    positions = mixer["positions"]
    if kind_of(tree) == "sound" and side == "encoder":
        for key, only in (("kv_heads", mixer["heads"]), ("head_width", tree["width"] / mixer["heads"])):
            if mixer[key] != only:
                yield f"encoder[0].mixer.{key}: {mixer[key]} cannot be said where sound is read (only {only:g})"
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
