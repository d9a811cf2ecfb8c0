"""The pattern algebra: text, reach, and boolean laws of the masks."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError, ValidationError

from allyouneed.config import Config, ConfigError, parse, tree_of
from allyouneed.nn.patterns.core import Causal, Full, Not, Pattern, Prefix, SameSegment, TokenFields, Window
from any_part import COMBINATORS, atoms, patterns

sizes = st.integers(1, 9)
expression = patterns()


def same(a: Pattern, b: Pattern) -> bool:
    """Equal masks for a row of three sentences with padding, and for one long sentence."""
    position = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1])
    segment = torch.tensor([1, 1, 1, 1, 1, 2, 2, 2, 0, 3, 3])
    query, key = TokenFields(position[:, None], segment[:, None]), TokenFields(position[None], segment[None])
    shape = (len(position), len(position))
    packed = torch.equal(a.allowed(query, key).expand(shape), b.allowed(query, key).expand(shape))
    return packed and torch.equal(a.mask(12, 12), b.mask(12, 12))


def test_the_reference_distinguishes_patterns():
    assert not any(same(a, b) for a, b in itertools.combinations([Full(), Causal(), Window(size=2)], 2))
    assert not same(Full(), SameSegment())


@given(expression, expression)
def test_de_morgan(a, b):
    assert same(~(a & b), ~a | ~b)
    assert same(~(a | b), ~a & ~b)


@given(expression, expression, expression)
def test_and_or_not_are_a_boolean_algebra(a, b, c):
    assert same(a & b, b & a) and same(a | b, b | a)
    assert same(a & (b | c), (a & b) | (a & c))
    assert same((a & b) & c, a & (b & c)) and same((a | b) | c, a | (b | c))
    assert same(~~a, a) and same(a & Full(), a) and same(a | ~Full(), a)


@given(expression)
def test_text_round_trip(pattern):
    again = Pattern.from_text(str(pattern))
    assert same(again, pattern)
    assert str(again) == str(pattern)
    assert again.reach == pattern.reach


class Holder(Config):
    pattern: Pattern


@given(expression)
def test_config_round_trip(pattern):
    tree = tree_of(Holder(pattern=pattern))
    assert tree == {"pattern": str(pattern)}
    assert same(parse(Holder, tree).pattern, pattern)
    assert tree_of(parse(Holder, tree)) == tree


@given(expression, sizes)
def test_reach_bounds_all_allowed_pairs(pattern, size):
    low, high = pattern.reach
    query, key = pattern.mask(size, size).nonzero(as_tuple=True)
    assert ((key - query) >= low).all() and ((key - query) <= high).all()


@given(expression, sizes)
def test_causal_patterns_never_attend_ahead(pattern, size):
    if pattern.causal:
        assert not pattern.mask(size, size).triu(1).any()


@given(expression, st.integers(1, 20))
def test_kv_window_covers_what_decoding_needs(pattern, size):
    """Every earlier key of a query is among the first or the most recent positions of `kv_window`."""
    if pattern.kv_window is not None:
        first, recent = pattern.kv_window
        for query, key in pattern.mask(size, size).nonzero().tolist():
            assert key > query or key < first or query - key < recent


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("causal & window(64)", (0, 64)),
        ("causal & (window(64) | prefix(4))", (4, 64)),
        ("causal & block(32)", (0, 32)),
        ("causal & dilated(4, 8)", (0, 25)),
        ("causal & (block-window(8, 2) | global(2) | self)", (3, 16)),
        ("causal & prefix(4) & window(64)", (4, 0)),
        ("causal", None),
        ("causal & (window(64) | strided(8))", None),
        ("causal & (window(64) | prompt)", None),
        ("causal & ~window(64)", None),
    ],
)
def test_kv_window_of_common_patterns(text, kept):
    assert Pattern.from_text(text).kv_window == kept


@given(expression)
def test_leak_names_the_part_that_attends_ahead(pattern):
    assert (pattern.leak() is None) == pattern.decodes
    assert pattern.decodes or not pattern.causal


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("causal & window(64) | global(0)", "global(0) lets position 0 attend to everything"),
        ("causal & (window(64) | global(0))", None),
        ("causal | prefix(3)", "prefix(3) lets the first 3 positions attend to each other"),
        ("causal | window(3) & ~prefix(1)", "window(3) attends to later tokens"),
        ("causal | prompt", None),
        ("causal | chosen", "chosen lets global tokens attend to everything"),
        ("full", "full attends to later tokens"),
    ],
)
def test_leak_texts(text, said):
    assert Pattern.from_text(text).leak() == said


@pytest.mark.parametrize("pattern", atoms(), ids=str)
def test_reach_is_tight_for_each_pattern(pattern):
    """A bound of infinity for everything would pass the test above."""
    low, high = pattern.reach
    query, key = pattern.mask(40, 40).nonzero(as_tuple=True)
    far = (key - query).tolist()
    assert low == -float("inf") or min(far) == low
    assert high == float("inf") or max(far) == high


@given(expression, st.integers(1, 64))
def test_mean_keys_is_the_mean_of_the_mask(pattern, length):
    """Up to 64 queries none is left out."""
    assert pattern.mean_keys(length) == pytest.approx(pattern.mask(length, length).sum(-1).double().mean().item())


@pytest.mark.parametrize("text", ["full", "causal", "window(7)", "causal & window(30)", "prefix(9) | causal"])
@pytest.mark.parametrize("length", [65, 200, 1000])
def test_mean_keys_of_long_sentences_is_close(text, length):
    """Longer ones are sampled at the middles of 64 even stretches: a stretch is length/64 wide, so is the error."""
    pattern = Pattern.from_text(text)
    exact = pattern.mask(length, length).sum(-1).double().mean().item()
    assert pattern.mean_keys(length) == pytest.approx(exact, abs=length / 64 / 2 + 0.5, rel=0)


@given(expression, sizes, st.data())
def test_mask_of_the_last_queries_is_the_end_of_the_full_mask(pattern, keys, data):
    queries = data.draw(st.integers(1, keys))
    assert torch.equal(pattern.mask(queries, keys), pattern.mask(keys, keys)[-queries:])


def test_masks_match_the_papers():
    assert torch.equal(Causal().mask(5, 5), torch.ones(5, 5).tril().bool())
    assert torch.equal(Full().mask(2, 5), torch.ones(2, 5).bool())
    window = [[abs(q - k) < 2 for k in range(5)] for q in range(5)]
    assert (Causal() & Window(size=2)).mask(5, 5).tolist() == [
        [seen and k <= q for k, seen in enumerate(row)] for q, row in enumerate(window)
    ]
    prefix = [[k <= q or k < 3 for k in range(5)] for q in range(5)]
    assert (Causal() | Prefix(length=3)).mask(5, 5).tolist() == prefix


def test_a_picture_is_the_mask():
    assert (Causal() & Window(size=2)).picture(4) == "█···\n██··\n·██·\n··██"
    assert Prefix(length=1).picture(3) == "█··\n█··\n█··"


def test_precedence_is_not_before_and_before_or():
    text = "causal & window(3) | ~prefix(2) & full"
    assert Pattern.from_text(text) == (Causal() & Window(size=3)) | (~Prefix(length=2) & Full())
    assert Pattern.from_text("causal & (window(3) | full)") == Causal() & (Window(size=3) | Full())
    assert Pattern.from_text("~(causal & full)") == Not(inner=Causal() & Full())
    assert Pattern.from_text(" causal&window( 3 ) ") == Causal() & Window(size=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "casual",
            "unknown pattern 'casual'; did you mean 'causal'? (allowed: block, block-window, causal, chosen, dilated",
        ),
        ("", "missing pattern at the end"),
        ("causal &", "missing pattern at the end"),
        ("causal window(3)", "unexpected 'window', in 'causal window(3)'"),
        ("(causal", "missing ')': the '(' at character 1 is not closed, in '(causal'"),
        ("(causal window(3))", "expected ')' before 'window'"),
        ("causal)", "unexpected ')'"),
        ("window", "window takes (size), got 0"),
        ("window(1, 2)", "window takes (size), got 2"),
        ("causal(1)", "causal takes no arguments, got 1"),
        ("window(-3)", "window(…) takes integers, not '-'"),
        ("window(many)", "window(…) takes integers, not 'many'"),
        ("window(3", "missing ')': the '(' at character 7 is not closed"),
        ("window(²)", "window(…) takes integers, not '²'"),
        ("and", "unknown pattern 'and'"),
    ],
)
def test_parse_errors(text, said):
    with pytest.raises(ConfigError) as caught:
        parse(Holder, {"pattern": text})
    (problem,) = caught.value.problems
    assert problem.startswith("pattern: ")
    assert said in problem


def test_out_of_range_numbers_are_reported_by_field():
    with pytest.raises(ConfigError, match=r"pattern\.size: .*greater than 0, not 0"):
        parse(Holder, {"pattern": "window(0)"})


@settings(max_examples=200)
@given(st.text(alphabet="causlwindo()&|~ 0123,²٣-X", max_size=12))
def test_any_text_parses_or_raises_a_config_error(text):
    try:
        pattern = Pattern.from_text(text)
    except (PydanticCustomError, ValidationError):
        return
    assert same(Pattern.from_text(str(pattern)), pattern)


def test_every_pattern_is_in_the_language():
    for kind, cls in Pattern.registry.items():
        if kind not in COMBINATORS:
            numbers = ", ".join("2" for name in cls.model_fields if name != "kind")
            assert Pattern.from_text(f"{kind}({numbers})" if numbers else kind).causal in (True, False)
