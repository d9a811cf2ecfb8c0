"""Prompts to answer, without answers: lines of text, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from allyouneed.data.chat.template import check_messages
from allyouneed.data.files.chats import Chat, prompt_problem
from allyouneed.data.files.lines import inner_suffix
from allyouneed.data.files.readers import (
    CELL_SUFFIXES,
    LINE_SUFFIXES,
    OBJECT_SUFFIXES,
    Files,
    Paths,
    Report,
    expand_paths,
    read_text,
)
from allyouneed.data.files.tables import read_objects


class PromptFiles(Files):
    """Files of prompts: a text per line, or JSON objects whose `key` is a text or a list of messages; comparisons have
    such prompts too."""

    examples: ClassVar[str] = "prompts"
    kind: Literal["prompts"] = "prompts"
    path: Paths
    """A file or a list of files: .txt, or .jsonl, .ndjson, .json."""
    key: str = "prompt"
    """In JSON: the key of the prompt."""

    def files(self) -> list[Path]:
        return expand_paths(self.path, (*LINE_SUFFIXES, *CELL_SUFFIXES, *OBJECT_SUFFIXES))

    def read(self, report: Report) -> Iterator[Chat]:
        for file in self.sources():
            if inner_suffix(file) not in (*CELL_SUFFIXES, *OBJECT_SUFFIXES):
                for number, text in read_text(file, report):
                    if text.strip():
                        yield Chat(tuple(check_messages(text.strip())), str(file), number)
                    else:
                        report.drop("empty", file, number, "the prompt is empty", text)
                continue
            for number, entry, text in read_objects(file, (self.key,), report, "key"):
                prompt = entry[self.key]
                problem = "" if isinstance(prompt, str) and prompt.strip() else prompt_problem(prompt)
                if problem:
                    report.drop("broken", file, number, problem, text)
                else:
                    yield Chat(tuple(check_messages(prompt)), str(file), number)
