"""The view "anatomy": figures, shapes, differences and reach, from configs alone."""

import json

import pytest
import torch

import allyouneed
from allyouneed.apps.inspect.pictures.pattern import panel, read
from allyouneed.apps.inspect.views import build_document
from allyouneed.apps.inspect.views.anatomy import reach
from allyouneed.apps.inspect.views.document import numbers
from allyouneed.config import preset_names, to_yaml
from allyouneed.errors import UserError

FIGURES = ("parameters", "flops", "state_per_token", "state_constant")
PLAIN = ("encoder", "decoder", "encoder-decoder")


def anatomy(**request):
    return json.loads(json.dumps(build_document("anatomy", None, **request)))["data"]


@pytest.mark.parametrize("name", preset_names())
def test_the_boxes_of_every_preset_add_up(name):
    data = anatomy(preset=name, length=300, size=16)
    (model,) = data["models"]
    config = allyouneed.model_config(name)
    for figure in FIGURES:
        assert model[figure] == pytest.approx(getattr(config.cost(300), figure))
        if model["kind"] in PLAIN:
            assert model["rest"][figure] == pytest.approx(0, abs=1e-6 * model[figure] + 1e-6)
    for column in model["columns"]:
        for layer in column["layers"]:
            assert layer["slots"] and layer["wiring"]["kind"]
            for figure in FIGURES[1:3]:
                once = layer["wiring"][figure] + sum(slot[figure] for slot in layer["slots"])
                assert layer[figure] >= 0 and (figure != "flops" or layer[figure] >= once)


@pytest.mark.parametrize("name", ["transformer-tiny", "llama-15m", "clip-vit-b-32", "rwkv-4-169m", "whisper-tiny"])
def test_the_shapes_are_those_of_the_built_model(name):
    with torch.device("meta"):
        module = allyouneed.build(name)
    (model,) = anatomy(preset=name, size=16)["models"]
    for column in model["columns"]:
        stack = module.get_submodule(column["name"])
        first = 0
        for layer in column["layers"]:
            block = stack.blocks[first]
            first += layer["repeat"]
            for slot in layer["slots"]:
                real = [list(value.shape) for value in block.sublayers[slot["slot"]].parameters()]
                shown = [one["shape"] for one in slot["shapes"] for _ in range(one["times"])]
                assert sorted(shown) == sorted(real)
                assert sum(torch.Size(shape).numel() for shape in shown) == slot["parameters"]


def test_differences_are_exactly_what_was_changed():
    base = to_yaml(allyouneed.model_config("transformer-tiny"), full=True)
    changed = to_yaml(
        allyouneed.model_config("transformer-tiny", ["decoder[0].mixer.heads=2", "dropout=0.25"]), full=True
    )
    data = anatomy(yaml=base, other_yaml=changed, size=16)
    assert {one["path"]: (one["left"], one["right"]) for one in data["differences"]} == {
        "decoder[0].mixer.heads": (4, 2),
        "dropout": (0.1, 0.25),
    }
    assert anatomy(yaml=base, other_yaml=base, size=16)["differences"] == []
    other = anatomy(preset="retnet-1.3b", other="llama-15m", size=16)["differences"]
    kinds = {one["path"]: one for one in other}["decoder[0].mixer"]
    assert kinds["left"].startswith("retention") and kinds["right"].startswith("attention")
    assert not any(one["path"].startswith("decoder[0].mixer.") for one in other)  # one difference, not one per key


@pytest.mark.parametrize(
    "text",
    ["full", "causal", "causal & window(5)", "block(4)", "causal & (block(8) | fixed(8, 2))", "causal & strided(5)"],
)
def test_hops_are_the_powers_of_the_mask(text):
    mask = panel(read(text), 37).values
    hops = reach(mask)
    step = (mask | torch.eye(37, dtype=torch.bool)).double()  # the residual stream
    power = torch.eye(37, dtype=torch.double)
    for number in range(37):
        assert torch.equal(power[-1] > 0, (hops <= number)), (text, number)
        power = ((power @ step) > 0).double()
    assert torch.equal(hops.isnan(), power[-1] == 0)
    (drawn,) = anatomy(patterns=[text], size=37)["patterns"]
    assert torch.equal(numbers(drawn["hops"]).nan_to_num(-1), hops.nan_to_num(-1))
    assert torch.equal(numbers(drawn["mask"]) > 0, mask) and drawn["never"] == int(hops.isnan().sum())


def test_patterns_and_positions_of_a_model_are_drawn_once():
    data = anatomy(preset="transformer-base", size=16)
    assert [(one["title"], len(one["used"])) for one in data["patterns"]] == [("full", 2), ("causal", 1)]
    assert [one["title"] for one in data["positions"]] == ["sinusoidal"]
    assert numbers(data["positions"][0]["values"]).shape == (16, 256)  # pooled
    data = anatomy(preset="bloom-560m", other="t5-small", positions=["rotary"], size=16)
    assert {one["shape"] for one in data["positions"]} == {"curves", "matrix"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"preset": "transformer-bse"}, "did you mean 'transformer-base'"),
        ({"preset": "../../etc/passwd.yaml"}, "unknown preset"),
        ({"preset": "/etc"}, "unknown preset"),
        (
            {"yaml": "kind: decoder\nwidth: 8\nvocab: 9\ndecoder: [{mixer: {kind: atention}}]"},
            r"decoder\[0\].mixer.*attention",
        ),
        ({"yaml": "kind: [1"}, "not valid YAML"),
        ({"yaml": "- 1"}, "expected a mapping"),
        ({"yaml": "a: 1", "preset": "gpt2"}, "remove one"),
        ({"patterns": ["causl"]}, "causal"),
        ({"positions": ["<script>"]}, "unknown positions"),
        ({"size": 10**9}, "size"),
    ],
)
def test_errors_are_those_of_the_config(request_, message):
    with pytest.raises(UserError, match=message):
        anatomy(**request_)
