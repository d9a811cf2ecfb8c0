"""What Infini-attention promises besides its equations (tests/parity): a text without end in constant memory.

infini-transformer-pytorch has the gate the other way round (sigmoid(β) for the near), and none in the first segment;
with both put right, its memory and these layers agree to rounding.
"""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.mixers.attention.infini import kept_tokens
from allyouneed.nn.models.base import Model
from allyouneed.nn.states.window import MAX_TRIM
from any_part import build


def decoder(repeat=2, **keys):
    mixer = {"kind": "infini", "heads": 2, "segment": 16} | keys
    layer = {"repeat": repeat, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 6}}
    return {"kind": "decoder", "vocab": 11, "width": 8, "decoder": [layer]}


def text(rows, length, seed=0):
    return torch.randint(1, 11, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("segment", [1, 16, 31, 50])
@pytest.mark.parametrize("cuts", [[130], [1] * 40 + [90], [50, 31, 1, 1, 47], [7, 90, 33]])
def test_chunks_of_any_size_equal_the_whole_pass(update, segment, cuts):
    model, tokens = build(decoder(update=update, segment=segment, positions="rotary")), text(2, 130)
    states = model.start(2)
    with torch.no_grad():
        found = [model.head(model.advance(Rows(part), states)) for part in tokens.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(found, 1), model.logits(Batch(Rows(tokens))), atol=1e-8, rtol=0)


def test_memory_stays_constant_over_8000_tokens():
    model, tokens = build(decoder(segment=128)), text(1, 8192)
    states, sizes, ends = model.start(1), [], []
    with torch.no_grad():
        for part in tokens.split(256, 1):
            for piece in part.split([249, *[1] * 7], 1):
                ends.append(model.head(model.advance(Rows(piece), states))[:, -1])
            sizes.append(states.bytes)
        whole = model.logits(Batch(Rows(tokens)))
    assert len(set(sizes)) == 1
    assert sizes[0] == 8 * model.config.cost(8192).state_constant
    torch.testing.assert_close(ends[-1], whole[:, -1], atol=1e-8, rtol=0)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_the_first_segment_influences_the_fifth(update):
    """In one layer nothing but the memory can carry it there."""
    model, tokens = build(decoder(repeat=1, update=update)), text(1, 80)
    changed = tokens.clone()
    changed[0, 3] = tokens[0, 3] % 10 + 1
    with torch.no_grad():
        first, second = (model.logits(Batch(Rows(given))) for given in (tokens, changed))
    differs = (first - second).abs().amax(-1)[0]
    assert differs[:3].max() == 0 and differs[16:].min() > 1e-6
    with torch.no_grad():
        model.decoder.blocks[0].sublayers["mixer"].gate.fill_(-100.0)  # near only: sigmoid(β) belongs to the memory
        first, second = (model.logits(Batch(Rows(given))) for given in (tokens, changed))
    assert (first - second).abs().amax(-1)[0, 16:].max() == 0


def test_trimming_across_a_segment_boundary():
    model, tokens = build(decoder()), text(3, 200)
    states = model.start(3)
    with torch.no_grad():
        expected = model.logits(Batch(Rows(tokens)))
        model.advance(Rows(tokens[:, :150]), states)
        states.trim(150 - MAX_TRIM)
        found = model.head(model.advance(Rows(tokens[:, 150 - MAX_TRIM :]), states))
        torch.testing.assert_close(found, expected[:, 150 - MAX_TRIM :], atol=1e-8, rtol=0)
    with pytest.raises(ValueError, match=f"can trim at most {MAX_TRIM} tokens"):
        states.trim(200 - kept_tokens(16) - 1)


def test_rows_of_unequal_lengths():
    model, tokens = build(decoder(positions="rotary")), text(2, 260, seed=1)
    states, done, found = model.start(2), [0, 0], [[], []]
    with torch.no_grad():
        for sizes in [(90, 3), (1, 40), (0, 1), (80, 80), (1, 1), (30, 100), (40, 0)]:
            chunks = [tokens[row, done[row] : done[row] + size].tolist() for row, size in enumerate(sizes)]
            scores = model.head(model.advance(Rows.of(chunks, pad=5), states))
            for row, size in enumerate(sizes):
                found[row].append(scores[row, :size])
                done[row] += size
        for row in range(2):
            alone = model.logits(Batch(Rows(tokens[row : row + 1, : done[row]])))[0]
            torch.testing.assert_close(torch.cat(found[row]), alone, atol=1e-8, rtol=0)


def test_only_rotary_positions_are_allowed():
    for positions, said in [("alibi", "rotary or none"), ({"kind": "rotary", "values": True}, "without positions")]:
        with pytest.raises(ConfigError, match=said):
            parse(Model, decoder(positions=positions))


def test_efficient_mixers_and_attention_in_one_stack():
    kinds = {
        "infini": {"segment": 5},
        "performer": {"features": 9},
        "synthesizer": {"length": 90, "pattern": "causal"},
        "attention": {"pattern": "causal"},
    }
    layers = {
        kind: {
            "wiring": "pre-norm",
            "mixer": {"kind": kind, "heads": 2} | keys,
            "channel": {"kind": "ffn", "hidden": 6},
        }
        for kind, keys in kinds.items()
    }
    stack = "2×infini, performer, attention, synthesizer, infini"
    model = build({"kind": "decoder", "vocab": 11, "width": 8, "layers": layers, "decoder": stack})
    tokens, states = text(2, 80), model.start(2)
    with torch.no_grad():
        expected = model.logits(Batch(Rows(tokens)))
        found = [model.head(model.advance(Rows(part), states)) for part in tokens.split([30, 1, 1, 48], 1)]
        states.trim(40)
        again = model.head(model.advance(Rows(tokens[:, 40:]), states))
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(again, expected[:, 40:], atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", ["infini", "performer", "synthesizer", "linformer"])
def test_efficient_mixers_in_half_precision(kind):
    """Under autocast and as bfloat16 models they give what they give in 32 bits, as near as 8 bits of fraction can."""
    keys = {"infini": {"segment": 7}, "performer": {"features": 32}}.get(kind, {"length": 40})
    keys |= {"rank": 9} if kind == "linformer" else {}
    layer = {"mixer": {"kind": kind, "heads": 2} | keys, "channel": {"kind": "ffn", "hidden": 16}}
    torch.manual_seed(0)
    model = parse(Model, {"kind": "encoder", "vocab": 11, "width": 16, "encoder": [layer]}).build()
    batch = Batch(Rows(text(3, 30), lengths=torch.tensor([30, 12, 3])))
    real = torch.arange(30)[None] < batch.target.lengths[:, None]
    exact = model.logits(batch).detach()
    with torch.autocast("cpu", torch.bfloat16):
        found = model.logits(batch)
    found.float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    for near in (found, model.bfloat16().logits(batch)):
        assert (near.float() - exact)[real].abs().max() < 0.05 * exact.abs().max()
