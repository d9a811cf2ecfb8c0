"""A model that looks up in an index what it has read or written (RETRO)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from allyouneed.data.batches.packing import Items
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.predictors.base import Predictor

if TYPE_CHECKING:
    from allyouneed.infer.retrieval.retriever import Retriever


class Retrieving(Predictor):
    """`remembered`: the index it was trained with, until something else is said."""

    engine: Any

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.retriever: Retriever | None = None
        self.remembered: dict[str, str] = dict(folder.retrieval)

    def retrieve(self, index: Path | str | Retriever | None, encoder: Path | str | None = None) -> Self:
        """The same, looking up each chunk it has read or written in an index (`allyouneed index`); without any, None.
        `encoder`: where the index's encoder lies, if not where it lay when the index was made. A model that a recipe
        trained knows its index."""
        from allyouneed.infer.retrieval.retriever import Retriever

        self.retriever = self.engine.retrieve = None
        if index is not None:
            found = index if isinstance(index, Retriever) else Retriever(index, encoder, str(self.device))
            found.check(self.model.config, self.tokenizer, str(self.folder.path))
            self.engine.retrieve = partial(found.search, count=self.model.config.neighbours)
            self.retriever = found
        self.remembered = {}
        return self

    def retrieve_as_trained(self) -> None:
        """Before anything is read or written: open the index, unless another one was said."""
        if not self.remembered:
            return
        index = self.remembered["index"]
        if not Path(index).is_dir():
            raise UserError(
                f"{index}: the index this model was trained with is not there; put it there, say where it is: "
                ".retrieve(FOLDER), or let the model write without neighbours: .retrieve(None)"
            )
        self.retrieve(**self.remembered)

    def completed(self, items: Items) -> Items:
        self.retrieve_as_trained()
        if self.retriever is None:
            return items
        from allyouneed.infer.retrieval.neighbour_cache import with_neighbours
        from allyouneed.tasks.causal_lm import DocumentItems

        assert isinstance(items, DocumentItems)
        return with_neighbours(items, self.retriever, self.model.config.neighbours)
