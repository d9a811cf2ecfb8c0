"""Reinforcement learning from a reward model by PPO: options and data. The loop is in training/ppo.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor

from allyouneed.config import Config
from allyouneed.data.batches.encoding import Encoding
from allyouneed.data.batches.packing import Items
from allyouneed.data.batches.store import Store
from allyouneed.data.files.prompts import PromptFiles
from allyouneed.data.files.readers import Files
from allyouneed.data.tokenizers.base import Vocabularies
from allyouneed.nn.context import TokenLayout
from allyouneed.tasks.task import Loss, Task

Share = Annotated[float, Field(ge=0, le=1)]


class PPOSettings(Config):
    batch: PositiveInt = 32
    """Prompts of a round."""
    passes: PositiveInt = 2
    """Updates on the answers of a round."""
    beta: NonNegativeFloat = 0.05
    """β: penalty per nat of divergence from the model it starts from."""
    clip: PositiveFloat = 0.2
    """ε: how far the probability ratio counts."""
    discount: Share = 1.0
    """γ of the advantages."""
    decay: Share = 0.95
    """λ of generalised advantage estimation."""
    rate: PositiveFloat = 1e-4
    """Learning rate of Adam."""
    value_rate: PositiveFloat = 1e-2
    """Learning rate of the value head, a linear map."""
    max_length: PositiveInt = 64
    """Longest answer in tokens."""
    max_norm: PositiveFloat = 1.0
    """Largest norm of the gradient."""


class PPOTask(Task, PPOSettings):
    """E[r(x, y) − β log(π(y|x) / π_ref(y|x))] over answers y that the policy π itself writes (Ouyang et al. 2022, eq.
    2), by the clipped surrogate of Schulman et al. 2017 (eq. 7). `start` is the policy and its reference, a chat model;
    a step is a round of answers, and the result is a chat model again."""

    files: ClassVar[type[Files]] = PromptFiles
    kinds: ClassVar[tuple[str, ...]] = ("decoder", "decoder-decoder")
    loss_unit: ClassVar[str] = "answers"
    has_perplexity: ClassVar[bool] = False
    metrics: ClassVar[dict[str, bool]] = {"reward": True}
    needs_start: ClassVar[bool] = True
    fills_rows: ClassVar[bool] = True
    required_keys: ClassVar[tuple[str, ...]] = ("reward",)
    free_keys: ClassVar[tuple[str, ...]] = ("reference", "reward")
    default_steps: ClassVar[int] = 100
    unused_keys: ClassVar[tuple[str, ...]] = (
        "batch", "optimiser", "schedule", "epochs", "accumulate", "clip", "precision", "compile", "parallel",
        "checkpoint_activations", "set_", "tensorboard", "retrieval", "decoding",
    )  # fmt: skip
    kind: Literal["ppo"] = "ppo"
    reward: Path | None = None
    """Model folder of the reward model, trained with `task: preference`; required."""

    def encoding(self, vocabularies: Vocabularies, labels: Sequence[str], max_tokens: int | None) -> Encoding:
        self._refuse()

    def items(self, store: Store, vocabularies: Vocabularies, capacities: tuple[int, ...], seed: int) -> Items:
        self._refuse()

    def objective(self, model: Any, hidden: Tensor, layout: TokenLayout, labels: Tensor) -> Loss:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError("ppo learns from answers that it draws itself: training/ppo.py")
