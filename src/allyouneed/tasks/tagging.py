"""Tag each word of a sentence: named entities, chunks, parts of speech."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, TagEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, add_special_tokens
from allyouneed.data.batches.store import Store
from allyouneed.data.files.labels import MANY_LABELS, TaggedFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, class_loss, read_examples, set_label_count


class Tagging(Task):
    """Cross-entropy of the tags, at the first token of each word (Devlin et al. 2019, 5.3)."""

    files: ClassVar[type[Files]] = TaggedFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    heads: ClassVar[tuple[str, ...]] = ("tags",)
    loss_unit: ClassVar[str] = "words"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"f1": True, "accuracy": True, "loss": False}
    kind: Literal["tagging"] = "tagging"

    def labels(self, files: Sequence[Files]) -> list[str]:
        tags: set[str] = set()
        words: set[str] = set()
        for example in read_examples(files):
            tags.update(example.tags)
            words.update(example.words)
        if len(tags) > MANY_LABELS and len(tags) > len(words):
            raise UserError(
                f"data.train: {len(tags):,} different tags for {len(words):,} different words; 'columns' (in JSON "
                "'keys') names the word first, then the tag"
            )
        found = sorted(tags)
        if len(found) < 2:
            what = f"only one tag, {found[0]!r}" if found else "no tags"
            raise UserError(f"data.train: {what}; check which column is the tag ('columns')")
        return found

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return set_label_count(super().head(model, labels), labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        assert max_tokens is not None
        return TagEncoding(vocabularies.target, labels, max_tokens, vocabularies.target.template.count())

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return TaggedItems(store, vocabularies.target)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        wanted = labels != IGNORE
        return class_loss(model.head(hidden[wanted]), labels[wanted])


class TaggedItems(StoredItems):
    """BOS, the tokens of all words, EOS; a label at the first token of each word."""

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths + self.tokenizer.template.count(),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        lengths = self.store["text"].lengths[members].astype(np.int64)
        tags = self.store["tags"].gather(members)
        labels = np.where(tags > 0, tags - 1, IGNORE)
        template = self.tokenizer.template
        tokens = add_special_tokens(self.store["text"].gather(members), lengths, template.before, template.after)
        nothing = [IGNORE] * len(template.before), [IGNORE] * len(template.after)
        return FlatBatch((FlatSide(tokens),), add_special_tokens(labels, lengths, *nothing))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.store["text"][number].tolist())}
