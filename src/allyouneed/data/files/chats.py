"""Chats, and pairs of answers with a preferred one: JSON, one object per line or in an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from allyouneed.data.chat.template import check_messages, message_problem
from allyouneed.data.files.readers import CELL_SUFFIXES, OBJECT_SUFFIXES, Files, Paths, Report, expand_paths
from allyouneed.data.files.tables import read_objects
from allyouneed.errors import UserError


class Chat(NamedTuple):
    """Messages, each with `role` and `content`."""

    messages: tuple[Mapping[str, Any], ...]
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(message["content"] for message in self.messages)

    @property
    def metadata(self) -> str:
        return " ".join(message["role"] for message in self.messages)


class ChatFiles(Files):
    """Files of chats: JSON objects with a list of messages, each with `role` (system, user, assistant, tool) and
    `content`."""

    examples: ClassVar[str] = "chats"
    kind: Literal["chats"] = "chats"
    path: Paths
    """A file or a list of files: .jsonl, .ndjson or .json."""
    key: str = "messages"
    """Key of the list of messages."""

    def files(self) -> list[Path]:
        return object_files(self.path)

    def read(self, report: Report) -> Iterator[Chat]:
        for file in self.sources():
            for number, entry, text in read_objects(file, (self.key,), report, "key"):
                messages = entry[self.key]
                if problem := chat_problem(messages):
                    report.drop("broken", file, number, problem, text)
                else:
                    yield Chat(tuple(messages), str(file), number)


class Comparison(NamedTuple):
    """A prompt (messages) and two answers, the preferred one first."""

    messages: tuple[Mapping[str, Any], ...]
    chosen: str
    rejected: str
    file: str
    line: int

    @property
    def texts(self) -> tuple[str, ...]:
        return *(message["content"] for message in self.messages), self.chosen, self.rejected

    @property
    def metadata(self) -> str:
        return ""


class ComparisonFiles(Files):
    """Files of comparisons: JSON objects with a prompt, the preferred answer and the other one. A prompt is a text or a
    list of messages; an answer is a text."""

    examples: ClassVar[str] = "comparisons"
    kind: Literal["comparisons"] = "comparisons"
    path: Paths
    """A file or a list of files: .jsonl, .ndjson or .json."""
    keys: tuple[str, str, str] = ("prompt", "chosen", "rejected")
    """Keys of the prompt, the preferred answer and the other one."""

    def files(self) -> list[Path]:
        return object_files(self.path)

    def read(self, report: Report) -> Iterator[Comparison]:
        for file in self.sources():
            for number, entry, text in read_objects(file, self.keys, report):
                prompt, *answers = (entry[key] for key in self.keys)
                problem = "" if isinstance(prompt, str) else prompt_problem(prompt)
                for key, answer in zip(self.keys[1:], answers, strict=True):
                    if not problem and not isinstance(answer, str):
                        problem = f"{key}: a {type(answer).__name__}, expected a text"
                if not problem and answers[0] == answers[1]:
                    problem = f"{self.keys[1]} and {self.keys[2]} are the same text"
                if problem:
                    report.drop("broken", file, number, problem, text)
                else:
                    messages = tuple(check_messages(prompt))
                    yield Comparison(messages, answers[0], answers[1], str(file), number)


def prompt_problem(messages: Any) -> str:
    """What is wrong with the messages before an answer; empty if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "no messages"
    for number, message in enumerate(messages):
        if problem := message_problem(message):
            return f"message {number + 1}: {problem}"
    return "the prompt ends with an answer" if messages[-1]["role"] == "assistant" else ""


def chat_problem(messages: Any) -> str:
    """What is wrong with a chat to learn from; empty if nothing is."""
    if not isinstance(messages, list) or not messages:
        return "no messages"
    for number, message in enumerate(messages):
        if problem := message_problem(message):
            return f"message {number + 1}: {problem}"
    answers = [message for message in messages if message["role"] == "assistant"]
    return "" if answers else "no answer (a message of role 'assistant')"


def object_files(paths: Paths) -> list[Path]:
    known = (*OBJECT_SUFFIXES, *CELL_SUFFIXES)
    found = expand_paths(paths, known)
    for file in found:
        if not any(suffix in known for suffix in file.suffixes):
            raise UserError(f"{file}: expected objects, JSON or a table with names of columns ({', '.join(known)})")
    return found
