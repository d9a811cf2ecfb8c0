"""A description says what the built model is: its words, its shapes, its numbers."""

import functools
import io
import math
import re

import pytest
from rich.console import Console

from allyouneed import model_config
from allyouneed.apps.inspect.reference.describe import describe
from allyouneed.config import preset_names
from parameter_count import parameter_count


@functools.cache
def shown(config, length=1024):
    console = Console(file=io.StringIO(), width=300)
    console.print(describe(config, length))
    return console.file.getvalue()


def number(text, pattern):
    (found,) = re.findall(pattern, text, re.MULTILINE)
    return int(found.replace(",", ""))


MIXED = [
    "encoder[0].repeat=2",
    "encoder[0].wiring=pre-norm",
    "vocab={source: 11, target: 23}",
    "decoder[0].mixer.pattern=causal & window(5)",
]
CASES = {name: model_config(name) for name in preset_names()} | {"mixed": model_config("transformer-tiny", MIXED)}


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_of_the_built_model(name):
    """`test_presets.py` builds every preset and compares the cost."""
    config = CASES[name]
    text, parameters = shown(config), config.cost().parameters if name != "mixed" else parameter_count(config)
    assert number(text, r"^\S+  ([\d,]+) parameters") == parameters
    assert number(text, r"^parameters +([\d,]+)$") == parameters


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_in_the_tree(name):
    """The shapes, each as often as the numbers of blocks around it say, add up to the model; tied ones count once."""
    config, total = CASES[name], 0
    repeats: list[tuple[int, int]] = []  # (depth, how often) of the branches above
    for line in shown(config).split("\n"):
        if "──" not in line:
            continue
        depth, label = line.index("──"), line.split("── ", 1)[1]
        repeats = [(d, n) for d, n in repeats if d < depth]
        times = re.match(r"(\d+) ×", label)
        repeats.append((depth, int(times[1]) if times else 1))
        often = 1
        for _, n in repeats:
            often *= n
        for shape, note in re.findall(r"\w+ +(\((?:\d+,|\d+(?:, \d+)*)?\))( \(tied\)| \(one for all layers\))?", label):
            size = math.prod(int(side) for side in re.findall(r"\d+", shape))
            total += {"": often, " (tied)": 0, " (one for all layers)": 1}[note] * size
    assert total == parameter_count(config)


def test_parts_are_named_as_in_the_config():
    text = shown(CASES["mixed"])
    assert re.search(r"2 × pre-norm block .* each", text)
    assert "mixer  attention, heads 4, pattern causal & window(5)" in text
    assert "channel  ffn, hidden 256" in text
    assert "tokens  Embedding  weight (11, 128)" in text and "tokens  Embedding  weight (23, 128)" in text
    assert "weight (23, 128) (tied)" in text


def test_layers_that_differ_in_a_word_are_not_shown_as_one():
    layer = "{mixer: {kind: attention, heads: 4, pattern: PATTERN}, cross: {kind: attention, heads: 4}}"
    layers = ", ".join(layer.replace("PATTERN", f"'{word}'") for word in ("causal", "causal & window(3)"))
    text = shown(model_config("transformer-tiny", [f"decoder=[{layers}]"]))
    assert text.count("pattern causal") == 2 and "pattern causal & window(3)" in text


def test_costs_follow_the_context():
    config = CASES["transformer-tiny"]
    for length in (10, 4096):
        cost, text = config.cost(length), shown(config, length)
        assert number(text, r"^FLOPs +([\d,]+) forward") == cost.flops
        assert f"context {length:,}" in text
        assert number(text, r"^cache, bf16 +([\d,]+) bytes") == 2 * cost.state_per_token
        assert number(text, r"^cache, fp32 .* \+ ([\d,]+) per source token") == 4 * cost.state_constant / length


def test_states_are_counted_with_and_without_what_trimming_needs():
    config = CASES["retnet-1.3b"]
    cost, text = config.cost(1024), shown(config, 1024)
    for name, size in (("fp32", 4), ("bf16", 2)):
        found = re.search(
            rf"^cache, {name} +0 bytes per token \+ ([\d,]+) whatever .* \(([\d,]+) in a CUDA graph\)", text, re.M
        )
        assert found is not None
        plain, captured = (int(number.replace(",", "")) for number in found.groups())
        assert (plain, captured) == (cost.state_bytes(1024, size), cost.state_bytes(1024, size, captured=True))
        assert captured == 4 * cost.wide_constant / 2 < plain  # sums stay in single precision


def test_the_executors_are_named_with_the_parts_that_keep_a_model_from_them():
    text = shown(CASES["transformer-base"])
    assert re.search(r"^CPU executor  native program$", text, re.MULTILINE)
    assert re.search(r"^GPU executor  captured CUDA graph$", text, re.MULTILINE)
    assert re.search(r"^GPU kernels   fused: decoder.blocks.0-5.mixer, .*cross, .*channel$", text, re.MULTILINE)
    text = shown(CASES["transformer-xl-base"])
    assert re.search(r"^CPU executor  native program; in torch: decoder.blocks.0-15.mixer \(", text, re.MULTILINE)
    said = r"fused: decoder.blocks.0-15.channel; plain: decoder.blocks.0-15.mixer \(a cache of hidden states has no"
    assert re.search(rf"^GPU kernels   {said}", text, re.MULTILINE)
    text = shown(CASES["synchronous-bidirectional"])
    assert re.search(r"^GPU executor  torch: decoder.blocks.0-5.mixer \(", text, re.MULTILINE)
    assert "GPU kernels" not in text
