import pytest

from allyouneed.config import parse, preset_names, preset_tree
from allyouneed.errors import UserError
from allyouneed.lab.comparison.sizes import MATCHES, cost_of, matched, scaled, sizes_text, words_text
from allyouneed.nn.models.base import Model

VARIED = ("llama-7b", "mamba-130m", "rwkv-4-169m", "retnet-1.3b", "yoco-3b", "reformer", "s4")
FIXED = {"tensorized-transformer"}  # weights for each pair of positions


def tree(name):
    return preset_tree(name) | {"vocab": 500}


def decoders():
    kinds = ("decoder", "decoder-decoder", "recurrent-memory")
    return [name for name in preset_names() if preset_tree(name).get("kind") in kinds and name not in FIXED]


def parameters(name):
    return matched({"gpt2": tree("gpt2"), f"{name}-small": tree(name)}, "parameters", 128, 2, 64)[1]


@pytest.mark.parametrize("name", VARIED)
def test_models_are_matched_by_their_built_parameters(name):
    first = scaled(tree("gpt2"), 128, 2, 64)
    built = [sum(p.numel() for p in parse(Model, one).build().parameters()) for one in (first, parameters(name).tree)]
    assert built[1] / built[0] == pytest.approx(1, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("name", decoders())
def test_every_decoder_finds_a_size_or_says_that_it_has_none(name):
    found = parameters(name)
    assert abs(found.ratio - 1) < 0.1 or "no closer match" in found.warning


@pytest.mark.parametrize("match", MATCHES)
def test_each_match_makes_its_own_cost_equal(match):
    first, other = matched({"a": tree("gpt2"), "b": tree("llama-7b")}, match, 64, 2, 64)
    costs = [cost_of(one.model, match, 64) for one in (first, other)]
    assert costs[1] / costs[0] == pytest.approx(other.ratio) == pytest.approx(1, abs=0.03)


def test_a_model_without_state_cannot_set_a_state_to_match():
    encoder = tree("bert-base")
    with pytest.raises(UserError, match=r"no decoding state"):
        matched({"bert-base": encoder, "roberta-base": tree("roberta-base")}, "state", 64, 2, 64)


def test_what_is_no_size_stays():
    small = parse(Model, scaled(tree("mistral-7b"), 64, 2, 32))
    mixer = small.decoder[0].mixer
    assert (small.width, small.decoder[0].repeat) == (64, 2)
    assert mixer.heads % mixer.kv_heads == 0 and mixer.kv_heads < mixer.heads
    assert str(mixer.pattern) == "causal & window(4096)"


def test_a_layer_that_only_mixes_is_half_a_block():
    assert sum(layer.repeat for layer in parse(Model, scaled(tree("mamba-130m"), 64, 3, 32)).decoder) == 6
    assert sum(layer.repeat for layer in parse(Model, scaled(tree("gpt2"), 64, 3, 32)).decoder) == 3


def test_shared_layers_stay_shared():
    albert = parse(Model, scaled(tree("albert-base"), 64, 3, 32))
    assert [(layer.share, layer.repeat) for layer in albert.encoder] == [(True, 3)]


def test_all_models_have_the_same_dropout_and_read_whole_texts():
    small = parse(Model, scaled(tree("gpt2"), 64, 2, 77, dropout=0.2))
    assert (small.dropout, small.limit) == (0.2, 77)
    assert small.decoder[0].mixer.dropout != 0.1  # the preset's own


def test_a_model_is_said_in_one_line():
    small = parse(Model, scaled(tree("llama-7b"), 64, 2, 32))
    assert words_text(small) == "decoder: pre-norm · attention (rotary) · glu (silu), rms norm"
    assert sizes_text(small) == "width 64, 2 layers, hidden 176, heads 2"
