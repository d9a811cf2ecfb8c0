"""Models with one stack: encoders and decoders. (Two stacks: tests/invariants.)"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from any_part import LONGEST, VOCAB, WIDTH, build, pack, sentence

LAYER = {"repeat": 2, "mixer": {"kind": "attention", "heads": 3}, "channel": {"kind": "ffn", "hidden": 14}}
CAUSAL = LAYER | {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal", "positions": "rotary"}}
sentences = st.lists(sentence, min_size=1, max_size=5)
few = settings(max_examples=10)


def encoder(**keys):
    embed = {"positions": "sinusoidal", "types": 2, "norm": "layer"}
    return {"kind": "encoder", "vocab": VOCAB, "width": WIDTH, "embed": embed, "encoder": [LAYER]} | keys


def decoder(**keys):
    return {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [CAUSAL]} | keys


def decoder_decoder(cross=None, **keys):
    window = LAYER | {"mixer": {"kind": "attention", "heads": 3, "pattern": "causal & window(3)"}}
    crossing = {"kind": "attention", "heads": 3, "pattern": "causal", "positions": "rotary"} | (cross or {})
    stacks = {"first": [window], "second": [{"repeat": 2, "cross": crossing, "channel": LAYER["channel"]}]}
    return {"kind": "decoder-decoder", "vocab": VOCAB, "width": WIDTH} | stacks | keys


KINDS = {
    "encoder": encoder(),
    "encoder, BERT's head": encoder(head={"bias": True, "transform": {}}),
    "encoder, factorised and shared": encoder(
        embed={"positions": {"kind": "learned", "length": LONGEST}, "inner": 5},
        encoder=[LAYER | {"share": True}],
        head={"transform": {}},
    ),
    "decoder": decoder(),
    "decoder, three of one kind and one of another": decoder(
        layers={
            "retention": {"mixer": {"kind": "retention", "heads": 3}, "wiring": "pre-norm"},
            "attention": CAUSAL | {"repeat": 1, "wiring": "pre-norm"},
            "rwkv": {"mixer": "rwkv", "channel": {"kind": "rwkv-channel", "hidden": 14}, "wiring": "pre-norm"},
        },
        decoder="2×(2×retention, attention), rwkv",
    ),
    "decoder, untied": decoder(embed={"tied": False}, head={"bias": True, "soft_cap": 3.0}),
    "decoder-decoder": decoder_decoder(),
    "decoder-decoder, few keys": decoder_decoder({"kv_heads": 1, "qk_norm": "rms", "positions": "transformer-xl"}),
    "decoder-decoder, window": decoder_decoder(
        {"pattern": "causal & window(4)", "positions": "alibi", "bias": {"k": False}},
        first=[
            {"wiring": {"kind": "pre-norm", "final": False}, "mixer": {"kind": "gated-retention", "heads": 3}},
            {"wiring": {"kind": "pre-norm", "final": False}, "mixer": {"kind": "retention", "heads": 3}},
        ],
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def alone(model, tokens):
    with torch.no_grad():
        return model.logits(Batch(Rows(torch.tensor([tokens]))))[0]


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@every_kind
@few
@given(sentences, st.sampled_from(["right", "left"]))
def test_padding_and_other_rows_do_not_matter(kind, sentences, side):
    model = build(KINDS[kind])
    found = model.logits(Batch(Rows.of(sentences, pad=3, side=side)))
    for row, tokens in enumerate(sentences):
        size = len(tokens)
        close(found[row, :size] if side == "right" else found[row, -size:], alone(model, tokens))


@every_kind
@few
@given(sentences, st.lists(st.integers(0, 2), min_size=5, max_size=5))
def test_packed_sentences_are_independent(kind, sentences, rows):
    model, count = build(KINDS[kind]), len(sentences)
    packed, places = pack(sentences, rows[:count], [1] * count)
    found = model.logits(Batch(packed))
    for tokens, (row, span) in zip(sentences, places, strict=True):
        close(found[row, span], alone(model, tokens))


@every_kind
def test_config_cost_matches_the_built_model(kind):
    config = parse(Model, KINDS[kind])
    assert config.cost().parameters == sum(p.numel() for p in config.build().parameters())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("decoder")])
@few
@given(sentences, st.integers(1, 3))
def test_decoding_equals_the_whole_pass(kind, sentences, size):
    model = build(KINDS[kind])
    states, found = model.start(len(sentences)), [[] for _ in sentences]
    for at in range(0, max(map(len, sentences)), size):
        chunks = [tokens[at : at + size] for tokens in sentences]
        with torch.no_grad():
            logits = model.head(model.advance(Rows.of(chunks, pad=2), states))
        for row, chunk in enumerate(chunks):
            found[row].append(logits[row, : len(chunk)])
    for tokens, parts in zip(sentences, found, strict=True):
        close(torch.cat(parts), alone(model, tokens))


def test_token_types_matter():
    model = build(encoder())
    tokens = torch.tensor([[1, 2, 3]])
    none, first, second = (
        model.logits(Batch(Rows(tokens, types=types)))
        for types in (None, torch.tensor([[0, 0, 0]]), torch.tensor([[0, 0, 1]]))
    )
    assert torch.equal(none, first)
    assert (first - second).abs().max() > 1e-2


def test_shared_layers_record_attention_separately():
    """ALBERT: one module, called once a layer."""
    model = build(KINDS["encoder, factorised and shared"])
    assert model.encoder.blocks[0] is model.encoder.blocks[1]
    shown = model.attention(Batch(Rows.of([[1, 2, 3, 4]])))
    assert sorted(shown) == [0, 1]
    assert (shown[0] - shown[1]).abs().max() > 1e-3
    only = model.attention(Batch(Rows.of([[1, 2, 3, 4]])), layers=[1], heads=[2])
    assert torch.equal(only[1], shown[1][:, [2]])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (decoder(decoder=[LAYER]), "decoder[0].mixer: a decoder must not attend to later tokens"),
        (encoder(vocab=None), "embed.kind: token embeddings require vocab"),
        (encoder(encoder=[LAYER | {"cross": {"kind": "attention", "heads": 3}}]), "encoder[0].cross: "),
        (encoder(embed={"inner": 5}), "head.transform: the tied token vectors have width 5"),
        (encoder(encoder=[]), "encoder: needs at least 1 layer"),
    ],
)
def test_invalid_configs_are_refused(keys, said):
    with pytest.raises(ConfigError) as refusal:
        parse(Model, keys)
    assert any(problem.startswith(said) for problem in refusal.value.problems)
