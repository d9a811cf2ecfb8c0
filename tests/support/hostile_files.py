"""Small folders and runs whose every field can be replaced, and the command that reads each."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import tiny_folders
from allyouneed.cli import main
from allyouneed.config import parse
from allyouneed.data.language_detection import LanguageDetector
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.files import checksum, sha256
from allyouneed.folder import Folder
from allyouneed.interop.load import load
from allyouneed.nn.models.base import Model

TEXTS = ["the small cat sat on the mat and the dog sat there too", "das kleine Haus ist rot und die Katze ist grau"] * 3
HEADS = {"kind": "attention", "heads": 2}
FFN = {"kind": "ffn", "hidden": 16}
TRANSLATOR: dict[str, Any] = {
    "kind": "encoder-decoder",
    "width": 8,
    "embed": {"positions": "sinusoidal"},
    "encoder": [{"mixer": HEADS, "channel": FFN}],
    "decoder": [{"mixer": HEADS | {"pattern": "causal & window(8)"}, "cross": HEADS, "channel": FFN}],
}
Key = str | int


@dataclass(frozen=True)
class Subject:
    """A folder, the files of it that hold fields, and the arguments that make a command read them."""

    folder: Path
    files: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]  # {} is the folder
    reseal: Callable[[Path], None] = lambda folder: None


def exit_code(*arguments: str) -> tuple[int, str]:
    """The exit code of a command in this process, and its standard error. A bug of ours is raised as it is."""
    errors = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0), errors.getvalue()
    return 0, errors.getvalue()


def read(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)


def write(path: Path, tree: Any) -> None:
    path.write_text(json.dumps(tree, ensure_ascii=False), encoding="utf-8")  # JSON is YAML


def paths(tree: Any, most: int = 3) -> list[tuple[Key, ...]]:
    """Where a value may be replaced; of a long list or mapping only the first few."""

    def inside(node: Any, at: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
        yield at
        entries = list(node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ())
        for key, value in entries if len(entries) <= 30 else entries[:most]:
            yield from inside(value, (*at, key))

    return list(inside(tree, ()))


def replaced(tree: Any, at: tuple[Key, ...], value: Any) -> Any:
    if not at:
        return value
    changed = copy.deepcopy(tree)
    node = changed
    for key in at[:-1]:
        node = node[key]
    node[at[-1]] = value
    return changed


def attack(subject: Subject, work: Path, name: str, tree: Any) -> list[tuple[int, str]]:
    """Put `tree` in place of a file and run the commands on the folder."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(subject.folder, work, copy_function=shutil.copyfile)
    write(work / name, tree)
    subject.reseal(work)
    return [exit_code(*(part.format(work) for part in command)) for command in subject.commands]


def reseal_files(folder: Path) -> None:
    """Correct the checksums of the files of a folder of ours; the tokenizer is not read."""
    about = read(folder / "config.json")
    if isinstance(about, dict) and isinstance(about.get("sha256"), dict):
        known = {name for name in about["sha256"] if (folder / name).is_file()}
        write(folder / "config.json", about | {"sha256": about["sha256"] | {n: sha256(folder / n) for n in known}})


def reseal(folder: Path) -> None:
    """Correct the checksums of a folder of ours, as somebody would who changed it on purpose."""
    about = read(folder / "config.json")
    reseal_files(folder)
    if isinstance(about, dict) and isinstance(about.get("sha256"), dict):
        try:  # the tokenizer's, too
            about["tokenizer_hash"] = about["tokenizer_hash"] and Vocabularies.load(folder).hash
            write(folder / "config.json", read(folder / "config.json") | {"tokenizer_hash": about["tokenizer_hash"]})
        except Exception:
            pass


def reseal_stores(folder: Path) -> None:
    for path in folder.rglob("meta.json"):
        tree = read(path)
        if isinstance(tree, dict):
            write(path, tree | {"checksum": checksum(tree)})


def translator(path: Path) -> Subject:
    """A folder of ours: two languages, a tokenizer, a language detector."""
    torch.manual_seed(0)
    both = train(TokenizerConfig(vocab=270), TEXTS, ["de", "en"])
    model = parse(Model, TRANSLATOR | {"vocab": both.size}).build().eval()  # type: ignore[type-abstract]
    made = Folder(model, Vocabularies(both, both), directions=[("en", "de"), ("de", "en")], decoding={"beam": 2})
    made.detector = LanguageDetector.learn({"en": TEXTS[::2], "de": TEXTS[1::2]})
    made.max_tokens, made.together, made.files = 16, 8, {"columns": [0, 1]}
    made.save(path)
    files = ("config.json", "tokenizer.json", "languages.json")
    return Subject(path, files, (("translate", "--model", "{}", "--to", "de", "the cat"), ("describe", "{}")), reseal)


def foreign(path: Path) -> Subject:
    """A Hugging Face folder with everything a tokenizer may have."""
    tiny_folders.write(path)
    train(TokenizerConfig(vocab=270), TEXTS).save(path / "tokenizer.json")
    write(path / "generation_config.json", {"num_beams": 2, "eos_token_id": [2, 3], "bad_words_ids": [[5], [6, 7]]})
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    write(path / "special_tokens_map.json", special)
    write(path / "tokenizer_config.json", special | {"add_bos_token": True, "model_max_length": 64})
    files = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
    generate = ("generate", "--model", "{}", "--max-length", "3", "the cat")
    return Subject(path, (*files, "tokenizer.json"), (generate, ("describe", "{}")))


def imported(path: Path, original: Subject) -> Subject:
    """The same in a folder of ours, with tokenizer.marks.json."""
    load(original.folder, as_stored=True).save(path)
    generate = ("generate", "--model", "{}", "--max-length", "3", "the cat")
    files = ("config.json", "tokenizer.json", "tokenizer.marks.json")
    return Subject(path, files, (generate, ("describe", "{}")), reseal)


def vocab_files(path: Path) -> Subject:
    """A Hugging Face folder without a tokenizer.json."""
    tiny_folders.write(path, model_type="llama", tokenizer_class="GPT2Tokenizer")
    letters = [chr(n) for n in range(0x21, 0x7F)] + ["Ġ", "th", "the"]
    write(path / "vocab.json", {text: n for n, text in enumerate([*letters, "<|endoftext|>"])})
    (path / "merges.txt").write_text("#version: 0.2\nt h\nth e\n", encoding="utf-8")
    write(path / "added_tokens.json", {"<extra>": len(letters) + 1})
    write(path / "tokenizer_config.json", {"added_tokens_decoder": {"0": {"content": "!", "special": False}}})
    files = ("vocab.json", "added_tokens.json", "tokenizer_config.json")
    return Subject(path, files, (("generate", "--model", "{}", "--max-length", "3", "the cat"),))


def run_folder(path: Path) -> Subject:
    """A finished run of four steps and the recipe that resumes it."""
    path.mkdir(parents=True)
    (path / "pairs.tsv").write_text("".join(f"{text}\t{text[::-1]}\n" for text in TEXTS[0].split()), encoding="utf-8")
    recipe = {
        "model": TRANSLATOR | {"vocab": 1},
        "data": {"train": {"path": "pairs.tsv", "columns": [0, 1], "weight": 2.0}, "max_tokens": 16},
        "tokenizer": {"vocab": 262},
        "batch": {"rows": 2, "row": 32},
        "schedule": {"kind": "inverse-sqrt", "peak": 0.01, "warmup": 2},
        "steps": 2,
        "save": {"every": 2, "keep": 1},
        "average": 0,
        "seed": 1,
        "device": "cpu",
        "precision": "fp32",
        "output": "run",
    }
    write(path / "recipe.yaml", recipe)
    assert exit_code("train", str(path / "recipe.yaml"))[0] == 0
    write(path / "run" / "checkpoints" / "best.json", {"step": 2, "folder": "step-00000002"})
    store = next((path / "run" / "data").glob("*/meta.json")).relative_to(path).as_posix()
    inside = (
        "recipe.yaml",
        "checkpoints/best.json",
        "checkpoints/last.json",
        "tokenizer/hash.json",
        "data/inputs.json",
        "result.json",
    )
    files = ("recipe.yaml", store, *(f"run/{name}" for name in inside if (path / "run" / name).exists()))
    resume = ("train", "{}/recipe.yaml", "--set", "steps=3")
    return Subject(path, files, (resume,), reseal_stores)
