"""A stack as text equals its expanded list."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from allyouneed.config import ConfigError, override, parse, to_yaml, tree_of
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.layer_text import expand_layers
from any_part import tree

FFN = {"kind": "ffn", "hidden": 14}
LOCAL = {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal & window(3)"}, "channel": FFN}
FULL = {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal"}, "channel": FFN, "wiring": "pre-norm"}
NAMED = {"a": {"wiring": "pre-norm"}, "b": {"repeat": 2}, "x1-y_z": {"share": True}}


def model(decoder, **layers):
    layers = layers or {"local": LOCAL, "full": FULL}
    return {"kind": "decoder", "vocab": 11, "width": 12, "layers": layers, "decoder": decoder}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", "a1"),
        ("3×a", "a3"),
        ("3xa, 1*b", "a3 b2"),
        ("  3 × a ,b,2 x x1-y_z ", "a3 b2 x1-y_z2"),
        ("2×(a, b)", "a1 b2 a1 b2"),
        ("2×(3×a, b), a", "a3 b2 a3 b2 a1"),
        ("2*(a, 2*(b, 5x a))", "a1 b2 a5 b2 a5 a1 b2 a5 b2 a5"),
        ("(((a)))", "a1"),
        ("4×b", "b8"),
    ],
)
def test_expanded_layers(text, expected):
    """A layer's own `repeat` is multiplied; its other keys stay."""

    def said(layer):
        (name,) = [name for name, keys in NAMED.items() if {**keys, "repeat": 0} == {**layer, "repeat": 0}]
        return f"{name}{layer['repeat']}"

    assert " ".join(map(said, expand_layers(text, NAMED))) == expected
    assert NAMED["b"] == {"repeat": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing layer at the end of ''"),
        ("a,", "missing layer at the end of 'a,'"),
        ("3×", "missing layer at the end of '3×'"),
        ("c", "unknown layer 'c' in 'c' (allowed: a, b, x1-y_z)"),
        ("3 a", "unknown layer '3' in '3 a' (allowed: a, b, x1-y_z)"),
        ("0×a", "repeat must be at least 1, not 0, in '0×a'"),
        ("2×(a, b", "missing ')': the '(' at character 3 is not closed, in '2×(a, b'"),
        ("a b", "unexpected 'b' in 'a b'"),
        ("a)", "unexpected ')' at character 2; no '(' is open, in 'a)'"),
        ("(a b)", "expected ')' before 'b' in '(a b)'"),
        ("()", "unknown layer ')' in '()' (allowed: a, b, x1-y_z)"),
    ],
)
def test_invalid_layer_texts_are_refused(text, said):
    with pytest.raises(ValueError) as error:
        expand_layers(text, NAMED)
    assert str(error.value) == said
    with pytest.raises(ConfigError) as error:
        parse(Model, model(text, **NAMED))
    assert error.value.problems == [f"decoder: {said}"]


@pytest.mark.parametrize("layers", [None, 3, ["local"], {"local": 3}, {"local": "attention"}])
def test_unknown_layer_names_are_refused(layers):
    with pytest.raises(ConfigError, match="decoder: 'local' requires `layers`, a mapping of names to layers"):
        parse(Model, model("local") | {"layers": layers})


def test_missing_layers_key_is_named():
    given = model("local")
    del given["layers"]
    with pytest.raises(ConfigError, match=r"unknown layer 'local' in .* \(allowed: none; define them under `layers`\)"):
        parse(Model, given)


def test_problems_of_named_layers_are_reported_by_path():
    wrong = {"mixer": {"kind": "attention", "heads": 3, "patern": "causal"}, "channel": FFN}
    with pytest.raises(ConfigError, match=r"decoder\[1\]\.mixer\.patern: unknown; did you mean 'pattern'\?"):
        parse(Model, model("full, 2×local", full=FULL, local=wrong))
    with pytest.raises(ConfigError, match=r"decoder\[0\]\.repeat"):
        parse(Model, model("2×local", local=LOCAL | {"repeat": "often"}))


def test_the_config_holds_the_expanded_list():
    found = parse(Model, model("3×local, 1×full"))
    given = model([LOCAL | {"repeat": 3}, FULL])
    del given["layers"]
    assert found == parse(Model, given)
    assert [layer.repeat for layer in found.decoder] == [3, 1]
    assert [len(found.build().decoder.blocks), found.decoder[1].wiring.kind] == [4, "pre-norm"]


def test_layers_without_text_are_refused():
    with pytest.raises(ConfigError, match="layers: unknown"):
        parse(Model, model([LOCAL]))


items = st.recursive(
    st.sampled_from(["local", "full", "2×local"]),
    lambda inner: st.builds(
        lambda n, parts: f"{n}×({', '.join(parts)})", st.integers(1, 3), st.lists(inner, min_size=1)
    ),
    max_leaves=4,
)


@given(items)
def test_yaml_round_trip(text):
    config = parse(Model, model(text))
    for full in (True, False):
        assert parse(Model, tree_of(config, full)) == config
        assert parse(Model, yaml.safe_load(to_yaml(config, full))) == config


def test_both_stacks_use_the_same_names():
    given = tree()
    named = {"reads": given["encoder"][0], "writes": given["decoder"][0] | {"repeat": 1}}
    found = parse(Model, given | {"layers": named, "encoder": "reads", "decoder": "2×writes"})
    assert found == parse(Model, given)


def test_layer_text_can_be_overridden():
    assert len(parse(Model, override(model("local"), ["decoder=3×(local, full)"])).decoder) == 6
