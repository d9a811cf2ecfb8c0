"""The cases of `any_part` include everything that is registered."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from allyouneed.config import Part, parse
from allyouneed.nn.linear.dense import Linear
from allyouneed.nn.mixers.attention.scores import Scores
from allyouneed.nn.models.base import Model
from allyouneed.nn.norms import Norm
from allyouneed.nn.patterns.core import Pattern
from allyouneed.nn.positions.absolute import Positions
from allyouneed.nn.positions.relative import Relative
from allyouneed.nn.positions.rotary_scaling import Scaling
from allyouneed.nn.sublayer import Channel, Mixer
from allyouneed.nn.wiring.residual import Wiring
from allyouneed.nn.wiring.universal import Halt
from any_part import CASES, COMBINATORS, atoms, composed, variants

SLOTS = [Mixer, Channel, Wiring, Norm, Linear, Positions, Relative, Scores, Scaling, Halt]


@functools.cache
def configs() -> list[Model]:
    return [parse(Model, keys) for keys in CASES.values()]


@pytest.mark.parametrize("slot", SLOTS, ids=lambda slot: slot.slot)
def test_every_registered_part_is_in_some_case(slot):
    def kinds(node: Any) -> Iterator[str]:
        if isinstance(node, Part) and slot in type(node).__mro__:
            yield type(node).model_fields["kind"].default
        if isinstance(node, BaseModel):
            node = [getattr(node, name) for name in type(node).model_fields]
        if isinstance(node, list | tuple):
            for child in node:
                yield from kinds(child)

    found = {kind for config in configs() for kind in kinds(config)}
    assert found == set(slot.registry)


def test_every_registered_pattern_is_an_atom_or_joins_atoms():
    assert {type(pattern).model_fields["kind"].default for pattern in atoms()} | set(COMBINATORS) == set(
        Pattern.registry
    )


def test_options_that_can_be_counted_are_all_tried():
    attention = [part for part in variants(Mixer) if part.kind == "attention"]
    assert {part.bias for part in attention} == {True, False}
    assert {str(part.pattern) for part in attention} == {str(pattern) for pattern in atoms()}


def test_what_is_composed_by_hand_is_possible():
    assert {name for name, _ in composed()} <= set(CASES)
