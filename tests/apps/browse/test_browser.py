"""The browser: every command, quotes that are checked, search, and models that use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import allyouneed as ayn
from allyouneed.apps.browse.agent import ask_many
from allyouneed.apps.browse.browser import Browser, Quote, Session
from allyouneed.apps.browse.search import BM25
from allyouneed.cli import main
from allyouneed.data.files.chats import ChatFiles
from allyouneed.data.files.readers import Report
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis

PAGES = {
    "otter.md": "# Otters\nOtters swim.\nThe otter eats fish.\nIt sleeps at night.\nIts fur is\nthick.\nIt has five"
    " toes.",
    "deep/river.txt": "Rivers\nA river is water that flows.\nOtters live there.",
    "stone.txt": "Stones\nNothing lives there.",
    ".hidden.txt": "Hidden\nOtters otters otters.",
    "picture.png": "not a page",
}
QUESTION = "What does the otter eat?"


def run_command(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    for name, text in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_every_command(pages: Path) -> None:
    browser = Browser(pages, lines=2)
    session = browser.session(QUESTION)
    assert session.step("open 1") == "no result 1; there are 0" and session.step("quote x") == "no page is open"
    assert session.step("back") == "there is nothing to go back to"
    assert session.step("jump high").startswith("unknown command 'jump'; use search WORDS, open")
    assert session.step("search") == "search needs more: search WORDS"
    assert session.step("search unicorn") == "nothing found for unicorn"
    assert session.step("search otters") == "1 Otters\n2 Rivers"  # hidden files are not pages
    assert session.step("open 3") == "no result 3; there are 2"
    top = session.step("open 1")
    assert top == "Otters (1-2 of 7)\n# Otters\nOtters swim."
    assert session.step("scroll up") == "the page begins here"
    assert session.step("scroll down") == "Otters (3-4 of 7)\nThe otter eats fish.\nIt sleeps at night."
    assert session.step("find TOES") == "Otters (7-7 of 7)\nIt has five toes."
    assert session.step("scroll down") == "the page ends here"
    assert session.step("find wings") == "wings is not on this page"
    assert session.step("back").startswith("Otters (3-4") and session.step("back") == top
    assert session.step("back") == "1 Otters\n2 Rivers"
    assert session.step("open Rivers") == "Rivers (1-2 of 3)\nRivers\nA river is water that flows."
    session.step("back"), session.step("open 1")
    assert session.step("quote The otter eats bread.") == "that text is not on this page"
    assert session.step("quote The otter eats fish.") == "quote [1]"
    assert session.step("quote  Its fur is thick.") == "quote [2]"  # over a line break
    session.step("answer Fish [1]")
    assert session.finished and session.text == "Fish" and session.supported
    assert session.cited == [Quote("The otter eats fish.", "otter.md", "Otters")]
    assert session.with_quotes() == "Fish [1]\nOtters: The otter eats fish."
    assert [message["role"] for message in session.messages[:3]] == ["user", "assistant", "tool"]
    with pytest.raises(UserError, match="has ended"):
        session.step("back")


@pytest.mark.parametrize(
    ("answer", "supported"), [("Fish", False), ("Fish [1]", True), ("Fish [2]", False), ("Fish [1] [7]", False)]
)
def test_an_answer_is_supported_by_the_quotes_it_cites(pages: Path, answer: str, supported: bool) -> None:
    session = Browser(pages).session(QUESTION)
    for command in ("search otter fish", "open 1", "quote The otter eats fish.", f"answer {answer}"):
        session.step(command)
    assert session.supported is supported
    forged = Quote("The otter eats stars.", "otter.md", "Otters")
    assert not session.browser.is_real(forged) and session.browser.is_real(session.quotes[0])


def test_search_prefers_rare_words_and_titles(pages: Path) -> None:
    browser = Browser(pages)
    found = [browser.pages[number].title for number in browser.search("there river nothing", 5)]
    assert found == ["Rivers", "Stones"] or found == ["Stones", "Rivers"]
    assert browser.pages[browser.search("lives nothing", 1)[0]].title == "Stones"
    assert browser.search("", 5) == [] and len(browser.search("otter otters", 1)) == 1
    chinese = BM25([SimpleNamespace(title=title, text="") for title in ("水獭吃鱼", "石头")])  # type: ignore[misc]
    assert chinese("鱼", 2) == [0]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such folder of pages"), ({}, "no pages; put text files there"), ({"a.txt": b"\xff"}, "not UTF-8")],
)
def test_a_folder_that_cannot_be_browsed_is_refused(
    content: dict[str, bytes] | None, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "pages"
    for name, text in (content or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    if content == {}:
        folder.mkdir()
    with pytest.raises(UserError, match=message):
        Browser(folder)
    assert run_command(["browse", "why?", "--pages", str(folder)]) == 2


class Scripted:
    """A stand-in for a model: it writes these commands whatever it reads; `-` ends one of two samples early."""

    limit = None

    def __init__(self, *commands: str) -> None:
        self.commands, self.read = commands, list[list[Any]]()
        self.chat_template = SimpleNamespace(prompt=lambda messages: messages)
        self.tokenizer = SimpleNamespace(decode=lambda tokens, specials=False: "".join(tokens))
        self.engine = self

    def decoding_options(self, changes: dict[str, Any]) -> Any:
        self.changes = changes
        return SimpleNamespace(stop=())

    def complete(self, prompts: list[Any], options: Any, progress: Any, first: int) -> Any:
        self.read.append(prompts)
        return [
            [
                Hypothesis([self.commands[len(self.read) - 1]], 0.0, 0.0, [], True)  # type: ignore[list-item]
            ]
            for _ in prompts
        ]


def test_a_model_browses_until_it_answers(pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("allyouneed.apps.browse.agent.detokenize", lambda tokenizer, tokens, *rest: tokens[0])
    model: Any = Scripted("search otter", "open 1", "quote The otter eats fish.", "answer Fish [1]")
    browser = Browser(pages)
    sessions = browser.ask_many(model, [QUESTION, "And what else?"])
    assert [session.text for session in sessions] == ["Fish", "Fish"] and all(s.supported for s in sessions)
    assert [len(prompts) for prompts in model.read] == [2, 2, 2, 2] and model.changes["method"] == "greedy"
    assert not browser.ask(Scripted(*["back"] * 3), QUESTION, max_steps=3).finished  # type: ignore[arg-type]
    with pytest.raises(UserError, match="best_of and reward belong together"):
        ask_many(browser, model, [QUESTION], 4, None, 9, {})


def test_the_session_with_the_highest_reward_is_kept(pages: Path) -> None:
    from allyouneed.apps.browse.agent import choose

    sessions = []
    for answer in ("answer Bread", "answer Fish [1]", ""):
        session = Browser(pages).session(QUESTION)
        for command in ("search otter", "open 1", "quote The otter eats fish.", answer):
            session.step(command)
        sessions.append(session)
    reward: Any = SimpleNamespace(score=lambda prompts, texts: [-9.0 + len(text) for text in texts])
    best = choose(sessions, reward)
    assert best is sessions[1] and best.reward == -9.0 + len(best.with_quotes()) and not sessions[2].finished


def test_a_person_records_a_session(
    pages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = tmp_path / "typed"
    typed.write_text("search otter\nopen 1\nquote The otter eats fish.\nanswer Fish [1]\nback\n")
    record = tmp_path / "sessions.jsonl"
    with typed.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert run_command(["browse", QUESTION, "--pages", str(pages), "--record", str(record), "-q"]) == 0
    out = capsys.readouterr().out
    assert "  1 Otters\n" in out and out.endswith("Fish [1]\n[1] Otters (otter.md): The otter eats fish.\n")
    (chat,) = ChatFiles(path=record).read(report := Report())  # ready for `task: chat`
    assert (
        report.dropped == 0
        and [m["content"] for m in chat.messages if m["role"] == "assistant"][-1] == "answer Fish [1]"
    )


def test_the_browse_command_answers_with_a_model(
    pages: Path, chat_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "browse",
        QUESTION,
        "--pages",
        str(pages),
        "-m",
        str(chat_model),
        "--max-steps",
        "2",
        "--max-length",
        "5",
    ]
    assert run_command([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] is None and not found["supported"] and len(found["messages"]) == 5
    assert run_command(command) == 0
    out = capsys.readouterr().out
    assert out.startswith("> ") and out.endswith("no answer\n")
    assert run_command([*command, "--best-of", "2"]) == 2 and "--reward belong together" in capsys.readouterr().err
    assert isinstance(ayn.Browser(pages).ask(ayn.load(chat_model), QUESTION, max_steps=1, max_length=3), Session)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New weights with a chat template: what it writes are no commands."""
    from allyouneed.data.chat.template import BUILT_IN, FILE
    from allyouneed.interop.save import build_folder
    from toy_texts import DECODER

    tokenizer = ayn.train_tokenizer(["search otter"], 300)
    folder = build_folder(ayn.build(DECODER, vocab=tokenizer.size), tokenizer, "chat")
    folder.originals[FILE] = BUILT_IN["plain"].encode()
    path = tmp_path_factory.mktemp("chat") / "model"
    folder.save(path)
    return path


def test_search_uses_a_retro_index(pages: Path, tmp_path: Path, encoder: Callable[[], Path]) -> None:
    pytest.importorskip("faiss")
    from allyouneed.infer.retrieval.retriever import index_corpus
    from allyouneed.interop.load import load

    files = sorted(path for path in pages.rglob("*") if path.suffix in (".md", ".txt") and path.name[0] != ".")
    index, _ = index_corpus(files, load(encoder()), chunk=8, document="file")
    index.save(tmp_path / "index")
    browser = Browser(pages, index=tmp_path / "index", results=2)
    for number, page in enumerate(browser.pages):
        chunk = index.tokens[index.bounds[number] : index.bounds[number] + 8]
        found = browser.search(index.tokenizer.decode(chunk.tolist()), 2)
        assert browser.pages[found[0]] is page and len(set(found)) == 2  # its own first chunk is nearest
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("Another page")
    with pytest.raises(UserError, match="has none of the pages"):
        Browser(other, index=tmp_path / "index")


@pytest.fixture
def encoder(tmp_path: Path) -> Callable[[], Path]:
    from toy_texts import ENCODER

    def build() -> Path:
        tokenizer = ayn.train_tokenizer(PAGES.values(), 300)
        module = ayn.build(ENCODER | {"head": {"kind": "pooled"}}, vocab=tokenizer.size)
        return ayn.save(module, tokenizer, tmp_path / "encoder", task="similarity")

    return build
