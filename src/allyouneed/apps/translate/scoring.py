"""Log-probabilities of given translations, for contrastive tests (Sennrich 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from allyouneed.apps.translate.context import ContextReader, find_contexts
from allyouneed.data.tokenizers.base import Tokenizer
from allyouneed.errors import UserError
from allyouneed.infer.frames import Frame
from allyouneed.infer.log_probs import target_log_probs
from allyouneed.infer.predictors.base import check_texts

if TYPE_CHECKING:
    from allyouneed.apps.translate.translator import Translator

Sentences = Sequence[Sequence[str]] | None  # for each text, those before it


def score_targets(
    translator: Translator,
    sources: Sequence[str],
    targets: Sequence[str],
    frame: Frame,
    context: Sentences,
    target_context: Sentences,
) -> list[float]:
    """`Translator.score`."""
    sources, targets = check_texts(sources, "score"), check_texts(targets, "score")
    if len(sources) != len(targets):
        raise UserError(f"score: {len(targets)} targets for {len(sources)} sources; give one for each")
    if translator.writes_whole_targets:
        raise UserError(f"score: not supported by {translator.folder.task['kind']}")
    if target_context is not None and not (translator.context and translator.context.target):
        raise UserError("target_context: this model does not write the sentences before; remove it")
    both = translator.folder.tokenizers
    read = [frame.source(ids) for ids in both.source.encode_batch(sources)]
    answers = [[*ids, both.target.eos] for ids in both.target.encode_batch(targets)]
    before = _context_tokens(translator, both.source, context, read)
    written = _context_tokens(translator, both.target, target_context, answers)
    return target_log_probs(
        translator.model,
        [[*some, *ids] for some, ids in zip(before, read, strict=True)],
        [[*frame.begin, *some] for some in written],
        answers,
    )


def _context_tokens(
    translator: Translator, tokenizer: Tokenizer, given: Sentences, texts: Sequence[list[int]]
) -> list[list[int]]:
    """The tokens before each text, as many sentences as were trained with."""
    found = find_contexts(given, [""] * len(texts), (), 0, translator.context)
    if found is None:
        return [[] for _ in texts]
    sentences = {(n, 0): some[-found.sentences :] for n, some in found.before.items()}
    reader = ContextReader(tokenizer, translator.max_tokens, sentences)
    return [reader.before((n, 0), len(ids)) for n, ids in enumerate(texts)]
