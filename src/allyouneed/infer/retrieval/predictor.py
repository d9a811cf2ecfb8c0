"""Predictors of retrieval models (RETRO)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from allyouneed.data.batches.packing import Items
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.infer.engine import Engine
from allyouneed.infer.predictors.generating import GeneratingPredictor

if TYPE_CHECKING:
    from allyouneed.infer.retrieval.retriever import Retriever


class RetrievalPredictor(GeneratingPredictor):
    """`pending`: the index it was trained with, until it is opened or replaced."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.retriever: Retriever | None = None
        self.pending: dict[str, str] = dict(folder.retrieval)

    @property
    def engine(self) -> Engine:
        engine, found = super().engine, self.retriever
        engine.runner.retrieve = None if found is None else partial(found.search, count=self.model.config.neighbours)
        return engine

    def retrieve(self, index: Path | str | Retriever | None, encoder: Path | str | None = None) -> Self:
        """Retrieve neighbours of each chunk from an index (`allyouneed index`); None: without neighbours. `encoder`:
        the path of the index's encoder, if it has moved. Default: the index of the training recipe."""
        from allyouneed.infer.retrieval.retriever import Retriever

        self.retriever = None
        if index is not None:
            found = index if isinstance(index, Retriever) else Retriever(index, encoder, str(self.device))
            found.check(self.model.config, self.tokenizer, str(self.folder.path))
            self.retriever = found
        self.pending = {}
        return self

    def retrieve_as_trained(self) -> None:
        """Open the index of the training recipe, unless `retrieve` was called."""
        if not self.pending:
            return
        index = self.pending["index"]
        if not Path(index).is_dir():
            raise UserError(
                f"{index}: the index this model was trained with is missing; restore it, set another with "
                ".retrieve(FOLDER), or generate without neighbours with .retrieve(None)"
            )
        self.retrieve(**self.pending)

    def prepare_items(self, items: Items) -> Items:
        self.retrieve_as_trained()
        if self.retriever is None:
            return items
        from allyouneed.infer.retrieval.neighbour_cache import with_neighbours
        from allyouneed.tasks.language.causal_lm import DocumentItems

        assert isinstance(items, DocumentItems)
        return with_neighbours(items, self.retriever, self.model.config.neighbours)
