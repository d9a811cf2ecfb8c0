"""Handling of non-finite losses and gradients.

The update itself is already a no-op on the device (see `step.py`). Here the batch is reported and recorded; after
several bad updates in a row the weights are suspect, and training rewinds to the last valid checkpoint and continues
with the data that follows. A checkpoint that leads to nothing but bad updates is set aside for the one before. If that
does not help, training stops. During a streak of bad updates nothing is validated, saved or deleted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from allyouneed.data.batches.packing import Batches
from allyouneed.errors import UserError
from allyouneed.training.step import StepResult

IN_A_ROW = 3  # bad updates before rewinding; finite ones that prove a checkpoint good
REWINDS = 3
RECOVERED = 20  # finite updates in a row after which a checkpoint resets the count of rewinds
SHOWN = 2  # sentences recorded in full

FAR = 2.0  # above ln of the vocabulary, that is e² times its perplexity

Verdict = Literal["good", "skipped", "rewind"]


class NonFiniteGuard:
    def __init__(self, folder: Path, data: Batches, report: Callable[[str], None], writes: bool = True) -> None:
        """`writes`: record bad batches; only the main process does."""
        self.path, self.data, self.report, self.writes = folder / "bad-batches.jsonl", data, report, writes
        self.consecutive = 0  # non-finite updates in a row, up to now
        self.finite = 0  # finite ones
        self.proven = 0  # the last step whose weights are known to be good: finite updates followed it
        self.rewinds = 0
        self.rewound_to: int | None = None  # the step of the last rewind, until an update after it was finite

    @property
    def in_streak(self) -> bool:
        """Whether the last update was not finite."""
        return self.consecutive > 0

    def check(self, result: StepResult) -> Verdict:
        if result.finite:
            self.consecutive, self.rewound_to = 0, None
            self.finite += 1
            if self.finite >= IN_A_ROW:
                self.proven = result.step - IN_A_ROW
            return "good"
        self.consecutive += 1
        self.finite = 0
        entry = self._describe(result)
        if self.writes:
            self._record(entry)
        what = "loss" if result.loss != result.loss or abs(result.loss) == float("inf") else "gradient"
        self.report(
            f"step {result.step}: the {what} is not finite; the update is skipped. Sentences "
            f"{_few(entry['sentences'])} of the training data (see {self.path.name})"
        )
        return "rewind" if self.consecutive >= IN_A_ROW else "skipped"

    def is_diverged(self, step: int) -> bool:
        """Whether a rewind to the checkpoint of this step led to nothing but bad updates."""
        return self.rewound_to == step

    def on_rewind(self, step: int) -> None:
        """Training was rewound to `step`. Raise after too many rewinds."""
        why = f"{IN_A_ROW} in a row" if self.consecutive >= IN_A_ROW else "the run would end with skipped updates"
        self.consecutive = self.finite = 0
        self.proven, self.rewound_to = min(self.proven, step), step
        self.rewinds += 1
        if self.rewinds > REWINDS:
            raise UserError(
                f"the loss keeps becoming non-finite after step {step}, even after {REWINDS} rewinds to the last valid "
                f"checkpoint; lower the learning rate, set clip, or use precision: fp32 (bad batches: {self.path})"
            )
        self.report(f"{why}: rewinding to the checkpoint of step {step}, continuing after the bad batches")

    def on_checkpoint(self) -> None:
        """A checkpoint after enough finite updates resets the count of rewinds."""
        if self.finite >= RECOVERED:
            self.rewinds = 0

    def _describe(self, result: StepResult) -> dict[str, Any]:
        numbers = [n for position in result.positions for n in self.data.describe(*position)]
        return {
            "step": result.step,
            "epoch": result.positions[0].epoch,
            "batches": [position.batch for position in result.positions],
            "loss": repr(result.loss),
            "gradient_norm": repr(result.norm),
            "sentences": numbers,
            "first": [{"number": n} | self.data.items.show(n) for n in numbers[:SHOWN]],
        }

    def _record(self, entry: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as error:
            self.report(f"{self.path}: cannot be written: {error.strerror}")


def _few(numbers: list[int]) -> str:
    more = f", … ({len(numbers)} in all)" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more


def high_first_loss(loss: float, vocabulary: int) -> str | None:
    """What to say where new weights begin far above the loss of equal probabilities."""
    even = math.log(vocabulary)
    if loss <= even + FAR:
        return None
    return (
        f"the first loss, {loss:.1f}, is far above {even:.1f}, that of equal probabilities: the initial scores are too "
        "large; check model.init (balanced: true), embed.scale and embed.tied"
    )
