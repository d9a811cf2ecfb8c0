"""The page's assets: complete in both languages, without anything from elsewhere, and texts stay data."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from allyouneed.apps.inspect import assets
from allyouneed.apps.inspect.notebook import Page
from allyouneed.apps.inspect.offline import save
from allyouneed.apps.inspect.views import views
from allyouneed.apps.inspect.views.document import numbers, tensor
from allyouneed.errors import UserError

ROOT = Path(__file__).parents[3]
HOSTILE = '</script><script>alert(1)</script><!--SCRIPT--><img src=x onerror=alert(2)>\u202e\u2028\ud800"&'
DOCUMENT = {"view": "walk", "model": None, "request": {"text": HOSTILE}, "python": "", "data": {"text": HOSTILE}}
DATA = re.compile(r'<script type="application/json" id="documents">(.*?)</script>', re.DOTALL)


def test_both_languages_have_the_same_strings_with_the_same_values_to_fill_in() -> None:
    found = assets.strings()
    assert list(found["en"]) == list(found["zh"])
    for key, english in found["en"].items():
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", found["zh"][key])), key


def test_every_string_that_the_script_names_exists() -> None:
    keys = assets.strings()["en"]
    named = set(re.findall(r'\bt\("([\w.-]+)"', assets.script()))
    assert len(named) > 20
    assert named <= set(keys)
    shown = {path.stem for path in (assets.FOLDER / "views").glob("*.js")}
    assert {f"view.{name}" for name in shown} <= set(keys)
    assert shown <= set(views())


def test_every_reason_against_an_attribution_has_a_string() -> None:
    source = (ROOT / "src/allyouneed/apps/inspect/inside/why.py").read_text(encoding="utf-8")
    reasons = re.findall(r'return f?"(.+)"', source[source.index("def attribution_problem") :].split("\ndef ")[0])
    said = [re.sub("[^a-z]+", "-", re.sub(r"\{.*?\} ", "", one.lower())) for one in reasons]
    assert len(said) == 6 and {f"why.problem.{one}" for one in said} <= set(assets.strings()["en"])


def test_nothing_comes_from_elsewhere_and_no_text_is_parsed_as_html() -> None:
    sources = assets.script() + assets.style() + (assets.FOLDER / "page.html").read_text(encoding="utf-8")
    urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", sources))
    assert urls <= {"http://www.w3.org/2000/svg"}  # the name of a namespace
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|@import|srcdoc", sources
    )
    assert not re.search(r"localStorage|sessionStorage|document\.cookie", sources)


def test_hostile_text_stays_inert_data_of_the_offline_file() -> None:
    page = assets.offline_page([DOCUMENT])
    assert page.count("<script") == 3 and page.count("</script>") == 3  # strings, documents, the script
    assert page.count("onerror") == 2 and "<img" not in page  # inside the data alone
    found = DATA.search(page)
    assert found and json.loads(found[1]) == {"offline": True, "views": ["walk"], "documents": [DOCUMENT]}


def test_the_offline_file_allows_only_its_own_script_and_style(tmp_path: Path) -> None:
    file = save([DOCUMENT], tmp_path / "page.html")
    text = file.read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy and "default-src 'none'" in policy[1] and "unsafe" not in policy[1]
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        inner = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inner) == 1
        digest = base64.b64encode(hashlib.sha256(inner[0].encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy[1]
    assert not re.search(r'(src|href)="(?!data:|#)', text)


@pytest.mark.parametrize(
    ("name", "said"), [("page.txt", "an .html file"), ("no/page.html", "no such folder"), ("d.html", "a folder")]
)
def test_a_page_that_cannot_be_written_is_refused(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "d.html").mkdir()
    with pytest.raises(UserError, match=said):
        save([DOCUMENT], tmp_path / name)


def test_a_notebook_shows_the_page_in_a_sandboxed_frame() -> None:
    shown = Page([DOCUMENT])._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "allow-same-origin" not in shown and shown.count("<") == 2
    content = re.search(r'srcdoc="(.*?)"', shown, re.DOTALL)
    assert content and html.unescape(content[1]) == assets.offline_page([DOCUMENT])


def test_every_asset_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["allyouneed"]
    package = ROOT / "src" / "allyouneed"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    used = {path for path in assets.FOLDER.rglob("*") if path.is_file()}
    assert used and used <= packed
    tracked = subprocess.run(["git", "ls-files", str(assets.FOLDER)], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0 and tracked.stdout:
        assert {ROOT / line for line in tracked.stdout.split()} <= used


def test_numbers_arrive_exactly_and_long_axes_are_pooled_by_size() -> None:
    values = torch.tensor([[float("nan"), float("inf"), -1e-45], [1 / 3, -0.0, 3e38]])
    assert torch.equal(numbers(tensor(values)), values) or numbers(tensor(values)).isnan().sum() == 1
    assert numbers(tensor(values)).view(torch.int32)[:, 1:].equal(values.view(torch.int32)[:, 1:])
    long = torch.zeros(2, 2500)
    long[1, 2499], long[0, 1] = -3.0, 2.0
    sent = tensor(long)
    assert sent["shape"] == [2, 834] and sent["pooled"] == [1, 3] and sent["by"] == "max"
    assert numbers(sent)[1, 833] == -3 and numbers(sent)[0, 0] == 2
