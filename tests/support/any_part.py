"""Small models of everything that is registered, so that a new part joins the invariant tests by existing.

`variants(Mixer)` gives small instances of every mixer there is: required fields are filled by their type, then each
`Literal`, `bool`, slot field and number that need not be there is varied in turn. `cases()` puts each into a model that
can translate and decode.
"""

import functools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from allyouneed import plugins
from allyouneed.config import ConfigError, Part, parse, tree_of
from allyouneed.nn.batch import Rows
from allyouneed.nn.linear.dense import Linear
from allyouneed.nn.mixers.attention.attention import Attention
from allyouneed.nn.mixers.attention.scores import Scores
from allyouneed.nn.models.base import STACKS, Model
from allyouneed.nn.norms import Norm
from allyouneed.nn.patterns.core import Causal, Pattern
from allyouneed.nn.positions.absolute import Positions
from allyouneed.nn.positions.relative import Relative
from allyouneed.nn.sublayer import Channel, Mixer
from allyouneed.nn.wiring.residual import Wiring

plugins.import_all_parts()

WIDTH, HEADS, VOCAB, LONGEST = 12, 3, 11, 9
COMBINATORS = ("and", "or", "not")
# names of fields and what fits them here
KNOWN = {
    "heads": HEADS,
    "kv_heads": 1,
    "groups": HEADS,
    "expert": {"kind": "ffn", "hidden": 14},
    "factor": 2.0,
    "factors": (2.0, 3.0),
    "rope_width": 4,
    "length": 40,  # of learned positions: no test's sentence is longer
    "size": 3,
    "far_width": HEADS,
    "left": {"kind": "convolution", "size": 3},
    "window": 4,
    "chunk": 3,
    "segment": 3,
    "segments": (3, 6),
    "dilations": (1, 2),
    "buckets": 4,
}


# --- parts ----------------------------------------------------------------------------------------------------------


def options(annotation: Any) -> list[Any]:
    """Values of a field of this type: all of them if enumerable, otherwise one small value."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return list(typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return [value for kind in typing.get_args(annotation) if kind is not type(None) for value in options(kind)]
    if origin is typing.Annotated:
        return options(typing.get_args(annotation)[0])
    if annotation is bool:
        return [False, True]
    if annotation is int:
        return [LONGEST]
    if annotation is float:
        return [0.5]
    if annotation is Pattern:
        return list(atoms())
    if annotation is Mixer:
        return []  # a part that may hold any mixer may hold itself: `composed` names a few
    if isinstance(annotation, type) and issubclass(annotation, Part) and "kind" not in annotation.model_fields:
        return [plain(kind) for kind in annotation.registry.values()]
    return []


def plain(cls: type[Part]) -> Any:
    """This part with default settings. Named sizes fit `WIDTH`; other integers are small."""
    filled = {}
    for name, field in cls.model_fields.items():
        if field.is_required():
            filled[name] = KNOWN[name] if name in KNOWN else options(field.annotation)[0]
    return cls(**filled)


def variants(slot: type[Part]) -> list[Any]:
    """Every part of a slot, plain and with each enumerable option changed in turn."""
    found: list[Any] = []
    for cls in slot.registry.values():
        base = plain(cls)
        found.append(base)
        for name, field in cls.model_fields.items():
            if name == "kind" or field.annotation in (int, float):
                continue
            values = [KNOWN[name]] if name in KNOWN else few(cls, options(field.annotation))
            found += [type(base)(**{**dict(base), name: value}) for value in values if value != getattr(base, name)]
    return found


def few(cls: type[Part], values: list[Any]) -> list[Any]:
    """Every pattern is tried in plain attention; elsewhere one bounded and one unbounded pattern suffice. Of positions
    inside positions, one that adds to scores and values. Of many options (activations), the first and the last."""
    if values and isinstance(values[0], Pattern) and cls is not Attention:
        return [pattern for pattern in values if str(pattern) in ("window(3)", "strided(3)")]
    if issubclass(cls, Relative) and values and isinstance(values[0], Relative):
        return [part for part in values if part.kind == "shaw"]
    return [values[0], values[-1]] if len(values) > 6 and all(isinstance(v, str) for v in values) else values


def causally(part: Any) -> Any:
    """The same part with a causal pattern, if it has one."""
    fields = [name for name, field in type(part).model_fields.items() if field.annotation is Pattern]
    if part.causal or not fields:
        return part
    return type(part)(**{**dict(part), **{name: Causal() & getattr(part, name) for name in fields}})


def atoms() -> list[Pattern]:
    """Every atomic pattern with small numbers: all 1, then 3, 2, 3, …"""
    found: list[Pattern] = []
    for kind, cls in Pattern.registry.items():
        names = [name for name in cls.model_fields if name != "kind"]
        if kind not in COMBINATORS:
            for sizes in ((1, 1, 1), (3, 2, 3)) if names else ((),):
                found.append(cls(**dict(zip(names, sizes, strict=False))))  # type: ignore[arg-type]
    return found


def patterns(leaves: int = 5) -> st.SearchStrategy[Pattern]:
    """Any expression over the registered patterns."""
    return st.recursive(
        st.sampled_from(atoms()),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=leaves,
    )


def decodable(leaves: int = 4) -> st.SearchStrategy[Pattern]:
    """Any causal expression; most need `causal &`."""
    return st.one_of(patterns(leaves).map(lambda p: Causal() & p), patterns(leaves).filter(lambda p: p.causal))


# --- models ---------------------------------------------------------------------------------------------------------


def tree(mixer: Any = None, encoder_mixer: Any = None, cross: Any = None, channel: Any = None, **keys: Any) -> dict:
    """A model of two blocks per side; defaults as in the paper."""
    attention = {"kind": "attention", "heads": HEADS}

    def written(part: Any) -> Any:
        return tree_of(part) if isinstance(part, Part) else part

    wiring = written(keys.pop("wiring", "post-norm"))
    channel = written(channel or {"kind": "ffn", "hidden": 14})
    inside = {
        "repeat": 2,
        "wiring": wiring,
        "mixer": written(encoder_mixer or attention),
        "channel": channel,
    }
    outside = {
        "repeat": 2,
        "wiring": wiring,
        "mixer": written(mixer or attention | {"pattern": "causal"}),
        "cross": written(cross or attention),
        "channel": channel,
    }
    base = {"kind": "encoder-decoder", "vocab": VOCAB, "width": WIDTH, "embed": {"positions": "sinusoidal"}}
    return base | {"encoder": [inside], "decoder": [outside]} | {key: written(part) for key, part in keys.items()}


def build(config: Any, seed: int = 0) -> nn.Module:
    """In double precision with random parameters: no bias is zero and no gain is one."""
    config = config if isinstance(config, Model) else parse(Model, config)
    model = config.build().double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.double)
            parameter.copy_(noise * 0.4 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def _cases() -> Iterator[tuple[str, dict]]:
    inside = [Attention(heads=HEADS, positions=part) for part in variants(Relative)]
    inside += [Attention(heads=HEADS, scores=part) for part in variants(Scores)]
    for part in [*variants(Mixer), *inside]:
        name = f"mixer {describe_part(part)}"
        if (decoding := causally(part)).causal:
            yield f"mixer {describe_part(decoding)}", with_one_layer(tree(mixer=decoding), "encoder")
        yield f"encoder {name}", with_one_layer(tree(encoder_mixer=part), "decoder")
        if part.supports_cross:
            yield f"cross {name}", with_one_layer(tree(cross=part), "encoder")
    for part in variants(Channel):
        if not part.batch_independent:  # declared batch-dependent
            continue
        yield f"channel {describe_part(part)}", tree(channel=part)
    for part in variants(Wiring):
        yield f"wiring {describe_part(part)}", tree(wiring=part)
    for part in variants(Norm):
        yield f"norm {describe_part(part)}", tree(norm=part)
    for part in variants(Linear):
        yield f"linear {describe_part(part)}", tree(linear=part)
    for part in variants(Positions):
        yield f"positions {describe_part(part)}", tree(embed={"positions": tree_of(part)})
    yield from composed()
    yield "two vocabularies, untied", tree(vocab={"source": VOCAB, "target": VOCAB + 2}, embed={"tied": False})


def with_one_layer(keys: dict, side: str) -> dict:
    """The same model with one layer on the side that is as in the paper; the part to be tried is on the other side."""
    return keys | {side: [keys[side][0] | {"repeat": 1}]}


def composed() -> Iterator[tuple[str, dict]]:
    """Nested parts, and layers in other arrangements."""
    attention, ffn = {"kind": "attention", "heads": HEADS, "pattern": "causal"}, {"kind": "ffn", "hidden": 14}
    past = {"kind": "convolution", "size": 3, "sees": "past"}
    narrow, wide = past | {"size": 4, "width": 5, "separable": True}, past | {"width": 19, "activation": "relu"}
    branches = {
        "summed": {"left": wide, "right": narrow, "then": narrow},
        "multiplied": {"left": attention, "right": narrow, "join": "product"},
        "in a row": {"left": ffn, "right": attention, "join": "concat", "then": past | {"width": WIDTH}},
        "of branches": {"left": {"kind": "branches", "left": attention, "right": ffn}, "norm": False},
    }
    for name, keys in branches.items():
        yield f"mixer branches {name}", tree(mixer={"kind": "branches"} | keys)
    # random gains avoid rounding ties of integer multiples of a step
    normed = {"kind": "attention", "heads": HEADS, "bias": False, "sub_norm": "rms"}
    bits = {"mixer": normed | {"pattern": "causal"}, "encoder_mixer": normed, "cross": normed, "linear": "bit"}
    yield "linear bit without biases", tree(channel={"kind": "glu", "hidden": 14, "norm": True}, **bits)
    around = {"kind": "convolution", "size": 4}
    yield "encoder mixer branches around", tree(encoder_mixer={"kind": "branches", "left": around, "right": ffn})
    universal = {"repeat": 4, "share": True, "coordinates": "sinusoidal"}
    arrangements = {
        "shared": {"share": True, "repeat": 3},
        "with coordinates": universal,
        "act": universal | {"halt": "act"},
        "act, summed": universal | {"halt": {"kind": "act", "result": "sum"}, "wiring": "pre-norm"},
        "act without sharing": {"repeat": 3, "halt": {"kind": "act", "threshold": 0.9}},
    }
    given = tree()
    together = universal | {"halt": {"kind": "act", "per": "text"}}
    yield "encoder layers act per text", given | {"encoder": [given["encoder"][0] | together]}
    for name, keys in arrangements.items():
        given = tree()
        yield f"layers {name}", given | {side: [given[side][0] | keys] for side in STACKS}
    given = tree()
    mixed = ("post-norm", "pre-norm", "parallel", "resi-dual", "post-norm", "sandwich")
    yield (
        "wirings mixed",
        given | {side: [given[side][0] | {"repeat": 1, "wiring": word} for word in mixed] for side in STACKS},
    )
    yield "context encoder", with_context(tree())
    yield "head copy", tree(head={"kind": "vocabulary", "copy": True})
    named = {"global": given["decoder"][0] | {"repeat": 1}, "reads": given["encoder"][0] | {"repeat": 1}}
    named["local"] = named["global"] | {"mixer": past, "wiring": "pre-norm"}
    texts = {"layers": named, "encoder": "2×reads", "decoder": "2×(local, global), local"}
    yield "layers of two kinds by text", given | texts


def with_context(keys: dict, separator: int = 5) -> dict:
    """The model with a context encoder that all of its layers read."""
    (reads,), (writes,) = keys["encoder"], keys["decoder"]
    cross = {"kind": "context-attention", "heads": HEADS}
    first = {"wiring": writes["wiring"], "mixer": writes["mixer"], "cross": cross}
    second = {"wiring": writes["wiring"], "cross": writes["cross"], "channel": writes["channel"]}
    stacks = {"encoder": [reads | {"cross": cross}], "decoder": [first, second] * writes["repeat"]}
    return keys | stacks | {"separator": separator, "context": [reads | {"repeat": 1}]}


def describe_part(part: Part) -> str:
    keys = tree_of(part, full=False)
    return " ".join([type(part).model_fields["kind"].default, *(f"{k}={v}" for k, v in keys.items() if k != "kind")])


def possible(keys: dict) -> bool:
    """Invalid combinations are skipped; another test checks that every part is valid somewhere."""
    try:
        parse(Model, keys)
    except ConfigError:
        return False
    return True


CASES: dict[str, dict] = {name: keys for name, keys in _cases() if possible(keys)}
# For tests of the decoder. An encoder has finished before the decoder starts, and sees nothing of the target: with
# another mixer in it, these tests only repeat themselves.
DECODER_CASES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("encoder") else pytest.param(name) for name in CASES
]


def first_of_each_kind(begins: tuple[str, ...]) -> list[str]:
    """The first case of each kind of part, among those that begin with one of these."""
    first: dict[str, str] = {}
    for name in CASES:
        if name.startswith(begins):
            words = name.split()
            first.setdefault(" ".join(words[: words.index("mixer") + 2]), name)
    return list(first.values())


def _slow_unless(wanted: list[str], begins: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith(begins) and name not in wanted else name
        for name in CASES
    ]


# For tests of everything else: of the mixers in an encoder, one of each kind; most repeat the decoder's.
MOST_CASES = _slow_unless(first_of_each_kind(("encoder mixer",)), ("encoder mixer",))
# For tests of what is done with a whole model (stored, quantized): of mixers, one of each kind in each place.
_MIXERS = ("mixer", "encoder mixer", "cross mixer")
KIND_CASES = _slow_unless(first_of_each_kind(_MIXERS), _MIXERS)
# For long tests of states: one of each kind of mixer; `make test-all` tries every option.
_STATEFUL = ("mixer", "cross mixer")
STATE_CASES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("encoder") else name
    for name in [*first_of_each_kind(_STATEFUL), *(one for one in CASES if not one.startswith(_STATEFUL))]
] + [
    pytest.param(name, marks=pytest.mark.slow)
    for name in CASES
    if name.startswith(_STATEFUL) and name not in first_of_each_kind(_STATEFUL)
]


@functools.cache
def case(name: str) -> nn.Module:
    return build(CASES[name])


# --- sentences ------------------------------------------------------------------------------------------------------

Pair = tuple[list[int], list[int]]  # source, target

sentence = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=LONGEST)
pairs = st.lists(st.tuples(sentence, sentence), min_size=1, max_size=5)
# the example that every case is tried with: one token, as many as there may be, and lengths between
PAIRS: list[Pair] = [
    ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8, 1, 8, 4]),
    ([8], [5]),
    ([6, 6, 2, 10], [9, 3, 10, 1, 7, 4, 6]),
    ([7, 2, 9, 9, 1, 4, 3], [1, 6, 6, 3]),
]


def reference_logits(model: nn.Module, pair: Pair) -> Tensor:
    """The reference: logits (time, vocab) of one sentence run on its own."""
    source, target = pair
    with torch.no_grad():
        memory = model.encode(Rows(torch.tensor([source])))
        return model.head(model.decode(Rows(torch.tensor([target])), memory))[0]


def case_logits(name: str, pairs: list[Pair]) -> list[Tensor]:
    """The reference for each pair; of `PAIRS`, which several tests use, computed once."""
    return _logits_of_pairs(name) if pairs is PAIRS else [reference_logits(case(name), pair) for pair in pairs]


@functools.cache
def _logits_of_pairs(name: str) -> list[Tensor]:
    return [reference_logits(case(name), pair) for pair in PAIRS]


def pack(sentences: Sequence[Sequence[int]], rows: Sequence[int], gaps: Sequence[int], pad: int = 7) -> tuple:
    """Rows with several sentences: sentence i goes into `rows[i]`, after `gaps[i]` columns of padding. Returns the
    rows and, for each sentence, its row and span."""
    lines: list[list[int]] = [[] for _ in range(max(rows) + 1)]
    numbers: list[list[int]] = [[] for _ in lines]
    found = []
    for tokens, row, gap in zip(sentences, rows, gaps, strict=True):
        lines[row] += [pad] * gap
        numbers[row] += [0] * gap
        found.append((row, slice(len(lines[row]), len(lines[row]) + len(tokens))))
        numbers[row] += [max(numbers[row], default=0) + 1] * len(tokens)
        lines[row] += tokens
    longest = max(map(len, lines))
    tokens = torch.tensor([line + [pad] * (longest - len(line)) for line in lines])
    segments = torch.tensor([number + [0] * (longest - len(number)) for number in numbers])
    return Rows(tokens, segments=segments), found


# --- every registered part takes part -------------------------------------------------------------------------------
