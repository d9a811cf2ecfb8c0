"""A recorded forward pass: `model.inside("…")` of a predictor, `inside(module, batch)` of a bare module."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.errors import UserError
from allyouneed.infer.inside.reading import Answer, Reading, Token, next_tokens, plain_tokens
from allyouneed.infer.inside.recorder import Recorder, Values, run_recorded
from allyouneed.infer.inside.steps import Step, decode_steps
from allyouneed.infer.inside.truth import differences, double_run
from allyouneed.nn.batch import Batch, Neighbours, Rows, Signal


class Candidate(NamedTuple):
    """An output, its text and its log-probability."""

    id: int
    text: str
    log_prob: float


class Run:
    """Every value of a forward pass by name. Tensors are the model's own, with the batch as the first axis.

    `names`: sites in the order of computation, with their shapes. `run["encoder.0.mixer"]`: a value. `tokens`: of each
    stack. `logits`: the output of the head. `answers`: what the model chose. `python`: the line that made it.
    """

    def __init__(self, model: Any, reading: Reading, logits: Tensor, recorder: Recorder) -> None:
        self.model, self.reading, self.logits, self.recorder = model, reading, logits, recorder
        self.batch, self.python = reading.batch, reading.python
        self.values: Values = recorder.values
        self.answers = reading.answers if reading.replies is None else reading.replies(logits)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def __repr__(self) -> str:
        return f"Run({len(self.values)} values, {self.python})"

    @cached_property
    def names(self) -> dict[str, tuple[int, ...]]:
        """Sites and shapes, in the order of computation."""
        return {name: self._shape(name) for name in self.values}

    def _shape(self, name: str) -> tuple[int, ...]:
        """Without computing scores and weights: (batch, heads, queries, keys)."""
        part, _, inner = name.rpartition(".")
        if inner in ("scores", "weights") and f"{part}.q" in self.values and f"{part}.k" in self.values:
            return (*self.values[f"{part}.q"].shape[:3], self.values[f"{part}.k"].shape[2])
        return tuple(self.values[name].shape)

    @property
    def tokens(self) -> dict[str, list[Token]]:
        return self.reading.tokens

    @cached_property
    def stacks(self) -> dict[str, int]:
        """Names of the stacks that ran, and their numbers of blocks."""
        found: dict[str, int] = {}
        for name in self.values:
            stack, _, rest = name.rpartition(".in")[0].rpartition(".") if name.endswith(".in") else ("", "", "")
            if rest.isdigit():
                found[stack] = max(found.get(stack, 0), int(rest) + 1)
        return found

    @property
    def decodes(self) -> bool:
        """Whether the model answers token by token."""
        return bool(self.model.config.generates) and hasattr(self.model, "advance") and bool(self.answers)

    @cached_property
    def steps(self) -> list[Step]:
        """Decoding step by step, with the states that the model keeps; of generative models."""
        return decode_steps(self.model, self.batch, min(self.reading.given, self.batch.rows.tokens.shape[1]))

    def name(self, number: int) -> str:
        """The text of an output: a token, a class, a tag."""
        return self.reading.name(number)

    def scores(self, position: int | None = None) -> Tensor:
        """Log-probabilities (outputs,) at a position of the target; `None`: of the whole input."""
        if self.reading.output == "vector":
            raise UserError("this model outputs a vector; it has no probabilities")
        row = self.logits[0] if position is None else self.logits[0, position]
        if row.dim() != 1:
            raise UserError(f"give a position from 0 to {self.logits.shape[1] - 1}")
        return row.float().log_softmax(-1) if row.dtype != torch.float64 else row.log_softmax(-1)

    def candidates(self, position: int | None = None, top: int = 5) -> list[Candidate]:
        """The likeliest outputs at a position, best first."""
        best = self.scores(position).topk(min(top, self.logits.shape[-1]))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Candidate(number, self.name(number), value) for number, value in pairs]

    def log_prob(self, answer: Answer) -> float:
        return float(self.scores(answer.position)[answer.id])

    # --- truth ------------------------------------------------------------------------------------------------------

    def truth(self) -> dict[str, float]:
        """{site: largest |difference| from the same run in float64, with the same weights}"""
        return differences(self.values, self._exact)

    @cached_property
    def _exact(self) -> Values:
        return double_run(self.model, self.batch)

    def exact_answers(self) -> list[bool]:
        """For each answer, whether it is as likely in float64: not more than others by less than rounding."""
        head = "logits" if "head" not in self._exact else "head"
        if self.reading.output in ("vector", "similarity") or head not in self._exact:
            return []
        here, there = self.logits[0], self._exact[head][0]
        rows = [(here, there) if a.position is None else (here[a.position], there[a.position]) for a in self.answers]
        return [int(one.argmax()) == int(other.argmax()) for one, other in rows]

    def largest(self, name: str) -> float:
        """The largest |number| of a value; masked scores do not count."""
        value = self.values[name]
        if not value.is_floating_point():
            return float(value.abs().max()) if value.numel() else 0.0
        kept = value[(value != torch.finfo(value.dtype).min) & value.isfinite()]
        return float(kept.abs().max()) if kept.numel() else 0.0


def inside(model: Any, batch: Batch | Rows | Signal, target: Any = None) -> Run:
    """Run a bare module on a batch, or on one input, and record. Rows of the batch are the first axis of every value;
    answers are those of its first row."""
    given = batch if isinstance(batch, Batch) else Batch(batch)
    if target is not None:
        given = Batch(target if isinstance(target, Rows) else Rows.of(target), given.target)
    return record(model, bare_reading(model, given))


def record(model: Any, reading: Reading) -> Run:
    logits, recorder = run_recorded(model, reading.batch)
    return Run(model, reading, logits, recorder)


def bare_reading(model: Any, batch: Batch) -> Reading:
    """How to read the output of a module without tokenizer and labels: ids are their own names."""
    config = model.config
    tokens: dict[str, list[Token]] = {}
    if config.kind == "two-towers":
        tokens = {"image.encoder": _tokens(batch.source), "text.encoder": _tokens(batch.target)}
    elif config.kind == "decoder-decoder":
        tokens = dict.fromkeys(("first", "second"), _tokens(batch.target))
    elif config.kind == "encoder":
        tokens = {"encoder": _tokens(batch.target, config.embed)}
    else:
        embed = getattr(config, "source_embed", None) or config.embed
        tokens = {"encoder": _tokens(batch.source, embed)} if batch.source is not None else {}
        tokens["decoder"] = _tokens(batch.target)
    answers: list[Answer] = []
    generates = getattr(config, "generates", False)
    if generates and isinstance(batch.target, Rows):
        row = batch.target.tokens[0]
        ids = row.tolist() if batch.target.lengths is None else row[: int(batch.target.lengths[0])].tolist()
        answers = next_tokens(ids, None, 1)
    return Reading(batch, tokens, answers, "tokens" if generates else "other", name=str, python="inside(module, batch)")


def _tokens(given: Any, embed: Any = None) -> list[Token]:
    if isinstance(given, Rows):
        return [Token(number, str(number), n) for n, number in enumerate(given.tokens[0].tolist())]
    if isinstance(given, Neighbours):
        return [Token(number, str(number), n) for n, number in enumerate(given.tokens[0].flatten().tolist())]
    if isinstance(given, Signal) and given.values.dim() == 4:
        return plain_tokens(getattr(embed, "token_count", 0), "patch")
    return plain_tokens((given.values.shape[-1] + 1) // 2, "frame") if isinstance(given, Signal) else []
