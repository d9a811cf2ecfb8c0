"""Mutated files for every reader of models: flipped bits, truncated files, JSON values of another type.

tests/interop/test_reader_fuzz.py runs this in a process of its own, whose memory is bounded.

`python reader_fuzz.py FOLDER COUNT [SUBJECT …]`: that many mutants of each file, made in the folder, the same every
time; it ends with what came out of each, and fails where that was neither a model nor a `UserError`.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hostile_files as hostile
import plain_llama
import shrink
import tiny_folders
import tiny_whisper
import translation_files as files
from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.export import writer
from allyouneed.interop.load import about, load
from allyouneed.interop.read_back import sample
from allyouneed.nn.models.base import Model

MEMORY = 4 << 30  # of addresses: torch itself maps about half of it
SLOW = 20  # seconds for one mutant
OTHERS = [None, True, 0, -1, 2**31, 10**30, 1e308, "", "x", "\ud800", [], [[]], {}, {"x": 1}, [1, "x"], 0.5]
Subjects = dict[str, Path]  # what is loaded; its folder holds the files that are mutated


def ours(folder: Path) -> Subjects:
    found = {"ours": hostile.translator(folder / "ours").folder}
    assert hostile.exit_code("quantize", str(found["ours"]), str(folder / "int8"), "--to", "int8")[0] == 0
    return found | {"int8": folder / "int8"}


def hugging_face(folder: Path) -> Subjects:
    original = hostile.foreign(folder / "llama")
    hostile.imported(folder / "imported", original)
    hostile.vocab_files(folder / "vocab files")
    tiny_folders.write(folder / "sharded")
    tiny_folders.shard(folder / "sharded")
    (folder / "pickled").mkdir()
    shutil.copy(folder / "llama" / "config.json", folder / "pickled")
    torch.save(tiny_folders.weights(), folder / "pickled" / "pytorch_model.bin")
    both = train(TokenizerConfig(vocab=270), hostile.TEXTS)
    tree = tree_of(shrink.shrink(parse(Model, preset_tree("bert-base"))))  # type: ignore[type-abstract]
    model = parse(Model, tree | {"vocab": both.size, "head": {"kind": "pooled"}}).build()  # type: ignore[type-abstract]
    (folder / "sentences").mkdir()
    writer("hf")(Folder(model, Vocabularies(both, both), {"kind": "similarity"}), folder / "sentences")
    return {name: folder / name for name in ("llama", "imported", "vocab files", "sharded", "pickled", "sentences")}


def translators(folder: Path) -> Subjects:
    found, pieces = {}, files.train_pieces()
    words = files.tokens_of(pieces)
    names = ["</s>", "<unk>", *words]
    arrays = files.marian_arrays(len(names), files.ORDINARY)
    quantized = files.quantize_as_intgemm(arrays, dict.fromkeys(arrays, 25.0))
    for kind, written in (("npz", arrays), ("bin", arrays), ("int8", quantized)):
        files.write_marian(folder / kind, written, files.ORDINARY, kind.replace("int8", "bin"))
        files.write_vocabulary(folder / kind, names)
        (folder / kind / "source.spm").write_bytes(pieces)
        (folder / kind / "target.spm").write_bytes(pieces)
        found[f"Marian {kind}"] = folder / kind
    options, path = files.fairseq_options(), folder / "fairseq"
    path.mkdir()
    torch.save({"args": options, "model": files.fairseq_weights(len(words) + 4, options)}, path / "checkpoint_best.pt")
    for language in ("de", "en"):
        (path / f"dict.{language}.txt").write_text("".join(f"{word} 9\n" for word in words), encoding="utf-8")
    (path / "sentencepiece.bpe.model").write_bytes(pieces)
    (folder / "CTranslate2").mkdir()
    writer("ctranslate2")(load(folder / "npz"), folder / "CTranslate2")
    other = Path(shutil.copytree(folder / "CTranslate2", folder / "another converter"))
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({key: settings[key] for key in settings if key != "allyouneed"}))
    for tokenizer in other.glob("tokenizer*"):
        tokenizer.unlink()
    for side in ("source", "target"):
        (other / f"{side}.spm").write_bytes(pieces)
    return found | {"fairseq": path, "CTranslate2": folder / "CTranslate2", "another converter": other}


def single_files(folder: Path) -> Subjects:
    for name in ("llama2.c", "Whisper"):
        (folder / name).mkdir()
    _, whisper = tiny_whisper.write_openai(folder / "Whisper", tiny_whisper.PIECES + tiny_whisper.MERGED)
    tiny_whisper.ranks_file(folder / "Whisper" / "gpt2.tiktoken", tiny_whisper.PIECES + tiny_whisper.MERGED)
    return {"llama2.c": plain_llama.write_stories(folder / "llama2.c"), "Whisper": whisper}


MAKERS: tuple[Callable[[Path], Subjects], ...] = (ours, hugging_face, translators, single_files)


# --- mutants ----------------------------------------------------------------------------------------------------------


def mutated(content: bytes, dice: random.Random) -> bytes:
    """With a few bits flipped, most often in the first bytes, where headers are; or without its end."""
    if dice.random() < 0.2:
        return content[: dice.randrange(len(content))]
    changed, first = bytearray(content), dice.choice([64, 1024, len(content)])
    for _ in range(dice.choice([1, 1, 2, 8])):
        at = dice.randrange(min(first, len(changed)))
        changed[at] = dice.choice([changed[at] ^ 1 << dice.randrange(8), 0, 0xFF, dice.randrange(256)])
    return bytes(changed)


def mutant(path: Path, dice: random.Random) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".json" or dice.random() < 0.2:
        return mutated(content, dice)
    tree: Any = json.loads(content)
    places = hostile.paths(tree)
    for _ in range(dice.choice([1, 1, 2])):
        at = dice.choice(places)
        try:
            tree = hostile.replaced(tree, at, dice.choice(OTHERS))
        except (LookupError, TypeError):
            continue  # a part that was there is gone
    return json.dumps(tree).encode()


def outcome(path: Path) -> str:
    """What comes of loading a model, and of calling it where that succeeds."""
    began = time.monotonic()
    try:
        found = load(path)
        about(path)
        predictor(found)
        with torch.inference_mode():
            found.model.logits(sample(found.model.config))  # type: ignore[operator]
        if found.vocabularies is not None:
            for tokenizer in (found.vocabularies.source, found.vocabularies.target):
                tokenizer.decode(tokenizer.frame(tokenizer.encode(hostile.TEXTS[0]))[0])
        result = "read"
    except UserError as error:
        result = "refused" if len(str(error).splitlines()) <= 40 else f"{len(str(error).splitlines())} lines"
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        result = f"{type(error).__name__} in {Path(at.filename).name}:{at.lineno}: {str(error)[:200]}"
    seconds = time.monotonic() - began
    return result if seconds < SLOW else f"{result} after {seconds:.0f} s"


def attack(name: str, path: Path, count: int, now: Path) -> Counter[str]:
    folder = path if path.is_dir() else path.parent
    found: Counter[str] = Counter()
    for file in sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".md"):
        whole, at = file.read_bytes(), file.relative_to(folder)
        sealed = (folder / "config.json").read_bytes() if name in ("ours", "int8", "imported") else None
        for number in range(count):
            file.write_bytes(mutant(file, random.Random(f"{name} {at} {number}")))
            now.write_text(f"{name}: {at}, mutant {number}")  # should the process end here
            if sealed is not None and at.name != "config.json":
                hostile.reseal_files(folder)
            result = outcome(path)
            if result not in ("read", "refused"):
                print(f"{name}: {at}, mutant {number}: {result}", flush=True)
                result = "wrong"
            found[result] += 1
            file.write_bytes(whole)
            if sealed is not None:
                (folder / "config.json").write_bytes(sealed)
    assert outcome(path) == "read", name
    return found


def main(folder: Path, count: int, *wanted: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    subjects: Subjects = {}
    for make in MAKERS:
        work = folder / make.__name__
        work.mkdir()
        subjects |= make(work)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    total: Counter[str] = Counter()
    for name, path in subjects.items():
        if not wanted or name in wanted:
            total += attack(name, path, count, folder / "now")
    print(dict(total))
    sys.exit(bool(total["wrong"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
