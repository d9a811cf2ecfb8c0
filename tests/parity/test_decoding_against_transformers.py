"""Hugging Face's `generate` and our engine, on the same random weights, give the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.batch import Batch, Rows
from convert import from_marian, random_marian

LENGTH = 40
END = 0


@pytest.fixture(scope="module", params=range(4))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Engine, list[list[int]]]:
    marian = random_marian(request.param)
    start = marian.config.decoder_start_token_id
    dice = torch.Generator().manual_seed(request.param)
    lengths = torch.randint(1, 25, (40,), generator=dice).tolist()
    sources = [[*torch.randint(1, start, (length,), generator=dice).tolist(), END] for length in lengths]
    return marian, Engine(from_marian(marian), bos=start, eos=END, pad=start), sources


def theirs(marian: Any, sources: list[list[int]], **options: Any) -> tuple[list[list[int]], list[float] | None]:
    rows = Rows.of(sources, marian.config.pad_token_id)
    steps = torch.arange(rows.tokens.shape[1])
    out = marian.generate(
        input_ids=rows.tokens,
        attention_mask=(steps < rows.lengths[:, None]).long(),
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **{"max_new_tokens": LENGTH} | options,
    )
    tokens = [row[1:] for row in out.sequences.tolist()]
    scores = getattr(out, "sequences_scores", None)
    return [row[: row.index(END)] if END in row else row for row in tokens], None if scores is None else scores.tolist()


def test_logits_are_the_same(pair: tuple[Any, Engine, list[list[int]]]) -> None:
    marian, engine, sources = pair
    source, target = torch.tensor(sources[:1]), torch.tensor([[60, 7, 8, 9]])
    expected = marian(input_ids=source, decoder_input_ids=target).logits
    torch.testing.assert_close(engine.model.logits(Batch(Rows(target), Rows(source))), expected, rtol=1e-5, atol=1e-5)


def test_greedy_tokens_are_the_same(pair: tuple[Any, Engine, list[list[int]]]) -> None:
    marian, engine, sources = pair
    expected, _ = theirs(marian, sources, num_beams=1)
    ours = engine.generate(sources, Decoding(loops=None, method="greedy", extra=1000, max_length=LENGTH))
    assert [answers[0].tokens for answers in ours] == expected
    assert len({len(tokens) for tokens in expected}) > 3, "the test should see sentences end at different times"


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_beam_search_finds_the_same_n_best_with_the_same_scores(
    pair: tuple[Any, Engine, list[list[int]]], alpha: float
) -> None:
    marian, engine, sources = pair
    expected, scores = theirs(
        marian, sources, num_beams=4, num_return_sequences=4, length_penalty=alpha, early_stopping=False
    )
    decoding = Decoding(
        loops=None, beam=4, best=4, length_penalty=alpha, penalty="power", extra=1000, max_length=LENGTH
    )
    ours = [hypothesis for answers in engine.generate(sources, decoding) for hypothesis in answers]
    assert [hypothesis.tokens for hypothesis in ours] == expected
    assert [hypothesis.score for hypothesis in ours] == pytest.approx(scores, rel=1e-5)
    assert sum(hypothesis.finished for hypothesis in ours) > 8


def test_min_length_and_banned_tokens_match(pair: tuple[Any, Engine, list[list[int]]]) -> None:
    marian, engine, sources = pair
    strict = Engine(engine.model, engine.runner.bos, engine.runner.eos, engine.runner.pad, forbidden=[5, 6, 7])
    options: dict[str, Any] = {"min_new_tokens": 6, "bad_words_ids": [[5], [6], [7]], "length_penalty": 0.6}
    expected, _ = theirs(marian, sources, num_beams=3, **options)
    decoding = Decoding(loops=None, beam=3, penalty="power", extra=1000, max_length=LENGTH, min_length=6)
    assert [answers[0].tokens for answers in strict.generate(sources, decoding)] == expected


def test_a_forced_prefix_means_the_same(pair: tuple[Any, Engine, list[list[int]]]) -> None:
    marian, engine, sources = pair
    prefix = torch.tensor([[engine.runner.bos, 9, 4]] * len(sources))
    expected, _ = theirs(marian, sources, num_beams=4, length_penalty=0.6, decoder_input_ids=prefix)
    decoding = Decoding(loops=None, beam=4, penalty="power", extra=1000, max_length=LENGTH)
    ours = engine.generate(sources, decoding, prefix=[[9, 4]] * len(sources))
    assert [[9, 4, *answers[0].tokens] for answers in ours] == expected
