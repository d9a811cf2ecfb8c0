"""Every mistake in a config is one line in our own words."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest

from allyouneed import plugins
from allyouneed.config import Config, ConfigError, parse
from allyouneed.config.messages import FOREIGN_NAMES, unknown_key
from allyouneed.errors import UserError
from allyouneed.nn.channels.feedforward import FFN
from allyouneed.nn.channels.moe import MoE
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Layer
from allyouneed.nn.models.decoder import Decoder
from allyouneed.nn.models.layer_text import expand_layers
from allyouneed.nn.patterns.core import Pattern
from allyouneed.training import load_recipe
from allyouneed.training.recipe.recipe import Recipe

RECIPE = "model: transformer-tiny\ndata: {train: pairs.tsv}\n"


def problems(tmp_path: Path, line: str) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(RECIPE + line)
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "recipe.yaml")
    return caught.value.problems


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("steps: twenty", "steps: expected an integer, not 'twenty'"),
        ("steps: 1.5", "steps: expected an integer, not 1.5"),
        ("steps: null\nclip: [1]", "clip: expected a number, not [1]"),
        ("tensorboard: perhaps", "tensorboard: expected true or false, not 'perhaps'"),
        ("name: 5", "name: expected a text, not 5"),
        ("set: 5", "set: expected a list, not 5"),
        ("batch: 5", "batch: expected a mapping of keys, not 5"),
        ("batch: {row: 3}", "batch.row: must be at least 4, not 3"),
        ("average: -1", "average: must be at least 0, not -1"),
        ("output: {}", "output: expected a path, not {}"),
        ("save: {every: x}", "save.every: expected an integer, not 'x'"),
        ("task: {kind: masked-lm, share: 2}", "task.share: must be less than 1, not 2"),
        ("lr: 0.1", "lr: unknown; set `schedule.peak` (allowed here: "),
        ("schedule: {kind: constant, peak: 1, lr: 0.1}", "schedule.lr: unknown; did you mean 'peak'? ("),
        ("hidden_size: 512", "hidden_size: unknown; set `width` of the model ("),
        ("num_layers: 6", "num_layers: unknown; set `repeat` of a layer ("),
    ],
)
def test_every_mistake_is_one_plain_line(tmp_path: Path, line: str, said: str) -> None:
    (problem,) = problems(tmp_path, line)
    assert problem.startswith(said) and "\n" not in problem and "Input should" not in problem


def test_a_union_is_one_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, {"model": 5, "data": {"train": "a.tsv"}, "output": "out"})
    assert caught.value.problems == ["model: expected a text, a mapping or null, not 5"]
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, {"model": "gpt2", "data": {"train": {"path": "a.tsv", "columns": [1.5, 0]}}, "output": "out"})
    assert caught.value.problems == ["data.train[0].columns[0]: expected an integer or a text, not 1.5"]


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Decoder, {"width": "x" * 5000, "vocab": 5, "decoder": []})
    assert len(caught.value.problems[0]) < 120


def _reach(cls: type[Config], path: str) -> bool:
    """Whether a dotted path names a field, of any part where a slot is passed."""
    name, _, rest = path.partition(".")
    field = next((f for key, f in cls.model_fields.items() if name in (key, f.alias)), None)
    if field is None:
        return False
    kinds: list[Any] = [one for one in (field.annotation, *typing.get_args(field.annotation)) if isinstance(one, type)]
    return not rest or any(
        _reach(part, rest) for kind in kinds for part in (getattr(kind, "registry", None) or {"": kind}).values()
    )


def test_foreign_names_lead_to_keys_that_exist() -> None:
    homes: dict[str, tuple[type[Config], ...]] = {
        "": (Recipe,),
        " of the model": (Decoder,),
        " of a layer": (Layer,),
        " of the token mixer": (Attention,),
        " of the channel mixer": (FFN, MoE),
    }
    names = [name for keys in FOREIGN_NAMES.values() for text in keys.values() for name in text.split()]
    assert len(names) == len(set(names)) > 100
    for place, keys in FOREIGN_NAMES.items():
        for key in keys:
            assert any(_reach(home, key) for home in homes[place]), key
    assert unknown_key("num_heads", Attention.model_fields).startswith("unknown; did you mean 'heads'?")
    assert unknown_key("num_heads", Layer.model_fields).startswith("unknown; set `heads` of the token mixer (")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("window(3", "missing ')': the '(' at character 7 is not closed, in 'window(3'"),
        ("causal & (window(3) | full", "missing ')': the '(' at character 10 is not closed"),
        ("causal)", "unexpected ')' at character 7; no '(' is open"),
    ],
)
def test_a_missing_parenthesis_is_named_with_its_place(text: str, said: str) -> None:
    from allyouneed.apps.inspect.pictures.pattern import read

    with pytest.raises(UserError) as caught:
        read(text)
    assert str(caught.value).startswith(said)
    assert Pattern.from_text("causal & (window(3) | full)")
    with pytest.raises(ValueError, match=r"missing '\)': the '\(' at character 3 is not closed, in '2×\(a, b'"):
        expand_layers("2×(a, b", {"a": {}, "b": {}})


# --- length ----------------------------------------------------------------------------------------------------------


def test_a_message_has_at_most_twenty_lines_of_bounded_length() -> None:
    found = str(UserError("a list\n  " + "\n  ".join(map(str, range(100_000)))))
    assert found.count("\n") == 19 and found.endswith("\n  17\n  … and 99,982 more lines")
    again = str(UserError(f"folder:\nmodel: {found}"))  # quoted by another message: the count stays right
    assert again.count("\n") == 19 and again.endswith("\n  16\n  … and 99,983 more lines")
    assert len(str(UserError("x" * 10**6))) < 5000
    whole = "\n".join(["one line"] * 20)
    assert str(UserError(whole)) == whole and str(UserError()) == ""


@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "decoder", "decoder": [{}], **{f"key{number}": 1 for number in range(30_000)}},
        {"kind": "decoder", "decoder": [{"mixer": {"kind": "nope"}}] * 2000},
        {"kind": "decoder", "decoder": [{"mixer": {"kind": "attention", f"key{n}": 1}} for n in range(2000)]},
        {"kind": "decoder", "decoder": [{}], "k" * 10**6: 1},
    ],
    ids=["keys", "kinds", "keys of parts", "a long key"],
)
def test_thousands_of_mistakes_are_a_short_message(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And each costs little: reading the metadata of all packages for each unknown kind took milliseconds."""
    asked: list[Any] = []
    read = plugins.entry_points
    monkeypatch.setattr(plugins, "entry_points", lambda **given: asked.append(given) or read(**given))
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree | {"width": 8, "vocab": 10})  # type: ignore[type-abstract]
    assert str(caught.value).count("\n") < 20 and len(str(caught.value)) < 30_000
    assert len(caught.value.problems) <= 1100 and len(asked) <= 1


def test_a_stack_of_too_many_layers_is_refused_by_its_length() -> None:
    layers = [{"mixer": object()}] * 20_000
    with pytest.raises(ConfigError, match=r"^decoder: 20,000 layers; at most 10,000 are supported$"):
        parse(Model, {"kind": "decoder", "width": 8, "vocab": 10, "decoder": layers})  # type: ignore[type-abstract]
