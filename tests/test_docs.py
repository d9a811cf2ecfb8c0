"""The documentation is executed: commands run, YAML parses, Python runs, tables and pictures match the code.

Pages run in a temporary folder with tiny versions of the files they name (`pairs.tsv`, `book.txt`, …). Recipes are
written there with the overrides `SMALL`; commands and blocks are otherwise unchanged. A YAML block whose first
line is a comment such as `# many.yaml` becomes a file of that name.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import allyouneed
import warm_python
from allyouneed.apps.inspect.reference.pages import PAGES as GENERATED
from allyouneed.apps.inspect.reference.pages import render
from allyouneed.cli import main
from allyouneed.config import ConfigError, override, parse, preset_names, preset_tree, to_yaml, tree_of
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files, Report
from allyouneed.models import shipped
from allyouneed.nn.models.base import Model
from allyouneed.nn.patterns.core import Pattern
from allyouneed.nn.patterns.parser import COMBINATORS
from allyouneed.nn.sublayer import Channel, Mixer
from allyouneed.tasks.task import Task
from allyouneed.training import Recipe, load_recipe
from allyouneed.training.optim.schedule import Schedule
from foreign_folders import write_strangers
from parameter_count import parameter_count
from toy_images import class_folders, write_pictures
from toy_sounds import sound_folders, write_sounds
from toy_texts import asked, chats, comparisons, documents, impressions, labelled, scored, sentence, several, tagged

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("zh/*.md"))]  # README.zh.md is compared with README.md
ALL_PAGES = [README, CHINESE, *sorted(DOCS.glob("**/*.md"))]
# pages with tables of recipe keys, and the first head of these tables
KEY_TABLES = {"key": ("training", "data", "decoding"), "键": ("zh/training", "zh/translating")}
SMALL = [
    "data.max_tokens=64",
    "batch={rows: 2, row: 64}",
    "schedule={kind: constant, peak: 0.01}",
    "steps=6",
    "validate={every: 3, limit: 2}",
    "save.every=3",
    "decoding.extra=5",
]
# overrides that shrink a preset, by prefix of its name
SMALL_MODELS = {
    "transformer": "set=[width=16, 'encoder[0].repeat=1', 'decoder[0].repeat=1']",
    "bert": "set=[width=16, 'encoder[0].repeat=1', 'encoder[0].mixer.heads=2', 'encoder[0].channel.hidden=32']",
    "gpt2": "set=[width=16, 'decoder[0].repeat=1', 'decoder[0].mixer.heads=2', 'decoder[0].channel.hidden=32']",
    "t5": "set=[width=16, 'encoder[0].repeat=1', 'decoder[0].repeat=1']",
}
SMALL_MODELS["behavior"] = "set=[width=16, 'encoder[0].mixer.heads=2', 'head.hidden=[8]']"
SMALL_MODELS["vit"] = "set=['encoder[0].repeat=1']"
SMALL_MODELS["clip"] = "set=['image.encoder[0].repeat=1', 'text.encoder[0].repeat=1']"
SMALL_MODELS["captioner"] = "set=['encoder[0].repeat=1', 'decoder[0].repeat=1']"
SMALL_MODELS["transformer-xl"] = SMALL_MODELS["gpt2"]
SPLITS = ("train", "valid", "test")
WORDS = {"机器": "machine", "学习": "learning", "很": "very", "有趣": "interesting", "句子": "sentence", "好": "good"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
any_page = pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# --- reading pages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(*block) for block in found if not languages or block[0] in languages]


def commands(page: Path) -> list[list[str]]:
    return [
        words for block in blocks(page, "sh") for line in block.text.splitlines() if (words := shlex.split(line, True))
    ]


def table(page: Path, head: str) -> dict[str, list[str]]:
    """Rows of all tables whose first header cell is `head`: first cell without backticks → other cells."""
    rows: dict[str, list[str]] = {}
    inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" |")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == head:
            inside = True
        elif inside and not line.startswith("|---"):
            assert cells[0].strip("`") not in rows, f"{page.name}: {cells[0]} twice"
            rows[cells[0].strip("`")] = cells[1:]
    return rows


def new_parts() -> str:
    """The parts of docs/add-a-part.md as one module."""
    texts = [block.text for block in blocks(ROOT / "docs" / "add-a-part.md", "python")]
    return "\n\n".join(text for text in texts if re.search(r"\((Pattern|Channel|Mixer)\):", text))


def is_recipe(tree: dict[str, Any]) -> bool:
    return "data" in tree


def small(tree: dict[str, Any]) -> list[str]:
    """Overrides that let a recipe finish within seconds."""
    if isinstance(tree.get("task"), dict) and tree["task"]["kind"] == "ppo":
        return ["steps=2", "task.batch=4", "task.max_length=5"]
    if "start" in tree or "retrieval" in tree:  # these bring their own tokenizer and a small model
        return SMALL
    classes = ("image-classification", "audio-classification")
    without = any(task in str(tree.get("task")) for task in classes)
    found = list(SMALL) if without else [*SMALL, "tokenizer.vocab=300"]
    found += [change for name, change in SMALL_MODELS.items() if str(tree["model"]).startswith(name)]
    return found


# --- a folder with every file the pages name ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files named on the pages, and the model trained by the README's first command."""
    folder = tmp_path_factory.mktemp("workspace")
    (folder / "book.txt").write_text("机器学习\n\n很有趣\n", encoding="utf-8")
    _write_pairs(folder / "test.tsv", 4)
    _write_pairs(folder / "pairs.tsv", 100)
    for page in PAGES:
        for block in blocks(page, "yaml"):
            tree, name = yaml.safe_load(block.text), re.match(r"# (\S+\.yaml)\n", block.text)
            if name and not is_recipe(tree):
                (folder / name[1]).write_text(block.text, encoding="utf-8")
            elif is_recipe(tree):
                changed = override({k: v for k, v in tree.items() if k != "epochs"}, small(tree))
                (folder / (name[1] if name else "recipe.yaml")).write_text(yaml.safe_dump(changed), encoding="utf-8")
                for entries in (tree["data"][split] for split in SPLITS if split in tree["data"]):
                    for entry in entries if isinstance(entries, list) else [entries]:
                        _write_data(folder / (entry if isinstance(entry, str) else entry["path"]), tree.get("task"))
    reviews = dict.fromkeys(labelled(60, random.Random(0)).replace("\t", ",").splitlines())
    (folder / "reviews.csv").write_text("\n".join(["label,text", *reviews]), "utf-8")
    write_strangers(folder)
    (folder / "models").mkdir()
    first = next(words for words in commands(README) if words[:2] == ["allyouneed", "train"])
    assert first == ["allyouneed", "train", "recipe.yaml"]
    run(first, folder)
    return folder


def _write_pairs(path: Path, count: int) -> None:
    if path.exists():
        return
    dice = random.Random(path.name)
    lines = []
    for _ in range(count):
        chosen = dice.choices(list(WORDS), k=dice.randint(1, 6))
        lines.append("".join(chosen) + "\t" + " ".join(WORDS[word] for word in chosen) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def _write_data(path: Path, task: Any) -> None:
    """Example data for a task; the file name seeds the generator, so `x.valid.tsv` differs from `x.tsv`."""
    kind = task["kind"] if isinstance(task, dict) else task
    if kind in ("image-classification", "image-text", "captioning"):
        if not path.exists():
            _write_images(path)
        return
    if kind in ("audio-classification", "transcription"):
        if not path.exists():
            _write_recordings(path)
        return
    write = TOYS.get(Task.registry[kind].files.model_fields["kind"].default) if kind else None
    write = several if isinstance(task, dict) and task.get("several") else write
    if write is None:
        _write_pairs(path, 20)
    elif not path.exists():
        path.write_text(write(40, random.Random(path.name)), encoding="utf-8")


def _write_images(path: Path) -> None:
    """A folder of images for each class, or a table with captions; and cat.png."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        write_pictures(path.parent, path.stem, 20)
        (path.parent / f"{path.stem}.captions.tsv").rename(path)
    else:
        class_folders(path, 18)
        (path.parents[1] / "cat.png").write_bytes(next(path.rglob("*.png")).read_bytes())


def _write_recordings(path: Path) -> None:
    """A folder of recordings for each class, or a table with transcripts; and speech.wav."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix:
        write_sounds(path.parent, path.stem, 20)
        (path.parent / f"{path.stem}.transcripts.tsv").rename(path)
    else:
        sound_folders(path, 18)
        (path.parents[1] / "speech.wav").write_bytes(next(path.rglob("*.wav")).read_bytes())


def asked_as_json(count: int, dice: random.Random) -> str:
    rows = [line.split("\t") for line in asked(count, dice).splitlines()]
    return "".join(json.dumps({"question": q, "context": text, "answers": a}) + "\n" for q, text, a in rows)


TOYS = {"text": documents, "labelled": labelled, "tagged": tagged, "scored": scored}
TOYS |= {"questions": asked_as_json, "chats": chats, "comparisons": comparisons, "log": impressions}
TOYS |= {"prompts": lambda count, dice: "".join(sentence(dice) + "\n" for _ in range(count))}


def run(words: list[str], folder: Path) -> None:
    """Run an `allyouneed` command in this process."""
    before = Path.cwd()
    os.chdir(folder)
    written = words[words.index("-o") + 1] if words[1] == "init" else ""
    try:
        main(words[1:] + (["--force"] if written else []))
    except SystemExit as ended:
        assert ended.code in (0, None), f"{shlex.join(words)}: exit code {ended.code}"
        if written:
            tree = {
                key: value for key, value in yaml.safe_load(Path(written).read_text("utf-8")).items() if key != "epochs"
            }
            Path(written).write_text(yaml.safe_dump(override(tree, SMALL)), "utf-8")
    finally:
        os.chdir(before)


def execute(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "a page", "exec", dont_inherit=True), names)  # without this file's `from __future__`


@pytest.fixture
def parts() -> Iterator[None]:
    """Unregister the parts defined on a page afterwards; other tests enumerate all parts."""
    slots: list[Any] = [Pattern, Channel, Mixer]
    before = [dict(slot.registry) for slot in slots]
    yield
    for slot, registry in zip(slots, before, strict=True):
        slot.registry.clear()
        slot.registry.update(registry)


# --- code blocks --------------------------------------------------------------------------------------------

MAKERS = (
    "init",
    "train",
    "index",
    "import",
    "export",
    "quantize",
)  # what they write is used by later commands of a page


@every_page
def test_every_command_runs(
    page: Path, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allyouneed.lab.benchmark.subprocess", warm_python)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elsewhere = [words for earlier in PAGES[: PAGES.index(page)] for words in commands(earlier)]
    for words in commands(page):
        if words in elsewhere and words[1] not in MAKERS:
            continue
        if words[0] == "make":
            assert words[1] in targets
        elif words[0] == "allyouneed":
            capsys.readouterr()
            run(words, workspace)
            shown = capsys.readouterr()
            made = workspace / words[words.index("--output") + 1] if "--output" in words else None
            made = workspace / words[-1] if words[1] == "translate" and words[-2] == "book.txt" else made
            assert shown.out or shown.err or made, shlex.join(words)
            for report in re.findall(r"^training [\w ]+: (\d.*)$", shown.err, re.MULTILINE):
                assert ", 0 left out" in report, "example data was rejected"
            if made is not None and words[1] == "look":
                assert made.stat().st_size > 5000
            elif made is not None and made.suffix == ".npy":
                assert len(np.load(made)) == 2, "one row per text"
            elif made is not None:
                assert len(made.read_text(encoding="utf-8").splitlines()) == 3, "one output line per input line"
        else:
            raise AssertionError(f"{page.name}: unknown command {shlex.join(words)}")


def test_readme_commands_print_what_the_comments_announce(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output matches the comments beside the commands."""
    run(["allyouneed", "train", "recipe.yaml"], workspace)
    assert "finished" in capsys.readouterr().err
    run(["allyouneed", "evaluate", "test.tsv", "--model", "runs/zh-en/model"], workspace)
    assert re.search(r"BLEU +\d+\.\d.*\nchrF +\d+\.\d.*\nexact", capsys.readouterr().out)
    run(["allyouneed", "describe", "transformer-base"], workspace)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("63,082,496", "(1536, 512)", "FLOPs", "cache", "bytes"))


def test_the_console_script_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="allyouneed")
    assert script.value == "allyouneed.__main__:main"
    assert script.load() is import_module("allyouneed.__main__").main


@every_page
def test_every_python_block_runs(page: Path, workspace: Path, parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run in order and share names; YAML blocks exist as files."""
    if any(python_of(page) == python_of(earlier) for earlier in PAGES[: PAGES.index(page)]):
        return  # a translation: its original has run
    monkeypatch.chdir(workspace)
    for words in commands(page):
        made = re.search(rf"ayn\.load\(.runs/{re.escape(Path(words[-1]).stem)}/", page.read_text(encoding="utf-8"))
        # train what a later block loads; finished runs are not repeated
        if (words[:2] == ["allyouneed", "train"] and made) or words[:2] == ["allyouneed", "index"]:
            run(words, workspace)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        printed: dict[int, str] = {}
        names["print"] = partial(note_printed, printed)
        execute(block.text, names)
        for line, said in announced(block.text):
            for one in facts(said):
                assert one.strip("'") in printed.get(line, ""), f"{page.name}: prints {printed.get(line)}, not {said}"


def facts(said: str) -> list[str]:
    """The numbers and quoted texts of a comment."""
    return [*re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", said), *re.findall("'[^']+'", said)]


def python_of(page: Path) -> list[tuple[str, list[list[str]]]]:
    """The code of each block, without its comments, and what they say that it prints."""
    texts = [block.text for block in blocks(page, "python")]
    return [(ast.dump(ast.parse(text)), [facts(said) for _, said in announced(text)]) for text in texts]


def note_printed(printed: dict[int, str], *values: Any, **options: Any) -> None:
    """`print`, for a block: what each of its lines printed."""
    line = sys._getframe(1).f_lineno
    printed[line] = f"{printed.get(line, '')}{' '.join(map(str, values))}\n"


def announced(text: str) -> Iterator[tuple[int, str]]:
    """Lines that print, and what the comment on them, or on the next line, says that they print."""
    lines = text.splitlines()
    for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1):
        if "print(" in line:
            yield number, line.partition("  # ")[2] or (following if following.startswith("# ") else "")


@every_page
def test_every_yaml_block_is_a_valid_recipe_or_model(page: Path, parts: None) -> None:
    execute(new_parts(), {"__name__": "my_parts"})
    for block in blocks(page, "yaml"):
        tree = yaml.safe_load(block.text)
        if is_recipe(tree):
            recipe = parse(Recipe, tree)
            if recipe.start is None:
                assert parse(Recipe, tree_of(recipe)) == recipe
                recipe.model_for(None)
        else:
            config = parse(Model, tree)
            for full in (True, False):
                assert parse(Model, yaml.safe_load(to_yaml(config, full))) == config
            assert parameter_count(config) == config.cost().parameters


def test_the_readme_model_is_transformer_base_and_its_typo_gives_the_shown_error() -> None:
    (tree,) = [t for block in blocks(README, "yaml") if not is_recipe(t := yaml.safe_load(block.text))]
    assert parse(Model, tree) == parse(Model, override(preset_tree("transformer-base"), ["dropout=0"]))
    tree["decoder"][0]["mixer"]["patern"] = tree["decoder"][0]["mixer"].pop("pattern")
    message = re.search(r"`(decoder\[0\].*?)`", README.read_text(encoding="utf-8"))
    with pytest.raises(ConfigError) as caught:
        parse(Model, tree)
    assert message and message[1] in str(caught.value)


def test_the_overrides_shown_in_the_readme_are_valid() -> None:
    text = README.read_text(encoding="utf-8")
    changes = {"wiring: pre-norm": "decoder[0].wiring=pre-norm", "norm: rms": "norm=rms"}
    changes['pattern: "causal & window(512)"'] = "decoder[0].mixer.pattern=causal & window(512)"
    for key, change in changes.items():
        assert f"`{key}`" in text
        assert allyouneed.model_config("transformer-base", [change]) != allyouneed.model_config("transformer-base")
    for (change,) in table(DOCS / "zh/looking-inside.md", "想要").values():
        assert allyouneed.model_config("transformer-base", [change.strip("`")]) != allyouneed.model_config(
            "transformer-base"
        )


@pytest.mark.parametrize("readme", [README, CHINESE], ids=lambda page: page.name)
def test_readme_figures_are_on_the_linked_pages(readme: Path) -> None:
    rows = re.findall(
        r"^\| .*?\((docs/results/[\w-]+\.md)\).*? \| (.*) \| (.*) \| \S+ \|$", readme.read_text(), re.MULTILINE
    )
    assert len(rows) >= 6
    for page, ours, peer in rows:
        text = (ROOT / page).read_text(encoding="utf-8")
        for figure in (re.findall(r"[\d.,]*\d", ours)[-1], re.findall(r"[\d.,]*\d", peer)[-1]):
            assert figure in text, f"{page} does not contain {figure}"


def test_both_readmes_have_the_same_blocks() -> None:
    def without_comments(block: Block) -> Any:
        if block.language == "yaml":
            return yaml.safe_load(block.text)
        if block.language == "python":
            return ast.dump(ast.parse(block.text))
        return [shlex.split(line, comments=True) for line in block.text.splitlines()]

    english, chinese = ([(b.language, without_comments(b)) for b in blocks(page)] for page in (README, CHINESE))
    assert english == chinese
    assert len(english) >= 5


# --- tables, pictures, links ------------------------------------------------------------------------


def flat(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("head", KEY_TABLES)
def test_every_recipe_key_is_documented_with_its_default(head: str) -> None:
    needed = {"model": "transformer-tiny", "data": {"train": "pairs.tsv"}, "output": "runs/it"}
    expected = dict(flat(tree_of(parse(Recipe, needed))))
    written: dict[str, str] = {}
    for name in KEY_TABLES[head]:
        rows = table(DOCS / f"{name}.md", head)
        assert not set(rows) & set(written)
        written |= {key: cells[0] for key, cells in rows.items()}
    assert set(written) == set(expected)
    for key, cell in written.items():
        if key in ("model", "data.train", "output"):
            assert "`" not in cell
        else:
            assert yaml.safe_load(cell.strip("`")) == expected[key], key


@pytest.mark.parametrize(("name", "head"), [("data", "key of an entry"), ("zh/training", "条目的键")])
def test_every_data_entry_key_is_documented_with_its_default(name: str, head: str) -> None:
    rows = table(DOCS / f"{name}.md", head)
    defaults = tree_of(parse(PairFiles, "pairs.tsv")) | {"path": None}
    defaults.pop("kind")  # set by the task
    assert {key: yaml.safe_load(cells[0].strip("`")) for key, cells in rows.items()} == defaults


@pytest.mark.parametrize(("name", "head"), [("tasks", "task"), ("zh/tasks", "任务")])
def test_every_task_is_documented(name: str, head: str) -> None:
    rows = table(DOCS / f"{name}.md", head)
    assert set(rows) == set(Task.registry)
    for kind, (models, first_head, reads, metrics, keys) in rows.items():
        task = Task.registry[kind]
        assert re.findall(r"`([\w-]+)`", models) == list(task.kinds)
        assert first_head == f"`{task.heads[0]}`" and reads == f"`{task.files.model_fields['kind'].default}`"
        assert re.findall(r"`([\w@.-]+)`", metrics) == list(task.metrics)
        found = {key: value for text in re.findall(r"`([^`]+)`", keys) for key, value in yaml.safe_load(text).items()}
        assert found == {key: value for key, value in tree_of(task()).items() if key != "kind"}


SHARED = {"kind", *Files.model_fields}  # set by the task; of all kinds, in data.md


@pytest.mark.parametrize(
    ("name", "head", "required"),
    [("tasks", "key of `{}` files", "required"), ("zh/tasks", "`{}` 文件的键", "必填")],
)
def test_every_file_key_is_documented_with_its_default(name: str, head: str, required: str) -> None:
    for kind, files in Files.registry.items():
        rows = table(DOCS / f"{name}.md", head.format(kind))
        if kind == "pairs":  # in data.md
            assert not rows
            continue
        expected = {key: value for key, value in tree_of(parse(files, "a.txt")).items() if key not in SHARED}
        written = {key: yaml.safe_load(cells[0].strip("`")) for key, cells in rows.items()}
        assert written == expected | {"path": required}


@pytest.mark.parametrize(("name", "head"), [("training", "schedule"), ("zh/training", "调度")])
def test_every_schedule_is_documented_with_its_keys(name: str, head: str) -> None:
    rows = table(DOCS / f"{name}.md", head)
    keys = {kind: [name for name in part.model_fields if name != "kind"] for kind, part in Schedule.registry.items()}
    assert {kind: re.findall(r"`(\w+)`", cells[0]) for kind, cells in rows.items()} == keys


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_are_up_to_date(name: str) -> None:
    """`make docs` writes these tables."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page == render(name, page), "run make docs"


def test_the_parts_table_lists_every_registered_part() -> None:
    rows = table(ROOT / "docs" / "parts.md", "slot")
    assert {"model", "embedding", "positions", "token mixer", "pattern", "channel mixer", "norm", "wiring"} <= set(rows)
    for slot, (where, listed) in rows.items():
        path, name = re.findall(r"\((\S+)\) `(\w+)`", where)[0]
        module = ".".join(Path(path).with_suffix("").parts[2:]).removesuffix(".__init__")
        base = getattr(__import__(module, fromlist=[name]), name)
        assert (base.slot, set(re.findall(r"`([\w-]+)`", listed))) == (slot, set(base.registry))


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "pictures").iterdir())
    assert pictures and all(picture.stat().st_size < 100_000 for picture in pictures)


def test_terminal_output_shown_on_pages_is_current(parts: None, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks(ROOT / "docs" / "add-a-part.md", "text")
    names: dict[str, Any] = {"__name__": "my_parts"}
    first, drawn = [block.text for block in blocks(ROOT / "docs" / "add-a-part.md", "python")][:2]
    execute(first, names)
    capsys.readouterr()
    execute(drawn, names)
    assert capsys.readouterr().out == shown.text
    (shown,) = blocks(ROOT / "docs" / "look.md", "text")
    first_look = next(words for words in commands(ROOT / "docs" / "look.md") if words[1] == "look")
    run(first_look, ROOT)
    assert capsys.readouterr().out == shown.text


def test_the_executors_shown_are_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks(ROOT / "docs" / "decoding.md", "text")
    run(["allyouneed", "describe", "transformer-xl-base"], tmp_path)
    assert capsys.readouterr().out.endswith(shown.text)


@pytest.mark.parametrize(("page", "drawings"), [("parts", 1), ("zh/patterns", 3)])
def test_drawn_patterns_are_current(page: str, drawings: int) -> None:
    drawn = [block.text for block in blocks(DOCS / f"{page}.md", "text") if "█" in block.text]
    assert len(drawn) == drawings
    for text in drawn:
        lines = text.splitlines()
        names = re.split(r" {2,}", lines[0])
        starts = [match.end() for match in re.finditer(r"^| {2,}", lines[0])]
        for name, start, end in zip(names, starts, [*starts[1:], None], strict=True):
            assert "\n".join(line[start:end].rstrip() for line in lines[1:]) == Pattern.from_text(name).picture(8), name


def test_the_chinese_page_of_patterns_is_complete_and_its_expressions_are_valid() -> None:
    page = DOCS / "zh" / "patterns.md"
    texts = {
        f"{kind}({', '.join(fields)})" if (fields := [f for f in part.model_fields if f != "kind"]) else kind
        for kind, part in Pattern.registry.items()
        if kind not in COMBINATORS
    }
    assert set(table(page, "模式")) == texts
    for written, preset in table(page, "论文").values():
        for text in re.findall(r"`([^`]+)`", written.replace("\\|", "|")):
            if not text.startswith("kind:"):
                Pattern.from_text(re.sub(r"(?<=[(, ])(?:l|n|w|r|头号)(?=[,)])", "4", text))
        assert preset.strip("`") in ("", *preset_names())


def test_the_scores_of_the_translator_are_the_same_in_both_languages() -> None:
    english, chinese = (table(DOCS / page, "BLEU") for page in ("translator.md", "zh/translating.md"))
    assert english == chinese and len(english) == 6


def test_every_quoted_error_is_in_the_source() -> None:
    """With `…` for each value that the code inserts, a quoted message is a string of the package, or a piece of one."""
    strings = {
        text
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (text := string_template(node))
    }
    quoted = [message.strip("`") for message in table(DOCS / "zh" / "errors.md", "报错信息")]
    assert len(quoted) >= 80
    for message in quoted:
        assert len(re.findall(r"[A-Za-z]", message)) >= 7, message
    stale = [message for message in quoted if not any(message in text for text in strings)]
    assert not stale, "no longer in the source: " + "; ".join(stale)


def string_template(node: ast.AST) -> str:
    """A string of the source, values replaced by `…`; empty for other nodes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(string_template(part) or "…" for part in node.values)
    return ""


def test_the_data_report_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["机器学习\tmachine learning"] * 2 + ["很有趣 very", "\tnothing", "很有趣\tvery\textra"]
    data = "\n".join([*lines, "一\tone two three four five", ""]).encode() + b"\xff\tx\n"
    Path("pairs.tsv").write_bytes(data)
    report = Report()
    list(Filters(duplicates=True, ratio=9).apply(PairFiles(path="pairs.tsv").read(report), report))
    (shown,) = blocks(ROOT / "docs" / "data.md", "text")
    assert shown.text == f"training pairs: {report.text()}\n"


@any_page
def test_every_link_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


def anchors(page: Path) -> list[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@any_page
def test_every_named_test_and_class_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/[\w/.]+?)(?:::(\w+))?`", text):
        assert (ROOT / path).exists(), path
        assert not name or f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
    for path, names in re.findall(r"\]\((\S+?\.py)\)((?:,? `\w+`)+)", text):
        code = (page.parent / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", code, re.MULTILINE), f"{path}: {name}"


# --- presets, recipes, new parts ---------------------------------------------------------------------------------


def test_every_preset_is_documented() -> None:
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    assert not [name for name in preset_names() if not any(f"`{name}`" in page for page in pages)]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid(path: Path) -> None:
    starts = "start" in yaml.safe_load(path.read_text(encoding="utf-8"))  # continues from the result of another recipe
    load_recipe(path, [f"start={shipped()}"] if starts else ())


def run_parts(tmp_path: Path, source: str, kinds: Iterable[str]) -> str:
    """What the command of docs/add-a-part.md prints about parts of these kinds, defined in a module."""
    (tmp_path / "my_parts.py").write_text(source, encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    options = ["-p", "my_parts", "-p", "no:xdist", "-p", "no:cacheprovider", "-rA", "-k", " or ".join(kinds)]
    where = [str(ROOT / "tests" / name) for name in ("invariants", "nn/test_cost.py")]
    return warm_python.run(
        [sys.executable, "-m", "pytest", *options, *where],
        cwd=ROOT,
        env=clean
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")]), "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.slow  # the parts of the page and those with mistakes are tried together, below
def test_the_invariant_tests_find_new_parts(tmp_path: Path) -> None:
    """The parts of docs/add-a-part.md as a module, loaded with `-p`."""
    shown = run_parts(tmp_path, new_parts(), ("running-mean", "grouped-ffn"))
    assert "FAILED" not in shown, shown
    for kind, count in {"running-mean": 15, "grouped-ffn": 5}.items():
        assert len(re.findall(rf"^PASSED .*{kind}", shown, re.MULTILINE)) >= count, shown


# by kind: what is changed in the page's EMA, and the tests that must fail, with a part of their message
MISTAKES = {
    "sees-strangers": (
        "rows = unpacked.gather(x)",
        "rows, unpacked = x, UnpackedRows(None)",
        {
            "test_neither_padding_nor_other_sentences_change_a_sentence": "",
            "test_packed_sentences_give_the_gradients_of_separate_ones": "",
        },
    ),
    "never-restarts": (
        "unpacked = unpack_rows(context)",
        "unpacked = unpack_rows(context, restarts=True)",
        {"test_a_sentence_in_a_packed_row_gets_the_results_it_gets_alone": ""},
    ),
    "counts-too-much": (
        "flops=3 * common.width",
        "flops=3 * common.width**2",
        {"test_flops_of_every_part": "declares 720 FLOPs per token of 9; it computes at least 288 and at most"},
    ),
    "counts-too-little": (
        "common.linear.cost(common.width, common.width, True)",
        "Cost(common.linear.cost(common.width, common.width, True).parameters)",
        {"test_flops_of_every_part": "declares 36 FLOPs per token of 9; it computes at least 288 and at most"},
    ),
    "hides-its-state": (
        "recurrent_cost(common.width, common.width)",
        "recurrent_cost(1, common.width)",
        {"test_state_is_as_large_as_declared": "", "test_captured_state_is_as_large_as_declared": ""},
    ),
}


def test_the_documented_command_catches_mistakes_of_new_parts(tmp_path: Path) -> None:
    """And finds nothing wrong with the parts of the page."""
    (ema,) = (block.text for block in blocks(ROOT / "docs" / "add-a-part.md", "python") if "class EMA(" in block.text)
    ema = ema.replace("import unpack_rows", "import UnpackedRows, unpack_rows")
    planted = []
    for kind, (right, wrong, _) in MISTAKES.items():
        assert right in ema
        text = ema.replace(right, wrong).replace('"ema"', f'"{kind}"').replace("EMA", f"Planted{len(planted)}")
        restarts = f"self.unpacks = {'restarts=True' in wrong}"
        planted.append(text.replace("        self.width =", f"        {restarts}\n        self.width ="))
    shown = run_parts(tmp_path, "\n\n".join([new_parts(), *planted]), ("ema", "log-sparse", *MISTAKES))
    for kind, count in {"ema": 15, "log-sparse": 5}.items():
        assert len(re.findall(rf"^PASSED .*{kind}", shown, re.MULTILINE)) >= count, shown
    failed = re.findall(r"^FAILED \S+::(\w+)\[(.*?)\] - (.*)$", shown, re.MULTILINE)
    assert not [name for _, name, _ in failed if not any(kind in name for kind in MISTAKES)], failed
    for kind, (_, _, tests) in MISTAKES.items():
        found = {test: said for test, name, said in failed if kind in name}
        assert found.keys() >= tests.keys(), (kind, found)
        for test, said in tests.items():
            assert said in found[test], (kind, found)
