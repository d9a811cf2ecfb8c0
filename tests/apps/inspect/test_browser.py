"""The page in a real browser: every view opens, answers clicks and keys, sends no other requests, and is accessible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from allyouneed.apps.inspect.assets import FOLDER
from allyouneed.apps.inspect.offline import collect, save, view_model
from allyouneed.apps.inspect.views import views
from allyouneed.models import shipped
from browser import Tab, chromium
from served import Running, serving, write_folder

VIEWS = [name for name, one in views().items() if (FOLDER / "views" / f"{name}.js").exists() and not one.runs]
HOSTILE = "<img src=x onerror=hit=1>\u202egnp 机器 👩‍👧"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def running(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    models = {"translator": shipped(), "another": shipped()}  # two, so that compare is offered
    models["generator"] = write_folder(tmp_path_factory.mktemp("models") / "generator", "lm", seed=3)
    with serving(models) as found:
        yield found


@pytest.fixture
def tab(browser: Any, running: Running) -> Iterator[Tab]:
    found = Tab(browser, running.url)
    yield found
    found.context.close()


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_opens_without_errors_and_is_accessible(tab: Tab, running: Running, view: str) -> None:
    page = tab.open(f"{running.url}/#/{view}?theme=dark&lang=zh" if view == "mixing" else f"{running.url}/#/{view}")
    assert page.locator("#main h1").first.inner_text().strip()
    assert page.locator("nav a[aria-current='page']").get_attribute("data-name") == view
    tab.check()
    assert tab.violations() == []


def test_the_paragraphs_of_a_text_are_paragraphs_of_its_answer(tab: Tab, running: Running) -> None:
    page = tab.open(f"{running.url}/#/use?lang=en&to=de&text=The%20car.%0A%0AThe%20dog.%0AA%20house.")
    answer = page.locator(".answer").first.inner_text()
    assert answer.count("\n") == 3 and "\n\n" in answer and "⏎" not in answer


def test_clicks_and_keys(tab: Tab, running: Running) -> None:
    page = tab.open(f"{running.url}/#/walk?lang=en")
    page.get_by_role("button", name="Next token").click()
    assert "Step 2 of" in page.locator("#main").inner_text()
    page.keyboard.press("Tab")
    page.locator("nav a[data-name='mixing']").press("Enter")
    tab.wait()
    page.locator(".grid button").nth(2).click()
    tab.wait()
    assert "shown=head+2" in page.url
    cursor = page.locator("canvas[tabindex='0'], [role='application'][tabindex='0'], .heatmap [tabindex='0']").last
    cursor.focus()
    before = page.locator("#live").inner_text()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.locator("#live").inner_text() != before  # the value of the cell is announced
    page.locator("nav a[data-name='what_if']").click()
    tab.wait()
    page.get_by_role("button", name="encoder.0.channel", exact=True).click()
    tab.wait()
    assert "ablate=encoder.0.channel" in page.url and "ablate" in page.locator("#main").inner_text()
    page.get_by_role("button", name="切换到中文").click()
    tab.wait()
    assert page.locator("html").get_attribute("lang") == "zh-Hans" and "编码器" in page.locator("#main").inner_text()
    tab.check()


@pytest.mark.parametrize("model", ["translator", "generator"])
def test_every_view_opens_for_a_new_text_after_a_word_was_clicked(tab: Tab, running: Running, model: str) -> None:
    def run(text: str) -> None:
        page.locator("#input textarea").fill(text)
        page.get_by_role("button", name="Run", exact=True).click()
        tab.wait()

    page = tab.open(f"{running.url}/#/use?lang=en&model={model}")
    for number, view in enumerate(VIEWS):
        page.locator("nav a[data-name='use']").click()
        tab.wait()
        run(f"the cat {number}")
        page.locator("[aria-label='Generated'] .token").first.click()
        tab.wait()
        tab.check()
        assert page.get_by_role("heading", name="Instead of this word").is_visible()
        page.locator(f"nav a[data-name='{view}']").click()
        tab.wait()
        if page.locator("#input").is_visible():
            run(f"the mat {number}")
        tab.check()


def test_lessons_lead_through_the_views(tab: Tab, running: Running) -> None:
    page = tab.open(f"{running.url}/#/lessons?lang=en")
    titles = []
    for _ in range(11):
        tab.wait()
        titles.append(page.locator("#main h1").first.inner_text())
        page.get_by_role("button", name="Show the solution").click()
        tab.wait()
        assert page.locator(".lesson .note").inner_text().strip()
        tab.check()
        following = page.get_by_role("button", name="Next lesson")
        if following.is_disabled():
            break
        following.click()
    assert len(set(titles)) == 11


def test_texts_come_back_but_stand_in_no_address(tab: Tab, running: Running) -> None:
    page = tab.open(f"{running.url}/#/walk?lang=en&position=1&text=a+link+with+a+text")
    field = page.locator("#input textarea")
    assert field.input_value() == "a link with a text" and "position=1" in page.url
    for text in ("我昨天在图书馆看书。", "a second one"):
        page.locator("#input textarea").fill(text)
        page.get_by_role("button", name="Run", exact=True).click()
        tab.wait()
        assert "text" not in page.url.partition("#")[2]
    page.go_back()
    tab.wait()
    assert field.input_value() == "我昨天在图书馆看书。"
    page.reload()
    tab.wait()
    assert field.input_value() == "我昨天在图书馆看书。" and "lang=en" in page.url
    page.locator("nav a[data-name='why']").click()
    tab.wait()
    assert field.input_value() == "我昨天在图书馆看书。" and "text" not in page.url.partition("#")[2]
    tab.check()


def test_rounded_numbers_are_explained_where_words_have_probabilities(tab: Tab, running: Running) -> None:
    for model, rounded in (("translator", True), ("generator", False)):  # int8, float32
        page = tab.open(f"{running.url}/#/why?lang=en&model={model}")
        assert page.locator("#foot").get_by_text("Numbers are rounded on the way").count() == rounded
        page.goto("about:blank")


@pytest.mark.parametrize("text", ["", "   "])
def test_without_a_text_every_view_asks_for_one(tab: Tab, running: Running, text: str) -> None:
    for view in VIEWS:
        page = tab.open(f"{running.url}/#/{view}?lang=en&model=generator")
        if page.locator("#input").is_visible():
            page.locator("#input textarea").fill(text)
            page.get_by_role("button", name="Run", exact=True).click()
            tab.wait()
            assert page.locator("#main").get_by_text("Enter a text above.").is_visible(), view
    assert not tab.problems


def test_hostile_text_is_shown_and_never_executed(tab: Tab, running: Running) -> None:
    page = tab.open(f"{running.url}/#/walk?lang=en")
    page.locator("textarea[name='text']").fill(HOSTILE)
    page.get_by_role("button", name="Run").click()
    tab.wait()
    assert page.evaluate("window.hit") is None and page.locator("#main img, #main script").count() == 0
    shown = page.locator("#main").inner_text()
    assert "\u202e" not in shown and "onerror" in shown.replace("·", "").replace("\n", "")
    tab.check()


def test_the_offline_file_opens_from_disk(browser: Any, running: Running, tmp_path: Path) -> None:
    import allyouneed as ayn

    model = view_model(ayn.load("translator"))
    path = save(collect(model, ("walk", "mixing", "why"), {"text": "机器学习很有趣"}), tmp_path / "page.html")
    tab = Tab(browser, path.as_uri(), offline=True)
    for view in ("walk", "mixing", "why"):
        page = tab.open(f"{path.as_uri()}#/{view}?lang=zh")
        assert page.locator("#main h1").first.inner_text().strip() and page.locator(".panel.error").count() == 0
    tab.check()
    assert tab.violations() == []
    tab.context.close()


def test_every_exercise_of_the_offline_lessons_can_be_done(browser: Any, tmp_path: Path) -> None:
    import allyouneed as ayn

    model = view_model(ayn.load("translator"))
    path = save(collect(model, ("lessons",), {"text": "机器学习很有趣"}), tmp_path / "lessons.html")
    tab = Tab(browser, path.as_uri(), offline=True)
    page = tab.open(path.as_uri())
    assert page.locator("nav a[aria-current='page']").get_attribute("data-name") == "lessons"
    missing = page.get_by_text("This part is not in the offline file")
    for _ in range(11):
        page.get_by_role("button", name="Show the solution").click()
        tab.wait()
        assert page.locator(".lesson .note").inner_text().strip()
        below = page.get_by_role("button", name="Show it below")
        if below.count():
            below.click()
            tab.wait()
        assert missing.count() == 0, page.locator("#main h1").first.inner_text()
        tab.check()
        if page.locator(".below [aria-label='Generated']").count():  # the search: click a word, take another
            page.locator(".below [aria-label='Generated'] .token").nth(1).click()
            tab.wait()
            page.locator(".below .bars[aria-label='Instead of this word'] button").nth(1).click()
            tab.wait()
            assert missing.count() == 0
        following = page.get_by_role("button", name="Next lesson")
        if following.is_enabled():
            following.click()
            tab.wait()
    assert page.locator("#main h1").first.inner_text() == "What if? Now you"
    tab.check()
    tab.context.close()


def test_a_narrow_screen_does_not_scroll_sideways(browser: Any, running: Running) -> None:
    tab = Tab(browser, running.url, viewport={"width": 360, "height": 740}, has_touch=True)
    for view in VIEWS:
        page = tab.open(f"{running.url}/#/{view}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
    tab.check()
    tab.context.close()
