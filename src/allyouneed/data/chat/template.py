"""Chat templates: messages become a prompt, as the folder's `chat_template` writes it (jinja2, as Hugging Face's).

A template is rendered by another process (render_template.py) within a time and a size, because it is code from a model
folder; encoding its output counts against the same time. Text of messages cannot contain special tokens: where a
message spells one, it is encoded as plain text, while those of the template are special.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.files.reading import has_file, parse_json, read_bytes

SCRIPT = Path(__file__).with_name("render_template.py")
MEMORY = 512 << 20  # bytes of the process
SECONDS, CHARACTERS = 5.0, 1 << 20  # default limits of a rendering
INLINE = 1 << 15  # characters that are encoded without a thread to wait for: it takes milliseconds
MAX_SOURCE = 1 << 20  # bytes of a template; the longest published ones have 30,000
FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
FILE = FILES[0]  # what we write
ORIGINALS = "original"  # folder.py: files of an imported model
MARK = "\ue000{}\ue001"  # stands for a special token that a message spelled; private-use characters
MARKS = re.compile("\ue000([0-9]{1,9})\ue001")
ROLES = ("system", "user", "assistant", "tool")
TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

# `roles`: one special token per role, which no message can spell; `plain`: for tokenizers that do not have them
BUILT_IN = {
    "roles": (
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' }}{{ message.content }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "plain": (
        "{{ bos_token }}{% for message in messages %}{{ message.role + ':\\n' + message.content }}"
        "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    ),
}
ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)

Message = Mapping[str, Any]  # `role` and `content`, and what else a template reads


class TemplateError(UserError):
    """A template that fails, or refuses the messages."""


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a chat, or an error that says which one is wrong."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, Sequence) or not messages:
        raise UserError("a chat is a list of messages: [{'role': 'user', 'content': 'Hello'}]")
    for number, message in enumerate(messages):
        if problem := message_problem(message):
            raise UserError(f"messages[{number}]: {problem}")
    return [dict(message) for message in messages]


def message_problem(message: Any) -> str:
    """What is wrong with a message; empty if nothing is."""
    if not isinstance(message, Mapping):
        return f"a {type(message).__name__}, expected an object with 'role' and 'content'"
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            return f"no text {key!r} (keys: {', '.join(map(repr, message)) or 'none'})"
    if message["role"] not in ROLES:
        return f"unknown role {message['role']!r} (allowed: {', '.join(ROLES)})"
    return ""


class ChatTemplate:
    """`source`: in jinja2. `values`: `bos_token` and the like; default: the tokenizer's. The process starts with the
    first use."""

    def __init__(
        self,
        source: str,
        values: Mapping[str, Any],
        tokenizer: Tokenizer,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
    ) -> None:
        self.source, self.tokenizer = source, tokenizer
        own = {"eos_token": tokenizer.added.get(tokenizer.eos)}
        if tokenizer.bos in tokenizer.opening:  # some tokenizers have no begin token
            own["bos_token"] = tokenizer.added.get(tokenizer.bos)
        self.values = {name: token for name, token in own.items() if token is not None} | dict(values)
        self.seconds, self.characters = seconds, characters
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()
        names = sorted(set(tokenizer.added.values()), key=lambda name: -len(name))
        self.specials = re.compile("|".join(map(re.escape, names))) if names else None

    @classmethod
    def find(
        cls,
        path: Path | None,
        tokenizer: Tokenizer,
        originals: Mapping[str, bytes] | None = None,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
    ) -> ChatTemplate | None:
        """That of a model folder, if it has one; see `find_template`."""
        source, values = find_template(path, originals)
        return None if source is None else cls(source, values, tokenizer, seconds, characters)

    def encode(self, messages: Iterable[Message], extra: Mapping[str, Any]) -> list[int]:
        """Token ids of the prompt. `extra`: further values for the template. It blocks; call it in a thread."""
        spelled: list[str] = []
        safe = self._safe(messages, spelled)
        text, left = self._render({**self.values, **extra, "messages": safe})
        return self._ids(text, spelled, left)

    def prompt(self, messages: Iterable[Message]) -> list[int]:
        """Token ids up to where the model answers."""
        return self.encode(messages, {"add_generation_prompt": True})

    def encode_parts(self, messages: Sequence[Message]) -> list[tuple[list[int], bool]]:
        """The chat in parts: token ids, and whether the model writes them: an answer up to its end token. An answer is
        what the template adds to the prompt before it, so every prompt is encoded as it is when the model answers."""
        spelled: list[str] = []
        safe = self._safe(messages, spelled)
        parts: list[tuple[list[int], bool]] = []
        before = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, _ = self._render({**self.values, "messages": safe[:number], "add_generation_prompt": True})
            whole, left = self._render({**self.values, "messages": safe[: number + 1], "add_generation_prompt": False})
            if not prompt.startswith(before) or not whole.startswith(prompt):
                raise TemplateError(
                    f"the chat template writes message {number + 1} elsewhere than after the prompt for it, so it "
                    "cannot be trained with; set another `template`"
                )
            parts.append((self._ids(prompt[len(before) :], spelled, left), False))
            answer, after = self._until_stop(self._ids(whole[len(prompt) :], spelled, left))
            parts += [(answer, True), (after, False)]
            before = whole
        if parts:
            del parts[-1]  # nothing is predicted from what follows the last answer
        return parts

    def answer(self, messages: Sequence[Message], text: str) -> list[int]:
        """Token ids of an answer to these messages, its end token included."""
        return self.encode_parts([*messages, {"role": "assistant", "content": text}])[-1][0]

    def _until_stop(self, ids: list[int]) -> tuple[list[int], list[int]]:
        stops = {self.tokenizer.eos, *self.tokenizer.template.stops}
        ends = [at for at, token in enumerate(ids) if token in stops]
        if not ends:
            raise TemplateError(
                f"the chat template does not end an answer with {self.values.get('eos_token', 'the end token')}, so "
                "the model would not learn to stop; set another `template`"
            )
        return ids[: ends[-1] + 1], ids[ends[-1] + 1 :]

    def _safe(self, messages: Iterable[Message], spelled: list[str]) -> list[Any]:
        try:
            return [_replace(dict(message), partial(self._hide, spelled=spelled)) for message in messages]
        except RecursionError:
            raise TemplateError("the messages are nested too deeply") from None

    def _ids(self, text: str, spelled: Sequence[str], seconds: float) -> list[int]:
        """Token ids of what the template wrote, within what is left of its time. A tokenizer cannot be stopped, so a
        text that takes longer is finished in a thread, and later ones wait for it."""
        if len(text) <= INLINE:
            return self._encode_marked(text, spelled)
        waiting = self._long_texts.submit(self._encode_marked, text, spelled)
        try:
            return waiting.result(max(0.0, seconds))
        except TimeoutError:
            waiting.cancel()
            raise TemplateError(
                f"the chat template writes {len(text):,} characters, which take more than {self.seconds:g} s to encode"
            ) from None

    @cached_property
    def _long_texts(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "chat-template")

    def _encode_marked(self, text: str, spelled: Sequence[str]) -> list[int]:
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
        return self._render(values)[0]

    def _render(self, values: Mapping[str, Any]) -> tuple[str, float]:
        """The text, and how many seconds are left of the template's time."""
        try:
            line = json.dumps({"template": self.source, "values": values})
        except RecursionError:
            raise TemplateError("the values of the chat template are nested too deeply") from None
        with self.lock:
            self._start()
            begun = time.monotonic()
            answer = self._exchange(line, self.seconds)
        if "error" in answer:
            raise TemplateError(f"the chat template refuses the messages: {answer['error']}")
        return str(answer["text"]), self.seconds - (time.monotonic() - begun)

    def _start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, "-I", str(SCRIPT), str(MEMORY), str(self.characters)]
            try:
                self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            except OSError as error:
                raise TemplateError(f"the process of chat templates cannot start: {error.strerror}") from None
            weakref.finalize(self, _end, self.process)
            if "error" in self._exchange(json.dumps({"template": "", "values": {}}), seconds=60):
                raise TemplateError("the process of chat templates does not start")

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
            self._stop()
            return {"error": f"it takes more than {seconds:g} s or too much memory"}
        return json.loads(answer)

    def close(self) -> None:
        self._stop()
        if "_long_texts" in self.__dict__:
            self.__dict__.pop("_long_texts").shutdown(wait=False, cancel_futures=True)

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def find_template(path: Path | None, originals: Mapping[str, bytes] | None = None) -> tuple[str | None, dict[str, str]]:
    """The template of a model folder, ours or Hugging Face's, if it has one, and the tokens that it names. `originals`:
    files of the folder that are in memory."""
    source, values = None, dict[str, str]()
    for name in FILES:
        content = _read(path, originals or {}, name)
        if content is None:
            continue
        where = name if path is None else path / name
        tree = {"chat_template": content.decode("utf-8", "replace")} if name == FILE else _parse(content, where)
        if source is None:
            source = _default(tree.get("chat_template"))
            if source is not None and len(source) > MAX_SOURCE:
                raise UserError(
                    f"{where}: a chat template of {len(source):,} characters; at most {MAX_SOURCE:,} are read"
                )
        for key in TOKENS:
            value = tree.get(key)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                values[key] = text
    return source, values


def _read(path: Path | None, originals: Mapping[str, bytes], name: str) -> bytes | None:
    if name in originals:
        return originals[name]
    if path is None:
        return None
    for inside in (name, f"{ORIGINALS}/{name}"):
        if has_file(path, inside):
            return read_bytes(path, inside)
    return None


def _parse(content: bytes, where: Path | str) -> dict[str, Any]:
    try:
        tree = parse_json(content)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    return tree if isinstance(tree, dict) else {}


def _default(found: Any) -> str | None:
    """A folder may have several templates by name."""
    if isinstance(found, list):
        named = [one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"]
        found = named[0] if named else None
    return found if isinstance(found, str) else None


def _replace(value: Any, change: Any) -> Any:
    """The same tree with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _replace(one, change) for key, one in value.items()}
    return [_replace(one, change) for one in value] if isinstance(value, list) else value
