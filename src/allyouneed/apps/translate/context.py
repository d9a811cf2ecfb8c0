"""Sentences that are read with a sentence because they precede it (document-level translation)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from allyouneed.apps.translate.splitting.split import Splitter, SplitText
from allyouneed.config import parse
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.infer.decoding.base import Hypothesis
from allyouneed.infer.predictors.base import check_texts

if TYPE_CHECKING:
    from allyouneed.tasks.translation.translation import DocumentContext

# how many of the texts before each are read with it; a text before each of them; or a list of sentences for each
ContextOption = int | str | Sequence[Sequence[str]] | None
Key = tuple[int, int]  # of a chunk: the index of its text in the request, and its number there
REFUSAL = (
    "this model was not trained with context sentences; remove context (--context), or train a model with task.context "
    "(docs/family/document.md)"
)


@dataclass(frozen=True)
class Contexts:
    """`sentences`: the most that are read with a sentence. `before`: the texts before each text, nearest last, by its
    index in the request."""

    sentences: int
    before: Mapping[int, Sequence[str]]

    def of_chunks(
        self, splitter: Splitter, splits: Sequence[SplitText], indices: Sequence[int]
    ) -> dict[Key, list[str]]:
        """The sentences before each chunk: of the texts before, and of its own text."""
        texts = list(dict.fromkeys(text for index in indices for text in self.before.get(index, ())))
        known = {one.source: [chunk.text for chunk in one.chunks] for one in splitter.split(texts)}
        found: dict[Key, list[str]] = {}
        for index, split in zip(indices, splits, strict=True):
            sentences = [sentence for text in self.before.get(index, ()) for sentence in known[text]]
            for part, chunk in enumerate(split.chunks):
                found[index, part] = sentences[-self.sentences :]
                sentences.append(chunk.text)
        return found

    def without_texts(self) -> Contexts:
        """The context within each text only: the other texts are in another language."""
        return replace(self, before={})


class ContextReader:
    """The tokens of the sentences before each chunk: as many as `max_tokens` hold, the nearest first."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int, sentences: Mapping[Key, Sequence[str]]) -> None:
        texts = list(dict.fromkeys(text for some in sentences.values() for text in some))
        ids = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
        self.contexts = {key: [ids[text] for text in some] for key, some in sentences.items()}
        self.max_tokens, self.tokenizer = max_tokens, tokenizer

    def before(self, key: tuple[int, ...], tokens: int) -> list[int]:
        """The context tokens before a chunk of `tokens` tokens; `key` identifies the chunk, or a part of it."""
        context = self.contexts.get((key[0], key[1]))
        if not context:
            return []
        from allyouneed.data.batches.context import BREAK, count_fitting, join_context

        count = count_fitting(context, self.max_tokens - tokens)
        return join_context(context[len(context) - count :], self.tokenizer.special(BREAK))


def trained_context(task: Mapping[str, Any]) -> DocumentContext | None:
    """How a model was trained, from the task in its folder."""
    given = task.get("context") if task.get("kind") == "translation" else None
    if given is None:
        return None
    from allyouneed.tasks.translation.translation import DocumentContext

    return parse(DocumentContext, given, "task.context")


def find_contexts(
    given: ContextOption, texts: Sequence[str], preceding: Sequence[str], first: int, trained: DocumentContext | None
) -> Contexts | None:
    """`preceding`: the texts before the first one, whose index is `first`. A blank text ends a document."""
    if given is None or (isinstance(given, int) and given == 0):
        return None
    if trained is None:
        raise UserError(REFUSAL)
    if isinstance(given, str):
        return Contexts(trained.sentences, {first + n: [given] for n in range(len(texts))})
    if not isinstance(given, int):
        lists = [check_texts(some, "context") for some in given]
        if len(lists) != len(texts):
            raise UserError(f"context: {len(lists)} lists of sentences for {len(texts)} texts; give one for each")
        return Contexts(trained.sentences, {first + n: some for n, some in enumerate(lists)})
    if isinstance(given, bool) or not 0 < given <= trained.sentences:
        raise UserError(f"context: this model was trained with up to {trained.sentences} sentences, not {given}")
    before, window = {}, list(preceding)
    for number, text in enumerate(texts):
        before[first + number] = after_blank(window[-given:])
        window.append(text)
    return Contexts(given, before)


def after_blank(texts: Sequence[str]) -> list[str]:
    """What follows the last blank text."""
    blank = max((n for n, text in enumerate(texts, 1) if not text.strip()), default=0)
    return list(texts[blank:])


def last_sentence(found: Hypothesis, vocabularies: Vocabularies) -> Hypothesis:
    """What follows the last break, of a model that writes the sentences before as well; the score is that of all."""
    from allyouneed.data.batches.context import BREAK

    mark = vocabularies.target.special(BREAK)
    begin = max((n for n, token in enumerate(found.tokens, 1) if token == mark), default=0)
    log_probs = found.log_probs[begin:]
    return replace(found, tokens=found.tokens[begin:], log_probs=log_probs, log_prob=sum(log_probs))
