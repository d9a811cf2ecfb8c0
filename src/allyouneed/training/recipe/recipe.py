"""A recipe: everything a training run depends on, in one YAML file. Defaults are the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic_core import PydanticCustomError

from allyouneed import plugins
from allyouneed.config import Config, ConfigError, model_validator, override, preset_names, preset_tree, tree_of
from allyouneed.data.batches.context import BREAK
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.interop.load import about
from allyouneed.models import resolve
from allyouneed.nn.models.base import Model
from allyouneed.tasks.task import Task
from allyouneed.tasks.translation.translation import Translation
from allyouneed.training.distributed.config import ParallelConfig
from allyouneed.training.optim.optimiser import Adam, Optimiser
from allyouneed.training.optim.schedule import Paper, Schedule
from allyouneed.training.recipe.fit import check_input, fitted
from allyouneed.training.recipe.sections import (
    SPLITS,
    BatchConfig,
    DataConfig,
    RetrievalConfig,
    SaveConfig,
    ValidationConfig,
    as_tuple,
)


def _parse_switch(value: Any) -> Any:
    return {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value


def _find_start(value: Any) -> Any:
    return resolve(value) if isinstance(value, str | Path) else value


# YAML parses a bare `on` as true; `blocks`: compile blocks, but capture no CUDA graph (cuda/capture.py)
Switch = Annotated[Literal["auto", "on", "blocks", "off"], BeforeValidator(_parse_switch)]


EMBEDS = ("embed", "source_embed")


class Recipe(Config):
    """Set `model` (new weights) or `start` (fine-tuning), `data`, and what differs from the defaults."""

    plugins: tuple[str, ...] = ()
    """Files or modules with parts of your own, imported before the rest is read."""
    model: str | dict[str, Any] | None = None
    """A preset's name, a YAML file, or the keys of a model: train it from new weights. Exclusive with `start`."""
    start: Annotated[Path, BeforeValidator(_find_start)] | None = None
    """A model folder to fine-tune (its config, weights and tokenizer), or `translator`, the bundled model."""
    set_: tuple[str, ...] = Field(default=(), alias="set")
    """Changes to the model: `[width=256, "decoder[0].mixer.heads=4"]`."""
    data: DataConfig
    """Files and filters."""
    retrieval: RetrievalConfig | None = None
    """The index that a RETRO model retrieves from."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer to train; with `start`, the folder's own is used."""
    task: Task = Translation()
    """What to train for."""
    batch: BatchConfig = BatchConfig()
    """Size of a batch."""
    optimiser: Optimiser = Adam()
    """Optimiser and its constants."""
    schedule: Schedule = Paper()
    """Learning rate by step."""
    steps: PositiveInt | None = None
    """Updates to train; default: 100,000 (the paper's base model), but at most 50 epochs; with ppo 100 rounds."""
    epochs: PositiveInt | None = None
    """Passes over the data, instead of `steps`."""
    accumulate: PositiveInt = 1
    """Batches whose gradients are summed for one update."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the gradient; null: no clipping."""
    precision: Literal["auto", "fp32", "bf16", "fp8"] = "auto"
    """Precision of computation; `auto`: bf16 on a GPU, and on a CPU with bf16 instructions. `fp8`: 8-bit products of
    linear maps, bf16 elsewhere; an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or newer."""
    compile: Switch = "auto"
    """torch.compile and CUDA graphs; `blocks`: compile blocks without capturing graphs; `auto`: on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: a GPU if there is one."""
    parallel: ParallelConfig = ParallelConfig()
    """How processes started by torchrun share the work."""
    checkpoint_activations: bool = False
    """Recompute the inside of blocks in the backward pass instead of storing it."""
    # not `validate`: BaseModel has a method of that name
    validation: ValidationConfig = Field(default=ValidationConfig(), alias="validate")
    """When and how to validate."""
    save: SaveConfig = SaveConfig()
    """When to save checkpoints."""
    average: NonNegativeInt = 5
    """Last checkpoints averaged at the end (the paper, 6.1); 0: none."""
    decoding: Decoding = Decoding()
    """Decoding options for scoring, and defaults of the model folder."""
    seed: Annotated[int, Field(ge=0, lt=1 << 64)] = 1
    """Seed of weights, data order and dropout."""
    output: Path
    """Folder of the run; default: runs/ and the recipe's name."""
    tensorboard: bool = False
    """Write TensorBoard logs."""
    name: str = ""
    """Name on the model card."""
    description: str = ""
    """Description on the model card."""
    licence: str = "not stated"
    """Licence of the weights, on the model card."""

    @model_validator(mode="before")
    @classmethod
    def _apply_task_defaults(cls, tree: Any) -> Any:
        """Data entries default to the task's file type, decoding to the task's options."""
        if not isinstance(tree, Mapping):
            return tree
        if isinstance(named := tree.get("plugins"), list | tuple):
            plugins.load_all(map(str, named))
        try:
            task = Task.choose(tree.get("task", {}))
        except (ValidationError, PydanticCustomError):
            # reported when the task itself is validated; data and decoding cannot be validated without it
            unknown = {"data": DataConfig.model_construct(train=()), "decoding": Decoding()}
            return dict(tree) | {key: value for key, value in unknown.items() if key in tree}
        found = dict(tree)
        if isinstance(start := found.get("start"), str | Path):
            defaults = task.defaults_from(Path(resolve(start)))
            missing = {key: value for key, value in defaults.items() if key not in task.model_fields_set}
            if missing:
                found["task"] = tree_of(task, full=False) | missing
                task = Task.choose(found["task"])
        if type(task).for_model is not Task.for_model and (model := _given_model(found)) is not None:
            found["task"] = tree_of(task.for_model(model))
        if isinstance(found.get("data"), Mapping):
            found["data"] = {
                key: [_parse_entry(entry, task) for entry in _list_entries(value)] if key in SPLITS else value
                for key, value in found["data"].items()
            }
        if isinstance(found.get("decoding", {}), Mapping):
            found["decoding"] = Decoding.merge(task.decoding, found.get("decoding", {}))
        return found

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if (self.model is None) == (self.start is None):
            raise ValueError("set either 'model' (new weights) or 'start' (a model folder to fine-tune)")
        if self.start is None and self.task.needs_start:
            raise ValueError(f"{self.task_kind} tunes a trained model; set 'start' (its folder) instead of 'model'")
        for key in self.task.required_keys:
            if getattr(self.task, key) is None:
                raise ValueError(f"task.{key}: {self.task_kind} requires it")
        for key in self.task.unused_keys:
            field = Recipe.model_fields[key]
            if getattr(self, key) != field.default:
                raise ValueError(f"'{field.alias or key}' has no effect on {self.task_kind}; remove it")
        if self.start is not None and "tokenizer" in self.model_fields_set:
            raise ValueError("'start' has its own tokenizer; remove 'tokenizer'")
        if self.retrieval is not None and self.tokenizer != TokenizerConfig():
            raise ValueError("'retrieval' uses the tokenizer of its index; remove 'tokenizer'")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("'steps' and 'epochs' are exclusive; set one")
        if self.precision == "fp8" and self.parallel.tensor > 1:
            raise ValueError("precision: fp8 does not support parallel.tensor above 1; use bf16")
        if self.optimiser.ema is not None and self.parallel.kind == "fsdp":
            raise ValueError("optimiser.ema: not with parallel: fsdp, which splits the weights; use ddp")
        if self.average > self.save.keep:
            raise ValueError(f"'average' needs the last {self.average} checkpoints, but save.keep is {self.save.keep}")
        if self.data.filters.ratio is not None and not self.task.file_type.has_two_texts:
            raise ValueError(f"data.filters.ratio needs two texts per example; {self.task_kind} has one")
        if self.task.sides == 1 and self.batch.source_row is not None:
            raise ValueError(f"batch.source_row needs a task with source and target; {self.task_kind} has one side")
        if not self.task.two_vocabularies:
            if not self.tokenizer.joint:
                raise ValueError(f"tokenizer.joint: false is for translation; {self.task_kind} has one vocabulary")
            if any(getattr(entry, "to", None) for name in SPLITS for entry in getattr(self.data, name)):
                raise ValueError("data: 'from' and 'to' are for translation; remove them")
        weighed = [split for split in SPLITS for e in getattr(self.data, split) if getattr(e, "weight", 1) != 1]
        if weighed and not self.task.supports_weights:
            raise ValueError(f"data: {self.task_kind} does not support 'weight'; translation and prefix-lm do")
        documents = any(getattr(e, "context", None) for split in SPLITS for e in getattr(self.data, split))
        if documents and not self.task.entry_defaults().get("context"):
            raise ValueError("data: 'context' needs a translation task with context; set task.context, or remove it")
        if set(weighed) - {"train"}:
            raise ValueError("data: 'weight' is for train only; remove it from valid and test")
        random = {split for split in SPLITS for e in getattr(self.data, split) if getattr(e, "bpe_dropout", None)}
        if random and self.task_kind != "translation":
            raise ValueError(f"data: {self.task_kind} does not support 'bpe_dropout'; translation does")
        if random - {"train"}:
            raise ValueError("data: 'bpe_dropout' is for train only; remove it from valid and test")
        if self.max_tokens > min(self.capacities):
            raise ValueError(
                f"data.max_tokens is {self.max_tokens}, but a row of batch holds {min(self.capacities)}; "
                "raise batch.row or lower data.max_tokens"
            )
        if self.metric not in self.task.metrics:
            raise ValueError(f"validate.metric: {self.task_kind} has {', '.join(self.task.metrics)}")
        return self

    @property
    def task_kind(self) -> str:
        return str(tree_of(self.task)["kind"])

    @property
    def metric(self) -> str:
        return self.validation.metric or next(iter(self.task.metrics))

    @property
    def capacities(self) -> tuple[int, ...]:
        """Tokens per row on each side."""
        return (self.batch.row,) if self.task.sides == 1 else (self.batch.source, self.batch.row)

    @property
    def max_tokens(self) -> int:
        """The longest example, special tokens included: longer ones are dropped, or split."""
        if self.data.max_tokens is not None:
            return self.data.max_tokens
        return min(self.capacities) if self.task.splits_documents or self.task.fills_rows else self.task.usual_tokens

    @property
    def last_step(self) -> int | None:
        """The step to end at; None if set by `epochs`."""
        return self.steps or (None if self.epochs else self.task.default_steps)

    def model_tree(self) -> dict[str, Any]:
        if self.start is not None:
            tree: dict[str, Any] = about(self.start)["model"]
            if isinstance(tree.get("head"), dict):  # the data determines the number of labels
                tree["head"] = {key: value for key, value in tree["head"].items() if key != "labels"}
        else:
            tree = model_named(self.model) if isinstance(self.model, str) else self.model or {}
        return override(tree, self.set_)

    def model_for(self, vocabularies: Vocabularies | None, labels: Sequence[str] | None = None) -> Model:
        """The model with the sizes of these tokenizers and labels (placeholders if None)."""
        vocab: Any = 1
        if vocabularies is not None:
            source, target = vocabularies.source.size, vocabularies.target.size
            vocab = target if vocabularies.joint else {"source": source, "target": target}
        tree = self.model_tree()
        check_input(self.task, tree)
        if self.start is None or vocabularies is None:
            tree = self.task.with_vocabulary(tree, vocab)
        tree = self._with_separator(tree, vocabularies)
        model = fitted(self.task, tree, labels, self.data.train, self.max_tokens)
        kind = tree_of(model)["kind"]
        if (kind == "retro") != (self.retrieval is not None):
            needs = "retro needs retrieval: a folder built by `allyouneed index`"
            raise ConfigError(
                [f"kind: {needs if kind == 'retro' else f'{kind} does not use retrieval; retro does'}"], "model"
            )
        reads = self.task.reads_of(kind)
        texts = () if "embed" in reads else ("limit",) if "source_embed" in reads else ("limit", "source_limit")
        limits = [limit for name in texts if (limit := getattr(model, name, None)) is not None]
        if limits and self.task.has_texts and self.max_tokens * self.task.copies > min(limits):
            positions = min(limits)
            examples = f"examples have up to {self.max_tokens} tokens"
            if self.task.copies > 1:
                examples += f", each read {self.task.copies} times"
            fix = f"set data.max_tokens: {positions // self.task.copies}"
            learned = positions in (getattr(getattr(model, name, None), "limit", None) for name in EMBEDS)
            raise ConfigError(
                [
                    f"embed.positions: {positions} positions, but {examples}; {fix}, or raise the number of positions"
                    if learned
                    else f"its mixers read up to {positions} tokens (length), but {examples}; {fix}, or raise that "
                    "length"
                ],
                "model",
            )
        return model

    def _with_separator(self, tree: dict[str, Any], vocabularies: Vocabularies | None) -> dict[str, Any]:
        """The break between sentences, for a model with a context encoder."""
        if not tree.get("context"):
            return tree
        context = self.task.context if isinstance(self.task, Translation) else None
        if context is None:
            raise ConfigError(["context: is trained with sentences before the source; set task.context"], "model")
        if context.target:
            text = "context: reads sources only; remove task.context.target, or the context encoder"
            raise ConfigError([text], "model")
        return tree | {"separator": 0 if vocabularies is None else vocabularies.source.special(BREAK)}

    def resolved(self) -> dict[str, Any]:
        """The whole tree with all defaults, preset and overrides expanded."""
        tree = tree_of(self)
        if self.start is None:
            return tree | {"model": self.model_tree(), "set": []}
        return {key: value for key, value in tree.items() if key not in ("model", "tokenizer")}


def model_named(name: str) -> dict[str, Any]:
    """The keys of a preset or a YAML file; a preset's number of classes is that of its paper, not of the data."""
    tree = preset_tree(name)
    if name in preset_names() and isinstance(tree.get("head"), dict):
        tree["head"] = {key: value for key, value in tree["head"].items() if key != "labels"}
    return tree


def _given_model(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model of a recipe that is not validated yet; None where that will fail."""
    try:
        start, model = tree.get("start"), tree.get("model")
        if isinstance(start, str | Path):
            found: Any = about(Path(resolve(start)))["model"]
        else:
            found = preset_tree(model) if isinstance(model, str) else model
        return override(dict(found), tree.get("set") or ())
    except (UserError, TypeError, ValueError):
        return None


def _list_entries(value: Any) -> Any:
    listed = as_tuple(value)
    return listed if isinstance(listed, Sequence) else ()


def _parse_entry(value: Any, task: Task) -> Any:
    kind = task.file_type.model_fields["kind"].default
    defaults = {"kind": kind, **task.entry_defaults()}
    if isinstance(value, str | Path):
        return {**defaults, "path": value}
    if not isinstance(value, Mapping):
        return value
    if value.get("kind", kind) != kind:
        named = tree_of(task)["kind"]
        raise ValueError(f"data: {named} reads files of kind {kind!r}, not {value['kind']!r}; remove 'kind'")
    return {**defaults, **value}
