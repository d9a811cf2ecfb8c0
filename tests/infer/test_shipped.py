"""The translator that comes with the package."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

import allyouneed as ayn
import warm_python
from allyouneed.cli import main
from allyouneed.models import shipped


@pytest.fixture(scope="module")
def model():
    return ayn.load()


def test_it_is_small_and_documents_its_data():
    folder = shipped()
    assert (folder / "model.safetensors").stat().st_size <= 45_000_000
    card = (folder / "README.md").read_text(encoding="utf-8")
    for said in ("CC BY-SA 4.0", "CC BY 2.0 FR", "Tatoeba", "limits", "tok:zh", "recipes/terms"):
        assert said in card


def test_its_licence_is_named_beside_that_of_the_code():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "Apache-2.0" in project["license"] and "CC-BY-SA-4.0" in project["license"]
    assert all((root / name).is_file() for name in project["license-files"])
    notice = shipped() / "LICENSE.md"
    assert notice.resolve() in [(root / name).resolve() for name in project["license-files"]]
    pages = [shipped() / "README.md", *(root / name for name in ("README.md", "README.zh.md", "docs/translator.md"))]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert all(word in text for word in ("CC BY-SA 4.0", "Apache-2.0", "LICENSE.md", "Tatoeba")), page
    for readme in ("README.md", "README.zh.md"):
        text = (root / readme).read_text(encoding="utf-8")
        assert all(word in text for word in ("~/.cache/allyouneed", "pip uninstall allyouneed", "allyouneed doctor"))


def test_the_running_example(model):
    found = model.translate("机器学习很有趣").lower()
    assert "machine learning" in found
    assert "interesting" in found


@pytest.mark.parametrize(
    ("text", "to", "words"),
    [
        ("Wo ist der Bahnhof?", None, {"station"}),
        ("Je voudrais un café, s'il vous plaît.", None, {"coffee"}),
        ("I like to eat apples.", "de", {"Äpfel"}),
        ("I like to eat apples.", "fr", {"pommes"}),
        ("I like to eat apples.", None, {"苹果"}),
        ("机器学习很有趣", "de", {"Lernen", "interessant"}),
    ],
)
def test_it_detects_the_source_and_takes_the_target(model, text, to, words):
    found = model.translate(text, to)
    assert all(word in found for word in words), found


def test_sentences_of_a_line_are_translated_one_by_one(model):
    alone = [model.translate(one, "de") for one in ("I got up at six.", "I had breakfast.", "I went to bed.")]
    assert model.translate("I got up at six. I had breakfast. I went to bed.", "de") == " ".join(alone)


MANUAL = """- Please open https://example.com/a?b=1 and read `README.md` first.
  * Hello {name}, you have %d new messages from @anna. 👍
1. The <b>red</b> car weighs 900 kg, and the dog sleeps in /usr/local/bin."""


@pytest.mark.parametrize("to", ["de", "fr", "zh"])
def test_protected_spans_are_kept(model, to):
    found = model.translate(MANUAL, to, from_="en")
    for span in (
        "- ",
        "\n  * ",
        "\n1. ",
        "https://example.com/a?b=1",
        "`README.md`",
        "{name}",
        "%d",
        "@anna",
        "<b>",
        "</b>",
    ):
        assert found.count(span) == 1, found
    assert " 👍\n" in found and "900" in found and "/usr/local/bin" in found and "\ufffd" not in found


def test_a_file_keeps_its_code_and_notes_are_counted(tmp_path: Path, capsys):
    doubtful = "The mome raths outgrabe all mimsy borogoves."
    lines = ["- Where is the `station`?", "```python", "print('Hello')", "```", doubtful]
    (tmp_path / "in.md").write_text("\n".join(lines) + "\n")
    for form in ([], ["--json"]):
        out = tmp_path / f"out{len(form)}"
        with pytest.raises(SystemExit) as stop:
            main(["translate", str(tmp_path / "in.md"), str(out), "--to", "German", "--from", "英语", *form])
        assert not stop.value.code
    plain = (tmp_path / "out0").read_text(encoding="utf-8").splitlines()
    assert plain[0].startswith("- ") and "`station`" in plain[0] and plain[1:4] == lines[1:4]
    assert re.search(r"in.md: some results are doubtful \(.*confidence 1\); --json says which", capsys.readouterr().err)
    found = [json.loads(line) for line in (tmp_path / "out1").read_text(encoding="utf-8").splitlines()]
    assert [one["skipped"] for one in found] == [False, True, True, True, False]
    assert found[2]["translation"] == lines[2] and any("low confidence" in note for note in found[4]["notes"])


def test_an_unknown_script_is_noted(model):
    (full,) = model.translate_full(["Где вокзал?"])
    assert any("not that of a known language" in note for note in full.notes)


def test_the_command_works_without_a_model_option(tmp_path: Path):
    done = warm_python.run(
        [sys.executable, "-m", "allyouneed", "translate", "机器学习很有趣"],
        capture_output=True, encoding="utf-8", cwd=tmp_path,
    )  # fmt: skip
    assert "machine learning" in done.stdout.lower()
    assert done.stderr == ""


def test_traditional_chinese_is_read_and_written(model):
    simplified, traditional = "她的头发很长。", "她的頭髮很長。"
    (one,) = model.translate_full([traditional], "en", align=True)
    assert one.text == model.translate(simplified, "en") and one.source == traditional
    assert all(link.source == traditional[slice(*link.source_span)] for link in one.alignment) and one.alignment
    for name, letter in (("zh-Hant", "裡"), ("zh-TW", "裡"), ("繁體中文", "裡"), ("zh-HK", "裏")):
        found = model.translate(["It is in the room.", "Her hair is long; run `头发` and {name}."], name)
        assert letter in found[0] and "頭髮" in found[1] and "`头发`" in found[1] and "{name}" in found[1]
    assert "里" in model.translate("It is in the room.", "zh-CN")
    assert model.translate("Ihr Haar ist lang.", "zh-TW").count("髮") == 1  # via English


def test_chinese_is_converted_from_script_to_script(model):
    assert model.translate("面条", "zh-Hant", from_="zh") == "麵條"
    (one,) = model.translate_full(["我們後來在這個房間裡發現了她的頭髮 `頭髮`。"], "zh-Hans")
    assert one.text == "我们后来在这个房间里发现了她的头发 `頭髮`。" and not one.skipped and "script" in one.notes[0]
