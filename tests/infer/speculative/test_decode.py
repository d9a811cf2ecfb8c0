"""A draft changes how long decoding takes, and nothing else."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from test_scheduler import FFN, LAYERS, build, decoder_model, prompts
from torch import Tensor

from allyouneed.apps.translate.translator import Translator
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, Vocabularies, train
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.decoding.detokenizer import StopStrings, detokenize
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.decoding.sampling import filter_logits, invert_cdf
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.rewriting.seq2seq import Seq2Seq
from allyouneed.infer.speculative.acceptance import is_accepted, resample
from allyouneed.infer.speculative.drafts import Draft, DraftModel, LookupIndex, PromptLookup
from allyouneed.infer.speculative.stats import DraftStats, SpeculativeHypothesis, total_stats
from allyouneed.nn.batch import Batch, Rows
from property_tests import THOROUGH
from toy_models import BOS, EOS, PAD, VOCAB, random_model

GREEDY = Decoding(method="greedy", max_length=30)
WAYS = [
    GREEDY,
    Decoding(method="beam", beam=1, max_length=9, length_penalty=1.3),
    Decoding(method="greedy", max_length=20, repetition_penalty=1.3, min_length=7),
    Decoding(method="greedy", max_length=25, no_repeat=2),
]
SAMPLES = [
    Decoding(method="sample", seed=5, temperature=0.7, max_length=25),
    Decoding(method="sample", seed=6, top_k=9, top_p=0.8, min_p=0.02, max_length=20, min_length=3),
    Decoding(method="sample", seed=7, repetition_penalty=1.2, no_repeat=3, temperature=0.5, best=3, max_length=15),
]
MIXERS: dict[str, Any] = LAYERS | {
    "infini": {"mixer": {"kind": "infini", "heads": 2, "segment": 3}},
    "convolution": {"mixer": {"kind": "convolution", "size": 3, "sees": "past"}},
}


def of_kind(mixer: str, **keys: Any) -> Any:
    block = {"wiring": "pre-norm", "repeat": 2, "channel": FFN} | MIXERS[mixer]
    return build({"kind": "decoder", "decoder": [block]} | keys)


def engine_of(model: Any, **options: Any) -> Engine:
    return Engine(model, BOS, EOS, PAD, **({"forbidden": [PAD, BOS]} | options))


def perturb(model: Any, by: float = 0.05) -> Any:
    """A copy with noise in its weights."""
    other = deepcopy(model)
    torch.manual_seed(9)
    with torch.no_grad():
        for weight in other.parameters():
            weight += by * weight.std() * torch.randn_like(weight)
    return other


def drafts(engine: Engine, ahead: int = 4) -> dict[str, Draft]:
    near, far = perturb(engine.model), perturb(engine.model, 3.0)
    near_runner, far_runner = (engine_of(model, limit=engine.runner.limit).runner for model in (near, far))
    return {"lookup": PromptLookup(ahead), "near": DraftModel(near_runner, ahead), "far": DraftModel(far_runner, ahead)}


def same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for answers, others in zip(found, expected, strict=True):
        assert [h.tokens for h in answers] == [h.tokens for h in others]
        assert [h.finished for h in answers] == [h.finished for h in others]
        for one, other in zip(answers, others, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-6)
            assert one.score == pytest.approx(other.score, abs=1e-6)


# --- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_generates_the_same_tokens_with_any_draft(mixer: str) -> None:
    """Every kind of state trims rejected tokens, a different number in each row."""
    engine = engine_of(of_kind(mixer))
    asked = [*prompts(4), [BOS, *[7, 8, 9, 11] * 5]]
    right: dict[str, float] = {}
    for way in WAYS if mixer == "kv" or (THOROUGH and mixer in LAYERS) else WAYS[:1]:
        expected = engine.complete(asked, way)
        for name, draft in drafts(engine, ahead=1 + len(way.method)).items():
            found = engine.complete(asked, way, draft=draft)
            same(found, expected)
            went = total_stats(found)
            assert went is not None and went.passes + went.right >= sum(len(h.tokens) for (h,) in found)
            right[name] = right.get(name, 0) + went.right
    assert right["near"] > right["far"] and right["lookup"] > 0, right


@pytest.mark.parametrize("way", WAYS + SAMPLES)
def test_targets_with_a_source_are_the_same_with_any_draft(sources: list[list[int]], way: Decoding) -> None:
    engine, sources = engine_of(random_model().double()), sources[:9]
    expected = engine.generate(sources, way)
    for name, draft in drafts(engine).items():
        found = engine.generate(sources, way, draft=draft)
        if way.method != "sample" or name == "lookup":
            same(found, expected)
        assert [len(answers) for answers in found] == [way.best] * len(sources)


@pytest.mark.parametrize("way", SAMPLES)
def test_samples_are_the_same_where_draft_tokens_are_not_sampled(way: Decoding) -> None:
    engine = engine_of(decoder_model())
    asked = prompts(12, seed=4)
    found = engine.complete(asked, way, draft=PromptLookup(ahead=3))
    same(found, engine.complete(asked, way))
    went = total_stats(found)
    assert went is not None and went.right < went.guessed and (went.right > 0 or way.no_repeat is not None)


@pytest.mark.parametrize("way", [GREEDY, *SAMPLES])
def test_results_do_not_depend_on_the_batch(way: Decoding) -> None:
    engine = engine_of(decoder_model())
    asked = prompts(4)
    for draft in drafts(engine, ahead=3).values():
        together = engine.complete(asked, way, draft=draft)
        for place, prompt in enumerate(asked):
            same(engine.complete([prompt], way, first=place, draft=draft), together[place : place + 1])


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    engine = engine_of(decoder_model(), forbidden=[PAD, BOS, EOS])
    for way in (GREEDY, SAMPLES[0]):
        ((found,),) = engine.complete([[BOS, 5]], way, draft=DraftModel(engine.runner, ahead=3))
        assert isinstance(found, SpeculativeHypothesis) and found.stats.right == found.stats.guessed
        assert (
            found.stats.passes == 1 + -(-(way.continuation_limit() - 1) // 4)
            and len(found.tokens) == way.continuation_limit()
        )


def test_models_of_other_kinds_decode_the_same_with_a_draft() -> None:
    wiring = {"kind": "pre-norm", "final": False}
    shared = {
        "first": [LAYERS["retention"] | {"wiring": wiring, "channel": FFN}],
        "second": [{"wiring": "pre-norm", "cross": LAYERS["kv"]["mixer"], "channel": FFN}],
    }
    attention = {"kind": "attention", "heads": 2}
    plain = {"wiring": "pre-norm", "mixer": attention | {"pattern": "causal"}, "channel": FFN}
    retro = {"kind": "retro", "neighbours": 2, "encoder": [{"mixer": attention, "channel": FFN}]}
    retro["decoder"] = [plain, plain | {"cross": {"kind": "chunked-cross", "heads": 2, "chunk": 3}}]
    prefix = LAYERS["kv"]["mixer"] | {"pattern": "causal | prompt"}
    engines = [
        engine_of(build({"kind": "decoder-decoder"} | shared)),
        engine_of(build(retro)),
        engine_of(
            decoder_model(decoder=[{"wiring": "pre-norm", "mixer": prefix, "channel": FFN}]), bidirectional_prompt=True
        ),
    ]
    engines[1].runner.retrieve = lambda chunks: [[chunk[::-1], chunk[:1] * 4] for chunk in chunks]
    for engine in engines:
        asked = prompts(8)
        for draft in (PromptLookup(), DraftModel(engine_of(decoder_model("rwkv")).runner), DraftModel(engine.runner)):
            same(engine.complete(asked, GREEDY, draft=draft), engine.complete(asked, GREEDY))


# --- the same distribution ------------------------------------------------------------------------------------------


def chi_square_excess(counts: Counter[Any], expected: dict[Any, float], total: int) -> float:
    """How many standard deviations χ² is above its mean; small cells are merged."""
    large = {cell: total * p for cell, p in expected.items() if total * p >= 8}
    rest = total - sum(large.values()), total - sum(counts[cell] for cell in large)
    cells = [(counts[cell], much) for cell, much in large.items()] + ([rest[::-1]] if rest[0] > 1 else [])
    assert not set(counts) - {cell for cell, p in expected.items() if p > 0}, "a text of probability 0"
    freedom = len(cells) - 1
    statistic = sum((seen - much) ** 2 / much for seen, much in cells)
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_and_resampling_give_the_distribution_of_the_model(seed: int) -> None:
    """The rule alone, for two distributions that differ much."""
    torch.manual_seed(seed)
    ours, theirs = (torch.randn(9).mul(1.5).double().softmax(-1) for _ in range(2))
    theirs[2], ours[4] = 0.0, 0.0
    theirs, ours = theirs / theirs.sum(), ours / ours.sum()
    numbers = torch.rand(3, 40_000, dtype=torch.double)
    guess = invert_cdf(theirs.expand(40_000, -1), numbers[0])
    right = is_accepted(numbers[1], theirs[guess], ours[guess])
    other = resample(ours.expand(40_000, -1), theirs.expand(40_000, -1), numbers[2])
    said = Counter(torch.where(right, guess, other).tolist())
    assert abs(chi_square_excess(said, dict(enumerate(ours.tolist())), 40_000)) < 4
    assert float(right.double().mean()) == pytest.approx(float(torch.minimum(ours, theirs).sum()), abs=0.01)


def text_probs(engine: Engine, prompt: list[int], way: Decoding, length: int) -> dict[tuple[int, ...], float]:
    """The probability of every text of `length` tokens by definition: one token at a time, no state, no draft."""
    model, vocab = engine.model, engine.model.config.vocab
    found = {(): 1.0}
    for place in range(length):
        longer = {}
        for text, chance in found.items():
            logits: Tensor = model.logits(Batch(Rows(torch.tensor([[*prompt, *text]]))))[0, -1].float()
            logits[list(engine.runner.forbidden)] = -torch.inf
            if place < way.min_length:
                logits[EOS] = -torch.inf
            odds = (
                filter_logits(logits[None] / way.temperature, way.top_k, way.top_p, way.min_p).double().softmax(-1)[0]
            )
            longer |= {(*text, token): chance * float(odds[token]) for token in range(vocab) if odds[token] > 0}
        found = longer
    return found


@pytest.mark.parametrize(
    "way",
    [
        Decoding(method="sample", temperature=0.8, max_length=4, min_length=4),
        Decoding(method="sample", temperature=1.2, top_k=4, max_length=4, min_length=4, seed=1),
        Decoding(method="sample", temperature=1.1, top_p=0.8, min_p=0.1, max_length=4, min_length=4, seed=2),
    ],
)
@torch.inference_mode()
def test_sampled_draft_tokens_leave_the_distribution_of_texts_unchanged(way: Decoding) -> None:
    """Four tokens, all but the first proposed, two at a time, by a model that often disagrees."""
    total, model = 6000, decoder_model(vocab=7)
    with torch.no_grad():
        model.head.weight *= 0.35
    engine = engine_of(model, budget=1 << 20)
    draft = DraftModel(engine_of(perturb(model, 0.6)).runner, ahead=2)
    answers = engine.complete([[BOS, 5, 6]] * total, way, draft=draft)
    went = total_stats(answers)
    assert went is not None and 0.3 < went.right / went.guessed < 0.9, went
    said = Counter(tuple(h.tokens) for (h,) in answers)
    assert abs(chi_square_excess(said, text_probs(engine, [BOS, 5, 6], way, 4), total)) < 4


# --- look-up --------------------------------------------------------------------------------------------------------


def test_look_up_proposes_what_followed_the_same_tokens_last() -> None:
    places = LookupIndex([])
    text = [1, 2, 3, 4, 9, 2, 3, 5, 6, 7, 2, 3]
    assert places.continuation(text, 3) == [5, 6, 7] and places.continuation([*text, 4], 2) == [9, 2]
    assert places.continuation([*text, 4, 8], 2) == []
    assert LookupIndex([]).continuation([4, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "a repetition continues"
    assert LookupIndex([]).continuation([7], 4) == LookupIndex([]).continuation([], 4) == []
    source = LookupIndex([11, 12, 13, 14, EOS])
    assert source.continuation([BOS, 11, 12], 4) == [13, 14, EOS] and source.continuation([BOS, 11, 12, 20], 2) == []
    assert LookupIndex([5, 6]).continuation([BOS, 5, 6], 3) == [], "nothing follows a source"
    assert LookupIndex([7, 11, 7, 12, 7, 13, 14]).continuation([BOS, 20, 21, 7], 2) == [12, 7], "the nearest one"


@pytest.mark.parametrize("seed", range(4))
def test_a_growing_index_equals_one_built_at_once(seed: int) -> None:
    dice, text = Random(seed), [0]
    source = [dice.randrange(3) for _ in range(9)]
    grown = LookupIndex(source)
    for _ in range(60):
        text.append(dice.randrange(4))
        assert grown.continuation(text, 3) == LookupIndex(source).continuation(text, 3)


# --- other options --------------------------------------------------------------------------------------------------


def test_texts_end_at_the_position_limit_with_a_draft() -> None:
    model = decoder_model(embed={"tied": False, "positions": {"kind": "learned", "length": 20}})
    engine = engine_of(model, forbidden=[PAD, BOS, EOS], limit=20)
    few = decoder_model(embed={"tied": False, "positions": {"kind": "learned", "length": 12}})
    asked, way = [[BOS, *[5] * n] for n in (19, *range(16))], Decoding(method="greedy", max_length=40)
    expected = engine.complete(asked, way)
    assert {len(prompt) + len(h.tokens) for prompt, (h,) in zip(asked, expected, strict=True)} == {21}
    for draft in (PromptLookup(), DraftModel(engine.runner), DraftModel(engine_of(few, limit=12).runner)):
        same(engine.complete(asked, way, draft=draft), expected)


def test_eos_may_be_forced_at_the_limit() -> None:
    engine = engine_of(decoder_model(), ended=True, ends=[9])
    asked = prompts(6)
    for draft in drafts(engine).values():
        same(engine.complete(asked, GREEDY, draft=draft), engine.complete(asked, GREEDY))


def test_stop_strings_are_found_across_passes(tokenizer: Tokenizer) -> None:
    engine = Engine(
        decoder_model(vocab=tokenizer.size), tokenizer.bos, tokenizer.eos, tokenizer.pad, tokenizer.specials
    )
    way, draft = Decoding(method="sample", temperature=1.5, seed=3, max_length=40), DraftModel(engine.runner, ahead=6)
    ((free,),) = engine.complete([[tokenizer.bos]], way, draft=draft)
    text, ended = tokenizer.decode(free.tokens), 0
    for place in range(0, len(text) - 3, 3):
        if "\ufffd" not in (stop := text[place : place + 3]):
            stops = StopStrings(tokenizer, [stop])
            ((found,),) = engine.complete([[tokenizer.bos]], way, stop=stops, draft=draft)
            assert found.tokens == free.tokens[: len(found.tokens)] and found.finished
            assert detokenize(tokenizer, found.tokens, stop=[stop]) == text[: text.index(stop)]
            ended += len(found.tokens) % 7 > 1  # not where a pass ends
    assert ended > 4


@pytest.mark.parametrize("way", [GREEDY, WAYS[2], *SAMPLES[:2]])
def test_streaming_with_a_draft(way: Decoding) -> None:
    engine = engine_of(decoder_model())
    for draft in drafts(engine).values():
        came, stream = [], engine.stream([BOS, 7, 8], way, draft=draft)
        while True:
            try:
                came.append(next(stream))
            except StopIteration as over:
                last: Hypothesis = over.value
                break
        ((whole,),) = engine.complete([[BOS, 7, 8]], way, draft=draft)
        assert came == last.tokens == whole.tokens


def test_a_draft_with_a_larger_vocabulary() -> None:
    """The head of an imported model may have more rows than there are tokens."""
    engine = engine_of(decoder_model())
    draft, asked = DraftModel(engine_of(decoder_model(vocab=VOCAB + 8)).runner), [[BOS, 5, 6], [BOS, 9]]
    same(engine.complete(asked, GREEDY, draft=draft), engine.complete(asked, GREEDY))
    assert all(h.tokens for answers in engine.complete(asked, SAMPLES[2], draft=draft) for h in answers)


def test_a_beam_is_rejected() -> None:
    engine = engine_of(decoder_model())
    with pytest.raises(UserError, match="not supported with a beam of 4; use method 'greedy' or 'sample'"):
        engine.complete([[BOS]], Decoding(), draft=PromptLookup())
    with pytest.raises(UserError, match="a beam of 2"):
        next(engine.stream([BOS], Decoding(beam=2), draft=PromptLookup()))


@pytest.mark.parametrize("ahead", [0, 64])
def test_no_more_tokens_are_proposed_than_can_be_trimmed(ahead: int) -> None:
    with pytest.raises(UserError, match=f"ahead={ahead}: must be from 1 to 63"):
        PromptLookup(ahead)


def test_a_draft_may_have_nothing_to_propose() -> None:
    engine = engine_of(decoder_model())
    assert engine.complete([], GREEDY, draft=PromptLookup()) == []
    one = Decoding(method="greedy", max_length=1)
    same(engine.complete([[BOS, 5]], one, draft=DraftModel(engine.runner)), engine.complete([[BOS, 5]], one))
    ((empty,),) = engine_of(random_model()).generate([[]], GREEDY, draft=PromptLookup())
    assert empty.tokens == []


# --- drafts by name -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tokenizer: Tokenizer) -> dict[str, Any]:
    both = Vocabularies(tokenizer, tokenizer)
    strange = train(TokenizerConfig(vocab=390), ["quite another text, with other pieces"] * 3)
    writes, model = {"kind": "causal-lm"}, decoder_model(vocab=tokenizer.size).float()
    found = {
        "large": Folder(model, both, task=writes, decoding={"method": "greedy", "max_length": 30}),
        "small": Folder(perturb(model, 0.02), both, task=writes),
        "strange": Folder(decoder_model(vocab=strange.size), Vocabularies(strange, strange), task=writes),
    }
    return {name: Generator(folder) for name, folder in found.items()}


def test_a_loaded_model_or_a_look_up(folders: dict[str, Any]) -> None:
    large, texts = folders["large"], ["The quick brown", "1 2 3 1 2 3"]
    plain = large.generate(texts)
    for draft in (folders["small"], "lookup"):
        assert large.generate(texts, draft=draft, ahead=5) == plain
        found = large.generate_full(texts, draft=draft)
        assert all(one.guesses.passes > 0 for one in found) and large.generate_full(texts)[0].guesses is None
        assert "".join(large.stream(texts[1], draft=draft)) == plain[1]
    assert str(DraftStats(10, 20, 14)) == "14 of 20 draft tokens accepted, 2.4 tokens per pass"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draft": "strange"}, "a different vocabulary"),
        ({"draft": "runs/small"}, 'must be "lookup" or a loaded model'),
        ({"draft": "lookup", "ahead": 0}, "from 1 to 63"),
        ({"ahead": 3}, "ahead=3 requires a draft"),
        ({"draft": "lookup", "method": "beam"}, "a beam of 4"),
        ({"draft": "translator"}, "is for translation; use a model for the same task"),
    ],
)
def test_unusable_drafts_are_rejected(folders: dict[str, Any], options: dict[str, Any], says: str) -> None:
    known = folders | {"translator": Translator(Folder(random_model(), folders["large"].folder.vocabularies))}
    options = options | ({"draft": known.get(options["draft"], options["draft"])} if "draft" in options else {})
    with pytest.raises(UserError, match=says):
        folders["large"].generate("the", **options)


def test_translations_are_the_same(tokenizer: Tokenizer) -> None:
    both = Vocabularies(tokenizer, tokenizer)
    model = random_model(vocab=tokenizer.size).double()
    large, small = Translator(Folder(model, both)), Translator(Folder(perturb(model), both))
    texts = ["The quick brown fox.", "你好，世界。今天天气很好！\nHow are you today?", "", "1 2 3"]
    plain = large.translate(texts, method="greedy")
    for draft in (small, "lookup"):
        found = large.translate_full(texts, method="greedy", draft=draft, ahead=3)
        assert [one.text for one in found] == plain and found[0].guesses.passes > 0
    rewriter = Seq2Seq(Folder(model, both, task={"kind": "seq2seq"}))
    assert rewriter.seq2seq(texts[0], method="greedy", draft="lookup") == rewriter.seq2seq(texts[0], method="greedy")
