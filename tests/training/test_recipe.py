from pathlib import Path

import pytest
import yaml

from allyouneed.config import ConfigError, parse
from allyouneed.errors import UserError
from allyouneed.training import Recipe, load_recipe
from allyouneed.training.optim.optimiser import Adam
from allyouneed.training.optim.schedule import Paper
from micro_run import Make


def write(folder: Path, **keys: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"model": "transformer-tiny", "data": {"train": "pairs.tsv"}} | keys))
    return path


def test_defaults_are_the_papers(tmp_path: Path):
    recipe = load_recipe(write(tmp_path))
    assert recipe.optimiser == Adam(beta1=0.9, beta2=0.98, eps=1e-9)
    assert recipe.schedule == Paper()
    assert [Paper().rate(n, 512, 100_000) for n in (1, 4000, 9000)] == [
        Paper(warmup=4000).rate(n, 512, 100_000) for n in (1, 4000, 9000)
    ]
    assert (recipe.last_step, recipe.average, recipe.decoding.beam, recipe.decoding.length_penalty) == (
        100_000,
        5,
        4,
        0.6,
    )


def test_paths_in_the_file_are_relative_to_it_and_those_of_the_command_line_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = write(tmp_path, data={"train": ["a.tsv", {"source": "b.en", "target": "b.de"}], "valid": {"path": "v.tsv"}})
    recipe = load_recipe(path)
    assert recipe.data.train[0].path == (tmp_path / "a.tsv",)
    assert recipe.data.train[1].source == (tmp_path / "b.en",)
    assert recipe.data.valid[0].path == (tmp_path / "v.tsv",)
    assert recipe.output == tmp_path / "runs" / "mine"
    assert load_recipe(path, ["output=here"]).output == tmp_path / "elsewhere" / "here"


def test_overrides_apply_after_the_file(tmp_path: Path):
    path = write(tmp_path, set=["width=64", "dropout=0.3"])
    recipe = load_recipe(path, ["optimiser.beta2=0.99", "model.width=32", "schedule.warmup=7", "steps=9"])
    assert isinstance(recipe.optimiser, Adam) and recipe.optimiser.beta2 == 0.99
    model = recipe.model_for(None)
    assert (model.width, model.dropout, recipe.last_step) == (32, 0.3, 9)
    assert load_recipe(path).model_for(None).width == 64


def test_a_bare_path_has_keys_to_set(tmp_path: Path):
    path = write(tmp_path, data={"train": "a.tsv", "valid": ["b.tsv", "c.tsv"]})
    data = load_recipe(path, ["data.train.columns=[1, 0]", "data.valid[1].columns=[2, 0]"]).data
    assert (data.train[0].path, data.train[0].columns) == ((tmp_path / "a.tsv",), (1, 0))
    assert [entry.columns for entry in data.valid] == [None, (2, 0)]


def test_everything_wrong_is_named_by_its_path(tmp_path: Path):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path, optimizer="adam", schedule="papper", batch={"row": 0}))
    text = str(caught.value)
    assert "optimizer: unknown; did you mean 'optimiser'?" in text
    assert "did you mean 'paper'?" in text and "batch.row" in text
    with pytest.raises(ConfigError, match=r"model\.widht: unknown; did you mean 'width'"):
        load_recipe(write(tmp_path), ["model.widht=3"])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"steps": 5, "epochs": 2}, "'steps' and 'epochs' are exclusive"),
        ({"average": 9}, "save.keep is 5"),
        ({"batch": {"row": 64}}, "data.max_tokens is 128, but a row of batch holds 64"),
        ({"save": {"every": None, "minutes": None}}, "'every' .* or 'minutes'"),
    ],
)
def test_impossible_recipes_are_rejected_with_the_reason(tmp_path: Path, keys: dict[str, object], words: str):
    with pytest.raises(UserError, match=words):
        load_recipe(write(tmp_path, **keys))


def test_the_resolved_recipe_means_the_same_run(make: Make):
    recipe = make("model.dropout=0.25", set=["width=24"])
    again = parse(Recipe, recipe.resolved())
    assert again.model_for(None) == recipe.model_for(None)
    assert again.resolved() == recipe.resolved()


def test_on_and_off_are_read_as_booleans(tmp_path: Path):
    """YAML reads a bare `on` as true."""
    path = write(tmp_path)
    assert load_recipe(path, ["compile=on"]).compile == "on"
    assert load_recipe(path, ["compile=off"]).compile == "off"
    assert load_recipe(path, ["compile=auto"]).compile == "auto"
    assert load_recipe(path, ["compile=blocks"]).compile == "blocks"
