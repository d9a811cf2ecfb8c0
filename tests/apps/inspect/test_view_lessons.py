"""Lessons: complete in both languages, true of the model that they are about, and every exercise has a solution."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from allyouneed.apps.inspect.assets import LANGUAGES, strings
from allyouneed.apps.inspect.inside.parts import find_part
from allyouneed.apps.inspect.views import build_document, find_view
from allyouneed.apps.inspect.views.exercises import SOLVERS
from allyouneed.apps.inspect.views.lessons import all_lessons
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.cli import main
from allyouneed.cli.look.inside import EXAMPLE
from allyouneed.errors import UserError
from inside_models import PIXELS, SENTENCE, make_predictor, system
from inside_models import translator as shipped

LM = {"kind": "causal-lm"}
# the shipped translator; decoders with pre-norm, one with fewer key heads and a gated layer; recurrent ones; post-norm;
# positions before every block; one that fills masks
NAMES = ("translator", "gpt2", "mistral", "rwkv", "retnet", "lstm", "post-norm", "universal", "masked")
PLACE = re.compile(r"\{(\w:)?[a-z_.]+\}")  # that nothing was filled in for
NUMBER = re.compile(r"\d[\d,]*")


@cache
def model_of(name: str) -> tuple[ViewModel, str]:
    match name:
        case "translator":
            return ViewModel(name, shipped()), EXAMPLE
        case "gpt2":
            return system("gpt-2"), SENTENCE
        case "rwkv" | "retnet":
            return system(name), SENTENCE
        case "post-norm":
            return system("post-norm encoder-decoder"), SENTENCE
        case "mistral":
            return ViewModel(name, make_predictor("mistral-7b", LM)), SENTENCE
        case "lstm":
            return ViewModel(name, make_predictor("rnnsearch", {"kind": "translation"})), SENTENCE
        case "universal":
            return ViewModel(name, make_predictor("universal-transformer", {"kind": "translation"})), SENTENCE
    return ViewModel(name, make_predictor("bert-base", {"kind": "masked-lm"})), "How are <mask> today?"


def lessons(name: str) -> dict[str, Any]:
    model, text = model_of(name)
    return {one["name"]: one for one in build_document("lessons", model, text=text)["data"]["lessons"]}


def solve(name: str, lesson: str) -> dict[str, Any]:
    model, text = model_of(name)
    found: dict[str, Any] = build_document("lessons", model, text=text, solve=lesson)["data"]["solution"]
    assert set(found["text"]) == set(LANGUAGES) and all(found["text"].values())
    assert not any(PLACE.search(text) for text in found["text"].values())
    return found


def test_every_lesson_is_complete_in_both_languages() -> None:
    keys = set(strings()["en"])
    assert 10 <= len(all_lessons()) <= 12 and [one["name"] for one in all_lessons()] == list(SOLVERS)
    for lesson in all_lessons():
        said = [lesson["title"], *lesson["text"], *lesson["try"], *lesson["solution"]]
        for one in said:
            assert set(one) - {"if"} == set(LANGUAGES) and all(one[language] for language in LANGUAGES)
            assert set(re.findall(r"\{t:([\w.]+)\}", str(one))) <= keys
        assert "if" not in lesson["try"][-1] and "if" not in lesson["solution"][-1]  # one of them always holds


@pytest.mark.parametrize("name", NAMES)
def test_what_a_lesson_shows_can_be_computed(name: str) -> None:
    model, text = model_of(name)
    for lesson in lessons(name).values():
        assert lesson["view"] in {view for view, _ in lesson["requests"]}
        assert all(isinstance(value, str) for value in lesson["params"].values())  # as in a hash
        for view, asked in [*lesson["requests"], *solve(name, lesson["name"])["requests"][:3]]:
            found = build_document(view, model, **({"text": text} | asked))
            assert found["view"] == view and found["data"]
            assert set(asked) <= set(find_view(view).request.model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_and_claim_is_that_of_the_config(name: str) -> None:
    model, text = model_of(name)
    config, run = model.predictor.model.config, model.predictor.inside(text)
    stack = next(iter(run.tokens))
    layers = getattr(config, stack)
    every = [layer for one in type(config).stacks for layer in getattr(config, one, None) or ()]
    first = layers[0]
    found = lessons(name)
    said = {one: " ".join([*lesson["text"]["en"], lesson["try"]["en"]]) for one, lesson in found.items()}
    numbers = {one: {int(n.replace(",", "")) for n in NUMBER.findall(text)} for one, text in said.items()}
    for one, lesson in found.items():  # both languages state the same numbers
        chinese = " ".join([*lesson["text"]["zh"], lesson["try"]["zh"]])
        known = {int(n.replace(",", "")) for n in NUMBER.findall(chinese)}
        assert known - {0} == numbers[one] - {0}, one
        assert not PLACE.search(said[one] + chinese), one

    assert model.predictor.folder.tokenizers.source.size in numbers["tokens"]
    assert config.embed.vector(config) in numbers["vectors"]
    kind = getattr(config.embed.positions, "kind", "none")
    assert ("sines and cosines" in said["vectors"]) == (kind == "sinusoidal")
    assert ("the position is added" in said["vectors"]) == (kind != "none")
    attends = first.mixer.kind == "attention"
    assert ("softmax" in said["attention"]) == attends and ("no attention weights" in said["attention"]) != attends
    if "heads" in found:
        assert first.mixer.heads in numbers["heads"]
        grouped = (getattr(first.mixer, "kv_heads", None) or first.mixer.heads) < first.mixer.heads
        assert ("share" in said["heads"]) == grouped and (not grouped or first.mixer.kv_heads in numbers["heads"])
    if "channel" in found:
        channels = [layer for layer in every if layer.channel is not None]
        inside = sum(one.channel.cost(config).parameters * (1 if one.share else one.repeat) for one in channels)
        assert f"{round(100 * inside / config.cost(1).parameters)} %" in said["channel"]
        assert ("the sum is not normalised" in said["channel"]) == (first.wiring.kind == "pre-norm")
        assert ("and the sum is normalised" in said["channel"]) == (first.wiring.kind == "post-norm")
        if first.channel.kind in ("ffn", "glu"):
            assert {config.width, first.channel.hidden} <= numbers["channel"]
            assert ("negative ones to 0" in said["channel"]) == (first.channel.activation == "relu")
    if "depth" in found:
        assert f"{sum(layer.repeat for layer in layers)} times" in said["depth"]
        assert ("shared weights" in said["depth"]) == first.share
        number = list(found).index("why") + 1
        assert f"Lesson {number} measures" in said["depth"]
    if "mask" in found:
        site = found["mask"]["params"]["site"]
        assert ("the mask lets" in said["mask"]) == hasattr(find_part(config, site).part, "pattern")
        weights = run.matrix(site).average
        assert not weights.triu(1).any()
    if "cross" in found:
        assert f"({sum(layer.repeat for layer in config.decoder)} of them)" in said["cross"]
        assert all(layer.cross is not None for layer in config.decoder)
        whole = all(layer.mixer is not None and layer.channel is not None for layer in config.decoder)
        assert ("Between its two other layers" in said["cross"]) == whole
        attends = all(layer.mixer is not None and layer.mixer.kind == "attention" for layer in config.decoder)
        assert ("the only way" in said["cross"]) == attends
    if "choice" in found:
        assert ("table of embeddings" in said["choice"]) == bool(config.embed.ties)
        decoding = model.predictor.folder.decoding
        assert (f"here {decoding.get('beam')}" in said["choice"]) == (decoding.get("beam", 1) > 1)


def test_the_lessons_of_the_shipped_translator() -> None:
    assert len(lessons("translator")) == 11
    said = " ".join(lessons("translator")["depth"]["text"]["en"])
    assert "8 times" in said and "six" not in said


# --- exercises ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_doing_what_a_solution_says_meets_each_exercise(name: str) -> None:
    model, text = model_of(name)
    run = model.predictor.inside(text)
    for lesson, shown in lessons(name).items():
        CHECKS[lesson](model, run, shown, solve(name, lesson))


def check_tokens(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    for language in LANGUAGES:
        rare = re.search("“(.*?)”", lesson["try"][language])
        assert rare is not None
        count = len(model.predictor.folder.tokenizers.source.encode(rare[1]))
        assert f"{count}" in solution["text"][language] and count > 1


def check_vectors(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    found = re.search(r"“(.*?)” above: the same token stands at positions (\d+) and (\d+)", lesson["try"]["en"])
    assert found is not None
    other, (here, there) = model.predictor.inside(found[1]), map(int, found.groups()[1:])
    tokens = next(iter(other.tokens.values()))
    assert tokens[here].id == tokens[there].id and here != there
    different, same = solution["text"]["en"].removeprefix("Different: ").rstrip(".").split(". The same: ")
    for names, equal in ((different, False), (same, True)):
        for site in names.split(", ") if names != "–" else ():
            assert torch.equal(other[site][0, here], other[site][0, there]) == equal


def row_of(lesson: dict) -> int:
    found = re.search(r"Click row (\d+)", lesson["try"]["en"])
    assert found is not None
    return int(found[1])


def check_attention(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    tokens, values = next(iter(run.tokens.values())), solution["values"]
    site = lesson["params"]["site"]
    assert tokens[run.matrix(site).average[row_of(lesson)].argmax()].text.strip() == values["most"]
    after = run.matrix(solution["params"]["site"]).average[row_of(lesson)]
    assert tokens[after.argmax()].text.strip() == values["next_most"]


def check_heads(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    weights, values = run.matrix(lesson["params"]["site"]).weights, solution["values"]
    size = weights.shape[1]
    if "furthest" in values:
        reach = [
            sum((q - k) * abs(float(head[q, k])) for q in range(size) for k in range(size)) / float(head.abs().sum())
            for head in weights
        ]
        assert reach[values["furthest"]] == max(reach)
        return
    before = [sum(float(head[n, n - 1]) for n in range(1, size)) / (size - 1) for head in weights]
    assert before[values["previous"]] == pytest.approx(max(before))
    column = 0 if "at the first" in lesson["try"]["en"] or "the first?" in lesson["try"]["en"] else size - 1
    edge = [float(head[:, column].mean()) for head in weights]
    assert edge[values["edge"]] == pytest.approx(max(edge))
    assert solution["params"]["shown"] == f"head {values['previous']}"


def value_of(said: str) -> float:
    return float(said.replace("−", "-"))


def total(run: Any, answers: Any) -> float:
    return sum(float(run.scores(one.position)[one.id]) for one in answers)


def worst_without(run: Any, sites: list[str]) -> tuple[str, float]:
    """Switch each off in turn."""
    drops = {site: total(run, run.answers) - total(run.ablate(site), run.answers) for site in sites}
    name = max(drops, key=lambda one: drops[one])
    return name, drops[name]


def check_channel(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    sites = [name for name in run.values if re.fullmatch(r"\w+\.\d+\.(mixer|cross|channel)", name)]
    worst, drop = worst_without(run, sites)
    chosen = solution["params"]["ablate"]
    assert chosen == worst or worst_without(run, [chosen])[1] == pytest.approx(drop, abs=1e-3)
    assert value_of(solution["values"]["drop"]) == pytest.approx(drop, abs=0.02)


def check_depth(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    stack, tokens = next(iter(run.tokens.items()))
    most = run.rollout[stack][stack][row_of(lesson)].argmax()
    alone = run.matrix(lesson["params"]["site"]).average[row_of(lesson)].argmax()
    assert tokens[most].text.strip() == solution["values"]["most"]
    assert tokens[alone].text.strip() == solution["values"]["last_most"]


def check_mask(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    *_, row, column = list(run.tokens.values())[-1]
    assert f"“{row.text}”" in lesson["try"]["en"] and f"“{column.text}”" in lesson["try"]["en"]
    assert float(run.matrix(lesson["params"]["site"]).average[-2, -1]) == 0
    assert solution["text"]["en"].startswith("0:")
    label = strings()["en"]["mixing.mask"]
    assert (f"“{label}”" in lesson["try"]["en"]) == (f"{lesson['params']['site']}.mask" in run)


def check_cross(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    means = [float(head.amax(-1).mean()) for head in run.matrix(lesson["params"]["site"]).weights]
    assert means[solution["values"]["sharpest"]] == max(means)


def check_choice(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    method = lesson["params"].get("method")
    asked = {"text": model_of_text(model), "method": method} if method else {"text": model_of_text(model)}
    prefix = [int(number) for number in solution["params"]["prefix"].split(",")]
    plain = build_document("use", model, **asked)["data"]
    changed = build_document("use", model, **asked, prefix=prefix)["data"]
    begun = [one["id"] for one in plain["parts"][0]["tokens"]]
    assert begun[: len(prefix)] != prefix
    assert changed["answer"].strip() == solution["values"]["continued"]
    assert [one["id"] for one in changed["parts"][0]["tokens"]][: len(prefix)] == prefix
    clicked = build_document("next", model, **asked, prefix=[], top=20)["data"]["choices"]
    assert prefix in [one.get("ids") for one in clicked]


def model_of_text(model: ViewModel) -> str:
    return next(text for one, text in map(model_of, NAMES) if one is model)


def check_why(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    number, values = int(lesson["params"]["answer"]), solution["values"]
    answer = run.answers[number]
    assert f"“{run.name(answer.id).strip()}”" in lesson["try"]["en"]
    without = run.ablate(values["best_part"])
    drop = float(run.scores(answer.position)[answer.id]) - float(without.scores(answer.position)[answer.id])
    assert value_of(values["best_part_value"]) == pytest.approx(drop, abs=0.02)
    tokens = run.why(number).units
    best = max(tokens, key=lambda unit: unit.value)
    masked = run.mask(*best.tokens, stack=best.name)
    left = masked.scores(masked.position_of(number))[answer.id]
    assert best.label.strip() == values["best_token"]
    assert value_of(values["best_token_value"]) == pytest.approx(
        float(run.scores(answer.position)[answer.id]) - float(left), abs=0.02
    )


def check_what_if(model: ViewModel, run: Any, lesson: dict, solution: dict) -> None:
    blocks = [f"{stack}.{number}" for stack, count in run.stacks.items() for number in range(count)]
    worst, drop = worst_without(run, blocks)
    chosen = solution["params"]["ablate"]
    assert chosen == worst or worst_without(run, [chosen])[1] == pytest.approx(drop, abs=1e-3)
    assert value_of(solution["values"]["block_drop"]) == pytest.approx(drop, abs=0.02)
    if "rewritten" in solution["values"]:
        target = model.predictor.folder.tokenizers.target
        ids = [one.id for one in run.ablate(chosen).rewrite()]
        assert target.decode([n for n in ids if n not in target.specials]).strip() == solution["values"]["rewritten"]


CHECKS = {name: globals()[f"check_{name}"] for name in SOLVERS}


# --- errors, and the command ----------------------------------------------------------------------------------------


def test_an_unknown_exercise_and_a_model_of_images_are_refused() -> None:
    model, text = model_of("gpt2")
    with pytest.raises(UserError, match="no lesson 'cross'"):  # it has no source
        build_document("lessons", model, text=text, solve="cross")
    vit, request = system("vit"), find_view("lessons").request.parse({"text": "its image"})
    vit.runs.get(request.input_key(), lambda: vit.predictor.inside(PIXELS))
    with pytest.raises(UserError, match="read a text"):
        build_document("lessons", vit, text="its image")


def test_the_command_writes_one_file_with_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a small model; with the bundled one, the command of README does (tests/test_docs.py)."""
    model, text = model_of("post-norm")
    model.predictor.folder.save(tmp_path / "model")

    def run(path: Path) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["look", "lessons", text, "--model", str(tmp_path / "model"), "-o", str(path)])
        return int(ended.value.code or 0)

    path = tmp_path / "lessons.html"
    assert run(path) == 0
    text = path.read_text(encoding="utf-8")
    for name in ("lessons", "walk", "mixing", "why", "what_if", "use", "next"):
        assert f'"view":"{name}"' in text
    assert run(tmp_path / "no" / "lessons.html") == 2
    assert "no such folder" in capsys.readouterr().err
