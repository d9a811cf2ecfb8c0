"""What changes the chances of the next token: the same numbers as Hugging Face's processors, on random logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.penalties import Penalties
from allyouneed.infer.decoding.sampling import filter_logits
from allyouneed.infer.engine import Engine
from convert import from_marian, random_marian

ROWS, VOCAB = 7, 53


@pytest.fixture(params=range(3))
def logits(request: pytest.FixtureRequest) -> torch.Tensor:
    return 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(request.param))


@pytest.fixture
def past() -> list[list[int]]:
    """Rows of one length, as theirs must be, in which much comes twice."""
    return torch.randint(0, 6, (ROWS, 23), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p(logits: torch.Tensor, min_p: float) -> None:
    expected = MinPLogitsWarper(min_p)(torch.zeros(0), logits)
    assert torch.equal(filter_logits(logits, min_p=min_p), expected) and expected.isinf().any()


def test_all_penalties_in_order(logits: torch.Tensor) -> None:
    warpers = [TemperatureLogitsWarper(1.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.04)]
    expected = logits
    kept = []
    for warper in warpers:
        expected = warper(torch.zeros(0), expected)
        kept.append(int(expected.isfinite().sum()))
    assert torch.equal(filter_logits(logits / 1.7, 30, 0.9, 0.04), expected)
    assert kept[1] > kept[2] > kept[3], "each of them has something to do"


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty(logits: torch.Tensor, past: list[list[int]], penalty: float) -> None:
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(past), logits.clone())
    found = Penalties(Decoding(repetition_penalty=penalty), past).apply(logits)
    assert torch.equal(found, expected) and not torch.equal(found, logits)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_repeat(logits: torch.Tensor, past: list[list[int]], size: int) -> None:
    expected = NoRepeatNGramLogitsProcessor(size)(torch.tensor(past), logits.clone())
    found = Penalties(Decoding(no_repeat=size), past).apply(logits)
    assert torch.equal(found, expected) and found.isinf().any()


def test_rows_of_unequal_length_and_of_none(logits: torch.Tensor, past: list[list[int]]) -> None:
    uneven = [row[: 3 * number] for number, row in enumerate(past)]
    found = Penalties(Decoding(repetition_penalty=1.5, no_repeat=2), uneven).apply(logits)
    both = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5), NoRepeatNGramLogitsProcessor(2)])
    for row, ids in enumerate(uneven):
        expected = both(torch.tensor([ids]), logits[row : row + 1].clone()) if ids else logits[row : row + 1]
        assert torch.equal(found[row : row + 1], expected)


SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy, penalty": (
        {"num_beams": 1, "repetition_penalty": 1.4},
        {"method": "greedy", "repetition_penalty": 1.4},
    ),
    "greedy, no repeat": ({"num_beams": 1, "no_repeat_ngram_size": 2}, {"method": "greedy", "no_repeat": 2}),
    "beam, both": (
        {"num_beams": 3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
        {"beam": 3, "repetition_penalty": 1.2, "no_repeat": 2},
    ),
    "beam, early": (
        {"num_beams": 3, "early_stopping": True, "length_penalty": 2.5},
        {"beam": 3, "early": True, "length_penalty": 2.5},
    ),
    "beam, forced end": ({"num_beams": 3, "forced_eos_token_id": 0, "max_new_tokens": 4}, {"beam": 3, "max_length": 4}),
    "greedy, forced end": (
        {"num_beams": 1, "forced_eos_token_id": 0, "max_new_tokens": 4},
        {"method": "greedy", "max_length": 4},
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("seed", range(2))
def test_searches_match(name: str, seed: int) -> None:
    theirs, ours = SEARCHES[name]
    marian = random_marian(seed)
    start = marian.config.decoder_start_token_id
    dice = torch.Generator().manual_seed(seed)
    sources = torch.cat([torch.randint(1, start, (12, 9), generator=dice), torch.zeros(12, 1, dtype=torch.long)], 1)
    options = {"max_new_tokens": 30, "do_sample": False, "length_penalty": 0.6} | theirs
    out = marian.generate(input_ids=sources, return_dict_in_generate=True, output_scores=True, **options)
    expected = [row[1:] for row in out.sequences.tolist()]
    engine = Engine(from_marian(marian), start, 0, start, ended="forced_eos_token_id" in theirs)
    settled = Decoding.model_validate({"length_penalty": 0.6, "penalty": "power", "extra": 99, "max_length": 30} | ours)
    found = engine.generate(sources.tolist(), settled)
    assert [h[0].tokens for h in found] == [row[: row.index(0)] if 0 in row else row for row in expected]
    if options["num_beams"] > 1:
        assert [h[0].score for h in found] == pytest.approx(out.sequences_scores.tolist(), rel=1e-5)
    plain = engine.generate(
        sources.tolist(),
        Decoding.model_validate(settled.model_dump() | {"repetition_penalty": 1.0, "no_repeat": None, "early": False}),
    )
    if "forced" not in name:
        assert [h[0].tokens for h in plain] != [h[0].tokens for h in found], "the option changes nothing here"
    else:
        assert all(h[0].finished for h in found) and any(len(h[0].tokens) == 3 for h in found)
