"""One vector per sentence, independent of the rest of the row; head costs."""

import pytest
import torch

from allyouneed.config import ConfigError, parse
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.heads.pooling import pool
from allyouneed.nn.heads.vocabulary import Head
from allyouneed.nn.models.base import Model

SENTENCES = [[3, 4, 5], [6], [7, 8, 9, 3], [4, 4]]
MODEL = {
    "kind": "encoder",
    "vocab": 11,
    "width": 8,
    "embed": {"positions": "sinusoidal"},
    "encoder": [{"mixer": {"kind": "attention", "heads": 2}, "channel": {"kind": "ffn", "hidden": 12}}],
}
HEADS = [
    {"kind": "classes", "labels": 3},
    {"kind": "classes", "labels": 2, "pool": "mean", "hidden": "tanh", "bias": False},
    {"kind": "classes", "labels": 5, "pool": "last", "dropout": 0.3},
    {"kind": "tags", "labels": 4},
    {"kind": "pooled"},
    {"kind": "pooled", "pool": "last", "width": 6, "bias": True},
    {"kind": "pooled", "pool": "first", "width": 5, "normalise": True},
    "none",
]


def packed() -> Rows:
    """Two rows: the first and the third sentence in one, the others in the other, padding after each row."""
    rows = [SENTENCES[0] + SENTENCES[1], SENTENCES[2] + SENTENCES[3]]
    segments = [[1, 1, 1, 2], [1, 1, 1, 1, 2, 2]]
    return Rows(
        torch.tensor([row + [9] * (7 - len(row)) for row in rows]),
        segments=torch.tensor([row + [0] * (7 - len(row)) for row in segments]),
    )


@pytest.mark.parametrize("how", ["first", "mean", "last"])
def test_pooling_uses_its_own_sentence_only(how: str) -> None:
    values = torch.randn(11, 4)

    def pooled(rows: Rows) -> torch.Tensor:
        return pool(values[rows.tokens], TokenLayout.of(rows), how)  # type: ignore[arg-type]

    expected = torch.stack(
        [{"first": values[s[0]], "last": values[s[-1]], "mean": values[s].mean(0)}[how] for s in SENTENCES]
    )
    for rows in (Rows.of(SENTENCES, 9), Rows.of(SENTENCES, 9, side="left"), packed()):
        torch.testing.assert_close(pooled(rows), expected)
    torch.testing.assert_close(pooled(Rows(torch.tensor([SENTENCES[0]]))), expected[:1])


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_head_cost_and_equal_results_packed_and_padded(head: object) -> None:
    config = parse(Model, MODEL | {"head": head})  # type: ignore[type-abstract]
    torch.manual_seed(0)
    model = config.build().eval()
    assert config.cost().parameters == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        alone = [model.logits(Batch(Rows(torch.tensor([s]))))[0] for s in SENTENCES]
        right, left, rows = Rows.of(SENTENCES, 0), Rows.of(SENTENCES, 0, side="left"), packed()
        for given in (right, left, rows):
            found = model.logits(Batch(given))
            if found.dim() == 3:  # a vector a token
                real = TokenLayout.of(given).real
                torch.testing.assert_close(found[real], torch.cat(alone))
            else:
                torch.testing.assert_close(found, torch.stack(alone))
    if isinstance(head, dict) and head.get("normalise"):
        torch.testing.assert_close(torch.stack(alone).norm(dim=-1), torch.ones(len(SENTENCES)))


def test_every_head_is_covered() -> None:
    kinds = {head if isinstance(head, str) else head["kind"] for head in HEADS} | {"vocabulary"}
    others = {"mask-predict", "click", "span"}  # need a source, or a log: tests/parity; test_span.py
    assert kinds | others == set(Head.registry)


def test_berts_pooler_is_a_dense_layer_with_tanh() -> None:
    model = parse(Model, MODEL | {"head": {"kind": "classes", "labels": 3, "hidden": "tanh"}}).build().eval()  # type: ignore[type-abstract]
    batch = Batch(Rows(torch.tensor([SENTENCES[0]])))
    hidden, head = model(batch), model.head
    expected = head.classes(torch.tanh(head.hidden(hidden[:, 0])))
    torch.testing.assert_close(model.logits(batch), expected)


def test_invalid_configs_are_refused() -> None:
    for head, words in [
        ({"kind": "classes"}, "head.labels: is required"),
        ({"kind": "classes", "labels": 0}, "head.labels"),
        ({"kind": "pooled", "bias": True}, "head.bias: needs a projection"),
        ({"kind": "clases", "labels": 2}, "did you mean 'classes'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse(Model, MODEL | {"head": head})  # type: ignore[type-abstract]
