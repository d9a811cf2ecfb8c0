"""The way of a person with a model, step by step: train it, be interrupted, resume, load, evaluate, ask it in Python,
on the command line and over HTTP, look inside, store it as int8, export it.

A step works, or ends with one message (`UserError`, exit code 2, a 4xx); everything else is an error of ours. A task
joins by being in `toy_texts.RUNS`, a method of predictors by a row of `USES`, a step by a function in `STEPS`.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.errors import UserError
from allyouneed.training import Recipe, loop, train
from allyouneed.training.reporting.log import read_log
from served import served_client
from toy_texts import GOOD, Listener

UPDATES = 3
KEYS: dict[str, Any] = {
    "steps": UPDATES,
    "save": {"every": 1, "keep": 1},
    "schedule": {"kind": "constant", "peak": 0.001, "warmup": 0},
}
CLICK = {"items": "a b", "item": "c", "place": "Ulm"}
TEXT = "the cat sees the sea"
ASKED, TOLD = "where does Anna live?", "Anna lives in Paris. Otto lives in Ulm."


class Use(NamedTuple):
    """One question to models whose predictor has `method`. `command`: its arguments, or lines of a file for it. The
    page shows the last word of the command, a text."""

    method: str
    question: tuple[Any, ...]
    command: tuple[str, ...]
    path: str  # over HTTP
    body: dict[str, Any]
    lines: tuple[str, ...] = ()
    target: str = ""  # an answer to look at


PICTURE, SOUND = "{picture}", "{sound}"  # of the held-out examples: the path, or over HTTP the bytes in base64
SIDES = ["a red square on the left", "a blue square on the right"]
# in order of preference: a predictor is asked by the first of its methods
USES = (
    Use(
        "match_image",
        (PICTURE, SIDES),
        ("match-image", "--text", SIDES[0], "--text", SIDES[1], PICTURE),
        "/v1/tasks/image-text",
        {"inputs": [PICTURE], "labels": SIDES},
        target=SIDES[0],
    ),
    Use(
        "caption",
        (PICTURE,),
        ("caption", PICTURE),
        "/v1/tasks/captioning",
        {"inputs": [PICTURE]},
        target=SIDES[0],
    ),
    Use(
        "classify_image",
        (PICTURE,),
        ("classify-image", PICTURE),
        "/v1/tasks/image-classification",
        {"inputs": [PICTURE]},
    ),
    Use(
        "classify_audio",
        (SOUND,),
        ("classify-audio", SOUND),
        "/v1/tasks/audio-classification",
        {"inputs": [SOUND]},
    ),
    Use("transcribe", (SOUND,), ("transcribe", SOUND), "/v1/tasks/transcription", {"inputs": [SOUND]}),
    Use("summarise", (TEXT,), ("summarise", TEXT), "/v1/tasks/summarisation", {"inputs": [TEXT]}),
    Use("correct", (TEXT,), ("correct", TEXT), "/v1/tasks/correction", {"inputs": [TEXT]}),
    Use("seq2seq", (TEXT,), ("seq2seq", TEXT), "/v1/tasks/seq2seq", {"inputs": [TEXT]}),
    Use(
        "answer",
        (ASKED, TOLD),
        ("answer",),
        "/v1/tasks/question-answering",
        {"inputs": [[ASKED, TOLD]]},
        (f"{ASKED}\t{TOLD}",),
    ),
    Use(
        "rerank",
        ("a cat?", ["the cat", "the sea"]),
        ("rerank", "--query", "a cat?", "the cat", "the sea"),
        "/v1/rerank",
        {"query": "a cat?", "documents": ["the cat", "the sea"]},
    ),
    Use("translate", (TEXT,), ("translate", TEXT), "/v1/tasks/translation", {"inputs": [TEXT]}),
    Use(
        "generate",
        ("the cat",),
        ("generate", "--max-length", "4", "the cat"),
        "/v1/completions",
        {"prompt": "the cat", "max_tokens": 4},
    ),
    Use(
        "fill",
        ("the cat <mask> the sea",),
        ("fill-mask", "the cat <mask> the sea"),
        "/v1/tasks/fill-mask",
        {"inputs": ["the cat <mask> the sea"]},
    ),
    Use(
        "fill_mask",
        ("the cat <mask> the sea",),
        ("fill-mask", "the cat <mask> the sea"),
        "/v1/tasks/fill-mask",
        {"inputs": ["the cat <mask> the sea"]},
    ),
    Use("classify", (GOOD[0],), ("classify", GOOD[0]), "/v1/tasks/classification", {"inputs": [GOOD[0]]}),
    Use("tag", ("Anna lives in Paris",), ("tag", "Anna lives in Paris"), "/v1/tasks/tagging", {"inputs": ["Anna"]}),
    Use("embed", ("the cat",), ("embed", "the cat"), "/v1/embeddings", {"input": "the cat"}),
    Use("score", ("the cat", "good"), ("score",), "/v1/tasks/preference", {"inputs": [["a", "b"]]}, ("the cat\tgood",)),
    Use(
        "predict_click",
        (CLICK,),
        ("predict-click",),
        "/v1/tasks/click",
        {"inputs": [CLICK]},
        (",".join(CLICK), ",".join(CLICK.values())),
    ),
)


def fill(given: Any, media: Mapping[str, str]) -> Any:
    """With the picture and the sound in their places."""
    if isinstance(given, str):
        for place, one in media.items():
            given = given.replace(place, one)
        return given
    if isinstance(given, dict):
        return {key: fill(value, media) for key, value in given.items()}
    if isinstance(given, Use):
        files = {place: Path(one) for place, one in media.items()}
        encoded = {p: base64.b64encode(f.read_bytes()).decode() if f.is_file() else "" for p, f in files.items()}
        return Use(*(fill(value, media) for value in given))._replace(body=fill(given.body, encoded))
    return type(given)(fill(value, media) for value in given) if isinstance(given, list | tuple) else given


class Refused(Exception):
    """The one message that a step ended with."""


class Killed(BaseException):
    """What ends a training that has no time to say goodbye."""


class Journey:
    """One recipe and what becomes of it in a folder. `data`: held-out examples."""

    def __init__(self, recipe: Recipe, data: Path) -> None:
        self.recipe, self.data, self.folder = recipe, data, recipe.output.parent
        self.model = recipe.output / "model"

    @property
    def media(self) -> dict[str, str]:
        folder = self.data.parent
        return {PICTURE: str(folder / "pictures" / "valid-0.png"), SOUND: str(folder / "sounds" / "valid-0.wav")}

    @cached_property
    def use(self) -> Use:
        predictor = ayn.load(self.model)
        use = next(use for use in USES if hasattr(predictor, use.method))
        filled: Use = fill(use, self.media)
        return filled

    def ask(self, folder: Path) -> Any:
        return getattr(ayn.load(folder), self.use.method)(*self.use.question)

    def walk(self, names: list[str] | None = None) -> dict[str, str]:
        """Each step with the message that it was refused with; empty if it works."""
        found = {}
        for name in names or STEPS:
            try:
                STEPS[name](self)
                found[name] = ""
            except (UserError, Refused) as error:
                message = str(error)
                assert message and len(message.splitlines()) <= 20, message
                found[name] = message.replace(str(self.folder), "…")
        return found


def trained(journey: Journey) -> None:
    """Trained until the second update, where the process dies, and trained again to the end, in one log."""
    with killed_at(2), contextlib.suppress(Killed):
        train(journey.recipe, console=Listener().console)
    result = train(journey.recipe, console=Listener().console)
    steps = [entry["step"] for entry in read_log(journey.recipe.output / "log.jsonl") if "loss" in entry]
    assert steps == [*range(1, UPDATES + 1)]
    assert result.model == journey.model


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    update = loop.Trainer._update

    def dies(self: Any, given: Any) -> None:
        update(self, given)
        if self.state.step == step:
            raise Killed

    loop.Trainer._update = dies  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.Trainer._update = update  # type: ignore[method-assign]


def python(journey: Journey) -> None:
    assert journey.ask(journey.model) is not None


def command(journey: Journey) -> None:
    use = journey.use
    given = list(use.command)
    if use.lines:
        path = journey.folder / "asked.csv"
        path.write_text("\n".join(use.lines) + "\n", encoding="utf-8")
        given.append(str(path))
    shell(given[0], "--model", journey.model, *given[1:])


def evaluated(journey: Journey) -> None:
    assert json.loads(shell("evaluate", journey.data, "--model", journey.model, "--json"))


def served(journey: Journey) -> None:
    use = journey.use
    with served_client({"model": journey.model}) as (_, client):
        got = client.post(use.path, json={"model": "model"} | use.body)
    if 400 <= got.status_code < 500:
        raise Refused(str(got.json()["error"]["message"]))
    assert got.status_code == 200, got.text
    assert got.json()


def looked(journey: Journey) -> None:
    page = journey.folder / "walk.html"
    follow = ["--target", journey.use.target] if journey.use.target else []
    shell("look", "walk", journey.use.command[-1], *follow, "--model", journey.model, "-o", page)
    assert page.stat().st_size > 10_000


def int8(journey: Journey) -> None:
    small = journey.folder / "int8"
    shell("quantize", journey.model, small, "--to", "int8", "--data", journey.data, "--force")
    assert journey.ask(small) is not None


def exported(journey: Journey) -> None:
    """Read back and compared by the command itself; opened again as whatever the other library calls it."""
    out = journey.folder / "hf"
    shell("export", journey.model, out, "--to", "hf", "--no-check")
    assert ayn.load(out)


STEPS: dict[str, Callable[[Journey], None]] = {
    "train": trained,
    "Python": python,
    "command": command,
    "evaluate": evaluated,
    "HTTP": served,
    "look": looked,
    "int8": int8,
    "export": exported,
}


def shell(*words: Any) -> str:
    """What a command prints, in this process; its message if it refuses."""
    out, err, streams = io.StringIO(), io.StringIO(), (sys.stdin, sys.stdout, sys.stderr)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), out, err
    try:
        main([str(word) for word in words])
        code: Any = 0
    except SystemExit as stopped:
        code = stopped.code or 0
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
    if code == 2:
        raise Refused(err.getvalue().removeprefix("allyouneed: ").strip())
    assert code == 0, err.getvalue()
    return out.getvalue()
