"""Translation by CTC against its definition: the sum over all alignments (Graves et al. 2006, eq. 3; Libovický and
Helcl 2018, 3), enumerated."""

from itertools import groupby, product

import pytest
import torch

from allyouneed.config import preset_tree
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.whole_targets.ctc import CtcEngine
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.tasks.translation.ctc_translation import CtcTranslation
from any_part import build

VOCAB = 5  # 0 is the blank


def small():
    """The shipped preset, narrowed."""
    given = preset_tree("ctc-translation") | {"vocab": VOCAB, "width": 12, "dropout": 0.0}
    (layer,) = given["encoder"]
    attention = layer["mixer"] | {"heads": 3}
    return given | {
        "encoder": [layer | {"repeat": 1, "mixer": attention, "channel": layer["channel"] | {"hidden": 13}}]
    }


def merge(path):
    return [token for token, _ in groupby(path) if token]


def all_paths(scores, target):
    """log Σ over the paths that become the target; scores (time, vocab) are log-probabilities."""
    paths = [path for path in product(range(VOCAB), repeat=len(scores)) if merge(path) == target]
    return torch.stack([sum(scores[t, token] for t, token in enumerate(path)) for path in paths]).logsumexp(0)


def test_the_loss_and_its_gradients(record_difference):
    model, task = build(small()), CtcTranslation(upsample=2)
    sources, targets = [[3, 3, 1, 1, 2, 2], [4, 4, 2, 2]], [[4, 4, 3], [1]]
    labels = torch.tensor([[4, 4, 3, IGNORE, IGNORE, IGNORE], [1] + [IGNORE] * 5])
    found = task.loss(model, Batch(Rows.of(sources), labels=labels))
    scores = [model.head(model(Batch(Rows(torch.tensor([source])))))[0].log_softmax(-1) for source in sources]
    total = -sum(all_paths(own, target) for own, target in zip(scores, targets, strict=True))
    outputs = (found.total - total).abs().item()
    weights = list(model.parameters())
    pairs = zip(*(torch.autograd.grad(one, weights) for one in (found.total, total)), strict=True)
    gradients = max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in pairs)
    assert found.tokens == 4 and outputs < 1e-5 and gradients < 1e-5
    record_difference("CTC translation", "all alignments, enumerated", outputs, gradients)


@torch.no_grad()
def test_decoding_merges_repetitions_and_removes_blanks():
    model = build(small(), seed=17)
    engine = CtcEngine(model, bos=1, eos=2, pad=0, forbidden=[0, 1])
    engine.upsample = 3
    sources = [[3, 4, 2], [4, 2], [3, 3, 4, 1, 2]]
    found = engine.generate(sources, Decoding())
    lengths = set()
    for source, (own,) in zip(sources, found, strict=True):
        rows = Rows(torch.tensor([[token for token in source for _ in range(3)]]))
        scores = model.head(model(Batch(rows)))[0].log_softmax(-1)
        scores[:, [1, 2]] = -torch.inf  # neither of the marks
        path = scores.argmax(-1).tolist()
        assert own.tokens == merge(path)
        assert own.log_prob == pytest.approx(scores.amax(-1).sum().item(), rel=1e-5)
        lengths.add(len(own.tokens))
    assert len(lengths) > 1, "one path says little"
