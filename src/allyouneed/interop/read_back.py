"""Read an exported folder with our own importer, and compare it with what was exported.

What another library needs to know has to be in its files, and this is where it shows what is not: a config it reads
otherwise, special tokens or token types it would not give, other numbers. The library itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from allyouneed.config import tree_of
from allyouneed.errors import UserError
from allyouneed.folder import Folder
from allyouneed.interop.families import FAMILIES
from allyouneed.interop.heads import config_of, with_head
from allyouneed.interop.hf.config_writer import canonical_tree, differences
from allyouneed.interop.load import load
from allyouneed.nn.batch import Batch, Input, Rows, Signal
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.weights import named_tensors

LENGTH = 7  # tokens of a row of the sample
TEXTS = ("Hello, world!", "naïve café — 3.14")
ROUNDING = 16  # units in the last place of narrow weights, which the other order of sums may cost
TOLERANCE = 1e-4  # of float32, relative to the largest output where that is above 1


def check_exported(folder: Folder, out: Path) -> None:
    """Refuse what does not come back from `out` as it was."""
    where = folder.path or "the model"
    try:
        again = load(out, as_stored=True)
    except UserError as error:
        raise UserError(f"{where}: what was exported cannot be read back: {error}") from None
    if config_head(folder.model) == "none":
        again.model = with_head(again.model, {"kind": "none"})
    family = again.origin.get("family")
    # the config that is written in place of ours, and computes the same; CTranslate2 has none to compare
    equivalent = None if family is None else FAMILIES[family].equivalent_config
    if problems := list(_problems(folder, again, equivalent)):
        listed = "\n  ".join(problems[:20])
        raise UserError(f"{where}: the export would not be exact, so nothing was written\n  {listed}")


def config_head(model: nn.Module) -> str:
    head = tree_of(config_of(model)).get("head")
    return str(head.get("kind", "vocabulary")) if isinstance(head, dict) else "vocabulary"


def _problems(folder: Folder, again: Folder, equivalent: Callable[[Model], Model] | None) -> Iterator[str]:
    ours, theirs = config_of(folder.model), config_of(again.model)
    trees = []
    if equivalent is not None:
        trees = list(differences(canonical_tree(equivalent(ours)), canonical_tree(theirs)))
        yield from trees
    if folder.labels and folder.labels != again.labels:
        yield f"labels: {', '.join(folder.labels)} would be read as {', '.join(again.labels) or 'none'}"
    if folder.vocabularies is not None and again.vocabularies is None:
        yield "tokenizer: would be lost"
    elif folder.vocabularies is not None:
        for (what, own), (_, found) in zip(_token_facts(folder), _token_facts(again), strict=True):
            if own != found:
                yield f"{what}: {own} would be read as {found}"
    if not trees and not _same_weights(folder.model, again.model, equivalent is not None):
        yield from _different_outputs(folder.model, again.model)


def _token_facts(folder: Folder) -> Iterator[tuple[str, Any]]:
    """What a model of this kind gets around its texts."""
    kind, config = tree_of(config_of(folder.model))["kind"], config_of(folder.model)
    source, target = folder.tokenizers.source, folder.tokenizers.target
    texts = source.encode_batch(TEXTS)
    yield "token ids of a text", texts
    if kind == "encoder-decoder":
        yield "tokens around a source", source.source_affixes
    if kind == "encoder" or config_head(folder.model) == "pooled":
        one, two = source.frame(texts[0]), source.frame(*texts)
        yield "token ids of a text with special tokens", one[0]
        yield "token ids of a pair of texts", two[0]
        if config.reads_types:
            yield "token types of a pair of texts", two[1]
    elif kind != "two-towers":
        yield "first tokens of a decoder", target.opening
        yield "token that ends a text", target.eos


def _same_weights(ours: nn.Module, theirs: nn.Module, same_config: bool) -> bool:
    """Whether all weights are the same bits, so that there is nothing to compute."""
    if not same_config:
        return False
    one, other = named_tensors(ours), named_tensors(theirs)
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.cpu().equal(other[name]) for name, tensor in one.items()
    )


@torch.no_grad()
def _different_outputs(ours: nn.Module, theirs: nn.Module) -> Iterator[str]:
    """The difference of the outputs of a small batch, if there is one."""
    batch, dtypes = sample(config_of(ours)), {tensor.dtype for tensor in named_tensors(ours).values()}
    expected, found = (_logits(model.eval(), batch) for model in (ours, theirs))
    narrowest = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    allowed = max(TOLERANCE, ROUNDING * narrowest * (narrowest > torch.finfo(torch.float32).eps))
    if found.shape != expected.shape:
        yield f"outputs: {tuple(expected.shape)} would become {tuple(found.shape)}"
    elif not (gap := float((found - expected).abs().max() / max(1.0, float(expected.abs().max())))) <= allowed:
        yield f"outputs of a small batch would differ by {gap:.1e} (allowed {allowed:.0e})"


def _logits(model: Any, batch: Batch) -> Tensor:
    first = next(iter(named_tensors(model).values()))
    found: Tensor = model.logits(batch.to(first.device))
    return found.float().cpu()


def sample(config: Any) -> Batch:
    """A small batch without padding for a model of any kind: random token ids, pixels, log-mel frames."""
    dice = torch.Generator().manual_seed(0)
    if config.kind == "two-towers":
        parts = [(config.text.embed, config.vocabs.target), (config.image.embed, None)]
    elif config.kind == "encoder-decoder":
        parts = [(config.embed, config.vocabs.target), (config.source_embed or config.embed, config.vocabs.source)]
    else:
        parts = [(config.embed, None if config.vocabs is None else config.vocabs.target)]
    target, *source = (_input(embed, vocab, config.limit, dice) for embed, vocab in parts)
    return Batch(target, source[0] if source else None)


def _input(embed: Any, vocab: int | None, limit: int | None, dice: torch.Generator) -> Input:
    if embed.kind == "patches":
        sides = [embed.image] * 2 if isinstance(embed.image, int) else list(embed.image)
        return Signal(torch.randn(2, embed.channels, *sides, generator=dice))
    if embed.kind == "frames":
        return Signal(torch.randn(2, embed.mels, 2 * LENGTH, generator=dice))
    assert vocab is not None
    shape = 2, min(limit or LENGTH, LENGTH)
    types = torch.randint(embed.types, shape, generator=dice) if embed.types else None
    return Rows(torch.randint(vocab, shape, generator=dice), types=types)
