"""The views "use" and "next": every number is the one that the engine decoded by."""

import base64
import io
import json
import wave
from dataclasses import replace

import pytest
import torch
from PIL import Image

import allyouneed
from allyouneed.apps.inspect.views import build_document, views
from allyouneed.apps.inspect.views.answers import answer_part
from allyouneed.apps.inspect.views.document import numbers
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.apps.inspect.views.tokens import token_list
from allyouneed.apps.translate.translator import one_line
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.notes import drop_invalid
from allyouneed.infer.decoding.observe import observe_decoding
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.sampling import filter_logits
from allyouneed.nn.batch import Batch, Rows
from inside_models import PIXELS, SENTENCE, SOUND, SYSTEMS, make_predictor, system
from served import KINDS, write_folder

TEXT = "the cat sat on the mat"
NEEDED = {"value": {"site": "head"}, "what_if": {"mask": [0]}}  # what a view does not open without
ROW = '{"items": ["a"], "item": "b"}'  # of a log


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        kind: ViewModel(kind, allyouneed.load(write_folder(root / kind, kind, seed=3)))
        for kind in KINDS
        if kind != "chat"
    }


def answer_of(predictor, **options):
    if hasattr(predictor, "translate"):
        return predictor.translate(TEXT, **options)
    return predictor.generate(TEXT, **options)


def clean(text):
    """Clean a text as predictors clean what a random model generates."""
    return drop_invalid(one_line(text))


@pytest.mark.parametrize("kind", ["translator", "lm"])
@pytest.mark.parametrize("beam", [2, 5])
def test_the_recorded_beam_search_is_the_real_one(models, kind, beam):
    predictor, options = models[kind].predictor, {"method": "beam", "beam": beam, "max_length": 12}
    with observe_decoding() as seen:
        assert answer_of(predictor, **options) == answer_of(predictor, **options)
    first, again = seen.decoded
    plain = answer_of(predictor, **options)
    (best, *_), record, nodes = first.hypotheses, first.beams, first.beams.nodes
    assert nodes == again.beams.nodes and clean(predictor.tokenizer.decode(best.tokens)) == clean(plain)

    winner = record.find(best, first.spec.eos_ids)
    ended = [best.tokens[-1:], [*best.tokens[-1:], first.spec.eos]]
    assert (
        record.tokens(winner)[len(best.tokens) - 1 :] in ended
        and record.tokens(winner)[: len(best.tokens)] == best.tokens
    )
    path = record.path(winner)
    assert [nodes[n].log_prob for n in path] == best.log_probs
    assert nodes[winner].score == best.score and nodes[winner].total == best.log_prob
    finished = [one.score for one in nodes if one.fate == "finished"]
    assert best.score == max(finished)
    for number, one in enumerate(nodes):
        before = nodes[one.parent].total if one.parent >= 0 else 0.0
        assert one.parent < number and one.total == pytest.approx(before + one.log_prob, abs=1e-5)
        assert one.parent < 0 or nodes[one.parent].fate == "kept"
    for step in range(nodes[-1].step):
        here = [one for one in nodes if one.step == step]
        kept = [one.total for one in here if one.fate == "kept"]
        assert len(kept) == beam and min(kept) >= max([one.total for one in here if one.fate == "pruned"], default=-1e9)


def test_without_an_observer_nothing_is_recorded(models, monkeypatch):
    from allyouneed.infer.decoding.beam import BeamSearch

    monkeypatch.setattr(BeamSearch, "record", lambda *_: pytest.fail("recorded"))
    answer_of(models["translator"].predictor, beam=3)


@pytest.mark.parametrize("kind", ["translator", "lm"])
@pytest.mark.parametrize("method", ["beam", "greedy", "sample"])
def test_alternatives_are_the_steps_of_the_engine_and_can_be_continued(models, kind, method):
    given = {"text": TEXT, "method": method, "tokens": 10, "top": 50}
    data = build_document("use", models[kind], **given)["data"]
    (part,) = data["parts"]
    assert clean(data["answer"]) == clean(part["text"])
    tokens = [one["id"] for one in part["tokens"]]
    for token, log_prob, choices in zip(tokens, part["log_probs"], part["alternatives"], strict=False):
        shown = {one["id"]: one["log_prob"] for one in choices}
        assert shown.get(token, log_prob) == pytest.approx(log_prob, abs=1e-5)
        assert list(shown.values()) == sorted(shown.values(), reverse=True)
    if method == "sample":
        return
    prefix = [
        *tokens[:2],
        next(one["id"] for one in part["alternatives"][2] if one["id"] != tokens[2] and not one["end"]),
    ]
    data = build_document("use", models[kind], **given, prefix=prefix)["data"]
    (other,) = data["parts"]
    assert [one["id"] for one in other["tokens"]][:3] == prefix and other["prefix"] == 3
    assert clean(data["answer"]) == clean(other["text"]) and other["text"] != part["text"]
    assert other["log_prob"] == pytest.approx(sum(other["log_probs"]), abs=1e-4)
    if method == "beam":
        tree = other["tree"]
        assert tree["score"][tree["winner"]] == pytest.approx(other["score"], abs=1e-5)


@pytest.mark.parametrize("kind", ["translator", "lm"])
def test_continuing_the_beginning_of_an_answer_gives_the_same_answer(models, kind):
    whole = build_document("use", models[kind], text=TEXT, method="greedy", tokens=10)["data"]
    (part,) = whole["parts"]
    prefix = [one["id"] for one in part["tokens"]][:4]
    again = build_document("use", models[kind], text=TEXT, method="greedy", tokens=10, prefix=prefix)["data"]
    assert again["answer"] == whole["answer"]
    assert again["parts"][0]["log_probs"] == pytest.approx(part["log_probs"], abs=1e-5)
    assert again["parts"][0]["score"] == pytest.approx(part["score"], abs=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5, "top_k": 7},
        {"temperature": 2.0, "top_p": 0.3},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("kind", ["translator", "lm"])
def test_the_cut_is_that_of_the_sampler(models, kind, options):
    """Against the logits of a plain forward pass."""
    predictor = models[kind].predictor
    with observe_decoding() as seen:
        answer_of(predictor, method="greedy", max_length=3)
    request, spec, prefix = seen.decoded[0].request, seen.decoded[0].spec, seen.decoded[0].hypotheses[0].tokens
    rows = Rows.of([[*request.prompt, *prefix]])
    with torch.no_grad():
        plain = predictor.model.logits(Batch(rows, None if request.source is None else Rows.of([request.source])))[
            0, -1
        ].clone()
    plain[list(spec.forbidden)] = -torch.inf
    decoding = Decoding(method="sample", **options)
    expected = filter_logits(plain[None] / decoding.temperature, decoding.top_k, decoding.top_p, decoding.min_p)[0]

    found = build_document("next", models[kind], text=TEXT, prefix=prefix, **options)["data"]["cut"]
    kept = {token for token, keep in zip(found["ids"], found["kept_shown"], strict=True) if keep}
    assert kept == set(expected.isfinite().nonzero()[:, 0].tolist()) and found["kept"] == len(kept)
    probs = (plain.double() / decoding.temperature).softmax(-1)
    assert torch.allclose(numbers(found["probs"]), probs[found["ids"]].float(), atol=1e-5)
    assert torch.allclose(numbers(found["sampled"]), expected.double().softmax(-1)[found["ids"]].float(), atol=1e-5)
    assert found["ids"] == sorted(found["ids"], key=lambda token: (-float(plain[token]), token))[: len(found["ids"])]
    assert found["drawn"]["id"] in kept and found["mass"] == pytest.approx(float(probs[list(kept)].sum()), abs=1e-5)


def test_next_words_are_whole_and_their_probabilities_multiply(models):
    predictor = models["lm"].predictor
    found = build_document("next", models["lm"], text=TEXT, top=4)["data"]["choices"]
    with observe_decoding() as seen:
        predictor.generate(TEXT, method="greedy", max_length=1)
    for one in found:
        if "ids" in one:
            log_probs = seen.decoded[0].logits(one["ids"]).log_softmax(-1)
            total = sum(float(row[token]) for row, token in zip(log_probs, one["ids"], strict=False))
            assert one["word_log_prob"] == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("kind", ["translator", "lm"])
def test_after_a_word_was_clicked_every_view_opens_for_another_text(models, kind):
    """A clicked word and a recorded run are kept side by side, each found only by those who stored it."""
    for name, one in views().items():
        if one.models and not one.many and not one.runs:
            build_document("next", models[kind], text=f"{TEXT} {name}", prefix=[5])
            assert build_document(name, models[kind], text=f"{name} {TEXT}", **NEEDED.get(name, {}))["data"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "chat"])
def test_every_task_answers(models, kind):
    text = {"masked": "the <mask> sat", "embedder": "one line\nanother <b>line</b>"}.get(kind, TEXT)
    text = ROW if kind == "click" else text
    found = json.loads(json.dumps(build_document("use", models[kind], text=text), allow_nan=False))
    assert found["view"] == "use" and found["data"]["shows"] and isinstance(found["data"]["answer"], str)
    assert found["python"].startswith("model.")
    if kind == "embedder":
        cosines = numbers(found["data"]["cosines"])
        expected = models[kind].predictor.similarity([tuple(text.splitlines())])[0]
        assert float(cosines[0, 1]) == pytest.approx(expected, abs=1e-6)
    if kind == "classifier":
        assert sum(score for _, score in found["data"]["scores"]) == pytest.approx(1)


def test_an_image_and_a_sound_are_asked_for(models):
    for kind, given, message in (
        ("translator", {}, "reads a text"),
        ("translator", {"text": " "}, "empty"),
        ("translator", {"text": "a", "prefix": [10**6]}, "outside the vocabulary"),
        ("translator", {"text": "a", "prefix": [1], "target": "b"}, "exclusive"),
        ("translator", {"text": "a", "part": 3, "prefix": [1]}, "part 3"),
        ("lm", {"text": "a", "to": "de"}, "only for a translator"),
        ("lm", {"text": "x " * 20_000}, "shorten"),
        ("lm", {"text": "a", "temprature": 1.0}, "unknown field"),
        ("lm", {"text": "a", "method": "beam", "temperature": 0.5}, "temperature"),
    ):
        with pytest.raises(UserError, match=message):
            build_document("use", models[kind], **given)
    with pytest.raises(UserError, match="generates no text"):
        build_document("next", models["tagger"], text="a")


def test_an_empty_answer_is_shown(models):
    predictor = models["lm"].predictor
    with observe_decoding() as seen:
        predictor.generate(TEXT, method="greedy", max_length=1)
    (one,) = seen.decoded
    empty = replace(one, hypotheses=[Hypothesis([], 0.0, -0.5, [-0.5], True)])
    part = answer_part(empty, predictor.tokenizer, predictor.tokenizer, 3)
    assert part["words"] == [] == part["tokens"] and len(part["alternatives"]) == 1 and part["text"] == ""


def test_characters_are_never_split(models):
    tokenizer = models["lm"].predictor.tokenizer
    for sign in ("机", "👩‍👩‍👧", "x\u030c", "🇩🇪", "👍🏽"):
        found = token_list(tokenizer, tokenizer.encode(f"{sign}{sign}"))
        groups = [one["group"] for one in found]
        assert groups == sorted(groups) and len(found) > 2 and set(groups) == {0, 1}, sign


def test_images_sounds_and_other_systems_answer():
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.fromarray(PIXELS).save(picture, "PNG")
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((SOUND.numpy() * 32_767).astype("<i2").tobytes())
    image, heard = (base64.b64encode(one.getvalue()).decode() for one in (picture, sound))
    clip = make_predictor("clip-vit-b-32", {"kind": "image-text", "image": SYSTEMS["vit"][1]["image"]})
    cases = [
        (system("vit"), {"image": image}, "classes"),
        (ViewModel("clip", clip), {"image": f"data:image/png;base64,{image}", "labels": ["a cat", "<b>"]}, "classes"),
        (system("whisper"), {"sound": heard}, "transcript"),
        (system("t5"), {"text": SENTENCE, "method": "beam", "beam": 3}, "text"),
        (system("retnet"), {"text": SENTENCE, "method": "beam", "beam": 3}, "text"),
        (system("rwkv"), {"text": SENTENCE, "method": "sample", "temperature": 0.7, "seed": 4}, "text"),
    ]
    for model, request, shows in cases:
        data = json.loads(json.dumps(build_document("use", model, **request), allow_nan=False))["data"]
        assert data["shows"] == shows and isinstance(data["answer"], str)
        for part in data.get("parts", ()):
            assert part["log_prob"] == pytest.approx(sum(part["log_probs"]), abs=1e-3)
            assert (part["alignment"] is not None) == (model.name == "t5")
    with pytest.raises(UserError, match="reads an image"):
        build_document("use", system("vit"), text="a cat")
    with pytest.raises(UserError, match="image: cannot be read"):
        build_document("use", system("vit"), image=heard)
