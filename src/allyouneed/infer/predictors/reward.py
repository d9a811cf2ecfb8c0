"""Reward models: scores of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from allyouneed.data.chat.template import ChatTemplate, check_messages
from allyouneed.data.files.chats import Comparison
from allyouneed.errors import UserError
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.predictors.base import EvaluationResult, Predictor, evenly_spaced, run_in_batches, to_list
from allyouneed.infer.predictors.chatting import Messages, folder_template
from allyouneed.nn.batch import Batch, Rows


class RewardModel(Predictor):
    """Scores answers to prompts (Ouyang et al. 2022, eq. 1). Only differences between answers to one prompt have a
    meaning: σ(difference) is the probability that the first one is preferred."""

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return folder_template(self.folder)

    def score(self, prompts: Messages | Sequence[Messages], answers: str | Sequence[str]) -> Any:
        """The reward of an answer to a prompt (a text, or messages), or of each answer of a list to the prompt of the
        same index."""
        if isinstance(answers, str):
            return self.score([prompts], [answers])[0]  # type: ignore[arg-type]
        if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping)):
            raise UserError("score takes one prompt per answer: score([prompt, …], [answer, …])")
        if len(prompts) != len(answers):
            raise UserError(f"score: {len(prompts)} prompts, but {len(answers)} answers")
        rows = [self._row(prompt, text) for prompt, text in zip(prompts, answers, strict=True)]

        def answer(batch: list[int]) -> list[float]:
            given = Rows.of([rows[n] for n in batch], self.tokenizer.pad).to(self.device)
            return to_list(self.model.logits(Batch(given)).squeeze(-1))

        return run_in_batches(self.model, [len(row) for row in rows], answer)

    def _row(self, prompt: Any, text: str) -> list[int]:
        messages = check_messages(prompt)
        ids = [*self.chat_template.prompt(messages), *self.chat_template.answer(messages, text)]
        if self.limit is not None and len(ids) > self.limit:
            raise UserError(f"prompt and answer: {len(ids)} tokens, more than the model's {self.limit}; shorten them")
        return ids

    def judge(
        self, examples: Sequence[Comparison], decoding: Decoding | None = None, show: int = 0, resamples: int = 0
    ) -> EvaluationResult:
        prompts = [list(example.messages) for example in examples]
        chosen = self.score(prompts, [example.chosen for example in examples])
        rejected = self.score(prompts, [example.rejected for example in examples])
        margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
        figures = {
            "accuracy": 100 * sum(margin > 0 for margin in margins) / len(margins),
            "margin": sum(margins) / len(margins),
        }
        text = (
            f"accuracy {figures['accuracy']:5.1f} %\nmargin   {figures['margin']:5.2f}  of {len(margins)} comparisons"
        )
        samples = [
            {
                "prompt": example.messages[-1]["content"],
                f"chosen {one:+.2f}": example.chosen,
                f"rejected {other:+.2f}": example.rejected,
            }
            for example, one, other in evenly_spaced(list(zip(examples, chosen, rejected, strict=True)), show)
        ]
        return EvaluationResult(figures, text, samples)
