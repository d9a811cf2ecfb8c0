"""What the engine guarantees for a list of sources."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from allyouneed.infer.decoding.alignment import cross_attention
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.nn.batch import Batch, Rows
from toy_models import BOS, EOS, PAD, random_model

DECODINGS = {
    "beam": Decoding(best=4, extra=8),
    "greedy": Decoding(method="greedy", extra=8),
    "sample": Decoding(method="sample", best=3, top_k=20, temperature=0.8, seed=5, extra=8),
}


def tokens(answers: list[list[Hypothesis]]) -> list[list[list[int]]]:
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in answers]


def log_probs(engine: Engine, source: list[int], token_lists: list[int]) -> list[float]:
    """The plain definition: the whole target at once."""
    batch = Batch(Rows(torch.tensor([[engine.runner.bos, *token_lists[:-1]]])), Rows(torch.tensor([source])))
    with torch.no_grad():
        found = engine.model.logits(batch)[0].log_softmax(-1)
    return found.gather(1, torch.tensor(token_lists)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("decoding", DECODINGS)
def test_the_answer_does_not_depend_on_the_batch(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    together = tokens(engine.generate(sources, DECODINGS[decoding]))
    decode_alone = [
        tokens(engine.generate([source], DECODINGS[decoding], sample_keys=[[number]]))[0]
        for number, source in enumerate(sources)
    ]
    small = Engine(engine.model, BOS, EOS, PAD, engine.runner.forbidden, budget=100)
    assert together == decode_alone == tokens(small.generate(sources, DECODINGS[decoding]))
    backwards = tokens(
        engine.generate(sources[::-1], DECODINGS[decoding], sample_keys=[[n] for n in range(len(sources))][::-1])
    )
    assert backwards[::-1] == together
    assert len({len(t) for hypotheses in together for t in hypotheses}) > 3


@pytest.mark.parametrize("decoding", DECODINGS)
def test_scores_equal_those_of_the_whole_sequence(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    for source, hypotheses in zip(sources, engine.generate(sources, DECODINGS[decoding]), strict=True):
        for found in hypotheses:
            token_lists = found.tokens + [EOS] * found.finished
            assert found.log_probs == pytest.approx(log_probs(engine, source, token_lists), abs=1e-4)
            assert found.log_prob == pytest.approx(sum(found.log_probs), abs=1e-4)
            assert found.score == pytest.approx(found.log_prob / DECODINGS[decoding].length_divisor(len(token_lists)))


@pytest.mark.parametrize("decoding", DECODINGS)
def test_hypotheses_come_best_first(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    for hypotheses in engine.generate(sources, DECODINGS[decoding]):
        scores = [hypothesis.score for hypothesis in hypotheses]
        assert scores == sorted(scores, reverse=True)
        assert len(hypotheses) == DECODINGS[decoding].best


def test_beams_are_different_sentences(engine: Engine, sources: list[list[int]]) -> None:
    for hypotheses in engine.generate(sources, DECODINGS["beam"]):
        assert len({tuple(hypothesis.tokens) for hypothesis in hypotheses}) == 4


def test_an_exhaustive_beam_finds_the_best_sequences() -> None:
    engine = Engine(random_model(3, vocab=6), BOS, EOS, PAD)
    decoding = Decoding(beam=300, best=3, max_length=3)
    source = [3, 4, 5, EOS]
    every = []
    for length in range(4):
        for middle in itertools.product([t for t in range(6) if t != EOS], repeat=length):
            token_lists = [*middle, EOS][:3]
            every.append(
                (sum(log_probs(engine, source, token_lists)) / decoding.length_divisor(len(token_lists)), token_lists)
            )
    best = sorted(every, reverse=True)[:3]
    (found,) = engine.generate([source], decoding)
    assert [h.tokens + [EOS] * h.finished for h in found] == [token_lists for _, token_lists in best]
    assert [h.score for h in found] == pytest.approx([score for score, _ in best], abs=1e-4)


def test_any_list_of_sources_works(engine: Engine) -> None:
    for decoding in DECODINGS.values():
        assert engine.generate([], decoding) == []
        ((nothing,),) = engine.generate([[]], decoding)
        assert (nothing.tokens, nothing.finished) == ([], True)
        mixed = engine.generate([[], [5, EOS], [], [6, 7, EOS]], decoding)
        assert tokens(mixed)[1] == tokens(engine.generate([[], [5, EOS]], decoding))[1]
        assert tokens(mixed)[0] == tokens(mixed)[2] == [[]]


def test_thousands_of_sources_come_back_in_order(engine: Engine) -> None:
    many = [[3 + n % 50, EOS] for n in range(3000)]
    answers = tokens(engine.generate(many, Decoding(method="greedy", max_length=3)))
    assert len(answers) == 3000
    assert answers[:50] * 60 == answers


def test_a_beam_wider_than_the_vocabulary_works() -> None:
    engine = Engine(random_model(1, vocab=5), BOS, EOS, PAD, forbidden=[PAD, BOS])
    (found,) = engine.generate([[3, 4, EOS]], Decoding(beam=16, best=16, max_length=2))
    assert len({tuple(h.tokens + [EOS] * h.finished) for h in found}) == len(found) == 7  # EOS; {3,4} × {3,4,EOS}


def test_sampling_depends_on_the_seed_and_on_nothing_else(engine: Engine, sources: list[list[int]]) -> None:
    first, again, other = (
        tokens(engine.generate(sources, Decoding(method="sample", seed=seed, extra=8))) for seed in (1, 1, 2)
    )
    assert first == again != other
    longer = tokens(engine.generate(sources, Decoding(method="sample", seed=1, extra=20)))
    cut = [len(source) + 8 for source in sources]
    assert [[hs[0][:n]] for hs, n in zip(longer, cut, strict=True)] == first
    torch.manual_seed(0)
    before = torch.rand(1)
    torch.manual_seed(0)
    engine.generate(sources, Decoding(method="sample"))
    assert torch.rand(1) == before, "the global random state is unchanged"


def test_sampling_the_likeliest_only_is_greedy(engine: Engine, sources: list[list[int]]) -> None:
    greedy = tokens(engine.generate(sources, Decoding(method="greedy")))
    for sure in ({"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-7}):
        assert tokens(engine.generate(sources, Decoding(method="sample", **sure))) == greedy


def test_a_beam_of_one_is_greedy(engine: Engine, sources: list[list[int]]) -> None:
    assert tokens(engine.generate(sources, Decoding(beam=1))) == tokens(
        engine.generate(sources, Decoding(method="greedy"))
    )


@pytest.mark.parametrize("decoding", DECODINGS)
def test_lengths_are_kept(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    exact = DECODINGS[decoding].model_copy(update={"min_length": 5, "max_length": 5})
    assert {len(t) for hypotheses in tokens(engine.generate(sources, exact)) for t in hypotheses} == {5}
    for source, hypotheses in zip(sources, engine.generate(sources, DECODINGS[decoding]), strict=True):
        assert all(len(h.tokens) + h.finished <= len(source) + 8 for h in hypotheses)
        assert all(h.finished or len(h.tokens) == len(source) + 8 for h in hypotheses)


@pytest.mark.parametrize("decoding", DECODINGS)
def test_forbidden_tokens_are_never_produced(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    used = {t for hypotheses in tokens(engine.generate(sources, DECODINGS[decoding])) for ts in hypotheses for t in ts}
    unwanted = sorted(used)[:10]
    strict = Engine(engine.model, BOS, EOS, PAD, forbidden=unwanted)
    found = {t for hypotheses in tokens(strict.generate(sources, DECODINGS[decoding])) for ts in hypotheses for t in ts}
    assert found and not found & set(unwanted)


@pytest.mark.parametrize("decoding", ["beam", "greedy"])
def test_prefixes_may_differ_in_length(engine: Engine, sources: list[list[int]], decoding: str) -> None:
    prefix = [[7, 9, 11][: n % 4] for n in range(len(sources))]
    together = tokens(engine.generate(sources, DECODINGS[decoding], prefix=prefix))
    decode_alone = [
        tokens(engine.generate([s], DECODINGS[decoding], prefix=[p]))[0] for s, p in zip(sources, prefix, strict=True)
    ]
    assert together == decode_alone


def test_a_model_with_few_positions_stops_in_time(engine: Engine, sources: list[list[int]]) -> None:
    short = Engine(engine.model, BOS, EOS, PAD, limit=6)
    for decoding in DECODINGS.values():
        lengths = [len(t) for hypotheses in tokens(short.generate(sources, decoding)) for t in hypotheses]
        assert max(lengths) == 6  # begin token and five tokens are read, the sixth is only produced


def test_progress_is_reported_and_training_mode_restored(sources: list[list[int]]) -> None:
    model = random_model().train()
    tokens_of: list[tuple[int, int]] = []
    engine = Engine(model, BOS, EOS, PAD, budget=200)
    engine.generate([*sources, []], Decoding(method="greedy"), on_progress=lambda *now: tokens_of.append(now))
    assert tokens_of[-1] == (len(sources) + 1, len(sources) + 1)
    assert len(tokens_of) > 1 and tokens_of == sorted(tokens_of)
    assert model.training


def test_lists_of_unequal_length_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 sources, but 1 entries in prefix"):
        engine.generate([[3], [4]], prefix=[[5]])


def test_cross_attention_shows_which_source_tokens_were_read(engine: Engine, sources: list[list[int]]) -> None:
    model: Any = engine.model
    targets = [[BOS, 5, 6], [BOS, 7]]
    found = cross_attention(model, sources[:2], targets, PAD)
    for weights, source, target in zip(found, sources, targets, strict=False):
        assert weights.shape == (len(target), len(source))
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(target)))
    last = cross_attention(model, sources[:1], targets[:1], PAD, layer=2)[0]
    assert not torch.allclose(last, found[0])
    torch.testing.assert_close(cross_attention(model, sources[:1], targets[:1], PAD, layer=1)[0], found[0])
