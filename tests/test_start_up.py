"""A command loads the modules it needs: none of another device, another app or another kind of model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import allyouneed as ayn
from allyouneed import plugins
from allyouneed.apps.inspect.reference.reference import slot_classes
from allyouneed.plugins import ROOT
from allyouneed.runtime.cpu.bindings import bind_state
from allyouneed.runtime.cpu.lower import lower
from allyouneed.runtime.cuda.capture import check_capture
from allyouneed.runtime.cuda.kernels import make_kernel
from allyouneed.runtime.cuda.static_cache import make_static_state
from allyouneed.runtime.rules import Rules, registering_modules

sys.path.append(str(ROOT.parents[1]))
from bench.house import modules_loaded

MOST = 200
MODELS = {
    "generate": ("gpt2", ["embed.positions.length=32"]),
    "classify": ("bert-base", ["embed.positions.length=32", "head={kind: classes, labels: 2}"]),
}


def tiny_folder(command: str, folder: Path) -> Path:
    preset, changes = MODELS[command]
    stack = "encoder" if command == "classify" else "decoder"
    tokenizer = ayn.train_tokenizer(["the cat", "a dog"], vocab=300)
    sizes = ["width=16", f"{stack}[0].repeat=1", f"{stack}[0].mixer.heads=2", f"{stack}[0].channel.hidden=16"]
    module = ayn.build(preset, [*sizes, *changes], vocab=tokenizer.size)
    return ayn.save(module, tokenizer, folder, labels=("no", "yes") if command == "classify" else ())


class Start(NamedTuple):
    """What a command has loaded, and left in the temporary folder."""

    modules: list[str]
    left: list[Path]


@pytest.fixture(scope="module", params=["--help", "translate", "generate", "classify"])
def start(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Start:
    command, work = str(request.param), tmp_path_factory.mktemp("start")
    arguments = [command]
    if command == "translate":
        arguments += ["机器学习很有趣"]
    elif command in MODELS:
        arguments += ["--model", str(tiny_folder(command, work / "model")), "the cat"]
    temporary = work / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        patch.setenv("TMPDIR", str(temporary))
        return Start(modules_loaded(arguments, work, ROOT), list(temporary.iterdir()))


def test_a_command_loads_few_modules(start: Start) -> None:
    assert 10 < len(start.modules) <= MOST


def test_a_command_on_a_cpu_loads_nothing_of_a_gpu(start: Start) -> None:
    assert not [name for name in start.modules if "cuda" in name or "triton" in name]


def test_a_command_loads_no_other_app(start: Start) -> None:
    others = ("serve", "inspect", "browse", "translate.documents")
    assert not [name for name in start.modules if name.startswith(tuple(f"allyouneed.apps.{app}" for app in others))]


def test_a_command_on_a_cpu_leaves_nothing_in_the_temporary_folder(start: Start) -> None:
    """Importing torch's compiler would create the folder of its cache there."""
    assert not start.left


def test_parts_are_found_by_their_kind_in_a_process_that_has_imported_none(tmp_path: Path) -> None:
    """Every preset is read where nothing has imported all parts."""
    program = (
        "import allyouneed as ayn\n"
        "from allyouneed.config import preset_names\n"
        "for name in preset_names():\n"
        "    ayn.model_config(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_part_is_found_by_the_kind_in_its_source() -> None:
    """Otherwise it would work only where something else has imported its file."""
    named = plugins._own_modules()
    for slot in slot_classes():
        for kind, part in slot.known().items():
            if part.__module__.startswith("allyouneed."):
                assert part.__module__ in named[kind], f"{part.__name__}: no line `kind: Literal[…]` is found"


@pytest.mark.parametrize("rules", [lower, bind_state, make_kernel, make_static_state, check_capture])
def test_every_rule_is_found_by_the_class_that_it_is_for(rules: Rules) -> None:
    named = registering_modules(rules.folder)
    assert named
    for cls in rules.classes():
        rule = rules.found[cls]
        if rule.__module__ != rules.module:  # that one is imported with the rules
            assert rule.__module__ in named.get(cls.__name__, ()), f"no `.register({cls.__name__})` is found"
