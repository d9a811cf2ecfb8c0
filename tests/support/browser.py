"""A headless Chromium for the tests of the page: found in the usual places, `make test` installs it where it can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from waiting import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
FLAGS += " --disable-component-update"


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser; without one the tests are skipped, and say so."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser ({', '.join(NAMES)}); install one: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS.split())
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page that notes what went wrong: console errors, exceptions, failed requests, and requests to other hosts."""

    def __init__(self, browser: Any, allowed: str, **options: Any) -> None:
        given = {"viewport": {"width": 1280, "height": 900}, "locale": "en-US", "reduced_motion": "reduce"} | options
        self.context = browser.new_context(**given)
        self.page = self.context.new_page()
        self.page.set_default_timeout(1000 * PATIENCE)
        self.problems: list[str] = []
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("console", self._console)
        self.page.on("request", lambda one: self._request(one.url, allowed))
        self.page.on("response", self._response)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _request(self, url: str, allowed: str) -> None:
        if not url.startswith((allowed, "data:", "blob:")):
            self.problems.append(f"foreign request: {url}")

    def _response(self, response: Any) -> None:
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.request.method} {response.url}")

    def open(self, url: str) -> Any:
        self.page.goto(url)
        return self.wait()

    def wait(self) -> Any:
        """Until nothing is being loaded."""
        self.page.wait_for_selector("#main[aria-busy='false']")
        self.page.wait_for_selector("[aria-busy='true']", state="detached")
        return self.page

    def check(self) -> None:
        """No error, and none is shown."""
        shown = self.page.locator(".panel.error").all_inner_texts()
        assert not self.problems and not shown, (self.problems, shown)

    def violations(self) -> list[str]:
        """Serious and critical accessibility problems that axe-core finds."""
        import axe_core_python

        script = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
        # the page's policy refuses foreign scripts, so it is evaluated through the debugger
        self.page.evaluate(f"() => {{ {script} }}")
        found = self.page.evaluate("async () => (await axe.run()).violations")
        return [
            f"{one['id']} ({one['impact']}): {[node['target'] for node in one['nodes']][:3]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
