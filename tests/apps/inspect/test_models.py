"""The table of presets agrees with their configs, and no model is built for it."""

import io
import json

import pytest
import torch
from rich.console import Console

from allyouneed import model_config
from allyouneed.apps.inspect.reference import models
from allyouneed.apps.inspect.reference.models import LENGTHS, notes, rows, short, table
from allyouneed.config import preset_names
from allyouneed.errors import UserError

every_preset = pytest.mark.parametrize("name", preset_names())


def shown(found, **more):
    console = Console(file=io.StringIO(), width=400)
    console.print(table(found, **more))
    return console.file.getvalue()


@every_preset
def test_a_row_matches_the_config(name):
    (row,) = [row for row in rows([name]) if row.name == name]
    config = model_config(name)
    assert row.parameters == config.cost().parameters
    for at, length in zip(row.at, LENGTHS, strict=True):
        cost = config.cost(length)
        assert (at.length, at.flops) == (length, cost.flops)
        assert at.state == (cost.state_bytes(length, 2, captured=True) if config.generates else None)
        assert at.reached == (config.limit is None or length <= config.limit)


@every_preset
def test_every_preset_names_its_source(name):
    said = models.paper(name)
    assert 20 < len(said) < 400 and not said.endswith((",", ".", ";")) and said.count("(") == said.count(")")


def test_the_source_of_a_preset_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "PRESETS", tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "# A model of mine (I et al.\n# 2026), base. Much more is\n# said.\nkind: decoder\n"
    )
    assert models.paper("mine") == "A model of mine (I et al. 2026), base"


def test_nothing_is_built(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__init__", None)  # would fail with a traceback
    assert [row.name for row in rows()] == sorted([*preset_names(), "translator"])


def test_presets_are_chosen_by_words_and_put_in_order():
    assert [row.name for row in rows(["transformer-b"])] == ["transformer-base", "transformer-big"]
    assert {row.name for row in rows(["tiny", "transformer-b"])} > {"transformer-tiny", "transformer-big"}
    sizes = [row.parameters for row in rows(order="parameters")]
    assert sizes == sorted(sizes)
    for order, key in (("flops", lambda row: row.at[-1].flops), ("state", lambda row: row.at[-1].state or 0)):
        values = [key(row) for row in rows(order=order)]
        assert values == sorted(values)


def test_unknown_presets_are_refused():
    with pytest.raises(UserError, match="did you mean 'transformer-base'"):
        rows(["transformer-bose"])
    with pytest.raises(UserError, match=r"unknown --sort size \(allowed: name, kind, parameters, flops, state\)"):
        rows(order="size")


def test_the_table_marks_what_positions_do_not_reach():
    row = rows(["whisper-tiny"])[0]
    assert row.limit == 448 and not any(at.reached for at in row.at)
    line = next(line for line in shown([row]).splitlines() if "whisper" in line)
    assert line.count("*") == 4 and "B*" in line
    assert any(note.startswith("*") for note in notes([row]))
    far = rows(["transformer-base"])
    assert "*" not in shown(far) and not any(note.startswith("*") for note in notes(far))


def test_the_table_has_papers_on_request():
    found = rows(["transformer-base"])
    assert "Attention Is All You Need" in shown(found, papers=True)
    assert "Attention Is All You Need" not in shown(found)
    assert "Attention Is All You Need" in json.dumps(found[0].tree())


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (999, "999"), (1000, "1k"), (63_082_496, "63.1M"), (999_999, "1000k"), (7e10, "70G")],
)
def test_numbers_are_short(value, text):
    assert short(value) == text
