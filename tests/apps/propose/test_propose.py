"""`allyouneed init` says what is in the data and writes a recipe that trains as it stands."""

from __future__ import annotations

import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from allyouneed.cli import main
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.training import load_recipe
from toy_texts import chats, comparisons, documents, labelled, misspelt, scored, tagged

SHORT = ["--set", "epochs=null", "--set", "steps=4", "--set", "validate.every=2", "--set", "save.every=2"]
SHORT += ["--set", "batch={rows: 2, row: 128}", "--set", "decoding.max_length=5"]


def init(*words: str) -> dict[str, Any]:
    """The recipe, as a tree."""
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    assert ended.value.code in (0, None)
    output = words[words.index("-o") + 1] if "-o" in words else "recipe.yaml"
    found: dict[str, Any] = yaml.safe_load(Path(output).read_text(encoding="utf-8"))
    return found


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def swapped(text: str) -> str:
    """Columns in another order, as a spreadsheet would have them."""
    return "".join("\t".join(reversed(line.split("\t"))) + "\n" for line in text.splitlines())


def pairs(count: int, dice: random.Random) -> str:
    words = {"Haus": "house", "schöne": "nice", "grüne": "green", "ist": "is", "Katze": "cat", "nicht": "not"}
    rows = [dice.choices(list(words), k=5) for _ in range(count)]
    return "".join(f"Das {' '.join(row)}.\tThe {' '.join(words[w] for w in row)} was here.\n" for row in rows)


DATA = {
    "classification": ("reviews.tsv", lambda dice: swapped(labelled(60, dice))),
    "tagging": ("names.txt", lambda dice: tagged(60, dice)),
    "similarity": ("sts.tsv", lambda dice: scored(60, dice).replace("1\t", "0.5\t")),
    "translation": ("pairs.tsv", lambda dice: pairs(60, dice)),
    "causal-lm": ("book.txt", lambda dice: documents(60, dice)),
    "chat": ("chats.jsonl", lambda dice: chats(40, dice)),
    "preference": ("answers.jsonl", lambda dice: comparisons(40, dice)),
    "correction": ("edits.tsv", lambda dice: misspelt(60, dice)),
    "contrastive": ("searches.csv", lambda dice: "query,text\n" + pairs(60, dice).replace("\t", ",")),
}


@pytest.mark.parametrize("task", DATA)
def test_the_task_is_seen_in_the_data(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, write = DATA[task]
    Path(name).write_text(write(random.Random(1)), encoding="utf-8")
    start = ["--start", "translator"] if task == "preference" else []  # it tunes a trained model
    if start:
        with pytest.raises(SystemExit) as ended:
            main(["init", name, *start])
        assert ended.value.code == 2 and not Path("recipe.yaml").exists()
        assert "task: preference" not in capsys.readouterr().out
        return
    tree = init(name)
    found = tree["task"]["kind"] if isinstance(tree["task"], dict) else tree["task"]
    assert found == task
    assert f"task: {task}, as " in capsys.readouterr().out.replace("\n", " ")
    recipe = load_recipe("recipe.yaml")
    assert tree["data"]["train"]["portion"] == [0, 0.9] and tree["data"]["valid"]["portion"] == [0.9, 1]
    assert recipe.data.train[0].files() == [Path(name).absolute()]


def test_several_labels_of_a_text_are_seen() -> None:
    dice = random.Random(1)
    rows = [(f"text {n} of many words", dice.sample(["sea", "moon", "bread"], dice.randint(1, 2))) for n in range(60)]
    Path("some.csv").write_text("text,about\n" + "".join(f"{text},{' ; '.join(about)}\n" for text, about in rows))
    Path("some.jsonl").write_text("".join(json.dumps({"text": t, "about": about}) + "\n" for t, about in rows))
    tree = init("some.csv")
    assert tree["task"] == {"kind": "classification", "several": True}
    assert tree["data"]["train"]["columns"] == ["text", "about"] and tree["data"]["train"]["between"] == ";"
    labels = [
        {name for one in entry.read(Report()) for name in one.labels} for entry in load_recipe("recipe.yaml").data.train
    ]
    assert labels == [{"sea", "moon", "bread"}]
    assert init("some.jsonl", "--force")["task"] == tree["task"]


def test_a_table_of_several_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(sqlite3.connect("shop.sqlite")) as shop:
        shop.execute("CREATE TABLE reviews (body TEXT, label TEXT)")
        shop.execute("CREATE TABLE other (number INT)")
        shop.executemany("INSERT INTO reviews VALUES (?, ?)", [(f"text {n} of many", "ab"[n % 2]) for n in range(40)])
        shop.commit()
    with pytest.raises(SystemExit) as ended:
        main(["init", "shop.sqlite"])
    assert ended.value.code == 2 and "2 tables (other, reviews)" in capsys.readouterr().err
    tree = init("shop.sqlite", "--table", "reviews")
    assert tree["task"] == "classification" and tree["data"]["train"]["table"] == "reviews"
    assert sum(1 for entry in load_recipe("recipe.yaml").data.train for _ in entry.read(Report())) > 20


def test_the_number_of_a_row_is_no_score() -> None:
    rows = [{"translation": {"en": f"the cat {n}", "de": f"die Katze {n}"}, "meta": {"id": n}} for n in range(60)]
    Path("hub.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert init("hub.jsonl")["task"] == "translation"


@pytest.mark.parametrize("task", ["classification", "similarity", "translation", "causal-lm", "tagging"])
def test_the_recipe_trains_as_it_stands(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, write = DATA[task]
    Path(name).write_text(write(random.Random(2)), encoding="utf-8")
    init(name, "-o", "mine.yaml")
    with pytest.raises(SystemExit) as ended:
        main(["train", "mine.yaml", *SHORT])
    shown = capsys.readouterr().err
    assert ended.value.code in (0, None), shown
    assert (Path("runs") / "mine" / "model" / "config.json").exists()
    assert "broken" not in shown and "too many tokens" not in shown, shown


def test_validation_data_is_split_off_by_texts(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal texts stay on one side, whatever their place and format."""
    rows = [(f"text number {n % 150} of many", ("good", "bad")[n % 2]) for n in range(300)]
    Path("a.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    Path("b.jsonl").write_text(
        "".join(json.dumps(dict(zip(("text", "label"), row, strict=True))) + "\n" for row in rows[::-1])
    )
    found = []
    for name in ("a.csv", "b.jsonl"):
        init(name, "--force")
        recipe = load_recipe("recipe.yaml")

        sides = [
            {e.texts for entry in split for e in entry.read(Report())}
            for split in (recipe.data.train, recipe.data.valid)
        ]
        assert sides[0] and sides[1] and not sides[0] & sides[1] and len(sides[0] | sides[1]) == 150
        found.append(sides)
    assert found[0] == found[1]
    assert "150" in capsys.readouterr().out, "repeated rows are counted"


def test_the_portion_held_out_can_be_scored_again(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.tsv").write_text(labelled(80, random.Random(3)), encoding="utf-8")
    init("a.tsv")
    for words in (
        ["train", "recipe.yaml", *SHORT],
        ["evaluate", "a.tsv", "--portion", "0.9,1", "-m", "runs/recipe/model"],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code in (0, None)
    (held,) = load_recipe("recipe.yaml").data.valid
    scores = json.loads(Path("runs/recipe/result.json").read_text())["scores"]["valid"]
    out = capsys.readouterr().out
    assert f"of {len(list(held.read(Report())))} texts" in out and f"{scores['accuracy']:5.1f} %" in out
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", "a.tsv", "--portion", "1", "-m", "runs/recipe/model"])
    assert ended.value.code == 2 and "--portion 1: expected two numbers" in capsys.readouterr().err


def test_it_says_what_it_saw(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{n};Das ist die schöne Nummer {n};{('gut', 'schlecht')[n % 3 == 0]}\n" for n in range(40)]
    Path("daten.train.csv").write_text("id;text;label\n" + "".join(rows) + rows[0] + "41;;gut\n", encoding="cp1252")
    Path("daten.test.csv").write_text("id;text;label\n" + rows[3], encoding="cp1252")
    tree = init("daten.train.csv", "daten.test.csv")
    out = " ".join(capsys.readouterr().out.split())
    assert tree["data"]["train"] == {
        "path": "daten.train.csv", "columns": ["text", "label"], "encoding": "cp1252", "portion": [0, 0.9],
    }  # fmt: skip
    assert tree["data"]["test"] == {"path": "daten.test.csv", "columns": ["text", "label"], "encoding": "cp1252"}
    assert "daten.train.csv train separator ';', quoted, header cp1252 42 0 1 1" in out
    assert "leak: 1 texts are in train and in test data" in out
    assert "gut 27 64.3%" in out and "daten.train.csv is not UTF-8" in out and "Nummer 1" in out


def test_formats_of_every_kind_are_proposed() -> None:
    with closing(sqlite3.connect("a.db")) as database:
        database.execute("create table reviews (id integer, body text, stars integer)")
        database.executemany("insert into reviews values (?, ?, ?)", [(n, f"the text {n}", n % 3) for n in range(60)])
        database.commit()
    assert init("a.db")["data"]["train"]["keys"] == ["body", "stars"]
    rows = [{"translation": {"en": f"the house number {n}", "zh": f"第{n}座房子"}} for n in range(60)]
    Path("a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    tree = init("a.jsonl", "--force")
    assert tree["task"] == "translation" and tree["data"]["train"]["keys"] == ["translation.en", "translation.zh"]
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in [("Frage", "Thema"), *((f"Was ist Nummer {n}?", ("a", "b")[n % 2]) for n in range(30))]:
        book.active.append(row)
    book.save("a.xlsx")
    assert init("a.xlsx", "--force")["data"]["train"]["columns"] == ["Frage", "Thema"]
    book.active.delete_rows(1)
    book.save("a.xlsx")
    train = init("a.xlsx", "--force")["data"]["train"]
    assert train["columns"] == [0, 1] and train["header"] is False, "the first row is an example"


def test_aligned_files_are_seen() -> None:
    lines = [line.split("\t") for line in pairs(30, random.Random(0)).splitlines()]
    for at, name in enumerate(("corpus.de", "corpus.en")):
        Path(name).write_text("".join(row[at] + "\n" for row in lines), encoding="utf-8")
    train = init("corpus.de", "corpus.en")["data"]["train"]
    assert train == {"source": "corpus.de", "target": "corpus.en", "portion": [0, 0.9]}


def test_a_recipe_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.tsv").write_text(labelled(30, random.Random(0)), encoding="utf-8")
    Path("recipe.yaml").write_text("mine\n")
    with pytest.raises(SystemExit) as ended:
        main(["init", "a.tsv"])
    assert ended.value.code == 2 and "recipe.yaml: exists" in capsys.readouterr().err
    assert Path("recipe.yaml").read_text() == "mine\n"
    init("a.tsv", "--force")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["missing.tsv"], "no such file"),
        (["a.tsv", "--task", "taging"], "unknown task 'taging' (did you mean 'tagging'?)"),
        (["a.tsv", "--task", "chat"], "reads chats, which the columns (0, 1) do not look like"),
        (["numbers.csv"], "no task fits these columns (a, b)"),
        (["empty.tsv"], "empty"),
    ],
)
def test_what_cannot_be_proposed_is_one_message(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.tsv").write_text(labelled(30, random.Random(0)), encoding="utf-8")
    Path("numbers.csv").write_text("a,b\n" + "".join(f"{n},{n * n}\n" for n in range(30)))
    Path("empty.tsv").touch()
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err and not Path("recipe.yaml").exists()


def test_a_named_task_takes_the_columns_that_fit_it() -> None:
    Path("a.tsv").write_text(pairs(30, random.Random(0)), encoding="utf-8")
    assert init("a.tsv", "--task", "contrastive")["task"] == "contrastive"
    with pytest.raises(UserError):
        load_recipe("nothing.yaml")
