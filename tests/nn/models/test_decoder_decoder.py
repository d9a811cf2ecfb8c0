"""One KV cache for all layers; only the last prompt token runs through the second stack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.mixers.attention.shared_kv import SharedAttention
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.block import Block
from any_part import HEADS, VOCAB, WIDTH, build, sentence

ATTENTION = {"kind": "attention", "heads": HEADS, "pattern": "causal", "positions": "rotary"}
FFN = {"kind": "ffn", "hidden": 14}


def config(layers=2, mixer=None, **cross):
    first = {"repeat": layers, "wiring": {"kind": "pre-norm", "final": False}, "channel": FFN}
    first["mixer"] = mixer or {"kind": "gated-retention", "heads": HEADS}
    second = {"repeat": layers, "wiring": "pre-norm", "cross": ATTENTION | cross, "channel": FFN}
    return {"kind": "decoder-decoder", "vocab": VOCAB, "width": WIDTH, "first": [first], "second": [second]}


def decoder(layers):
    layer = {"repeat": layers, "wiring": "pre-norm", "mixer": ATTENTION, "channel": FFN}
    return {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [layer]}


def used(tree, tokens, rows=3):
    """(elements that a config declares for a text of `tokens` tokens, elements found in use)."""
    declared = parse(Model, tree).cost(tokens)
    model = parse(Model, tree).build()
    with torch.no_grad():
        states = model.start(rows)
        for start in range(0, tokens, 50):
            model.advance(Rows(torch.ones(rows, min(50, tokens - start), dtype=torch.long)), states)
    return declared.state_constant + tokens * declared.state_per_token, states.bytes / 4 / rows


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tokens", [1, 130, 300])
def test_the_cache_is_as_large_as_declared(layers, tokens):
    declared, found = used(config(layers), tokens)
    assert found == declared


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_state_grows_like_one_decoder_layer(layers):
    """A decoder of as many layers grows 2·layers times faster, declared and measured."""
    own, plain = parse(Model, config(layers)).cost(), parse(Model, decoder(2 * layers)).cost()
    assert own.state_per_token * 2 * layers == plain.state_per_token
    growth = used(config(layers), 700)[1] - used(config(layers), 200)[1]
    assert growth * 2 * layers == used(decoder(2 * layers), 700)[1] - used(decoder(2 * layers), 200)[1]
    assert growth == 500 * 2 * WIDTH


@settings(max_examples=10)
@given(st.lists(sentence, min_size=1, max_size=4), st.lists(sentence, min_size=4, max_size=4))
def test_only_the_last_prompt_token_runs_through_both_stacks(prompts, more):
    """The same numbers as if all did, then and afterwards."""
    model = build(config())
    with torch.no_grad():
        whole, short = model.start(len(prompts)), model.start(len(prompts))
        rows = Rows.of(prompts, pad=4)
        found, expected = model.advance(rows, short, last=True), model.advance(rows, whole)
        ends = [len(prompt) - 1 for prompt in prompts]
        assert found.shape == (len(prompts), 1, WIDTH)
        torch.testing.assert_close(found[:, 0], expected[range(len(prompts)), ends])
        assert short.lengths == whole.lengths
        rows = Rows.of(more[: len(prompts)])
        real = torch.tensor([[n < len(line) for n in range(rows.tokens.shape[1])] for line in more[: len(prompts)]])
        torch.testing.assert_close(model.advance(rows, short)[real], model.advance(rows, whole)[real])


def test_the_second_stack_sees_one_token_of_a_prompt():
    model, seen = build(config(layers=2)), {"first": [], "second": []}
    for name in seen:
        for block in getattr(model, name).blocks:
            assert isinstance(block, Block)
            block.register_forward_pre_hook(lambda _, given, name=name: seen[name].append(given[0].shape[1]))
    with torch.no_grad():
        model.advance(Rows.of([[1, 2, 3, 4, 5]]), model.start(1), last=True)
    assert seen == {"first": [5, 5], "second": [1, 1]}


@settings(max_examples=10)
@given(st.lists(sentence, min_size=1, max_size=4))
def test_last_returns_the_last_token(prompts):
    model = build(decoder(2))
    with torch.no_grad():
        rows = Rows.of(prompts, pad=4)
        found = model.advance(rows, model.start(len(prompts)), last=True)
        expected = model.advance(rows, model.start(len(prompts)))
    torch.testing.assert_close(found[:, 0], expected[range(len(prompts)), [len(prompt) - 1 for prompt in prompts]])


def test_reordered_states_equal_a_fresh_start():
    model = build(config(mixer={"kind": "attention", "heads": HEADS, "pattern": "causal & window(3)"}))
    texts = [[1, 2, 3, 4], [5, 6]]
    with torch.no_grad():
        states = model.start(2)
        model.advance(Rows.of(texts, pad=9), states)
        states.repeat_rows(2)
        states.select([3, 2, 0, 0])
        states.trim(3)
        rows = [[5, 6], [5, 6], [1, 2, 3], [1, 2, 3]]
        assert states.lengths == [2, 2, 3, 3]
        found = model.head(model.advance(Rows(torch.tensor([[7], [8], [9], [10]])), states))[:, 0]
        for row, token, logits in zip(rows, (7, 8, 9, 10), found, strict=True):
            torch.testing.assert_close(logits, model.logits(Batch(Rows.of([[*row, token]])))[0, -1])


def test_attention_weights_can_be_recorded():
    model = build(config(mixer=ATTENTION))
    batch = Batch(Rows.of([[1, 2, 3]]))
    for where in ("first", "second"):
        shown = model.attention(batch, where)
        assert sorted(shown) == [0, 1]
        torch.testing.assert_close(shown[1].sum(-1), torch.ones(1, HEADS, 3, dtype=torch.double))
        assert not shown[0].triu(1).any()


def test_both_stacks_can_be_written_as_text():
    given = config()
    named = {"fading": given["first"][0] | {"repeat": 1}, "looking": given["second"][0] | {"repeat": 1}}
    short = given | {"layers": named, "first": "2×fading", "second": "2×looking"}
    model = build(short)
    assert len(model.first.blocks) == len(model.second.blocks) == 2
    readers = [part for part in model.modules() if isinstance(part, SharedAttention)]
    assert len(readers) == 2
    assert not any(
        name.endswith((".k.weight", ".v.weight", ".kv.weight")) for name, _ in model.second.named_parameters()
    )


def with_second(**keys):
    given = config()
    return given | {"second": [given["second"][0], given["second"][0] | keys]}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (config(pattern="full"), "second[0].cross.pattern: must not attend to later tokens"),
        (with_second(mixer=ATTENTION), "second[1].mixer: not supported"),
        (with_second(cross=ATTENTION | {"kv_heads": 1}), "second[1].cross: all layers share the keys"),
        (with_second(cross=ATTENTION | {"positions": "none"}), "second[1].cross: all layers share the keys"),
        (config(mixer={"kind": "attention", "heads": 3}), "first[0].mixer: a decoder must not attend to later tokens"),
        (config() | {"second": [{"channel": FFN}]}, "second: no layer has a cross"),
        (config() | {"second": []}, "second: needs at least 1 layer"),
    ],
)
def test_invalid_configs_are_refused(keys, said):
    with pytest.raises(ConfigError) as refusal:
        parse(Model, keys)
    assert any(problem.startswith(said) for problem in refusal.value.problems), refusal.value.problems
