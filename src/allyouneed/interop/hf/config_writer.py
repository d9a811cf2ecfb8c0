"""Saying our model in their words: what a family's `back` asks our tree, the mirror of config_reader.py.

A path goes through a list of layers by its first entry: `said["decoder.mixer.heads"]`. `back` may be short and
careless: what it makes is read again by the family's own `tree`, and whatever does not come back is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from allyouneed.config import tree_of
from allyouneed.interop.hf.config_reader import ACTIVATIONS, Tree
from allyouneed.nn.models.base import Model

# only training looks at these
TRAINING = ("dropout", "init", "jitter", "z_loss", "balance")


class Said:
    """Our tree, with every default in it. What is asked for and not there is noted in `problems`."""

    def __init__(self, tree: Tree, where: str = "", problems: list[str] | None = None) -> None:
        self.tree, self.where = tree, where
        self.problems: list[str] = [] if problems is None else problems

    def get(self, path: str, default: Any = None) -> Any:
        """What stands there, or what to say where nothing does."""
        node: Any = self.tree
        for step in path.split("."):
            node = node[0] if isinstance(node, list) and node else node
            node = node.get(step) if isinstance(node, dict) else None
        return default if node is None else node

    def __getitem__(self, path: str) -> Any:
        found = self.get(path)
        if found is None:
            self.problems.append(f"{self.where}{path}: is needed, and {self._nearest(path)} has none")
        return found

    def _nearest(self, path: str) -> str:
        """The part on this path that is there, by its kind."""
        ways = path.split(".")
        for count in reversed(range(1, len(ways))):
            if (kind := self.get(".".join([*ways[:count], "kind"]))) is not None:
                return f"{kind!r} in {self.where}{'.'.join(ways[:count])}"
        return f"this {self.tree.get('kind', 'layer')}"

    def layers(self, side: str) -> list[Said]:
        """Each layer of a stack, written out."""
        entries = enumerate(self[side] or [])
        return [Said(one, f"{side}[{n}].", self.problems) for n, one in entries for _ in range(one["repeat"])]

    def depth(self, side: str) -> int:
        return sum(layer["repeat"] for layer in self.get(side, []))

    def word(self, path: str, words: Mapping[Any, Any]) -> Any:
        """Theirs for ours, by the words that turn theirs into ours."""
        ours = self[path]
        theirs = [word for word, meant in words.items() if meant == ours]
        if not theirs and ours is not None:
            self.problems.append(
                f"{self.where}{path}: {ours!r} has no word there ({', '.join(map(str, words.values()))} have)"
            )
        return next(iter(theirs), None)

    def flag(self, path: str) -> bool:
        """On or off, of something that ours may have for each of several maps."""
        said = self[path]
        each = set(said.values()) if isinstance(said, dict) else {said}
        if len(each) > 1:
            self.problems.append(f"{self.where}{path}: {said} is not the same for all, and has no word there")
        return bool(next(iter(each)))

    def writer(self, name: str) -> list[str]:
        """`architectures` of a decoder: this class, or, without a head, the bare one."""
        bare = self.get("head.kind") == "none"
        return [re.sub("(ForCausalLM|LMHeadModel|ModelWithLMHead)$", "Model", name) if bare else name]

    def norm(self, path: str) -> float:
        """How much a norm adds before it divides."""
        eps: float = self[f"{path}.eps"]
        return eps

    def numbers(self, form: str, text: str | None, count: int) -> list[int]:
        """Those in a text of this form (a pattern); so many zeros where it has another, which nobody can mean."""
        match = re.fullmatch(form, text or "")
        return [int(group) for group in match.groups()] if match else [0] * count

    def activation(self, path: str, tanh: str = "gelu_new") -> str:
        """`tanh`: which of several words a family has for the gelu that is made of it."""
        word: str = tanh if self[path] == "gelu-tanh" else self.word(path, ACTIVATIONS)
        return word


def meaning(config: Model) -> Tree:
    """A model's tree in one way of saying it, without what only training looks at."""
    tree = tree_of(config, full=True)
    found: Tree = _plain(tree, tree.get("width"))
    if isinstance(source := found.get("source_embed"), dict):
        source.pop("tied", None)  # a head is tied to what is written
    return found


def _plain(node: Any, width: Any) -> Any:
    if isinstance(node, list):
        return _runs([_plain(entry, width) for entry in node])
    if not isinstance(node, dict):
        return float(f"{node:.12g}") if isinstance(node, float) else node
    width = node.get("width") or width  # a tower's own
    found = {key: _plain(value, width) for key, value in node.items() if key not in TRAINING}
    if node.get("kind") == "attention":
        found["kv_heads"] = node["kv_heads"] or node["heads"]
        found["head_width"] = node["head_width"] or width // node["heads"]
        if isinstance(bias := node["bias"], bool):
            found["bias"] = dict.fromkeys(("q", "k", "v", "out"), bias)
        usual = found["head_width"] ** -0.5
        scales = {"dot": 1.0, "scaled-dot": node["scores"].get("scale") or usual}
        if (kind := node["scores"]["kind"]) in scales:
            found["scores"] = {"kind": "scaled-dot", "scale": float(f"{scales[kind]:.12g}")}
    return found


def _runs(entries: list[Any]) -> list[Any]:
    """Layers alike that follow each other are said once; those that share weights are not the same when apart."""
    if not all(isinstance(entry, dict) and "repeat" in entry for entry in entries):
        return entries
    found = []
    for _, run in groupby(enumerate(entries), lambda pair: _name(*pair)):
        alike = [entry for _, entry in run]
        found.append(alike[0] | {"repeat": sum(entry["repeat"] for entry in alike)})
    return found


def _name(number: int, entry: Tree) -> Any:
    without = {key: value for key, value in entry.items() if key != "repeat"}
    return (number if entry.get("share") else None), without


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What the one says and the other does not, by path; where two parts are of different kinds, only that."""
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
        yield f"{path}: {_short(ours)} cannot be said (only {_short(theirs)})"


def _short(value: Any) -> str:
    text = f"{len(value)} kinds of layers" if isinstance(value, list) else repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"
