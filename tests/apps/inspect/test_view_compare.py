"""The view "compare": each model's own view, and its log-probabilities of both answers."""

import json

import pytest
import torch

import allyouneed
from allyouneed.apps.inspect.views import build_document
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Rows
from served import write_folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    kinds = {
        "one": ("translator", 7),
        "other": ("translator", 9),
        "lm": ("lm", 3),
        "lm2": ("lm", 5),
        "tagger": ("tagger", 0),
    }
    return {
        name: ViewModel(name, allyouneed.load(write_folder(root / name, kind, seed=seed)))
        for name, (kind, seed) in kinds.items()
    }


def compare(models, *names, **request):
    document = build_document("compare", [models[name] for name in names], models=list(names), **request)
    return json.loads(json.dumps(document, allow_nan=False))["data"]


@pytest.mark.parametrize("names", [("one", "other"), ("lm", "lm2")])
def test_both_answers_are_scored_by_both_models(models, names):
    """Against a plain forward pass over the answer."""
    data = compare(models, *names, text="the cat sat", method="greedy", tokens=6)
    assert [side["model"]["name"] for side in data["sides"]] == list(names)
    for side, name in zip(data["sides"], names, strict=True):
        alone = build_document("use", models[name], text="the cat sat", method="greedy", tokens=6)["data"]
        assert side["data"]["answer"] == alone["answer"]
    assert len(data["texts"]) == 2 and data["texts"][0]["text"] != data["texts"][1]["text"]
    for one in data["texts"]:
        for name, scores in zip(names, one["by"], strict=True):
            predictor = models[name].predictor
            part = next(side for side in data["sides"] if side["model"]["name"] == name)["data"]["parts"][0]
            own = part["text"].strip() == one["text"]
            tokens = [token["id"] for token in part["tokens"]] if own else predictor.tokenizer.encode(one["text"])
            if own:
                assert scores["total"] == pytest.approx(sum(part["log_probs"][: len(tokens)]), abs=1e-4)
            read = [token["id"] for token in part["read"]]
            begin, source = (read, None) if part["continues"] else ([predictor.tokenizer.bos], Rows.of([read]))
            with torch.no_grad():
                logits = predictor.model.logits(Batch(Rows.of([[*begin, *tokens]]), source))[0]
            log_probs = logits.log_softmax(-1)[len(begin) - 1 :]
            expected = log_probs[range(len(tokens)), tokens].sum()
            assert scores["total"] == pytest.approx(float(expected), abs=1e-3)
            assert sum(scores["log_probs"]) == pytest.approx(scores["total"], abs=1e-4)
            assert scores["end"] == pytest.approx(float(log_probs[len(tokens), predictor.tokenizer.eos]), abs=1e-3)
        assert "".join(one["words"]) == "".join(one["text"].split())


def test_models_of_different_tasks_are_shown_without_scores(models):
    data = compare(models, "lm", "tagger", text="the cat sat")
    assert data["texts"] == [] and [side["data"]["shows"] for side in data["sides"]] == ["text", "tags"]


def test_bad_requests(models):
    with pytest.raises(UserError, match="models"):
        compare(models, "lm", text="a")
    with pytest.raises(UserError, match="different tokens"):
        compare(models, "lm", "lm2", text="a", prefix=[5])
