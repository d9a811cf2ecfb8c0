"""Images and sounds in prompts: whatever the batch and the chunks of the prefill, a request decodes as alone."""

import pytest
import torch

import allyouneed as ayn
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Medium, Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.nn.batch import MEDIA, Batch, Media, Rows
from allyouneed.nn.states.paged import BlockPool

BOS, EOS, PAD, SLOT, VOCAB, NEW = 1, 2, 0, 3, 30, 7
SHAPES, SLOTS = {"image": (1, 4, 4), "audio": (5, 6)}, {"image": 3, "audio": 2}
LAYER = {"wiring": "pre-norm", "channel": {"kind": "ffn", "hidden": 24}}
INSIDE = [LAYER | {"mixer": {"kind": "attention", "heads": 2}}]


def tower(name, embed):
    encoder = {"width": 8, "embed": embed, "encoder": INSIDE}
    return {"encoder": encoder, "resampler": {"kind": "attentive-pooling", "heads": 2, "slots": SLOTS[name]}}


@pytest.fixture(scope="module")
def engine():
    torch.manual_seed(0)
    tree = {"kind": "interleaved", "vocab": VOCAB, "width": 16, "embed": {"tied": False}}
    tree["decoder"] = [LAYER | {"repeat": 2, "mixer": {"kind": "attention", "heads": 2, "pattern": "causal"}}]
    tree["image"] = tower("image", {"kind": "patches", "image": 4, "patch": 2, "channels": 1})
    tree["audio"] = tower("audio", {"kind": "frames", "mels": 5, "positions": {"kind": "learned", "length": 3}})
    model = ayn.build(tree).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.0)
    return Engine(model, BOS, EOS, PAD, forbidden=[PAD, BOS, SLOT])


def request(*pieces, limit=NEW):
    """Pieces: tokens, or the kind of a medium and its seed."""
    prompt, media = [BOS], []
    for piece in pieces:
        if isinstance(piece, int):
            prompt.append(piece)
            continue
        name, seed = piece
        values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
        media.append(Medium(name, len(prompt), SLOTS[name], values))
        prompt += [SLOT] * SLOTS[name]
    return Request(prompt, limit, (0,), media=tuple(media))


REQUESTS = [
    request(5, ("image", 0), 6),
    request(5, ("image", 1), 6),
    request(7, 8, 9),
    request(("audio", 2), 5, ("image", 0), ("image", 1), 9),
    request(*range(4, 20), ("image", 0), 6, limit=3),
]
GREEDY = Decoding(method="greedy", min_length=NEW, loops=None)


def by_whole_passes(engine, given):
    """Greedy tokens by one pass over the whole text for each."""
    model, tokens = engine.model, list(given.prompt)
    slots = torch.zeros(1, len(tokens) + given.limit, dtype=torch.long)
    for medium in given.media:
        slots[0, medium.at : medium.at + medium.slots] = MEDIA.index(medium.kind) + 1
    media = {name: [one.values for one in given.media if one.kind == name] for name in MEDIA}
    source = Media(**{name: torch.stack(some).double() for name, some in media.items() if some})
    for _ in range(given.limit):
        with torch.no_grad():
            logits = model.logits(Batch(Rows(torch.tensor([tokens]), slots=slots[:, : len(tokens)]), source))[0, -1]
        logits[[*engine.runner.forbidden, EOS]] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(given.prompt) :]


def test_every_way_of_prefilling_gives_the_tokens_of_whole_passes(engine):
    expected = [by_whole_passes(engine, one) for one in REQUESTS]
    assert expected[0] != expected[1]  # the image decides
    offline = engine.decode(REQUESTS, GREEDY)
    assert [best.tokens for (best,) in offline] == expected
    for pool in (None, BlockPool(40, size=2)):
        # chunks of 2 tokens end inside images; requests arrive while others decode
        scheduler = Scheduler(engine.runner, budget=2, rows=3, pool=pool)
        states = [scheduler.submit(one, GREEDY) for one in REQUESTS]
        scheduler.run()
        assert [state.hypotheses[0].tokens for state in states] == expected


def test_beams_and_streams_read_media(engine):
    beams = Decoding(beam=3, max_length=5)
    together = engine.decode(REQUESTS, beams)
    for given, found in zip(REQUESTS, together, strict=True):
        (alone,) = engine.decode([given], beams)
        assert [one.tokens for one in found] == [one.tokens for one in alone]
    first = REQUESTS[3]
    options = Decoding(method="greedy", min_length=NEW, max_length=NEW, loops=None)
    assert list(engine.stream(first.prompt, options, media=first.media)) == by_whole_passes(engine, first)


def test_a_cached_prefix_is_that_of_the_same_image(engine):
    pool = BlockPool(60, size=2)
    scheduler = Scheduler(engine.runner, pool=pool)

    def hits(given):
        before = scheduler.blocks.prefixes.hits
        state = scheduler.submit(given, GREEDY)
        scheduler.run()
        assert state.hypotheses[0].tokens == by_whole_passes(engine, given)
        return scheduler.blocks.prefixes.hits - before

    assert hits(request(5, ("image", 0), 6, 7, 8)) == 0
    assert hits(request(5, ("image", 0), 6, 7, 9)) == 6
    assert hits(request(5, ("image", 1), 6, 7, 8)) == 2  # only what stands before the image


@pytest.mark.parametrize(
    ("medium", "message"),
    [
        (Medium("video", 1, 3, torch.zeros(1, 4, 4)), "video: the model reads texts and image, audio"),
        (Medium("image", 1, 4, torch.zeros(1, 4, 4)), "image: 4 slots; the model has 3"),
        (Medium("image", 1, 3, torch.zeros(3, 4, 4)), "values of 3×4×4; the model reads 1×4×4"),
        (Medium("audio", 1, 2, torch.zeros(5, 7)), "the model reads 5 mels × at most 6 frames"),
        (Medium("image", 2, 3, torch.zeros(1, 4, 4)), "3 slots must lie in the prompt of 5 tokens"),
    ],
)
def test_media_that_do_not_fit_are_refused(engine, medium, message):
    with pytest.raises(UserError, match=message):
        engine.decode([Request([BOS, SLOT, SLOT, SLOT, 5], 3, (0,), media=(medium,))], GREEDY)
