"""Chat templates: messages become a prompt, as the folder's `chat_template` writes it.

A template is rendered by another process (render_template.py) within a time and a size. Text of clients cannot contain
special tokens: where a message spells one, it is encoded as plain text, while those of the template are special.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.folder import Folder
from allyouneed.serve.errors import ApiError
from allyouneed.serve.settings import Limits

SCRIPT = Path(__file__).with_name("render_template.py")
MEMORY = 512 << 20  # bytes of the process
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
MARK = "\ue000{}\ue001"  # stands for a special token that a client spelled; private-use characters
MARKS = re.compile("\ue000(\\d+)\ue001")


class ChatTemplate:
    """`source`: in jinja2. `values`: `bos_token` and the like. The process starts with the first use."""

    def __init__(self, source: str, values: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> None:
        self.source, self.values, self.tokenizer = source, dict(values), tokenizer
        self.seconds, self.characters = limits.template_seconds, limits.template_characters
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()
        names = sorted(set(tokenizer.added.values()), key=lambda name: -len(name))
        self.specials = re.compile("|".join(map(re.escape, names))) if names else None

    @classmethod
    def of(cls, folder: Folder, limits: Limits) -> ChatTemplate | None:
        """The template of a model folder, ours or Hugging Face's, if it has one."""
        source, values = None, dict[str, Any]()
        for name in FILES:
            content = _read(folder, name)
            if content is None:
                continue
            tree = {"chat_template": content} if name.endswith(".jinja") else _parse(content)
            if source is None:
                source = _default(tree.get("chat_template"))
            for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
                value = tree.get(key)
                text = value.get("content") if isinstance(value, dict) else value
                if isinstance(text, str):
                    values[key] = text
        return None if source is None else cls(source, values, folder.tokenizers.target, limits)

    def encode(self, messages: Iterable[Mapping[str, Any]], extra: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt. `extra`: further values for the template. It blocks; call it in a thread."""
        spelled: list[str] = []
        safe = [_replace(dict(message), lambda text: self._hide(text, spelled)) for message in messages]
        text = self.render({**self.values, **extra, "messages": safe})
        ids: list[int] = []
        parts = MARKS.split(text)  # text, number, text, …
        for position, part in enumerate(parts):
            if position % 2 and int(part) < len(spelled):
                ids += self.tokenizer.encode(spelled[int(part)])
            elif part:
                ids += self.tokenizer.encode(part, specials=True)
        return ids

    def _hide(self, text: str, spelled: list[str]) -> str:
        text = text.replace("\ue000", "\ufffd")
        if self.specials is None:
            return text

        def mark(found: re.Match[str]) -> str:
            spelled.append(found[0])
            return MARK.format(len(spelled) - 1)

        return self.specials.sub(mark, text)

    def render(self, values: Mapping[str, Any]) -> str:
        line = json.dumps({"template": self.source, "values": values})
        with self.lock:
            answer = self._ask(line)
        if "error" in answer:
            raise ApiError(f"the chat template refuses the messages: {answer['error']}", param="messages")
        return str(answer["text"])

    def _ask(self, line: str) -> dict[str, Any]:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-I", str(SCRIPT), str(MEMORY), str(self.characters)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._exchange(json.dumps({"template": "", "values": {}}), seconds=60)  # it has started
        return self._exchange(line, self.seconds)

    def _exchange(self, line: str, seconds: float) -> dict[str, Any]:
        """One line to the process and one back; it is killed when it takes too long."""
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self.close()
            return {"error": f"it takes more than {seconds:g} s or too much memory"}
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()


def _read(folder: Folder, name: str) -> str | None:
    if name in folder.originals:
        return folder.originals[name].decode("utf-8", "replace")
    if folder.path is None or not (folder.path / name).is_file():
        return None
    return (folder.path / name).read_text(encoding="utf-8", errors="replace")


def _parse(content: str) -> dict[str, Any]:
    try:
        tree = json.loads(content)
    except ValueError:
        return {}
    return tree if isinstance(tree, dict) else {}


def _default(found: Any) -> str | None:
    """A folder may have several templates by name."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _replace(value: Any, change: Any) -> Any:
    """The same tree with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _replace(one, change) for key, one in value.items()}
    return [_replace(one, change) for one in value] if isinstance(value, list) else value
