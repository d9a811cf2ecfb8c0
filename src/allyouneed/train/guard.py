"""What happens when a loss or a gradient is not a number.

The update itself was already refused on the device (see `step.py`). Here the batch is named and written down; when
several in a row are bad, the weights are to blame, and training goes back to the last good checkpoint and on with
the data that follows. When that does not help either, it stops.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from allyouneed.data.batches.packing import Batches
from allyouneed.errors import UserError
from allyouneed.train.step import Measured

IN_A_ROW = 3
REWINDS = 3
SHOWN = 2  # sentences written down in full

Verdict = Literal["good", "skipped", "rewind"]


class Guard:
    def __init__(self, folder: Path, data: Batches, say: Callable[[str], None], writes: bool = True) -> None:
        """`writes`: no other process of the run does."""
        self.path, self.data, self.say, self.writes = folder / "bad-batches.jsonl", data, say, writes
        self.row = 0
        self.rewinds = 0

    def judge(self, measured: Measured) -> Verdict:
        if measured.finite:
            self.row = 0
            return "good"
        self.row += 1
        entry = self._describe(measured)
        if self.writes:
            self._record(entry)
        what = "loss" if measured.loss != measured.loss or abs(measured.loss) == float("inf") else "gradient"
        self.say(
            f"step {measured.step}: the {what} is not finite; the update is skipped. Sentences "
            f"{_few(entry['sentences'])} of the training data (see {self.path.name})"
        )
        return "rewind" if self.row >= IN_A_ROW else "skipped"

    def rewound(self, step: int) -> None:
        """Training is back at `step`. Too often without having passed a checkpoint in between: it cannot go on."""
        self.row = 0
        self.rewinds += 1
        if self.rewinds > REWINDS:
            raise UserError(
                f"the loss keeps becoming non-finite after step {step}, even after {REWINDS} returns to the last good "
                f"checkpoint; lower the learning rate, set clip, or use precision: fp32 (bad batches: {self.path})"
            )
        self.say(f"{IN_A_ROW} in a row: back to the checkpoint of step {step}, on with the data after the bad batches")

    def checkpointed(self) -> None:
        """A new good checkpoint: earlier returns are forgiven."""
        self.rewinds = 0

    def _describe(self, measured: Measured) -> dict[str, Any]:
        numbers = [n for place in measured.places for n in self.data.describe(*place)]
        return {
            "step": measured.step,
            "epoch": measured.places[0].epoch,
            "batches": [place.batch for place in measured.places],
            "loss": repr(measured.loss),
            "gradient_norm": repr(measured.norm),
            "sentences": numbers,
            "first": [{"number": n} | self.data.items.show(n) for n in numbers[:SHOWN]],
        }

    def _record(self, entry: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        except OSError as error:
            self.say(f"{self.path}: cannot be written: {error.strerror}")


def _few(numbers: list[int]) -> str:
    more = f", … ({len(numbers)} in all)" if len(numbers) > 5 else ""
    return ", ".join(map(str, numbers[:5])) + more
