"""The reference is complete and current: every key of every part is described, in docs/reference/ and in `parts`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from allyouneed.apps.inspect.reference.reference import ReferenceEntry, find, slot_classes, slots
from allyouneed.apps.inspect.reference.reference_pages import pages, terminal
from allyouneed.cli import main
from allyouneed.config import parse
from allyouneed.nn.models.base import Model

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"
PLUGIN = '''
from typing import Literal
from allyouneed.nn.norms import LayerNorm

class Mine(LayerNorm):
    """Somebody 2031, eq. 1."""

    kind: Literal["reference-test"] = "reference-test"
    strength: int = 3
    """How strong it is."""
'''


def run(*args: Any) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    return int(stopped.value.code or 0)


def entries(found: tuple[ReferenceEntry, ...]) -> Iterator[ReferenceEntry]:
    for one in found:
        yield one
        yield from entries(one.groups)


def test_every_part_and_every_key_is_described() -> None:
    missing = []
    for slot in slots(own=True):
        for one in entries(slot.entries):
            missing += [f"{slot.name} {one.name}"] * (not one.text)
            missing += [f"{slot.name} {one.name}.{key.name}" for key in one.keys if not re.search(r"[.…]$", key.text)]
    assert not missing, "write a sentence below each of these fields (or a docstring)"


def test_every_registered_part_and_every_field_is_listed() -> None:
    listed = {(slot.name, one.name): {key.name for key in one.keys} for slot in slots() for one in slot.entries}
    for cls in slot_classes():
        for kind, part in cls.registry.items():
            fields = {field.alias or name for name, field in part.model_fields.items()} - {"kind"}
            assert listed[cls.slot, kind] == fields


def test_the_pages_are_current() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md")}
    assert written == pages(), "run make docs"


def test_examples_on_the_pages_are_valid_models() -> None:
    shown = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", "".join(pages().values()), re.DOTALL)]
    assert len(shown) == 3
    layers, text, _ = (parse(Model, tree) for tree in shown)  # type: ignore[type-abstract]
    assert text.decoder == layers.decoder * 2  # type: ignore[attr-defined]


def test_types_defaults_and_bounds() -> None:
    (attention,) = find("token_mixer", "attention")[0].entries
    keys = {key.name: key for key in attention.keys}
    assert (keys["heads"].type, keys["heads"].default) == ("integer > 0", "required")
    assert (keys["kv_heads"].type, keys["kv_heads"].default) == ("integer > 0 or null", "null")
    assert keys["dropout"].type == "number ≥ 0, < 1" and keys["scores"].default == "scaled-dot"
    assert keys["cache"].type == "'keys' or 'hidden'" and keys["qk_norm"].type == "norm or null"
    assert [group.name for group in attention.groups] == ["bias"]


def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parts") == 0 and "attentive-gru" in capsys.readouterr().out
    assert run("parts", "mixer", "attention") == 0
    assert capsys.readouterr().out.rstrip("\n") == terminal(find("token mixer", "attention"), 120)
    assert run("parts", "rotary") == 0 and "Base of the frequencies" in capsys.readouterr().out
    assert run("parts", "norm", "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["norm"]][:2] == ["layer", "rms"]
    assert run("parts", "mixer", "atention") == 2
    assert "unknown token mixer 'atention'; did you mean 'attention'?" in capsys.readouterr().err
    assert run("parts", "nrom") == 2 and "did you mean 'norm'?" in capsys.readouterr().err


def test_parts_of_a_plugin_are_shown_but_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from allyouneed.nn.norms import Norm

    (tmp_path / "mine.py").write_text(PLUGIN)
    try:
        assert run("parts", "norm", "reference-test", "--plugin", tmp_path / "mine.py") == 0
        shown = capsys.readouterr().out
        assert "How strong it is. [integer; default 3]" in shown and "Added to the variance" in shown
        assert "reference-test" not in pages()["norm.md"]
    finally:
        Norm.registry.pop("reference-test", None)
