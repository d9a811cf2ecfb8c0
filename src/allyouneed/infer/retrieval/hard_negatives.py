"""Hard negatives: texts that an embedder finds similar to a query and that are not its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.functional import normalize

from allyouneed.data.retrieval.nearest import nearest
from allyouneed.errors import UserError
from allyouneed.files import sha256
from allyouneed.infer.predictors.registry import predictor
from allyouneed.interop.load import load, resolve_device
from allyouneed.runtime.process import ignore_warnings
from allyouneed.tasks.reranking import QueryItems

KEPT = 32  # texts of each query


def with_hard_negatives(items: QueryItems, embedder: Path, device: str) -> QueryItems:
    """The items with the texts most similar to each query. They are kept beside the store, for the next start."""
    weights = embedder / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"task.hard: {embedder} is not a model folder of allyouneed; import it first")
    path = items.store.folder / f"hard-{sha256(weights)[:16]}.npy"
    if path.is_file():
        return items.with_hard(np.load(path, allow_pickle=False))
    model: Any = predictor(load(embedder, resolve_device(device, embedder), None, "similarity"))
    column, decode = items.store["second"], items.tokenizer.decode
    texts = [decode(column[int(example)].tolist()) for example in items.firsts]
    queries, firsts = np.unique(items.queries, return_index=True)
    asked = [decode(items.store["text"][int(example)].tolist()) for example in firsts]
    with ignore_warnings():  # long texts are truncated
        there, here = (normalize(model.embed(some), dim=-1) for some in (texts, asked))
    numbers = np.arange(len(texts))
    _, found = nearest(here, there, KEPT, lambda row: items.is_right(queries[row : row + 1], numbers))
    hard = found[items.queries]
    partial = path.with_name(f"{path.stem}.{os.getpid()}.npy")  # several processes may write the same
    np.save(partial, hard)
    partial.replace(path)
    return items.with_hard(hard)
