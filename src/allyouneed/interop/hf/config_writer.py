"""Write our model as a Hugging Face config: the view of our tree that a family's table reads; mirrors config_reader.py.

A path goes through a list of layers by its first entry: `ours["decoder.mixer.heads"]`, or by the first whose part is of
a kind: `ours["decoder.channel<moe>.experts"]`. What is written is read back, and every difference is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any

from allyouneed.config import tree_of
from allyouneed.interop.hf.config_reader import ACTIVATIONS, Tree
from allyouneed.nn.models.base import Model

OMITTED: Any = object()  # the value of a key that is not written, or of an option that is not set
TRAINING_KEYS = ("dropout", "depth_dropout", "init", "jitter", "z_loss", "balance")  # no effect on inference


class ModelTree:
    """Our config tree with all defaults filled in. Missing paths that were required are recorded in `problems`."""

    def __init__(self, tree: Tree, prefix: str = "", problems: list[str] | None = None) -> None:
        self.tree, self.prefix = tree, prefix
        self.problems: list[str] = [] if problems is None else problems

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a path; the `repeat` of a stack is its depth."""
        if path.endswith(".repeat"):
            return self.depth(path.removesuffix(".repeat"))
        nodes: list[Any] = [self.tree]
        for name, kind in split_path(path):
            nodes = [layer for node in nodes for layer in (node if isinstance(node, list) else [node])]
            nodes = [node.get(name) if isinstance(node, dict) else None for node in nodes]
            nodes = [node for node in nodes if kind is None or (isinstance(node, dict) and node["kind"] == kind)]
        return default if not nodes or nodes[0] is None else nodes[0]

    def has_kinds(self, path: str) -> bool:
        """Whether there are parts of the kinds that the path names."""
        place = path.rpartition(">")[0]
        return not place or self.get(f"{place}>") is not None

    def __getitem__(self, path: str) -> Any:
        found = self.get(path)
        if found is None:
            path = re.sub("<.*?>", "", path)
            self.problems.append(f"{self.prefix}{path}: required, but {self._nearest(path)} has none")
        return found

    def _nearest(self, path: str) -> str:
        """The deepest part on this path that exists, by its kind."""
        keys = path.split(".")
        for count in reversed(range(1, len(keys))):
            if (kind := self.get(".".join([*keys[:count], "kind"]))) is not None:
                return f"{kind!r} in {self.prefix}{'.'.join(keys[:count])}"
        return f"this {self.tree.get('kind', 'layer')}"

    def layers(self, side: str) -> list[ModelTree]:
        """Every layer of a stack, with `repeat` unrolled."""
        entries = enumerate(self[side] or [])
        return [ModelTree(one, f"{side}[{n}].", self.problems) for n, one in entries for _ in range(one["repeat"])]

    def depth(self, side: str) -> int:
        return sum(layer["repeat"] for layer in self.get(side, []))

    def hf_name(self, path: str, names: Mapping[Any, Any]) -> Any:
        """Their name for our value, from a mapping of theirs to ours."""
        ours = self[path]
        found = [theirs for theirs, name in names.items() if name == ours]
        if not found and ours is not None:
            allowed = ", ".join(map(str, dict.fromkeys(names.values())))
            self.problems.append(f"{self.prefix}{path}: {ours!r} has no counterpart (allowed: {allowed})")
        return next(iter(found), None)

    def flag(self, path: str) -> bool:
        """One flag for an option that ours may set per projection."""
        value = self[path]
        each = set(value.values()) if isinstance(value, dict) else {value}
        if len(each) > 1:
            self.problems.append(f"{self.prefix}{path}: {value} differs between projections and has no counterpart")
        return bool(next(iter(each)))

    def architectures(self, name: str) -> list[str]:
        """`architectures` of a decoder: this class, or the class without a head."""
        headless = self.get("head.kind") == "none"
        return [re.sub("(ForCausalLM|LMHeadModel|ModelWithLMHead)$", "Model", name) if headless else name]

    def parse_integers(self, pattern: str, text: str | None, count: int) -> list[int]:
        """The groups of `pattern` in `text`; zeros where it does not match, which the round-trip check refuses."""
        match = re.fullmatch(pattern, text or "")
        return [int(group) for group in match.groups()] if match else [0] * count

    def window(self) -> int | None:
        """The causal window of the first layer that has one."""
        patterns = [layer.get("mixer.pattern", "") for layer in self.layers("decoder")]
        found = (re.fullmatch(r"causal & window\((\d+)\)", pattern) for pattern in patterns)
        return next((int(match[1]) for match in found if match), None)

    def activation(self, path: str, tanh: str = "gelu_new") -> str:
        """`tanh`: the family's name for the tanh approximation of GELU, which has several."""
        return tanh if self[path] == "gelu-tanh" else self.hf_name(path, ACTIVATIONS)


@cache
def split_path(path: str) -> tuple[tuple[str, str | None], ...]:
    """The names of a path, each with the kind it is limited to."""
    return tuple((name, kind or None) for name, kind in re.findall(r"(\w+)(?:\[\*\])?(?:<(.+?)>)?", path))


def canonical_tree(config: Model) -> Tree:
    """A model's tree in one canonical form, without training-only options."""
    tree = tree_of(config, full=True)
    found: Tree = _canonical(tree, tree.get("width"))
    if isinstance(source := found.get("source_embed"), dict):
        source.pop("tied", None)  # the head is tied to the target embedding only
    return found


def _canonical(node: Any, width: Any) -> Any:
    if isinstance(node, list):
        return merge_repeats([_canonical(entry, width) for entry in node])
    if not isinstance(node, dict):
        return float(f"{node:.12g}") if isinstance(node, float) else node
    width = node.get("width") or width  # a tower has its own
    found = {key: _canonical(value, width) for key, value in node.items() if key not in TRAINING_KEYS}
    if node.get("kind") == "attention":
        found["kv_heads"] = node["kv_heads"] or node["heads"]
        found["head_width"] = node["head_width"] or width // node["heads"]
        if isinstance(bias := node["bias"], bool):
            found["bias"] = dict.fromkeys(("q", "k", "v", "out"), bias)
        default = found["head_width"] ** -0.5
        scales = {"dot": 1.0, "scaled-dot": node["scores"].get("scale") or default}
        if (kind := node["scores"]["kind"]) in scales:
            found["scores"] = {"kind": "scaled-dot", "scale": float(f"{scales[kind]:.12g}")}
    return found


def merge_repeats(entries: list[Any]) -> list[Any]:
    """Merge equal consecutive layers into one entry; entries with shared weights stay separate."""
    if not all(isinstance(entry, dict) and "repeat" in entry for entry in entries):
        return entries
    found = []
    for _, run in groupby(enumerate(entries), lambda pair: _layer_key(*pair)):
        equal = [entry for _, entry in run]
        found.append(equal[0] | {"repeat": sum(entry["repeat"] for entry in equal)})
    return found


def _layer_key(number: int, entry: Tree) -> Any:
    without = {key: value for key, value in entry.items() if key != "repeat"}
    return (number if entry.get("share") else None), without


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Paths at which two trees differ; where two parts have different kinds, only that."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.get("kind") != theirs.get("kind"):
            ours, theirs = ({"kind": tree.get("kind")} for tree in (ours, theirs))
        for key in dict.fromkeys([*ours, *theirs]):
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(*pair, f"{path}[{number}]")
    elif isinstance(ours, float) and isinstance(theirs, float) and math.isclose(ours, theirs, rel_tol=1e-9):
        return
    elif ours != theirs:
        yield f"{path}: {_short(ours)} cannot be expressed (only {_short(theirs)})"


def _short(value: Any) -> str:
    text = f"{len(value)} different layers" if isinstance(value, list) else repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"
