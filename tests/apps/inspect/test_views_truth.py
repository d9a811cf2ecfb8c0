"""Truth: 200 random numbers of every view equal the model's own, which plain forward passes and hooks recompute."""

import math
import random
from copy import deepcopy

import pytest
import torch

from allyouneed.apps.inspect.inside.readers import read_input
from allyouneed.apps.inspect.inside.reading import Prediction
from allyouneed.apps.inspect.views import build_document
from allyouneed.apps.inspect.views.document import numbers
from inside_models import PIXELS, SOUND, SYSTEMS, system

COUNT = 200
NEAR = {"rel": 1e-4, "abs": 2e-5}


def given(name):
    """The input as a request."""
    value = SYSTEMS[name][2]
    return {"text": value} if isinstance(value, str) else {"image": "…"} if value is PIXELS else {"sound": "…"}


@pytest.fixture(autouse=True)
def inputs(monkeypatch):
    monkeypatch.setattr("allyouneed.apps.inspect.views.input.read_image", lambda text: PIXELS)
    monkeypatch.setattr("allyouneed.apps.inspect.views.input.read_sound", lambda text: SOUND)


def send(view, name, **request):
    return build_document(view, system(name), **given(name), **request)["data"]


def hooked(model, batch):
    """Outputs of all sub-layers and norms and the input of every stack's blocks, by hooks on a plain forward pass."""
    found, hooks = {}, []

    def keep(name):
        def hook(module, inputs, output):
            found.setdefault(name, output)

        return hook

    for path, block in model.named_modules():
        if not hasattr(block, "sublayers"):
            continue
        site = path.replace(".blocks", "")
        hooks += [part.register_forward_hook(keep(f"{site}.{slot}")) for slot, part in block.sublayers.items()]
        hooks.append(block.register_forward_hook(keep(site)))
    with torch.no_grad():
        found["head"] = model.logits(batch)
    for hook in hooks:
        hook.remove()
    return found


def plain(name):
    model = system(name).predictor
    reading = read_input(model, SYSTEMS[name][2])
    return model.model, reading, hooked(model.model, reading.batch)


def draw(pairs):
    """200 of (sent, own) numbers, drawn with a fixed seed."""
    pairs = list(pairs)
    assert len(pairs) >= 10
    return random.Random(0).choices(pairs, k=COUNT)


def check(pairs):
    for sent, own in draw(pairs):
        assert sent == pytest.approx(own, **NEAR)


def flat(sent, own):
    return zip(numbers(sent).flatten().tolist(), own.float().flatten().tolist(), strict=True)


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_walk_shows_the_numbers_of_the_model(name):
    *_, own = plain(name)
    pairs = []
    for position in (0, 3):
        for box in send("walk", name, position=position)["boxes"]:
            if box["name"] in own:
                value = own[box["name"]][0]
                row = value if value.dim() == 1 else value[min(position, len(value) - 1)]
                pairs += zip(box["numbers"], row[:8].tolist(), strict=True)
    sent = send("walk", name, site="head")
    pairs += flat(sent["tensor"], own["head"])
    for answer in sent["answers"]:
        row = own["head"][0] if answer["position"] is None else own["head"][0, answer["position"]]
        probabilities = row.log_softmax(-1)
        pairs += [(one["log_prob"], float(probabilities[one["id"]])) for one in answer["candidates"]]
    check(pairs)


@pytest.mark.parametrize("name", SYSTEMS)
def test_mixing_shows_the_numbers_of_the_model(name):
    model, reading, _ = plain(name)
    data = send("mixing", name, head=0)
    site, matrix = data["site"], numbers(data["matrix"]).double()
    assert data["residual"] <= data["limit"]
    run = system(name).predictor.inside(SYSTEMS[name][2])
    if hasattr(model, "attention") and data["how"] == "attention":
        where = () if model.config.kind in ("encoder", "decoder") else ("encoder",)
        check(flat(data["matrix"], model.attention(reading.batch, *where)[0][0, 0]))
    v, heads = run[f"{site}.v"][0].double(), run[f"{site}.heads"][0].double()
    first = data["heads"][0] if data["channels"] else 0
    if data["channels"]:
        matrix = numbers(send("mixing", name, head=first)["matrix"]).double()
        v, heads = v[:, first, None], heads[:, first, None]
    else:
        v, heads = v[0], heads[0]
    check(zip((matrix @ v).flatten().tolist(), heads.flatten().tolist(), strict=True))
    check(flat(data["average"], run.matrix(site).average))


@pytest.mark.parametrize("name", SYSTEMS)
def test_why_shows_the_numbers_of_the_model(name):
    """Effects of sub-layers by hooks that zero their output; the lens by the model's own norm and head."""
    model, reading, own = plain(name)
    run = system(name).predictor.inside(SYSTEMS[name][2])
    answer: Prediction = run.answers[0]
    data, pairs = send("why", name, unit="sublayer"), []
    paths = {
        f"{path.replace('.blocks', '')}.{slot}": part
        for path, block in model.named_modules()
        if hasattr(block, "sublayers")
        for slot, part in block.sublayers.items()
    }

    def log_prob(logits):
        row = logits[0] if answer.position is None else logits[0, answer.position]
        return float(row.log_softmax(-1)[answer.id])

    for unit in data["units"]:
        hook = paths[unit["name"]].register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
        with torch.no_grad():
            pairs.append((unit["value"], log_prob(own["head"]) - log_prob(model.logits(reading.batch))))
        hook.remove()
    for row in data["lens"][1:]:
        stack = model.get_submodule(row["site"].rpartition(".")[0])
        stream = own[row["site"]]
        with torch.no_grad():
            closed = stream if stack.end is None else stack.end(stream, context=None)
            logits = model.head(closed, model.embed.layout(reading.batch.target))
        row_own = (logits[0] if answer.position is None else logits[0, answer.position]).log_softmax(-1)
        pairs += [(one["log_prob"], float(row_own[one["id"]])) for one in row["candidates"]]
    pairs += [(data["total"], log_prob(own["head"]))] * 8
    check(pairs)


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_if_shows_the_numbers_of_the_model(name):
    """The first mixer switched off, by a hook and by the view."""
    model, reading, own = plain(name)
    stack = "encoder" if hasattr(model, "encoder") else "decoder"
    data = send("what_if", name, ablate=[f"{stack}.0.mixer"])
    part = model.get_submodule(stack).blocks[0].sublayers["mixer"]
    hook = part.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    after = hooked(model, reading.batch)
    hook.remove()
    pairs = []
    for site in data["sites"]:
        if site["name"] in own and site["name"] != f"{stack}.0.mixer":
            pairs.append((site["difference"], float((after[site["name"]] - own[site["name"]]).abs().max())))
            pairs.append((site["largest"], float(own[site["name"]].abs().max())))
    for sent in data["answers"]:
        rows = [logits["head"][0] for logits in (own, after)]
        rows = rows if sent["position"] is None else [row[sent["position"]] for row in rows]
        before, then = (row.log_softmax(-1) for row in rows)
        pairs += [(sent["before"], float(before[sent["id"]])), (sent["after"], float(then[sent["id"]]))]
        pairs += [(one["log_prob"], float(then[one["id"]])) for one in sent["candidates"]]
    check(pairs)


@pytest.mark.parametrize("name", SYSTEMS)
def test_truth_shows_the_differences_from_float64(name):
    """Against a float64 copy of the model, run here."""
    model, reading, own = plain(name)
    exact = deepcopy(model).double()
    batch = reading.batch.each(lambda value: value.double() if value.is_floating_point() else value)
    there = hooked(exact, batch)
    data = send("truth", name)
    sites = {site["name"]: site for site in data["sites"]}
    assert own.keys() <= sites.keys()
    for site, value in own.items():
        difference = float((value.double() - there[site]).abs().max())
        assert sites[site]["difference"] == pytest.approx(difference, rel=1e-6, abs=1e-12)
        assert difference <= 1e-4 * max(sites[site]["largest"], 1e-3)
    assert data["relative"] < 1e-4 and math.isfinite(data["relative"])
    assert data["answers"]["same"] == data["answers"]["of"] > 0
