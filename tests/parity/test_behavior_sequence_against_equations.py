"""The Behavior Sequence Transformer against the paper's equations (Chen et al. 2019, 2.1-2.4), one user at a time."""

import pytest
import torch
from torch import nn

from allyouneed.config import parse, preset_tree, tree_of
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from attention_layers import TOLERANCE, agreement, randomise_module
from shrink import shrink

SIDES, FEATURES, VOCAB = 2, 3, 55
USERS = [5, 1, 8, 2]  # items before the one shown; their sequences have different lengths


def model():
    config = tree_of(shrink(parse(Model, preset_tree("behavior-sequence"))), full=True)
    config["embed"] |= {"sides": SIDES}
    config["head"] |= {"features": FEATURES}
    return randomise_module(parse(Model, config).build())


def users():
    """For each user: ids of items and side information (time, 1 + sides), ages (time,), features, click."""
    dice = torch.Generator().manual_seed(1)
    for number, count in enumerate(USERS):
        columns = torch.randint(4, VOCAB, (count + 1, 1 + SIDES), generator=dice)
        ages = torch.randint(0, 1 << (4 * number + 4), (count + 1,), generator=dice).sort(descending=True)[0]
        ages[-1] = 0
        yield columns, ages, torch.randint(4, VOCAB, (FEATURES,), generator=dice), float(number % 2)


def by_the_paper(own, columns, ages, features):
    """The log-odds of one user's click. Logarithmic buckets of pos are ours; the paper leaves them open."""
    p, heads = dict(own.named_parameters()), own.encoder.blocks[0].sublayers["mixer"].heads
    w, name = p["embed.tokens.weight"], "encoder.blocks.0.sublayers."
    rows = []
    for item, pos in zip(columns, ages.tolist(), strict=True):  # [item; category; pos], pos = t(v_t) − t(v_i)
        bucket = min((pos + 1).bit_length() - 1, len(p["embed.positions.weight"]) - 1)
        rows.append(torch.cat([*(w[value] for value in item), p["embed.positions.weight"][bucket]]))
    e = torch.stack(rows)
    wq, wk, wv = p[f"{name}mixer.qkv.weight"].chunk(3)
    bq, bk, bv = p[f"{name}mixer.qkv.bias"].chunk(3)
    d, found = e.shape[1] // heads, []
    for h in range(heads):  # eq. 1-3
        at = slice(h * d, (h + 1) * d)
        q, k, v = e @ wq[at].T + bq[at], e @ wk[at].T + bk[at], e @ wv[at].T + bv[at]
        found.append((q @ k.T / d**0.5).softmax(-1) @ v)
    s = torch.cat(found, -1) @ p[f"{name}mixer.out.weight"].T + p[f"{name}mixer.out.bias"]

    def norm(x, number):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        wiring = "encoder.blocks.0.wiring.norms."
        return x * p[f"{wiring}{number}.weight"] + p[f"{wiring}{number}.bias"]

    s = norm(e + s, 0)  # eq. 4
    hidden = nn.functional.leaky_relu(s @ p[f"{name}channel.up.weight"].T + p[f"{name}channel.up.bias"])
    f = norm(s + hidden @ p[f"{name}channel.down.weight"].T + p[f"{name}channel.down.bias"], 1)  # eq. 5
    x = torch.cat([f[-1], *(w[value] for value in features)])  # 2.3: the item to recommend and other features
    for layer in range(3):
        x = nn.functional.leaky_relu(p[f"head.layers.{layer}.weight"] @ x + p[f"head.layers.{layer}.bias"])
    return (p["head.layers.3.weight"] @ x + p["head.layers.3.bias"])[0]


def batch(side):
    """All users as padded rows, or as one packed row; padding holds ids that must not matter."""
    given = list(users())
    if side == "packed":
        cells = [torch.cat(parts) for parts in zip(*((c, a) for c, a, _, _ in given), strict=True)]
        segments = torch.cat([torch.full((len(c),), n) for n, (c, _, _, _) in enumerate(given, start=1)])
        details = torch.cat([cells[0][:, 1:], torch.zeros(len(segments), FEATURES, dtype=torch.long)], 1)
        details[torch.tensor([len(c) for c, _, _, _ in given]).cumsum(0) - 1, SIDES:] = torch.stack(
            [features for _, _, features, _ in given]
        )
        return Rows(cells[0][None, :, 0], segments=segments[None], ages=cells[1][None], details=details[None])
    time = max(USERS) + 1
    tokens, ages = torch.full((4, time), 7), torch.full((4, time), 3)
    details = torch.full((4, time, SIDES + FEATURES), 9)
    for row, (columns, since, features, _) in enumerate(given):
        at = slice(0, len(columns)) if side == "right" else slice(time - len(columns), time)
        tokens[row, at], ages[row, at] = columns[:, 0], since
        details[row, at, :SIDES] = columns[:, 1:]
        details[row, at.stop - 1, SIDES:] = features
    return Rows(tokens, torch.tensor(USERS) + 1, side=side, ages=ages, details=details)


@pytest.mark.parametrize("side", ["right", "left", "packed"])
def test_the_odds_of_a_click(side, record_difference):
    own = model()
    found = own.logits(Batch(batch(side)))
    expected = torch.stack([by_the_paper(own, columns, ages, features) for columns, ages, features, _ in users()])
    differences = agreement(found, expected, list(own.parameters()))
    record_difference("Behavior Sequence Transformer", "equations written out", *differences)
    assert max(differences) < TOLERANCE


def test_without_times_positions_count_the_items_since():
    own, given = model(), batch("left")
    counted = Rows(given.tokens, given.lengths, side="left", details=given.details)
    ages = torch.arange(max(USERS), -1, -1).expand(4, -1)
    torch.testing.assert_close(
        own.logits(Batch(counted)),
        own.logits(Batch(Rows(given.tokens, given.lengths, side="left", ages=ages, details=given.details))),
    )
