"""A run of PPO by a recipe: prompts, checkpoints to resume from, log, model folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from allyouneed.config import tree_of
from allyouneed.data.files.chats import Chat
from allyouneed.data.files.readers import Files, Report
from allyouneed.errors import UserError
from allyouneed.files import write_text
from allyouneed.infer.predictors.chatting import folder_template
from allyouneed.infer.predictors.registry import predictor
from allyouneed.infer.predictors.reward import RewardModel
from allyouneed.interop.load import load
from allyouneed.nn.models.precision import stored_as
from allyouneed.tasks.feedback.ppo import PPOTask
from allyouneed.training.backend import Backend
from allyouneed.training.checkpoints import Checkpoint, Checkpoints, TrainState
from allyouneed.training.finish import model_card, origin_line
from allyouneed.training.optim.optimiser import load_state_tensors, state_tensors
from allyouneed.training.planning.data_size import EVERY
from allyouneed.training.ppo.tuner import PPOTuner
from allyouneed.training.prepare import RunFolder
from allyouneed.training.recipe.recipe import Recipe
from allyouneed.training.reporting.log import Log
from allyouneed.training.reporting.progress import PLAIN_EVERY, Reporter
from allyouneed.training.signals import Interrupted, StopRequest

Scores = dict[str, dict[str, float]]


class PPORun:
    """Rounds of PPO with checkpoints. A round is a function of what a checkpoint holds, so that a run that was stopped
    resumes with the same numbers."""

    def __init__(self, recipe: Recipe, run: RunFolder, backend: Backend, reporter: Reporter) -> None:
        assert isinstance(recipe.task, PPOTask) and recipe.start is not None
        self.recipe, self.run, self.backend, self.reporter = recipe, run, backend, reporter
        assert recipe.task.reward is not None
        reward = load_reward(recipe.task.reward, backend)
        self.tuner = PPOTuner(recipe.start, reward, recipe.task, recipe.seed % (1 << 32), backend.device)
        if (stored := stored_as(self.tuner.model)) is not None:
            raise UserError(f"{recipe.start}: its weights are quantized ({stored}); start from the original")
        self.prompts = self._read(recipe.data.train, "training")
        self.held_out = {
            name: self._read(files, name)
            for name, files in (("valid", recipe.data.valid), ("test", recipe.data.test))
            if files
        }
        self.checkpoints = Checkpoints(run.checkpoints, recipe.save.keep, reporter.print)
        self.state = TrainState()
        self.resumed = self._resume()
        self.total = recipe.last_step or 0
        self.log = Log(run.log, self.state.step)

    def _read(self, files: Sequence[Files], name: str) -> list[list[Any]]:
        """The prompts that leave room for an answer."""
        report, found = Report(), list[list[Any]]()
        template, limit = folder_template(self.tuner.folder), self.tuner.model.config.limit
        examples = (example for entry in files for example in entry.read(report))
        for example in self.recipe.data.filters.apply(examples, report):
            assert isinstance(example, Chat)
            tokens = len(template.prompt(list(example.messages))) + self.tuner.settings.max_length
            if limit is not None and tokens > limit:
                detail = f"{tokens} tokens with an answer of {self.tuner.settings.max_length}, at most {limit}"
                report.drop("too many tokens", example.file, example.line, detail, example.texts[-1])
            else:
                found.append(list(example.messages))
        self.reporter.print(f"{name} prompts: {report.text()}")
        if not found:
            raise UserError(f"none of the {name} prompts is usable\n{report.text()}")
        return found

    def _resume(self) -> bool:
        newest = self.checkpoints.latest_valid()
        if newest is None:
            return False
        from safetensors.torch import load_file

        self.state, _ = newest.restore(self.tuner.model, self.tuner.optimiser)
        tensors = load_file(newest.path / "training" / "memory.safetensors")
        parts = {"value": dict[str, Tensor](), "optimiser": dict[str, Tensor]()}
        for name, tensor in tensors.items():
            part, _, rest = name.partition("/")
            parts[part][rest] = tensor
        self.tuner.value.load_state_dict(parts["value"])
        load_state_tensors(self.tuner.value_optimiser, self.tuner.value, parts["optimiser"])
        return True

    def save(self, regular: bool) -> Checkpoint | None:
        self.log.flush(sync=True)
        value, optimiser = self.tuner.value, self.tuner.value_optimiser
        # the value head is stored where other runs keep a segment memory
        tensors = {f"value/{name}": tensor.detach().cpu().contiguous() for name, tensor in value.named_parameters()}
        for name, tensor in state_tensors(optimiser, value).items():
            tensors[f"optimiser/{name}"] = tensor.cpu().contiguous()
        saved = self.checkpoints.save(self.tuner.folder, self.tuner.optimiser, self.state, regular, (tensors, None))
        if saved is not None:
            self.checkpoints.prune(self.state, self.state.step)
        return saved

    def train(self) -> None:
        """Train to the last round, or raise Interrupted."""
        saved = time.monotonic()
        printed = 0.0
        if not self.resumed:
            self.save(regular=True)  # reports a full disk early
        with StopRequest(self.reporter.print) as stop:
            while self.state.step < self.total:
                began = time.monotonic()
                found = self.tuner.round(self.state.step + 1, self.prompts)
                now, last = time.monotonic(), found.step == self.total
                answers, seconds = self.state.tokens + self.tuner.settings.batch, self.state.seconds + now - began
                self.state = replace(self.state, step=found.step, tokens=answers, seconds=seconds)
                self.log.write(asdict(found))
                if found.step == 1 or last or now - printed >= PLAIN_EVERY:
                    printed = now
                    self.reporter.print(
                        f"step {found.step:,}/{self.total:,}  reward {found.reward:.3f}  divergence "
                        f"{found.divergence:.3f} nats  {found.tokens:.1f} tokens per answer"
                    )
                if found.step % (self.recipe.validation.every or EVERY) == 0 and not last:
                    self.validate()
                if self._due(now - saved) or last or stop.requested:
                    self._save_or_refuse(last)
                    saved = time.monotonic()
                if stop.requested and not last:
                    raise Interrupted(found.step)

    def _due(self, seconds: float) -> bool:
        """Whether a checkpoint is due `seconds` after the last."""
        minutes = self.recipe.save.minutes
        return self._on_schedule or (minutes is not None and seconds >= 60 * minutes)

    @property
    def _on_schedule(self) -> bool:
        every = self.recipe.save.every
        return every is not None and self.state.step % every == 0

    def _save_or_refuse(self, last: bool) -> None:
        if self.save(regular=self._on_schedule or last) is None and last:
            raise UserError(f"{self.run.folder}: the last checkpoint was not saved; free disk space and run it again")

    def validate(self) -> Scores:
        """The mean reward of one answer to each held-out prompt."""
        scores: Scores = {}
        for name, prompts in self.held_out.items():
            some = prompts[: self.recipe.validation.limit]
            scores[name] = {"reward": float(self.tuner.draw(some, 0).rewards.mean())}
            self.reporter.print(
                f"step {self.state.step:,} {name}  reward {scores[name]['reward']:.3f} of {len(some):,} prompts"
            )
        if scores:
            self.log.write({"step": self.state.step, **scores})
            self.log.flush()
        return scores

    def finish(self, recipe_text: str, sums: dict[str, str]) -> Scores:
        """Write the model folder and the result."""
        scores, folder = self.validate(), self.tuner.folder
        self.tuner.model.eval()
        fields = {
            "name": self.recipe.name or self.run.folder.name,
            "description": self.recipe.description,
            "kind": tree_of(self.tuner.model.config)["kind"],
            "parameters": self.tuner.model.config.cost().parameters,
            "licence": self.recipe.licence,
            "origin": origin_line(Path(str(self.recipe.start))),
            "task": "ppo",
            "labels": [],
            "vocabulary": f"{folder.tokenizers.target.size:,} tokens (that of the model it started from)",
            "examples": f"{len(self.prompts):,} prompts",
            "tokens": f"{self.state.tokens:,} answers",
            "steps": self.state.step,
            "epochs": -(-self.state.tokens // len(self.prompts)),
            "machine": str(self.backend.device),
            "weights": f"step {self.state.step}",
            "unit": "prompts",
            "columns": ["reward"],
            "scores": scores,
            "scored": {name: len(prompts) for name, prompts in self.held_out.items()},
            "sha256": sums,
        }
        replace(folder, card=model_card(fields, recipe_text)).save(self.run.model)
        result = {
            "steps": self.state.step,
            "asked": {"steps": self.recipe.last_step, "epochs": None},
            "weights": fields["weights"],
            "answers": self.state.tokens,
            "training_seconds": self.state.seconds,
            "scores": scores,
            "examples": fields["scored"],
        }
        write_text(self.run.result, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        self.reporter.print(f"the model is in {self.run.model}")
        return scores


def load_reward(path: Path, backend: Backend) -> RewardModel:
    found = predictor(load(path, backend.device))
    if not isinstance(found, RewardModel):
        kind = found.folder.task.get("kind")
        raise UserError(f"task.reward: {path} is a model for {kind}, not a reward model; train one (task: preference)")
    return found
