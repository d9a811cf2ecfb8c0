"""Forced phrases: a model that knows nothing of them writes them, as whole words and as often as asked."""

from __future__ import annotations

import pytest

from allyouneed.apps.translate.glossary import count_term
from allyouneed.apps.translate.spans.forced_phrases import force_phrases
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.frames import Frame, generate_targets
from toy_models import random_model

FRAME = Frame((), (2,), (1,))


@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 4, "best": 4}, {"method": "greedy"}, {"method": "sample"}])
def test_every_hypothesis_has_its_phrases(tokenizer: Tokenizer, options: dict[str, object]) -> None:
    engine = Engine(random_model(vocab=tokenizer.size, ends=1.0), 1, 2, 0, forbidden=[0, 1])
    sources = [FRAME.source(tokenizer.encode(text)) for text in ("The quick fox", "你好，世界", "dog")]
    phrases = [{"lazy dog": 1, "fox": 2}, {"公园": 1}, {"Xylophon": 1, "3 D": 2}]
    decoding, keys = Decoding.of({}, extra=40, **options), [(number,) for number in range(3)]
    free = generate_targets(engine, FRAME, sources, decoding, sample_keys=keys)
    both = Vocabularies(tokenizer, tokenizer)
    found = force_phrases(engine, FRAME, both, sources, decoding, keys, phrases)
    (alone,) = force_phrases(engine, FRAME, both, sources[2:], decoding, keys[2:], phrases[2:])
    assert [one.tokens for one in alone] == [one.tokens for one in found[2]], "the others do not matter"
    for hypotheses, plain, some in zip(found, free, phrases, strict=True):
        assert len(hypotheses) == len(plain)
        for one in hypotheses:
            text = tokenizer.decode(one.tokens)
            assert all(count_term(phrase, text) >= times for phrase, times in some.items()), text
    texts = [tokenizer.decode(one.tokens) for hypotheses in free for one in hypotheses]
    assert not any("Xylophon" in text for text in texts), "the model alone does not write it"


def test_nothing_changes_where_the_phrase_is_there_already(tokenizer: Tokenizer) -> None:
    engine = Engine(random_model(vocab=tokenizer.size, ends=1.0), 1, 2, 0, forbidden=[0, 1])
    source = FRAME.source(tokenizer.encode("The quick fox"))
    decoding = Decoding.of({}, beam=1, extra=10)
    ((plain,),) = generate_targets(engine, FRAME, [source], decoding)
    both = Vocabularies(tokenizer, tokenizer)
    ((same,),) = force_phrases(engine, FRAME, both, [source], decoding, [(0,)], [{}])
    assert same.tokens == plain.tokens
    assert same.score == pytest.approx(plain.score, rel=1e-6)
