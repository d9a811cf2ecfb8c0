"""The browser: a world of pages, and sessions in it that answer one question each.

The commands are those of WebGPT (Nakano et al. 2021, table 1), as a text of one line. What a session says and sees is a
chat: the question is the user's message, commands are the assistant's, pages are those of a tool. A recorded session is
therefore an example for `task: chat` (behaviour cloning).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allyouneed.apps.browse.pages import TextPage, read_pages
from allyouneed.apps.browse.search import BM25, IndexSearch, Search
from allyouneed.errors import UserError

if TYPE_CHECKING:
    from allyouneed.infer.predictors.generator import Generator
    from allyouneed.infer.predictors.reward import RewardModel

COMMANDS = {
    "search": "search WORDS",
    "open": "open NUMBER|TITLE",
    "scroll": "scroll down|up",
    "find": "find WORDS",
    "quote": "quote TEXT",
    "back": "back",
    "answer": "answer TEXT",
}
HELP = ", ".join(COMMANDS.values())
MARK = re.compile(r"\[(\d+)\]")  # cites a quote


@dataclass(frozen=True)
class Quote:
    """A text that stands on a page, word for word."""

    text: str
    page: str  # its path
    title: str


@dataclass(frozen=True)
class BrowserView:
    """What a session looks at: results of a search, or a page from some line on."""

    results: tuple[int, ...] = ()
    page: int | None = None
    line: int = 0


@dataclass
class Session:
    """A question on its way to an answer. `step` runs a command and gives what the browser shows."""

    browser: Browser
    question: str
    messages: list[dict[str, str]] = field(default_factory=list)
    quotes: list[Quote] = field(default_factory=list)
    answer: str | None = None
    reward: float | None = None  # by a reward model, if one has chosen this session
    views: list[BrowserView] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "user", "content": self.question}]

    @property
    def finished(self) -> bool:
        return self.answer is not None

    @property
    def steps(self) -> list[str]:
        """The commands so far."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]

    @property
    def text(self) -> str:
        """The answer without its citations."""
        return MARK.sub("", self.answer or "").strip()

    @property
    def cited(self) -> list[Quote]:
        """The quotes that the answer cites by number, [1]; those that do not exist are left out."""
        numbers = dict.fromkeys(int(found) for found in MARK.findall(self.answer or ""))
        return [self.quotes[number - 1] for number in numbers if 1 <= number <= len(self.quotes)]

    @property
    def supported(self) -> bool:
        """The answer cites at least one quote, all cited ones exist, and each stands on its page."""
        numbers = {int(found) for found in MARK.findall(self.answer or "")}
        return bool(numbers) and len(numbers) == len(self.cited) and all(map(self.browser.is_real, self.cited))

    def with_quotes(self) -> str:
        """The answer and the quotes that it cites, for a reader or a reward model."""
        return "\n".join([self.answer or "", *(f"{quote.title}: {quote.text}" for quote in self.cited)])

    def step(self, command: str) -> str:
        if self.finished:
            raise UserError("the session has ended with an answer")
        command = " ".join(command.split())
        verb, _, rest = command.partition(" ")
        shown = self._run(verb.lower(), rest)
        self.messages.append({"role": "assistant", "content": command})
        if not self.finished:
            self.messages.append({"role": "tool", "content": shown})
        return shown

    def _run(self, verb: str, rest: str) -> str:
        if verb not in COMMANDS:
            return f"unknown command {verb!r}; use {HELP}"
        if verb != "back" and not rest:
            return f"{verb} needs more: {COMMANDS[verb]}"
        return getattr(self, f"_{verb}")(rest)

    # --- the commands; each returns what is shown -------------------------------------------------------------------

    def _search(self, query: str) -> str:
        results = self.browser.search(query, self.browser.results)
        return self._show(BrowserView(results=tuple(results))) if results else f"nothing found for {query}"

    def _open(self, name: str) -> str:
        results = next((view.results for view in reversed(self.views) if view.results), ())
        titles = [self.browser.pages[page].title for page in results]
        if name in titles:
            return self._show(BrowserView(page=results[titles.index(name)]))
        if not name.isdecimal() or not 1 <= int(name) <= len(results):
            return f"no result {name}; there are {len(results)}"
        return self._show(BrowserView(page=results[int(name) - 1]))

    def _scroll(self, direction: str) -> str:
        page, view = self._page(), self.views[-1] if self.views else BrowserView()
        if page is None:
            return "no page is open"
        if direction not in ("down", "up"):
            return f"scroll down or up, not {direction}"
        line = view.line + (self.browser.lines if direction == "down" else -self.browser.lines)
        if line >= len(page.lines) or (line < 0 and view.line == 0):
            return "the page ends here" if line > 0 else "the page begins here"
        return self._show(BrowserView(page=view.page, line=max(line, 0)))

    def _find(self, text: str) -> str:
        page, view = self._page(), self.views[-1] if self.views else BrowserView()
        if page is None:
            return "no page is open"
        lines = [number for number, line in enumerate(page.lines) if text.lower() in line.lower()]
        after = [number for number in lines if number > view.line] or lines
        return self._show(BrowserView(page=view.page, line=after[0])) if after else f"{text} is not on this page"

    def _quote(self, text: str) -> str:
        page = self._page()
        if page is None:
            return "no page is open"
        if not contains(page, text):
            return "that text is not on this page"
        self.quotes.append(Quote(text, page.path, page.title))
        return f"quote [{len(self.quotes)}]"

    def _back(self, _: str) -> str:
        if len(self.views) < 2:
            return "there is nothing to go back to"
        self.views.pop()
        return self._show(self.views.pop())

    def _answer(self, text: str) -> str:
        self.answer = text
        return ""

    def _page(self) -> TextPage | None:
        number = self.views[-1].page if self.views else None
        return None if number is None else self.browser.pages[number]

    def _show(self, view: BrowserView) -> str:
        self.views.append(view)
        pages = self.browser.pages
        if view.page is None:
            return "\n".join(f"{number} {pages[page].title}" for number, page in enumerate(view.results, 1))
        page = pages[view.page]
        last = min(view.line + self.browser.lines, len(page.lines))
        rest = "" if view.line == 0 and last == len(page.lines) else f" ({view.line + 1}-{last} of {len(page.lines)})"
        return "\n".join([f"{page.title}{rest}", *page.lines[view.line : last]])


class Browser:
    """A world of pages: the text files of a folder, or pages. Nothing outside it is read, and there is no network.

    `index`: a folder built by `allyouneed index`, to search by vectors; default: by words (BM25). `lines`: lines of a
    page shown at once. `results`: pages found by a search.
    """

    def __init__(
        self, pages: Path | str | Sequence[TextPage], index: Path | str | None = None, lines: int = 10, results: int = 5
    ) -> None:
        if lines < 1 or results < 1:
            raise UserError("a browser shows at least one line and one result")
        self.pages = read_pages(pages) if isinstance(pages, str | Path) else list(pages)
        if not self.pages:
            raise UserError("there are no pages to browse")
        self.search: Search = BM25(self.pages) if index is None else IndexSearch(index, self.pages)
        self.lines, self.results = lines, results
        self.by_path = {page.path: page for page in self.pages}

    def session(self, question: str) -> Session:
        """A session to run commands in: by hand, by a script or by a model (`ask`)."""
        if not question.strip():
            raise UserError("the question is empty")
        return Session(self, question)

    def is_real(self, quote: Quote) -> bool:
        """Whether a quote stands on its page."""
        page = self.by_path.get(quote.page)
        return page is not None and contains(page, quote.text)

    def ask(self, model: Generator, question: str, **options: Any) -> Session:
        """Let a model answer a question; for `options` see `ask_many`."""
        return self.ask_many(model, [question], **options)[0]

    def ask_many(
        self,
        model: Generator,
        questions: Sequence[str],
        best_of: int | None = None,
        reward: RewardModel | None = None,
        max_steps: int = 20,
        **decoding: Any,
    ) -> list[Session]:
        """One session per question. `best_of` and `reward`: how many sessions each gets; the one with the highest
        reward is kept. `max_steps`: commands of a session; one that has not answered by then has no answer."""
        from allyouneed.apps.browse.agent import ask_many

        return ask_many(self, model, questions, best_of, reward, max_steps, decoding)


def contains(page: TextPage, text: str) -> bool:
    """Word for word; line breaks and repeated spaces are the same."""
    return bool(text.strip()) and " ".join(text.split()) in " ".join(page.text.split())
