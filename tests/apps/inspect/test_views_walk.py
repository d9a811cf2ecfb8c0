"""The walk: every box has its part, its formula, its file, and the model's own numbers."""

import csv as read_csv
import json

import pytest
import torch

from allyouneed.apps.inspect.reference.reference import parts_of, slot_classes
from allyouneed.apps.inspect.views import build_document, find_view
from allyouneed.apps.inspect.views.document import numbers
from allyouneed.apps.inspect.views.formulas import PARTS, formula_of
from allyouneed.apps.inspect.views.model import ViewModel
from allyouneed.apps.inspect.views.walk import csv
from allyouneed.config import Part
from inside_models import system
from inside_models import translator as shipped

TEXT = "机器学习很有趣"


@pytest.fixture(scope="module")
def translator():
    return ViewModel("translator", shipped())


def test_every_part_of_the_registry_has_a_formula_and_says_where_it_comes_from():
    found = {(cls.slot, kind): part for cls in slot_classes() for kind, part in cls.registry.items()}
    assert set(PARTS) <= set(found)
    assert all(formula_of(part).formula and formula_of(part).paper for part in found.values())
    assert any(formula_of(part).equation == "eq. 2" for part in found.values())
    assert all(issubclass(part, Part) for cls in slot_classes() for part in parts_of(cls))


def test_the_boxes_lead_from_the_tokens_to_the_choice(translator):
    sent = build_document("walk", translator, text=TEXT, position=2, site="decoder.0.cross.weights")
    assert json.loads(json.dumps(sent)) == sent
    data, run = sent["data"], translator.predictor.inside(TEXT)
    boxes = {box["name"]: box for box in data["boxes"]}
    assert list(boxes) == list(run.names)
    assert all(box["shape"] == list(run.names[name]) for name, box in boxes.items())
    assert all(box["formula"] and box["file"].startswith("allyouneed/nn/") for box in boxes.values())
    assert boxes["encoder.0.mixer"]["kind"] == "attention"
    cited = {name: boxes[f"encoder.0.{name}"]["equation"] for name in ("mixer", "mixer.weights", "channel")}
    assert cited == {"mixer": "3.2.2", "mixer.weights": "eq. 1", "channel": "eq. 2"}  # MultiHead has no number there
    assert boxes["encoder.5.channel"]["numbers"] == run["encoder.5.channel"][0, 2, :8].tolist()
    assert boxes["decoder.0.mixer.q"]["numbers"] == run["decoder.0.mixer.q"][0, 0, 2, :8].tolist()
    assert (numbers(data["tensor"]) == run["decoder.0.cross.weights"]).all()
    assert sent["python"] == f"model.inside({TEXT!r})['decoder.0.cross.weights']"
    assert [answer["text"] for answer in data["answers"]][-2:] == [" interesting", "</s>"]
    sizes = [step["bytes"] for step in data["steps"]]
    assert sizes == sorted(set(sizes)) and len(sizes) == len(data["answers"])
    assert data["steps"][0]["states"][0]["word"] == "KV cache"


@pytest.mark.parametrize("name", ["translator", "gpt-2", "retnet", "rwkv", "moe", "t5"])
def test_a_value_inside_a_part_is_not_described_by_the_formula_of_the_part(name, translator):
    model = translator if name == "translator" else system(name)
    whole = {formula_of(part).formula for cls in slot_classes() for part in cls.registry.values()}
    for box in build_document("walk", model, text=TEXT)["data"]["boxes"]:
        last = box["name"].rpartition(".")[2]
        if last in ("mask", "q", "weights", "heads", "hidden"):
            assert box["formula"] and box["formula"] not in whole, box["name"]
        if last == "end":
            norm = model.predictor.model.config.norm
            assert box["formula"] == formula_of(norm).formula


def test_masked_scores_are_minus_infinity_wherever_they_are_shown(translator):
    site = "decoder.0.mixer.scores"
    sent = build_document("walk", translator, text=TEXT, site=site)["data"]
    (box,) = (one for one in sent["boxes"] if one["name"] == site)
    assert box["numbers"][0] is not None and set(box["numbers"][1:]) == {None}  # JSON has no infinity
    assert (numbers(sent["tensor"]).triu(1).tril(1)[0, 0, 0, 1] == -torch.inf).all()
    value = numbers(build_document("value", translator, text=TEXT, site=site)["data"]["tensor"])
    assert value.isinf().any() and float(value[value.isfinite()].abs().max()) < 1e4
    text = csv(translator.record(find_view("walk").request.parse({"text": TEXT})), site)
    assert "-inf" in text and "e+38" not in text


def test_a_value_is_exported_whole_as_csv(translator):
    run = translator.predictor.inside(TEXT)
    lines = list(read_csv.reader(csv(run, "encoder.0.mixer.q").splitlines()))
    _, heads, tokens, _ = run["encoder.0.mixer.q"].shape
    assert lines[0][:4] == ["axis0", "axis1", "axis2", "0"] and len(lines) == 1 + heads * tokens
    assert [float(number) for number in lines[1 + 5 * tokens + 4][3:]] == run["encoder.0.mixer.q"][0, 5, 4].tolist()


def test_a_paged_cache_grows_block_by_block_and_old_runs_are_dropped_by_size(monkeypatch):
    model = system("gpt-2")
    text = "How are you today? 今天天气很好！我们去公园"
    plain = build_document("walk", model, text=text)["data"]["steps"]
    data = build_document("walk", model, text=text, paged=True)["data"]
    assert [len(step["blocks"]) for step in data["steps"]] == [
        -(-(step["position"] + 1) // data["block_size"]) for step in data["steps"]
    ]
    assert data["steps"][0]["states"][0]["word"] == "paged KV cache"
    assert [step["bytes"] for step in data["steps"]] >= [step["bytes"] for step in plain]
    monkeypatch.setattr("allyouneed.apps.inspect.views.model.MOST_BYTES", 1)
    build_document("walk", model, text="another")
    assert len(model.runs) == 1
