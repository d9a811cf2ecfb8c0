"""A folder or recipe from somebody else: ids, sizes, links and names in it are checked before anything is built."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, normalizers, pre_tokenizers

import allyouneed as ayn
import hostile_files as hostile
from allyouneed.cli import main, memory_asked_for
from allyouneed.config import parse, read_tree
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, train
from allyouneed.data.tokenizers.bounds import check_tokenizer
from allyouneed.data.tokenizers.regex import OutOfBounds, least_width
from allyouneed.errors import UserError, printable
from allyouneed.files.reading import parse_json, parse_yaml
from allyouneed.folder import Folder
from allyouneed.interop.load import load
from allyouneed.nn.models.base import Model
from allyouneed.nn.patterns.core import Pattern
from bounded import load_within_bounds
from hostile_files import Subject, read, write


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    folder = tmp_path_factory.mktemp("made")
    theirs = hostile.foreign(folder / "theirs")
    return {
        "ours": hostile.translator(folder / "ours"),
        "theirs": theirs,
        "imported": hostile.imported(folder / "imported", theirs),
        "files": hostile.vocab_files(folder / "files"),
    }


@pytest.fixture
def copied(made: dict[str, Subject], tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return shutil.copytree(made[name].folder, tmp_path / name)

    return copy


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    return str(caught.value)


def change(path: Path, **changes: Any) -> None:
    write(path, read(path) | changes)


# --- ids --------------------------------------------------------------------------------------------------------------


def with_id(folder: Path, number: int) -> None:
    """The same folder; a language's token has this id."""
    tree = read(folder / "tokenizer.json")
    tree["model"]["vocab"]["<2de>"] = number
    for token in tree["added_tokens"]:
        token["id"] = number if token["content"] == "<2de>" else token["id"]
    write(folder / "tokenizer.json", tree)


def test_a_token_with_an_id_outside_the_model_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("ours")
    with_id(folder, 1_000_000)
    hostile.reseal(folder)
    assert "tokenizer has 1,000,001 tokens, the model" in refusal(folder)


@pytest.mark.parametrize("name", ["ours", "theirs", "imported"])
@pytest.mark.parametrize("number", [30_000_000, 4 * 10**9])
def test_ids_that_would_need_a_table_of_gigabytes_are_refused(
    copied: Callable[[str], Path], name: str, number: int
) -> None:
    folder = copied(name)
    tree = read(folder / "tokenizer.json")
    tree["model"]["vocab"]["far away"] = number
    write(folder / "tokenizer.json", tree)
    hostile.reseal_files(folder)
    assert re.search(rf"tokenizer.json: \d+ tokens with ids up to {number:,}", load_within_bounds(folder))


@pytest.mark.parametrize("name", ["ours", "theirs", "imported"])
@pytest.mark.parametrize("strategy", [{"Fixed": 10**9}, "BatchLongest"])
def test_padding_and_truncation_of_a_tokenizer_are_ignored(
    copied: Callable[[str], Path], name: str, strategy: Any
) -> None:
    folder = copied(name)
    token = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}
    padding = token | {"strategy": strategy, "direction": "Right", "pad_to_multiple_of": 10**9}
    cut = {"max_length": 1, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    change(folder / "tokenizer.json", padding=padding, truncation=cut)
    hostile.reseal_files(folder)
    assert load_within_bounds(folder) == ""


@pytest.mark.parametrize("key", ["pad", "bos", "eos", "mask", "languages", "never", "stops", "forced", "opening"])
@pytest.mark.parametrize("number", [300, 30_000_000, -1])
def test_a_special_token_with_an_id_outside_the_model_is_refused(
    copied: Callable[[str], Path], key: str, number: int
) -> None:
    folder = copied("imported")
    tree = read(folder / "tokenizer.marks.json")
    if key in tree["marks"]:
        tree["marks"][key] = [number]
    else:
        tree[key] = {"xx": number} if key == "languages" else number
    write(folder / "tokenizer.marks.json", tree)
    hostile.reseal(folder)
    assert re.search(rf"uses the ids {number}|marks.json: .*{key}", refusal(folder))


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ours", "theirs"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.index_fill(0, torch.tensor([1]), torch.nan), "contains NaN or infinity"),
        (lambda t: t.index_fill(0, torch.tensor([1]), torch.inf), "contains NaN or infinity"),
        (lambda t: t.int(), "int32 instead of floating point"),
        (lambda t: t > 0, "bool instead of floating point"),
        (lambda t: t.to(torch.float8_e5m2), "unsupported dtype F8_E5M2"),
        (lambda t: t.to(torch.complex64), "unsupported dtype C64"),
    ],
)
def test_weights_that_are_no_numbers_are_named(
    copied: Callable[[str], Path], name: str, spoil: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    folder = copied(name)
    tensors = load_file(folder / "model.safetensors")
    largest = max(tensors, key=lambda name: tensors[name].numel())
    save_file(tensors | {largest: spoil(tensors[largest])}, folder / "model.safetensors")
    hostile.reseal(folder)
    assert message in refusal(folder)


def test_int8_weights_with_floats_of_another_precision_are_used(made: dict[str, Subject], tmp_path: Path) -> None:
    whole = tmp_path / "int8"
    assert hostile.exit_code("quantize", str(made["ours"].folder), str(whole), "--to", "int8")[0] == 0
    tensors = load_file(whole / "model.safetensors")
    for number, part in enumerate(("step", "bias", "weight", "embed.tokens.step")):
        for dtype in (torch.float64, torch.bfloat16):
            folder = Path(shutil.copytree(whole, tmp_path / f"{number} {dtype}"))
            other = {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith(part)}
            save_file(tensors | other, folder / "model.safetensors")
            hostile.reseal_files(folder)
            model = ayn.load(folder)
            assert other and {tensor.dtype for tensor in model.model.buffers()} == {torch.float32, torch.int8}
            model.translate("the cat", to="de", max_length=3)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeat": 10**9}, "repeat"),
        ({"repeat": 9999}, "tensors, but the config has 10,000 layers"),
        ({"repeat": 9999, "share": True}, "tensors, but the config has 10,000 layers"),
        ({"channel": {"kind": "ffn", "hidden": 10**8}}, "parameters"),
        ({"channel": {"kind": "ffn", "hidden": 10**12}}, "is too large"),
    ],
)
def test_a_config_larger_than_its_weights_builds_nothing(
    copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    folder = copied("ours")
    about = read(folder / "config.json")
    about["model"]["decoder"][0] |= change
    write(folder / "config.json", about)
    monkeypatch.setattr("allyouneed.folder.meta_model", lambda config: pytest.fail("built"))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"decoder": "10000000000×a"}, "more than 10,000 layers"),
        ({"decoder": "9999×(9999×(9999×a))"}, "more than 10,000 layers"),
        ({"decoder": "(" * 5000 + "a" + ")" * 5000}, "nested more than 50 levels deep"),
        ({"decoder": "9000×a, 9000×a"}, "18,000 layers"),
        ({"vocab": 10**12}, "is too large"),
        ({"vocab": 2**31 - 1, "width": 2**30}, "parameters; at most"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(tree: dict[str, Any], message: str) -> None:
    layer = {"mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}}
    model = {"kind": "decoder", "vocab": 10, "width": 8, "layers": {"a": layer}, "decoder": "a"}
    with pytest.raises(UserError, match=re.escape(message)):
        parse(Model, model | tree)  # type: ignore[type-abstract]


@pytest.mark.parametrize(
    "text",
    [
        "(" * 5000 + "causal" + ")" * 5000,
        "~" * 5000 + "causal",
        " | ".join(["causal"] * 5000),
        "window(" + "9" * 5000 + ")",
    ],
)
def test_a_pattern_without_an_end_is_refused(text: str) -> None:
    with pytest.raises(Exception, match=r"nested more than|more than 500 words|takes integers") as caught:
        Pattern.choose(text)
    assert len(str(caught.value)) < 300


def test_a_vocabulary_of_a_trillion_is_refused() -> None:
    with pytest.raises(UserError, match="vocab"):
        parse(TokenizerConfig, {"vocab": 10**12})


@pytest.mark.parametrize("value", [10**9, -1, "many", None, True])
def test_extra_ids_are_bounded(copied: Callable[[str], Path], value: Any) -> None:
    folder = copied("files")
    change(folder / "tokenizer_config.json", tokenizer_class="ByT5Tokenizer", extra_ids=value)
    assert "extra_ids" in refusal(folder)


def test_a_vocabulary_with_a_huge_gap_is_refused(copied: Callable[[str], Path]) -> None:
    folder = copied("files")
    change(folder / "vocab.json", far=4 * 10**9)
    assert "vocab.json: not a vocabulary" in refusal(folder)


# --- tokenizers that explode ------------------------------------------------------------------------------------------

DOUBLES = [normalizers.Replace("a", "aa")] * 40
BOMBS: dict[str, tuple[str, Any, str]] = {
    "doubling": ("normalizer", normalizers.Sequence(DOUBLES), "makes more than 256 characters of one"),
    "rare letter": ("normalizer", normalizers.Replace("Ж", "Ж" * 900), "makes more than"),
    "prepend": ("normalizer", normalizers.Prepend("x" * 10**6), "adds 1,000,000 characters"),
    "everywhere": ("normalizer", normalizers.Replace(Regex("x*"), "y" * 999), "makes|adds"),
    "bytes of bytes": ("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 40), "makes more than"),
    "decoder": ("decoder", decoders.Sequence([decoders.Replace("a", "aa")] * 40), "decoder: makes more than"),
    "nested": ("pre_tokenizer", pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated"), "exponential time"),
    "alternatives": ("pre_tokenizer", pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated"), "exponential time"),
    "many repeats": ("pre_tokenizer", pre_tokenizers.Split(Regex("a*a*a*a*a*a*b"), "isolated"), "follow each other"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_explodes_is_refused_by_name(name: str) -> None:
    where, step, message = BOMBS[name]
    inner = train(TokenizerConfig(vocab=270), hostile.TEXTS)._inner
    setattr(inner, where, step)
    with pytest.raises(UserError, match=message) as caught:
        check_tokenizer(inner, "folder/tokenizer.json")
    assert str(caught.value).startswith("folder/tokenizer.json: ")


def test_an_exploding_tokenizer_is_refused_in_every_folder(copied: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("ours", "theirs", "imported"):
        folder = copied(name)
        inner = Tokenizer.load(folder / "tokenizer.json", 0, 1, 2)._inner
        inner.normalizer = BOMBS["doubling"][1]
        (folder / "tokenizer.json").write_text(inner.to_str())
        hostile.reseal(folder)
        assert "makes more than 256 characters of one" in refusal(folder)


@pytest.mark.parametrize("key", ["precompiled_charsmap", "precompiled_chars\\u006dap"])
def test_a_charsmap_smaller_than_its_table_is_refused(copied: Callable[[str], Path], key: str) -> None:
    """The library makes the table while it reads the file."""
    folder = copied("theirs")
    charsmap = base64.b64encode((0xF0000000).to_bytes(4, "little") + b"a\0").decode()
    tree = read(folder / "tokenizer.json") | {"normalizer": {"type": "Precompiled", "KEY": charsmap}}
    (folder / "tokenizer.json").write_text(json.dumps(tree).replace("KEY", key))
    assert load_within_bounds(folder).endswith("cannot be read as a tokenizer: a charsmap of 6 bytes is not whole")


WITHOUT_UNKNOWN: dict[str, Any] = {
    "Unigram without pieces": {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False},
    "Unigram": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False},
    "WordLevel": {"type": "WordLevel", "vocab": {"a": 5}, "unk_token": "[UNK]"},
    "WordPiece": {"type": "WordPiece", "vocab": {"a": 5}, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
    | {"max_input_chars_per_word": 100},
    "BPE": {"type": "BPE", "vocab": {"a": 5}, "merges": [], "unk_token": "<unk>", "byte_fallback": False}
    | {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False},
}


@pytest.mark.parametrize("kind", WITHOUT_UNKNOWN)
@pytest.mark.parametrize("name", ["ours", "theirs", "imported"])
def test_a_tokenizer_without_a_token_for_unknown_text_is_refused(
    copied: Callable[[str], Path], name: str, kind: str
) -> None:
    folder = copied(name)
    change(folder / "tokenizer.json", model=WITHOUT_UNKNOWN[kind])
    hostile.reseal(folder)
    assert "tokenizer.json: the tokenizer cannot encode every text" in refusal(folder)


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", 1),
        (
            r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            1,
        ),
        (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+", 1),
        (r"\d{1,3}(?=(?:\d{3})*\b)", 1),
        (r"[]a\]]+|[^(\s|[.,!?…])]{2}|(?<=a)b", 1),
        (r"\A\s*|x{2,}", 0),
    ],
)
def test_the_patterns_of_published_tokenizers_are_accepted(pattern: str, least: int) -> None:
    Regex(pattern)
    assert least_width(pattern) == least


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", r"\g<0>", "(?~a)", "(" * 500 + ")" * 500, r"(a)(\1+)*"])
def test_patterns_that_are_not_understood_are_refused(pattern: str) -> None:
    with pytest.raises(OutOfBounds):
        least_width(pattern)


# --- archives, JSON, YAML ---------------------------------------------------------------------------------------------


def test_a_deflated_model_file_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "tiny.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**8))
    assert "archive/data/0 is compressed" in refusal(tmp_path / "tiny.pt")


def test_duplicate_keys_are_found_in_linear_time() -> None:
    keys = ", ".join(f'"{number}": 0' for number in range(200_000))
    with pytest.raises(ValueError, match="'199999' is duplicated"):
        parse_json(f'{{{keys}, "199999": 1}}')


LISTS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
KEYS = "b0: &b0 {a: 1, b: 2}\n" + "".join(
    f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LISTS, "more than 1,000,000 values"),
        (KEYS, "a mapping of more than"),
        ("&a [*a]", "nested more than 100 levels"),
        ("[" * 400 + "]" * 400, "nested"),
        ("steps: " + "9" * 5000, "more than 40 digits"),
        ("when: 2024-99-99", "month must be in"),
        ("when: !!timestamp x", "does not match its tag"),
    ],
)
def test_yaml_that_expands_or_means_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_tree(tmp_path / "recipe.yaml")


def test_aliases_that_do_not_multiply_are_read() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: [*a, *a]\nc: {<<: *a, y: 2}") == {
        "a": {"x": 1},
        "b": [{"x": 1}, {"x": 1}],
        "c": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2**64}, "seed"),
        ({"schedule": {"kind": "constant", "peak": float("inf")}}, "schedule.peak"),
        ({"data": {"train": {"path": "a.tsv", "weight": 1e9}}}, "weight"),
        ({"clip": float("nan")}, "clip"),
        ({"steps": 10**30}, "steps"),
    ],
)
def test_numbers_of_a_recipe_are_bounded(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n")
    recipe = {"model": "transformer-tiny", "data": {"train": "a.tsv"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | change))
    code, errors = hostile.exit_code("train", str(tmp_path / "recipe.yaml"))
    assert code == 2 and message in errors


# --- links and names --------------------------------------------------------------------------------------------------

OURS = ("config.json", "model.safetensors", "tokenizer.json", "languages.json", "README.md")
THEIRS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        *(("ours", file) for file in OURS),
        *(("theirs", file) for file in (*THEIRS, "README.md")),
        ("imported", "tokenizer.marks.json"),
        ("imported", "original/tokenizer_config.json"),
        *(("files", file) for file in ("vocab.json", "merges.txt", "added_tokens.json")),
    ],
)
def test_a_link_out_of_a_folder_is_refused(copied: Callable[[str], Path], tmp_path: Path, name: str, file: str) -> None:
    folder = copied(name)
    (folder / file).touch()
    load(folder)
    (folder / file).rename(tmp_path / "outside")
    (folder / file).symlink_to(tmp_path / "outside")
    assert "link to a file outside the folder" in refusal(folder)


def test_a_name_in_config_json_cannot_leave_the_folder(copied: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copied("ours")
    (tmp_path / "secret").write_text("mine")
    about = read(folder / "config.json")
    write(folder / "config.json", about | {"sha256": about["sha256"] | {"../secret": "0" * 64}})
    assert "'../secret' is not the name of a file in this folder" in refusal(folder)


def test_no_text_of_a_folder_controls_the_terminal(copied: Callable[[str], Path]) -> None:
    folder = copied("theirs")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"\x1b[2J\x1b]0;owned\x07": torch.zeros(1)}, folder / "model.safetensors")
    code, errors = hostile.exit_code("describe", str(folder))
    code, errors = hostile.exit_code("generate", "--model", str(folder), "a")
    assert code == 2 and "\\x1b[2J\\x1b]0;owned\\x07: not used" in errors and "\x1b" not in errors
    assert printable("a\tb\n中文 \x9b1m\u202e") == "a\tb\n中文 \\x9b1m\\u202e"


# --- the process ------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_importing_ends_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    ended = subprocess.run([sys.executable, "-m", "allyouneed", "--help"], env=environment, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_running_out_of_memory_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def asks(*_: object, **__: object) -> None:
        torch.empty(1 << 50)

    monkeypatch.setattr("allyouneed.cli.app", asks)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "out of memory (4,503,599.63 GB asked for at once)" in capsys.readouterr().err
    assert memory_asked_for(MemoryError()) == "" and memory_asked_for(RuntimeError("else")) is None


def test_a_valid_folder_still_loads(copied: Callable[[str], Path]) -> None:
    for name in ("ours", "imported"):
        folder = copied(name)
        about = json.loads((folder / "config.json").read_text())
        write(folder / "config.json", about | {"added by a later version": [1]})
        assert Folder.load(folder).path == folder
