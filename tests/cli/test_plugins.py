"""Parts from outside the package: `--plugin`, `plugins:` of a recipe, entry points, and model folders that need them.

Every command runs in a process of its own, as for a user: a plugin stays registered in the process that imported it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import toy_texts
import warm_python
from allyouneed import plugins
from allyouneed.errors import UserError

PLUGIN = Path(toy_texts.__file__).with_name("gla_plugin.py")
LAYER = toy_texts.LAYER | {"mixer": {"kind": "plugin-gla", "keys": 4}}
RECIPE: dict[str, Any] = toy_texts.RECIPE | {
    "task": "causal-lm",
    "model": toy_texts.BODY | {"kind": "decoder", "decoder": [LAYER]},
    "data": {"train": {"path": "train.txt", "document": "line"}},
    "batch": {"rows": 4, "row": 32},
    "steps": 12,
    "save": {"every": 6, "keep": 2},
}


def command(*args: object, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | ({} if path is None else {"PYTHONPATH": os.pathsep.join(paths)})
    return warm_python.run(
        [sys.executable, "-m", "allyouneed", *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipe, plugin and a run that was stopped after half of its steps and resumed."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "train.txt").write_text("the cat sees the sea\na dog likes a bird\n" * 40)
    shutil.copy(PLUGIN, folder / "my_part.py")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
    first = command("train", "recipe.yaml", "--plugin", "my_part.py", "--set", "steps=6", cwd=folder)
    assert first.returncode == 0, first.stderr
    resumed = command("train", "recipe.yaml", "--plugin", "my_part.py", cwd=folder)
    assert resumed.returncode == 0 and "step 6" in resumed.stderr, resumed.stdout + resumed.stderr
    return folder


def test_a_model_with_a_plugin_part_trains_resumes_and_generates(trained: Path) -> None:
    model = trained / "run" / "model"
    options = ["the cat", "--model", model, "--plugin", trained / "my_part.py", "--max-length", 8, "--method", "greedy"]
    first, second = (command("generate", *options, cwd=trained) for _ in range(2))
    assert first.returncode == 0 and first.stdout == second.stdout, first.stderr
    described = command("describe", model, "--plugin", trained / "my_part.py", cwd=trained)
    assert described.returncode == 0 and "plugin-gla" in described.stdout


def test_the_folder_records_the_plugin_and_contains_no_code(trained: Path) -> None:
    model = trained / "run" / "model"
    (record,) = json.loads((model / "config.json").read_text())["plugins"]
    assert record["name"] == "my_part.py" and record["parts"] == [{"slot": "token mixer", "kind": "plugin-gla"}]
    assert not list(model.rglob("*.py"))


def test_without_the_plugin_the_error_names_it(trained: Path) -> None:
    model = trained / "run" / "model"
    for args in (
        ["generate", "the cat", "--model", model],
        ["describe", model],
        ["export", model, "out", "--to", "hf"],
    ):
        refused = command(*args, cwd=trained)
        assert refused.returncode == 2, refused.stderr
        message = "this model needs the part 'plugin-gla' from plugin my_part.py; pass --plugin PATH"
        assert message in refused.stderr and "Traceback" not in refused.stderr


def test_a_changed_plugin_is_noted(trained: Path, tmp_path: Path) -> None:
    changed = tmp_path / "my_part.py"
    changed.write_text(PLUGIN.read_text() + "\n# another version\n")
    options = ["the cat", "--model", trained / "run" / "model", "--plugin", changed, "--max-length", 3]
    found = command("generate", *options, cwd=trained)
    assert found.returncode == 0 and "differs from the plugin my_part.py" in found.stderr


def test_a_recipe_names_its_plugins_relative_to_itself(trained: Path, tmp_path: Path) -> None:
    recipe = RECIPE | {"plugins": ["my_part.py"], "steps": 2, "output": str(tmp_path / "run")}
    (trained / "named.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    found = command("train", trained / "named.yaml", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["plugins"] == [str(trained / "my_part.py")]


def test_an_installed_entry_point_is_imported_when_a_config_uses_its_kind(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "gla_package.py").write_text(PLUGIN.read_text())
    (tmp_path / "bystander.py").write_text("raise SystemExit('imported though no config uses it')\n")
    about = tmp_path / "gla_package-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gla_package\nVersion: 1\n")
    points = "[allyouneed.parts]\nplugin-gla = gla_package\nother = bystander\n"
    (about / "entry_points.txt").write_text(points)
    found = command("describe", trained / "run" / "model", cwd=tmp_path, path=tmp_path)
    assert found.returncode == 0 and "plugin-gla" in found.stdout, found.stderr
    assert command("describe", "transformer-base", cwd=tmp_path, path=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such plugin file"),
        ("def broken(:\n", "syntax error in line 1"),
        ("import os\n\n1 / 0\n", "cannot be imported: ZeroDivisionError in line 3"),
        (
            PLUGIN.read_text().replace('"plugin-gla"', '"attention"'),
            "PluginGLA: the slot 'token mixer' already has a part of kind 'attention'",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_message(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "bad_part.py").write_text(content)
    found = command("describe", "transformer-base", "--plugin", "bad_part.py", cwd=tmp_path)
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr, found.stderr
    assert "bad_part.py" in found.stderr


def test_plugins_are_loaded_by_module_name_or_path(tmp_path: Path) -> None:
    for source, message in [
        ("no_such_module_of_parts", "no such module"),
        (tmp_path / "nowhere.py", "no such plugin file"),
        ("my part", "give the path of a .py file or the name of a module"),
    ]:
        with pytest.raises(UserError, match=message):
            plugins.load(source)
    (tmp_path / "empty_part.py").write_text("X = 1\n")
    module = plugins.load(tmp_path / "empty_part.py")
    assert module.X == 1 and plugins.load(tmp_path / "empty_part.py") is module
    assert str(tmp_path / "empty_part.py") in plugins.sources()
