"""The objective of translation, held to its definition."""

import torch
from torch.nn.functional import kl_div

from allyouneed.nn.batch import Batch, Rows
from allyouneed.tasks.translation import Translation
from anypart import build, tree

LABELS = torch.tensor([[2, 3, 4], [5, 6, -100]])
BATCH = Batch(Rows.of([[1, 2, 3], [4, 5]]), Rows.of([[1, 2, 3, 4], [5, 6]]), LABELS)


def test_consistency_is_r_drop():
    """Liang et al. 2021, eq. 4, halved: the mean loss of two passes and a quarter of α times KL in both directions."""
    model = build(tree(dropout=0.3)).train()
    torch.manual_seed(3)
    found = Translation(smoothing=0.1, consistency=5.0).loss(model, BATCH)
    torch.manual_seed(3)
    once, twice = model(BATCH), model(BATCH)
    kept = LABELS != -100
    first, second = (model.head(hidden)[kept].float().log_softmax(-1) for hidden in (once, twice))
    apart = kl_div(first, second, log_target=True, reduction="sum") + kl_div(
        second, first, log_target=True, reduction="sum"
    )
    plain = [model.head.loss(hidden, LABELS, 0.1)[0] for hidden in (once, twice)]
    assert apart > 0.01
    torch.testing.assert_close(found.total.float(), (sum(plain) / 2 + 5 / 4 * apart).float(), rtol=1e-5, atol=1e-5)
    assert int(found.tokens) == 5


def test_consistency_plays_no_part_in_validation():
    model = build(tree(dropout=0.3)).eval()
    strict, loose = (Translation(consistency=alpha).loss(model, BATCH) for alpha in (5.0, 0.0))
    assert strict.total == loose.total
