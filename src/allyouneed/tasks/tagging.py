"""What each word of a sentence is: names, chunks, parts of speech."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from allyouneed.data.batches.encoding import Encoding, Tags
from allyouneed.data.batches.packing import Filled, Ints, Items, Side, marked
from allyouneed.data.batches.store import Store
from allyouneed.data.files.labels import TaggedFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task, class_loss, every, with_labels


class Tagging(Task):
    """Cross-entropy of the tags, at the first token of each word (Devlin et al. 2019, 5.3)."""

    files: ClassVar[type[Files]] = TaggedFiles
    kinds: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    heads: ClassVar[tuple[str, ...]] = ("tags",)
    counted: ClassVar[str] = "words"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"f1": True, "accuracy": True, "loss": False}
    kind: Literal["tagging"] = "tagging"

    def labels(self, files: Sequence[Files]) -> list[str]:
        found = sorted({tag for example in every(files) for tag in example.tags})
        if len(found) < 2:
            said = f"there is only one tag, {found[0]!r}," if found else "there are no tags"
            raise UserError(f"data.train: {said} in it; check which column is the tag ('columns')")
        return found

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        return with_labels(super().head(model, labels), labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        assert max_tokens is not None
        return Tags(vocabularies.target, labels, max_tokens, vocabularies.target.template.count())

    def items(self, store: Store, vocabularies: Vocabularies, room: tuple[int, ...], seed: int) -> Items:
        return TaggedItems(store, vocabularies.target)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        wanted = labels != IGNORE
        return class_loss(model.head(hidden[wanted]), labels[wanted])


class TaggedItems(Items):
    """Begin mark, the tokens of all words, end mark; a label where a word begins."""

    def __init__(self, store: Store, tokenizer: Tokenizer) -> None:
        self.store, self.tokenizer = store, tokenizer
        store.check(text=tokenizer)
        self.pads = (tokenizer.pad,)

    def __len__(self) -> int:
        return len(self.store)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        return (self.store["text"].lengths + self.tokenizer.template.count(),)

    def fill(self, epoch: int, members: Ints) -> Filled:
        lengths = self.store["text"].lengths[members].astype(np.int64)
        tags = self.store["tags"].gather(members)
        labels = np.where(tags > 0, tags - 1, IGNORE)
        marks = self.tokenizer.template
        tokens = marked(self.store["text"].gather(members), lengths, marks.before, marks.after)
        nothing = [IGNORE] * len(marks.before), [IGNORE] * len(marks.after)
        return Filled((Side(tokens),), marked(labels, lengths, *nothing))

    def show(self, number: int) -> dict[str, str]:
        return {"text": self.tokenizer.decode(self.store["text"][number].tolist())}
