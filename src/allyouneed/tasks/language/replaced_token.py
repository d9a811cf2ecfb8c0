"""Replaced-token detection: tell the tokens of a text from those that a small masked language model fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from allyouneed.data.batches.packing import Ints, Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.errors import UserError
from allyouneed.nn.batch import IGNORE, Batch
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.models.encoder import without_generator
from allyouneed.tasks.language.masked_lm import MaskedItems, MaskedLM
from allyouneed.tasks.task import VALIDATION_SEED, Loss, Task, token_loss

HEAD_WIDTH = 64


class ReplacedToken(Task):
    """Clark et al. 2020, "ELECTRA", 3.1: a generator fills masked tokens; the model says of every token whether it was
    replaced. Both are trained together, the sum of L_MLM and `weight` · L_Disc (eq. 3), and share the vectors of tokens
    (3.2). The generator is not kept."""

    files: ClassVar[type[Files]] = MaskedLM.files
    kinds: ClassVar[tuple[str, ...]] = ("encoder",)
    heads: ClassVar[tuple[str, ...]] = ("tags",)
    loss_unit: ClassVar[str] = "masked tokens"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"loss": False, "auc": True, "accuracy": True}
    kind: Literal["replaced-token"] = "replaced-token"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens that the generator fills."""
    generator: Annotated[float, Field(gt=0, le=1)] = 0.25
    """Width of the generator, as a share of the model's; a generator under `model` has its own."""
    weight: Annotated[float, Field(gt=0)] = 50.0
    """λ: weight of the loss of the model against that of the generator."""

    def specials(self) -> tuple[str, ...]:
        return MaskedLM().specials()

    def head(self, model: dict[str, Any], labels: Sequence[str] | None) -> Any:
        given = model.get("head")
        same = isinstance(given, Mapping) and given.get("kind") == "tags"
        return given if same else {"kind": "tags", "labels": 1, "hidden": "gelu", "dropout": 0.0}

    def complete(self, model: Mapping[str, Any], files: Sequence[Files]) -> Mapping[str, Any]:
        if isinstance(own := model.get("generator"), Mapping):
            return {**model, "generator": {**own, "vocab": model.get("vocab")}}
        return {**model, "generator": generator_of(model, self.generator)}

    def finished(self, model: nn.Module) -> nn.Module:
        return without_generator(model)

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Any:
        return MaskedLM().encoding(vocabularies, labels, max_tokens)

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        room = capacities[-1] - vocabularies.target.template.count()
        return MaskItems(store, vocabularies.target, room, self.share, seed)

    def loss(self, model: Any, batch: Batch) -> Loss:
        rows, labels = batch.rows, batch.labels
        assert labels is not None and model.generator is not None
        losses: list[Tensor] = []
        guessed, _ = model.generator.run(batch, losses)
        masked = labels != IGNORE
        found = token_loss(model.generator.head, guessed, labels)
        with torch.no_grad():
            drawn = draw(model.generator.head(guessed[masked]), model.training)
        tokens = rows.tokens.masked_scatter(masked, labels[masked]).masked_scatter(masked, drawn)
        original = rows.tokens.masked_scatter(masked, labels[masked])
        hidden, layout = model.run(Batch(replace(rows, tokens=tokens)), losses)
        scores, wanted = model.head(hidden, layout)[..., 0].float(), (tokens != original).float()
        real = torch.ones_like(masked) if layout.real is None else layout.real
        each = nn.functional.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        mean = each.where(real, 0).sum() / real.sum().clamp(min=1)
        right = (((scores > 0) == wanted.bool()) & real).sum() / real.sum().clamp(min=1)
        total = found.total + self.weight * mean * found.tokens
        figures = {"generator-loss": found.plain, "model-loss": mean.detach() * found.tokens}
        figures["right"] = 100.0 * right * found.tokens
        return Loss(total, total.detach(), found.tokens, figures).with_auxiliary(losses)

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        raise NotImplementedError("two models have a loss together")


class MaskItems(MaskedItems):
    """All chosen tokens become `<mask>` (3.1)."""

    def masked(self, ids: Ints, chosen: Any, rng: np.random.Generator) -> Ints:
        return np.where(chosen, self.mask, ids)


def draw(scores: Tensor, random: bool) -> Tensor:
    """A token for each row of scores, by their probabilities; the same in every validation."""
    dice = None
    if not random:
        dice = torch.Generator(scores.device).manual_seed(VALIDATION_SEED)
    if not len(scores):
        return torch.zeros(0, dtype=torch.long, device=scores.device)
    return torch.multinomial(scores.float().softmax(-1), 1, generator=dice)[:, 0]


def generator_of(model: Mapping[str, Any], share: float) -> dict[str, Any]:
    """A plain encoder of about this share of the width, as deep, with the same embedding."""
    embed, layers, width = model.get("embed", {}), model.get("encoder"), model.get("width")
    embed = dict(embed) if isinstance(embed, Mapping) else {"kind": embed}
    if (
        not isinstance(layers, list)
        or not all(isinstance(one, Mapping) for one in layers)
        or not isinstance(width, int)
    ):
        raise UserError("model.generator: is not made from layers that are not a list; write it, an encoder of its own")
    unit = HEAD_WIDTH if width * share >= HEAD_WIDTH else 2
    narrow = max(unit, round(width * share / unit) * unit)
    inner = embed.get("inner") or width
    kept = {name: model[name] for name in ("norm", "dropout", "init", "linear") if name in model}
    mixer: dict[str, Any] = {"kind": "attention", "heads": max(1, narrow // HEAD_WIDTH)}
    positions = embed.get("positions", "none")
    if (positions.get("kind") if isinstance(positions, Mapping) else positions) == "none":
        mixer["positions"] = {"kind": "rotary"}
    layer = {"repeat": sum(one.get("repeat", 1) for one in layers), "wiring": layers[0].get("wiring", "post-norm")}
    own = {"inner": None if inner == narrow else inner, "tied": True, "asks": False, "chosen": "none"}
    return {
        "kind": "encoder",
        "vocab": model.get("vocab"),
        "width": narrow,
        **kept,
        "embed": embed | own,
        "encoder": [layer | {"mixer": mixer, "channel": {"kind": "ffn", "hidden": 4 * narrow}}],
        "head": {"kind": "vocabulary", "bias": True, "transform": {"activation": "gelu"}},
    }
