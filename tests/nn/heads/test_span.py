"""The head of question answering: two scores for each token."""

from __future__ import annotations

import torch

import allyouneed as ayn
from allyouneed.nn.batch import Batch, Rows
from toy_texts import ENCODER


def test_each_token_has_a_score_to_begin_and_one_to_end_an_answer() -> None:
    module = ayn.build(ENCODER | {"head": {"kind": "span"}}, vocab=9).eval()
    batch = Batch(Rows(torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), lengths=torch.tensor([4, 2])))
    with torch.no_grad():
        scores = module.logits(batch)
        hidden = module(batch)
    head = module.head
    assert scores.shape == (2, 4, 2)
    torch.testing.assert_close(scores, hidden @ head.ends.weight.T + head.ends.bias)
    parameters = sum(p.numel() for p in module.parameters())
    assert module.config.cost(1).parameters == parameters
