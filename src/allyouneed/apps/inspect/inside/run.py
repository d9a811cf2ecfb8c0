"""A recorded forward pass: `model.inside("…")` of a predictor, `inside(module, batch)` of a bare module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from allyouneed.apps.inspect.inside.changes import (
    Change,
    ablation,
    input_side,
    leave_out,
    one_number,
    patching,
    place_tokens,
)
from allyouneed.apps.inspect.inside.effects import Effect, measure
from allyouneed.apps.inspect.inside.lens import lens_logits
from allyouneed.apps.inspect.inside.mixing import Mixing, mixing, mixing_sites, rollout
from allyouneed.apps.inspect.inside.reading import Prediction, Reading, Token, next_tokens, plain_tokens
from allyouneed.apps.inspect.inside.recorder import Recorder, Values, run_recorded
from allyouneed.apps.inspect.inside.steps import Step, decode_steps
from allyouneed.apps.inspect.inside.truth import differences, double_run
from allyouneed.apps.inspect.inside.why import Why, explain
from allyouneed.errors import UserError
from allyouneed.nn.batch import Batch, Neighbours, Rows, Signal

MATRICES = 8  # kept
MOST_BYTES = 1 << 26  # of a matrix that is kept beside others


class ScoredOutput(NamedTuple):
    """An output, its text and its log-probability."""

    id: int
    text: str
    log_prob: float


class Run:
    """Every value of a forward pass by name. Tensors are the model's own, with the batch as the first axis.

    `names`: sites in the order of computation, with their shapes. `run["encoder.0.mixer"]`: a value. `tokens`: of each
    stack. `logits`: the output of the head. `answers`: what the model chose. `python`: the line that made it.
    """

    def __init__(
        self,
        model: Any,
        reading: Reading,
        logits: Tensor,
        recorder: Recorder,
        changes: Sequence[Change] = (),
        before: Run | None = None,
    ) -> None:
        self.model, self.reading, self.logits, self.recorder = model, reading, logits, recorder
        self.batch, self.python = reading.batch, reading.python
        self.values: Values = recorder.values
        self.changes, self.before = tuple(changes), before
        self._matrices: dict[Any, Mixing] = {}
        self._effects: dict[str, list[Effect]] = {}
        self._largest: dict[str, float] = {}
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
        """The shape of a value; scores and weights (batch, heads, queries, keys) are not computed for it."""
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
        return decode_steps(self.model, self.batch, self._prompt)

    @cached_property
    def paged_steps(self) -> list[Step]:
        """The same with growing caches in blocks of a pool, as in the server."""
        return decode_steps(self.model, self.batch, self._prompt, paged=True)

    @property
    def _prompt(self) -> int:
        """Tokens that are read at once."""
        return min(self.reading.given, self.batch.rows.tokens.shape[1])

    @property
    def bytes(self) -> int:
        """Memory of the recorded values."""
        return self.values.bytes

    def name(self, number: int) -> str:
        """The text of an output: a token, a class, a tag."""
        return self.reading.name(number)

    def scores(self, position: int | None = None) -> Tensor:
        """Log-probabilities (outputs,) at a position of the target; `None`: of the whole input. Of an image and a text:
        their similarity."""
        if self.reading.output == "vector":
            raise UserError("this model outputs a vector; it has no probabilities")
        row = self.logits[0] if position is None else self.logits[0, position]
        if row.dim() != 1:
            raise UserError(f"give a position from 0 to {self.logits.shape[1] - 1}")
        row = row if row.dtype == torch.float64 else row.float()
        return row if self.reading.output == "similarity" else row.log_softmax(-1)

    def candidates(self, position: int | None = None, top: int = 5) -> list[ScoredOutput]:
        """The likeliest outputs at a position, best first."""
        return self._best(self.scores(position), top)

    def _best(self, scores: Tensor, top: int) -> list[ScoredOutput]:
        log_probs = scores.float().log_softmax(-1)  # of log-probabilities, these are themselves
        best = log_probs.topk(min(top, len(log_probs)))
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [ScoredOutput(number, self.name(number), value) for number, value in pairs]

    def log_prob(self, answer: Prediction) -> float:
        return float(self.scores(answer.position)[answer.id])

    # --- mixing -----------------------------------------------------------------------------------------------------

    @cached_property
    def mixers(self) -> list[str]:
        """Sites of the token mixers, for `matrix`."""
        return mixing_sites(self.values, self.recorder.calls)

    def matrix(self, site: str, heads: Sequence[int] | None = None) -> Mixing:
        """The matrix of a token mixer, out = M v: attention weights, or what does the same (inside/mixing.py). `heads`:
        which heads or channels; default: all heads, or a few channels."""
        key = (site, None if heads is None else tuple(heads))
        if key not in self._matrices:
            found = mixing(self.model, self.recorder, site, heads)
            if len(self._matrices) >= MATRICES or found.weights.nbytes > MOST_BYTES:
                self._matrices.clear()
            self._matrices[key] = found
        return self._matrices[key]

    @cached_property
    def rollout(self) -> dict[str, dict[str, Tensor]]:
        """Attention rollout: {stack: {stack of the inputs: (queries, inputs)}}, rows of shares that sum to 1."""
        return rollout({site: self.matrix(site).average for site in self.mixers}, self.stacks)

    # --- why ----------------------------------------------------------------------------------------------------------

    def why(self, answer: int = 0, method: str = "causal", unit: str = "token") -> Why:
        """What answer number `answer` rests on (inside/why.py). `method`: causal, attention, rollout or logits; `unit`:
        token, head, sublayer or block."""
        return explain(self, self._answer(answer), method, unit)

    def effects(self, unit: str = "token") -> list[Effect]:
        """What the log-probabilities of all answers become without each token, head, sub-layer or block."""
        if unit not in self._effects:
            self._effects[unit] = measure(self, unit)
        return self._effects[unit]

    def lens(self, answer: int = 0, top: int = 5) -> dict[str, list[ScoredOutput]]:
        """Logit lens: the `top` likeliest outputs after the embedding and after each block, by site."""
        found = lens_logits(self, self._answer(answer).position)
        return {site: self._best(row, top) for site, row in found.items()}

    def _answer(self, number: int) -> Prediction:
        if not self.answers:
            vector = self.reading.output == "vector"
            raise UserError(
                "this model outputs a vector: there is no word to explain"
                if vector
                else "this run has no answer: the model chose nothing"
            )
        if not -len(self.answers) <= number < len(self.answers):
            raise UserError(f"answer {number}: expected 0 to {len(self.answers) - 1}")
        return self.answers[number]

    # --- what if ------------------------------------------------------------------------------------------------------

    def ablate(self, *sites: str) -> Run:
        """The run with parts switched off: a block (`decoder.3`) passes its input on; a sub-layer (`decoder.3.mixer`)
        and heads (`decoder.3.mixer.heads[4]`) give zeros."""
        listed = ", ".join(map(repr, sites))
        return self._changed(self._fixed, [ablation(site) for site in sites], f"ablate({listed})")

    def patch(self, site: str, new: Any, positions: Sequence[int] | Mapping[int, int] | None = None) -> Run:
        """The run with a value replaced. `new`: another run (its value at the same site), a tensor, a number or a
        function of the value. `positions`: only these tokens; {here: there} takes token `there` of the other run."""
        shown = new.python if isinstance(new, Run) else repr(new) if isinstance(new, int | float) else "new"
        where = "" if positions is None else f", positions={positions!r}"
        return self._changed(self._fixed, [patching(site, new, positions)], f"patch({site!r}, {shown}{where})")

    def edit(self, site: str, at: Sequence[int], number: float) -> Run:
        """The run with one number changed; `at`: its index on the axes after the batch."""
        text = f"edit({site!r}, {tuple(at)!r}, {number!r})"
        return self._changed(self._fixed, [one_number(site, at, number)], text)

    def mask(self, *tokens: int, stack: str | None = None) -> Run:
        """The run without some tokens; the others keep their positions. `stack`: which reads them; default: the
        first."""
        side = stack or next(iter(self.tokens))
        reading, changes = leave_out(self.model, self._fixed, side, tokens)
        named = "" if stack is None else f", stack={stack!r}"
        return self._changed(reading, changes, f"mask({', '.join(map(str, tokens))}{named})")

    def place(self, positions: Sequence[int], stack: str | None = None) -> Run:
        """The run with other positions for the tokens of a stack."""
        reading = place_tokens(self.model, self._fixed, stack or next(iter(self.tokens)), positions)
        named = "" if stack is None else f", stack={stack!r}"
        return self._changed(reading, [], f"place({list(positions)!r}{named})")

    @property
    def _fixed(self) -> Reading:
        """The reading with the answers of this run, which changed runs are asked about."""
        return replace(self.reading, answers=self.answers, replies=None)

    @property
    def original(self) -> Run:
        """The run before all changes."""
        return self if self.before is None else self.before.original

    def position_of(self, answer: int) -> int | None:
        """The position of an answer of the original run in this one; None: it was left out, or answers have none."""
        position, moved = self.original.answers[answer].position, self.reading.moved
        return position if position is None or moved is None else moved.get(position)

    def rewrite(self, most: int | None = None) -> list[ScoredOutput]:
        """Greedy decoding under the changes, without caches: the tokens that the changed model would choose. `most`:
        tokens; default: 16 more than the answers."""
        if not self.decodes or input_side(self.model, "decoder") != "target":
            raise UserError("this model does not answer token by token")
        rows, begin = self.batch.rows, self.reading.given
        kept = set(range(begin)) if self.reading.moved is None else {n for n in self.reading.moved if n < begin}
        prompt, found = len(kept), list[ScoredOutput]()
        if not prompt or rows.positions is not None or rows.prompt is not None:
            raise UserError("the target was moved or masked; it cannot be continued")
        tokens = rows.tokens[:1, :prompt]
        count = len(self.answers) + 16 if most is None else most
        limit = self.model.config.limit
        for _ in range(count if limit is None else min(count, limit - prompt + 1)):
            batch = replace(self.batch, target=Rows(tokens))
            edits = [change.edit() for change in self.changes]
            logits = run_recorded(self.model, batch, edits, keep=lambda name: False)[0][0, -1].float()
            logits[list(self.reading.never)] = float("-inf")
            found += self._best(logits, 1)
            if found[-1].id in self.reading.ends:
                break
            tokens = torch.cat((tokens, tokens.new_tensor([[found[-1].id]])), 1)
        return found

    def _changed(self, reading: Reading, changes: Sequence[Change], text: str) -> Run:
        every = [*self.changes, *changes]
        python = f"{self.python}.{text}"
        logits, recorder = run_recorded(self.model, reading.batch, [change.edit() for change in every])
        recorder.check()
        return Run(self.model, replace(reading, python=python), logits, recorder, every, self)

    # --- truth ------------------------------------------------------------------------------------------------------

    def truth(self) -> dict[str, float]:
        """{site: largest |difference| from the same run in float64, with the same weights}"""
        return dict(self._differences)

    @cached_property
    def _differences(self) -> dict[str, float]:
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

    def shown(self, name: str) -> Tensor:
        """A value as it is shown: scores that the model masks with the smallest number of their dtype are −∞."""
        value = self.values[name]
        if not value.is_floating_point() or not name.endswith("scores"):
            return value
        return value.masked_fill(value == torch.finfo(value.dtype).min, -torch.inf)

    def largest(self, name: str) -> float:
        """The largest |number| of a value; masked scores do not count."""
        if name not in self._largest:
            value = self.shown(name)
            size = value.abs() if value.is_floating_point() else value.double().abs()
            size = size.masked_fill(~size.isfinite(), 0.0)
            self._largest[name] = float(size.max()) if size.numel() else 0.0
        return self._largest[name]


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
        embed = getattr(config, "source_embed", None) or getattr(config, "embed", None)
        tokens = {"encoder": _tokens(batch.source, embed)} if batch.source is not None else {}
        tokens["decoder"] = _tokens(batch.target)
    answers: list[Prediction] = []
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
