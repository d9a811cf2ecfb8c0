"""The first answers of a process are those of later calls, and of the plain engine, for every mixer: the first prefill
of a captured decoder is not captured, and a first pass may find weights in a state that no later one does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allyouneed.config import parse, tree_of
from allyouneed.infer.cuda_graph.shape import weight_addresses
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.nn.mixers.rnn import RNNModule
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import assign_weights, meta_model, named_tensors
from allyouneed.nn.sublayer import Mixer
from any_part import VOCAB, WIDTH, build, causally, possible, variants
from graph_runner import token_lists
from tape_graph import capture_on_cpu, flatten_as_on_a_gpu

PROMPTS = [[1, 5, 6, 7, 8, 9], [1, 9], [1, *range(3, 10)], [1, 4, 3, 8]]
TOKENS = {"plain": 12, "captured": 33}  # of each text; graphs are captured once it pays
METHODS: dict[str, dict[str, Any]] = {"greedy": {}, "sample": {"seed": 3}}


@functools.cache
def decoders() -> dict[str, dict[str, Any]]:
    """A decoder with each kind of mixer that can decode alone."""
    found: dict[str, dict[str, Any]] = {}
    for part in variants(Mixer):
        keys = {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "embed": {"tied": False}}
        keys |= {"decoder": [{"repeat": 2, "mixer": tree_of(causally(part)), "channel": {"kind": "ffn", "hidden": 14}}]}
        if part.kind not in found and possible(keys):
            found[part.kind] = keys
    return found


def loaded(keys: dict[str, Any]) -> Any:
    """The model as a folder is loaded: its tensors take the place of others."""
    source = build(keys)
    torch.manual_seed(0)  # what is drawn when a model is built is no weight
    model = meta_model(parse(Model, keys))  # type: ignore[type-abstract]
    assign_weights(model, {name: tensor.detach().clone() for name, tensor in named_tensors(source).items()})
    return model.eval()


def with_int8_weights(model: Any) -> Any:
    """LSTMs and GRUs in int8; all else as before."""
    for part in list(model.modules()):
        if isinstance(part, RNNModule):
            part.rnn_to_int8()
    return model.double()


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("name", decoders())
def test_first_answers_are_those_of_later_calls(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(lambda: loaded(decoders()[name]), TOKENS[kind], monkeypatch)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_first_answers_of_int8_weights_are_those_of_later_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_calls(lambda: with_int8_weights(loaded(decoders()[name])), TOKENS["captured"], monkeypatch)


def check_calls(load: Callable[[], Any], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for method, options in METHODS.items():
        decoding = Decoding(method=method, min_length=tokens, max_length=tokens, **options)
        expected = token_lists(Engine(load(), 1, 2, 0).complete(PROMPTS, decoding))
        with monkeypatch.context() as patch:
            capture_on_cpu(patch)
            flatten_as_on_a_gpu(patch)
            model = load()
            engine, before = Engine(model, 1, 2, 0), weight_addresses(model)
            for call in range(3):
                assert token_lists(engine.complete(PROMPTS, decoding)) == expected, f"call {call + 1}, {method}"
                assert weight_addresses(model) == before, "captured graphs read weights where they were"
            requests = [Request(prompt, tokens, (n,)) for n, prompt in enumerate(PROMPTS)]
            assert bool(engine.graphs.kept) == engine.graphs.suits(engine.runner.spec(decoding), requests)
