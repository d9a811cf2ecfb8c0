"""Opening a folder of ours imports no Hugging Face family; opening a Hugging Face folder imports only its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import tiny_folders
from allyouneed.models import shipped

PROGRAM = """
import json, sys
from allyouneed.interop.load import about, load, weight_files

path = sys.argv[1]
load(path), about(path), weight_files(path)
print(json.dumps([name for name in sys.modules if name.startswith("allyouneed.interop.")]))
"""


def modules_after_loading(path: Path) -> set[str]:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True, check=True)
    return {name.removeprefix("allyouneed.interop.") for name in json.loads(run.stdout.splitlines()[-1])}


def test_a_folder_of_ours_imports_no_family() -> None:
    assert modules_after_loading(Path(shipped())) == {"hf", "hf.checkpoint", "load"}


def test_a_hugging_face_folder_imports_its_own_family_only(tmp_path: Path) -> None:
    tiny_folders.write(tmp_path / "llama", tiny_folders.weights())
    found = modules_after_loading(tmp_path / "llama")
    assert {name for name in found if name.startswith("families.")} == {"families.llama"}
