"""ResiDual and DeepNet, small, against whole models written out from the equations of their papers."""

from functools import partial

import pytest
import torch

import parity
from allyouneed.config import override, parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from shrink import shrink
from written_out import Weights, attention, differences, ffn, layer_norm, past, sinusoids

SOURCES = [[4, 9, 7, 30, 2], [8, 8], [11, 3, 6]]
TARGETS = [[1, 5, 6], [1, 9, 12, 13, 40], [1]]


def dual(x, sublayers, norms, weights, alpha, eps=1e-5):
    """Xie et al. 2023, section 3: x ← LN(x + f(x)), d ← d + f(x), both beginning as the input; y = x + LN(d)."""
    d = x
    for f, norm in zip(sublayers, norms, strict=True):
        added = f(x)
        x, d = layer_norm(x + added, norm), d + added
    return x + layer_norm(d, weights.at("end.norm"), eps)


def deep(x, sublayers, norms, weights, alpha):
    """Wang et al. 2022, figure 2: x ← LN(α x + f(x))."""
    for f, norm in zip(sublayers, norms, strict=True):
        x = layer_norm(alpha * x + f(x), norm)
    return x


def stack(x, layers, heads, weights, run, alpha, memory=None):
    time, whole = len(x), len(x) if memory is None else len(memory)
    seen = torch.ones(time, time, dtype=torch.bool) if memory is None else past(time)
    every = torch.ones(time, whole, dtype=torch.bool)
    kinds = {"mixer": lambda w, x: attention(x, x, seen, heads, w)}
    if memory is not None:
        kinds["cross"] = lambda w, x: attention(x, memory, every, heads, w)
    kinds["channel"] = lambda w, x: ffn(x, w)
    blocks = [weights.at(f"blocks.{number}") for number in range(layers)]
    sublayers = [partial(f, block.at(f"sublayers.{name}")) for block in blocks for name, f in kinds.items()]
    norms = [block.at(f"wiring.norms.{number}") for block in blocks for number in range(len(kinds))]
    return run(x, sublayers, norms, weights, alpha)


def written_out(config, weights, source, target, run, alphas):
    heads, tokens = config.encoder[0].mixer.heads, weights["embed.tokens.weight"]

    def embedded(text):
        return tokens[text] * config.width**0.5 + sinusoids(len(text), config.width)

    encoder, decoder = weights.at("encoder"), weights.at("decoder")
    memory = stack(embedded(source), config.encoder[0].repeat, heads, encoder, run, alphas[0])
    return stack(embedded(target), config.decoder[0].repeat, heads, decoder, run, alphas[1], memory) @ tokens.T


def test_the_last_norm_of_residual_has_an_eps_of_its_own(record_difference):
    changes = [
        "encoder.0.wiring={kind: resi-dual, final_eps: 0.5}",
        "decoder.0.wiring={kind: resi-dual, final_eps: 0.5}",
    ]
    run = partial(dual, eps=0.5)
    compared("ResiDual", "residual", run, 2, 2, record_difference, changes)


@pytest.mark.parametrize(("encoder", "decoder"), [(2, 2), (1, 3)])
@pytest.mark.parametrize(("system", "name", "run"), [("ResiDual", "residual", dual), ("DeepNet", "deepnet", deep)])
def test_logits_gradients_and_steps(system, name, run, encoder, decoder, record_difference):
    compared(system, name, run, encoder, decoder, record_difference)


def compared(system, name, run, encoder, decoder, record_difference, changes=()):
    tree = override(tree_of(shrink(parse(Model, preset_tree(name)))), list(changes))
    tree["encoder"][0]["repeat"], tree["decoder"][0]["repeat"] = encoder, decoder
    config = parse(Model, tree)
    model = config.build()
    parity.randomise(model)
    weights = Weights.of(model)
    alphas = 0.81 * (encoder**4 * decoder) ** (1 / 16), (3 * decoder) ** (1 / 4)  # DeepNet, figure 2, encoder-decoder
    pairs = [(torch.tensor(source), torch.tensor(target)) for source, target in zip(SOURCES, TARGETS, strict=True)]
    expected = torch.cat([written_out(config, weights, *pair, run, alphas) for pair in pairs])
    rows, source = Rows.of(TARGETS), Rows.of(SOURCES)
    real = torch.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    outputs, gradients = differences(model, weights, model.logits(Batch(rows, source))[real], expected)
    with torch.no_grad():
        states = model.eval().start(source)
        steps = [model.head(model.advance(Rows(column), states)) for column in rows.tokens.split(1, 1)]
    worst = max(outputs, parity.difference(torch.cat(steps, 1)[real], expected.detach()))
    record_difference(system, "oracle from the paper", worst, gradients)
    assert worst < parity.TOLERANCE and gradients < parity.TOLERANCE
