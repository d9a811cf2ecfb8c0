"""Translation language modelling: predict masked tokens of a sentence and of its translation from both (XLM)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from allyouneed.data.batches.encoding import Encoding, TextEncoding
from allyouneed.data.batches.items import StoredItems
from allyouneed.data.batches.packing import FlatBatch, FlatSide, Ints, Items, generator
from allyouneed.data.batches.store import Store
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Tokenizer, Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE
from allyouneed.tasks.language.masked_lm import MaskedLM, apply_mask, choose_masked

SIDES = ("source", "target")


class TranslationLM(MaskedLM):
    """Lample, Conneau 2019, "Cross-lingual Language Model Pretraining", 3.3 (TLM) and figure 1: a sentence and its
    translation form one text. Each has its special tokens, positions restart at the translation, and a language vector
    (token type 0: source, 1: target) is added to every token. To predict a masked word, the model may attend to the
    other language.

    With probability `alone`, only one sentence of a pair is read (3.2, MLM, which the paper alternates with TLM).
    """

    files: ClassVar[type[Files]] = PairFiles
    kind: Literal["translation-lm"] = "translation-lm"  # type: ignore[assignment]
    alone: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the pairs that are read as a single sentence."""
    whole_word: Literal[False] = False
    """Not supported here."""
    pairs: None = None
    """Not supported here: both sentences are the same text."""

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        embed = model.get("embed")
        if ((embed.get("types") if isinstance(embed, dict) else None) or 0) < 2:
            raise UserError("model.embed.types: translation-lm adds a vector for each language; set it to 2 or more")
        return super().head(model, labels)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        texts, count = dict.fromkeys(SIDES, vocabularies.target), vocabularies.target.template.count()
        return TextEncoding(texts, max_tokens, count, separators=count)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        return TranslationItems(store, vocabularies.target, self.share, self.alone, seed)


class TranslationItems(StoredItems):
    """A pair of sentences, or one of them, each with its special tokens."""

    columns = SIDES

    def __init__(self, store: Store, tokenizer: Tokenizer, share: float, alone: float, seed: int) -> None:
        super().__init__(store, tokenizer)
        self.share, self.alone, self.seed = share, alone, seed
        self.mask = tokenizer.mask
        self.replacements = np.setdiff1d(np.arange(tokenizer.size), tokenizer.specials)

    def reads(self, epoch: int) -> NDArray[np.bool_]:
        """(items, 2): which sides of each pair are read in an epoch."""
        rng = generator(self.seed, epoch, len(self))
        alone, side = rng.random(len(self)) < self.alone, rng.integers(2, size=len(self))
        return np.stack([~alone | (side == 0), ~alone | (side == 1)], 1)

    def lengths(self, epoch: int) -> tuple[NDArray[np.integer], ...]:
        each = np.stack([self.store[name].lengths.astype(np.int64) for name in SIDES], 1)
        return (((each + self.tokenizer.template.count()) * self.reads(epoch)).sum(1),)

    def collate(self, epoch: int, members: Ints) -> FlatBatch:
        template, reads = self.tokenizer.template, self.reads(epoch)
        before, after = (np.array(ids, dtype=np.int64) for ids in (template.before, template.after))
        columns: dict[str, list[Ints]] = {"tokens": [], "labels": [], "types": [], "positions": []}
        for number in members.tolist():
            rng = generator(self.seed, epoch, number)
            for language in np.flatnonzero(reads[number]).tolist():
                ids = self.store[SIDES[language]][number].astype(np.int64)
                chosen = choose_masked(len(ids), None, self.share, rng)
                masked = apply_mask(ids, chosen, self.mask, self.replacements, rng)
                tokens = np.concatenate([before, masked, after])
                labels = np.full_like(tokens, IGNORE)
                labels[len(before) : len(before) + len(ids)] = np.where(chosen, ids, IGNORE)
                columns["tokens"].append(tokens)
                columns["labels"].append(labels)
                columns["types"].append(np.full_like(tokens, language))
                columns["positions"].append(np.arange(len(tokens)))
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        side = FlatSide(joined["tokens"], {name: joined[name] for name in ("types", "positions")})
        return FlatBatch((side,), joined["labels"])

    def show(self, number: int) -> dict[str, str]:
        return {name: self.tokenizer.decode(self.store[name][number].tolist()) for name in SIDES}
