"""Synchronous bidirectional attention (Zhou et al. 2019, eq. 5-9) against its equations, one token at a time; and its
beam search against one that computes everything anew in every step."""

import pytest
import torch

from allyouneed.config import preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.whole_targets.synchronous import SynchronousEngine
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.context import Context, TokenLayout
from allyouneed.tasks.translation.synchronous import SynchronousTranslation, reverse
from any_part import build, tree
from parity import pair_differences

HEADS, WIDTH = 3, 12
SOURCES = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]


def model(fusion="tanh", weight=0.7):
    return build(tree(mixer={"kind": "synchronous", "heads": HEADS, "fusion": fusion, "weight": weight}))


def oracle(part, streams, fusion, weight):
    """streams: two (time, width), left to right and right to left; the output of both."""
    size = WIDTH // HEADS
    projected = [(x @ part.qkv.weight.T + part.qkv.bias).chunk(3, -1) for x in streams]
    outputs = []
    for own, other in ((0, 1), (1, 0)):
        (q, _, _), rows = projected[own], []
        for t in range(len(streams[own])):
            heads = []
            for h in (slice(n * size, (n + 1) * size) for n in range(HEADS)):

                def attend(which, t=t, h=h, q=q):
                    _, k, v = projected[which]
                    return (k[: t + 1, h] @ q[t, h] / size**0.5).softmax(0) @ v[: t + 1, h]

                history, future = attend(own), attend(other)
                if fusion == "gate":
                    r, z = (part.gate.weight @ torch.cat([history, future])).sigmoid().chunk(2)
                    heads.append(r * history + z * future)
                else:
                    heads.append(history + weight * (future.tanh() if fusion == "tanh" else future))
            rows.append(part.out.weight @ torch.cat(heads) + part.out.bias)
        outputs.append(torch.stack(rows))
    return outputs


@pytest.mark.parametrize("fusion", ["linear", "tanh", "gate"])
def test_outputs_and_gradients(fusion, record_difference):
    part = model(fusion).decoder.blocks[0].sublayers["mixer"]
    streams = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    # two texts of 5 and 3 tokens: rows 0 and 1 from left to right, 2 and 3 their partners
    layout = TokenLayout.of(Rows(torch.zeros(4, 5), lengths=torch.tensor([5, 3, 5, 3]), mirrored=True))
    found = part(streams, Context(layout))
    expected = [
        oracle(part, (streams[n, :count], streams[n + 2, :count]), fusion, 0.7) for n, count in ((0, 5), (1, 3))
    ]
    pairs = [(found[0, :5], expected[0][0]), (found[2, :5], expected[0][1])]
    pairs += [(found[1, :3], expected[1][0]), (found[3, :3], expected[1][1])]
    outputs, gradients = pair_differences(pairs, list(part.parameters()))
    assert outputs < 1e-9 and gradients < 1e-9
    record_difference("Synchronous bidirectional", "oracle from equations 5-9", outputs, gradients)


def test_the_preset_uses_it():
    (layer,) = preset_tree("synchronous-bidirectional")["decoder"]
    assert layer["mixer"] == {"kind": "synchronous", "heads": 8, "fusion": "tanh", "weight": 0.1}


def test_token_by_token_is_the_same_as_whole_targets():
    whole = model()
    source = Rows.of([SOURCES[0], SOURCES[1], SOURCES[0], SOURCES[1]])
    target = torch.randint(1, 11, (4, 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = whole.decode(Rows(target, mirrored=True), whole.encode(source))
        states = whole.start(source)
        steps = [whole.advance(Rows(target[:, t : t + 1], mirrored=True), states) for t in range(6)]
        torch.testing.assert_close(torch.cat(steps, 1), expected)
        alone = whole.decode(Rows(target), whole.encode(source))
        assert (alone - expected).abs().max() > 0.01
        # what the other direction has not written yet is not seen
        changed = target.clone()
        changed[2:, 3:] = 1
        later = whole.decode(Rows(changed, mirrored=True), whole.encode(source))
    torch.testing.assert_close(later[:2, :3], expected[:2, :3])
    assert (later[:2, 3:] - expected[:2, 3:]).abs().max() > 1e-3


def plain_search(decoder, source, half, bos, eos, limit):
    """The rules of Zhou et al. 3.3 for one source, with whole targets recomputed in every step."""
    beams = [[((), 0.0)], [((), 0.0)]]
    finished = [[], []]
    penalty = Decoding().length_divisor
    done = [False, False]
    for length in range(1, limit + 1):
        lines = [[[begin, *(beams[d] * half)[n][0]] for n in range(half)] for d, begin in ((0, bos), (1, eos))]
        rows = Rows(torch.tensor([*lines[0], *lines[1]]), mirrored=True)
        memory = decoder.encode(Rows(torch.tensor([source] * (2 * half))))
        scores = decoder.head(decoder.decode(rows, memory))[:, -1].log_softmax(-1)
        for d in (0, 1):
            options = [
                (total + scores[d * half + n, word].item(), (*tokens, word))
                for n, (tokens, total) in enumerate(beams[d])
                for word in range(scores.shape[1])
                if word != 0
            ]
            best = sorted(options, reverse=True)[: 2 * half]
            ends = [(one, one[1][-1] == eos or length == limit) for one in best]
            if not done[d]:
                finished[d] += [(total / penalty(length), tokens) for (total, tokens), end in ends[:half] if end]
                finished[d] = sorted(finished[d], reverse=True)[:half]
            beams[d] = [(tokens, total) for (total, tokens), end in ends if not end][:half]
            beams[d] += [((0,) * length, float("-inf"))] * (half - len(beams[d]))
            hopeless = len(finished[d]) == half and beams[d][0][1] / penalty(length) <= finished[d][-1][0]
            done[d] = done[d] or hopeless or length == limit
        if all(done):
            break
    turned = [(s, t[:-1] if t[-1] == eos else t) for s, t in finished[0]]
    turned += [(s, (t[:-1] if t[-1] == eos else t)[::-1]) for s, t in finished[1]]
    return max(turned)


@pytest.mark.parametrize("beam", [1, 4])
@torch.no_grad()
def test_the_search_follows_the_paper(beam):
    decoder = model()
    engine = SynchronousEngine(decoder, bos=1, eos=2, pad=0, forbidden=[0])
    options = Decoding(beam=beam, extra=3, loops=None)
    found = engine.generate(SOURCES, options)
    for source, (best, *_) in zip(SOURCES, found, strict=True):
        score, tokens = plain_search(decoder, source, max(1, beam // 2), 1, 2, len(source) + 3)
        assert tuple(best.tokens) == tokens
        assert best.score == pytest.approx(score)


def test_targets_are_reversed_within_packed_and_padded_rows():
    tokens = torch.tensor([[1, 5, 6, 7, 1, 8, 0], [1, 9, 1, 4, 5, 0, 0]])
    labels = torch.tensor([[5, 6, 7, 2, 8, 2, IGNORE], [9, 2, 4, 5, 2, IGNORE, IGNORE]])
    rows = Rows(tokens, segments=torch.tensor([[1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 0, 0]]))
    back, turned = reverse(rows, labels, TokenLayout.of(rows))
    assert back.tokens.tolist() == [[2, 7, 6, 5, 2, 8, 0], [2, 9, 2, 5, 4, 0, 0]]
    assert turned.tolist() == [[7, 6, 5, 2, 8, 2, IGNORE], [9, 2, 5, 4, 2, IGNORE, IGNORE]]


def test_the_loss_of_packed_rows_is_that_of_the_sentences():
    """And no direction sees the answer in the other one: the other reads the model's predictions."""
    learner, task = model(), SynchronousTranslation(smoothing=0.0)
    texts = [([3, 1, 4], [5, 6, 7]), ([9, 2], [8])]
    sides = [(source, [1, *target], [*target, 2]) for source, target in texts]
    alone = [
        task.loss(learner, Batch(Rows(torch.tensor([t])), Rows(torch.tensor([s])), torch.tensor([y])))
        for s, t, y in sides
    ]
    packed = Batch(
        Rows(torch.tensor([[1, 5, 6, 7, 1, 8]]), segments=torch.tensor([[1, 1, 1, 1, 2, 2]])),
        Rows(torch.tensor([[3, 1, 4, 9, 2]]), segments=torch.tensor([[1, 1, 1, 2, 2]])),
        torch.tensor([[5, 6, 7, 2, 8, 2]]),
    )
    together = task.loss(learner, packed)
    torch.testing.assert_close(together.total, alone[0].total + alone[1].total)
    assert together.tokens == 6
