"""Reinforcement learning from a reward model by PPO, in its plainest form.

Ouyang et al. 2022, eq. 2: maximise E[r(x, y) − β log(π(y|x) / π_ref(y|x))] over answers y that the policy π itself
writes; π_ref is the model it starts from. The update is the clipped surrogate of Schulman et al. 2017 (eq. 7) with
advantages by generalised advantage estimation (Schulman et al. 2016, eq. 16) from a value head on the policy's hidden
states. The term for pre-training data (γ in eq. 2) is left out.

Answers are drawn by the engine, so each step builds it anew: its programs hold the weights of their time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from allyouneed.data.batches.packing import generator
from allyouneed.data.chat.template import ChatTemplate, check_messages
from allyouneed.errors import UserError
from allyouneed.infer.predictors.chatting import Messages, folder_template
from allyouneed.infer.predictors.generator import Generator
from allyouneed.infer.predictors.reward import RewardModel
from allyouneed.interop.load import load
from allyouneed.interop.save import save_folder
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.tasks.feedback.dpo import answer_labels
from allyouneed.tasks.feedback.ppo import PPOSettings, PPOTask
from allyouneed.tasks.feedback.preference import widen_half


class PPOOptions(PPOSettings):
    steps: PositiveInt = PPOTask.default_steps
    """Rounds of drawing answers and learning from them."""
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 1
    """Seed of prompts and samples."""


@dataclass(frozen=True)
class PPOStep:
    """Means over the answers of a round: reward, divergence from the reference in nats, and tokens."""

    step: int
    reward: float
    divergence: float
    tokens: float


def ppo(
    policy: Path | str,
    reward: RewardModel,
    prompts: Sequence[Messages],
    output: Path | str,
    options: PPOOptions | None = None,
    device: str = "cpu",
    on_step: Callable[[PPOStep], None] | None = None,
) -> list[PPOStep]:
    """Tune the chat model of a folder by a reward model, and write it to the folder `output`."""
    if not prompts:
        raise UserError("ppo needs prompts to answer")
    options = options or PPOOptions()
    tuner, history = PPOTuner(policy, reward, options, options.seed, device), []
    for step in range(1, options.steps + 1):
        history.append(tuner.round(step, prompts))
        if on_step is not None:
            on_step(history[-1])
    save_folder(tuner.folder, output)
    return history


class PPOTuner:
    """Policy, reference, value head and optimisers. A round depends on them, the seed and its number alone."""

    def __init__(
        self, policy: Path | str, reward: RewardModel, settings: PPOSettings, seed: int, device: str | torch.device
    ) -> None:
        self.folder, self.reward, self.settings, self.seed = load(policy, device), reward, settings, seed
        self.reference = load(policy, device).model.eval()
        self.model: Any = self.folder.model
        tree: Any = self.model.config
        self.template = folder_template(self.folder)
        self.value = nn.Linear(tree.width, 1, device=device)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.optimiser = torch.optim.Adam(self.model.parameters(), lr=settings.rate)
        self.value_optimiser = torch.optim.Adam(self.value.parameters(), lr=settings.value_rate)

    def round(self, step: int, prompts: Sequence[Messages]) -> PPOStep:
        """Draw answers to some of the prompts, and learn from their rewards."""
        settings, model, value = self.settings, self.model, self.value
        picked = generator(self.seed, step).integers(len(prompts), size=settings.batch)
        drawn = self.draw([prompts[int(number)] for number in picked], step)
        with torch.no_grad():
            before = [part.detach() for part in log_probs_and_values(model, value, drawn.rows)]
            ref, _, _ = log_probs_and_values(self.reference, value, drawn.rows)
        real = before[2]
        rewards = token_rewards(before[0], ref, real, drawn.rewards.to(real.device), settings.beta)
        gains = advantages(rewards, before[1], real, settings.discount, settings.decay)
        returns = gains + before[1]
        whitened = (gains - gains[real].mean()) / (gains[real].std() + 1e-8)
        for _ in range(settings.passes):
            now, values, _ = log_probs_and_values(model, value, drawn.rows)
            loss = surrogate(now, before[0], whitened, real, settings.clip)
            loss = loss + (values - returns)[real].square().mean()
            for optimiser in (self.optimiser, self.value_optimiser):
                optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_norm)
            for optimiser in (self.optimiser, self.value_optimiser):
                optimiser.step()
        away = ((before[0] - ref) * real).sum(1).mean()
        tokens = real.sum(1).float().mean()
        return PPOStep(step, float(drawn.rewards.mean()), float(away), float(tokens))

    def draw(self, prompts: Sequence[Messages], step: int) -> Round:
        """One answer per prompt, drawn from the policy as it is now."""
        messages = [check_messages(prompt) for prompt in prompts]
        length = self.settings.max_length
        return draw(Generator(self.folder), self.template, self.reward, messages, length, self.seed, step)


@dataclass(frozen=True)
class Round:
    """Prompts with their answers as rows (prompt tokens are marked), and the reward of each answer (answers,)."""

    rows: Rows
    rewards: Tensor


def draw(
    writer: Generator,
    template: ChatTemplate,
    reward: RewardModel,
    messages: Sequence[Sequence[Any]],
    max_length: int,
    seed: int,
    step: int,
) -> Round:
    """One answer per prompt, drawn from the policy itself."""
    tokenizer = writer.tokenizer
    prompts = [template.prompt(chat) for chat in messages]
    decoding = writer.decoding_options(
        {"method": "sample", "temperature": 1.0, "top_p": None, "loops": None, "max_length": max_length}
        | {"seed": seed, "best": 1}
    )
    answers = [found[0] for found in writer.engine.complete(prompts, decoding, None, step * len(prompts))]
    texts = [tokenizer.decode(answer.tokens) for answer in answers]
    written = [[*answer.tokens, *([tokenizer.eos] if answer.finished else [])] for answer in answers]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, written, strict=True)]
    given = [[1] * len(prompt) + [0] * len(answer) for prompt, answer in zip(prompts, written, strict=True)]
    rows = Rows.of(whole, tokenizer.pad)
    marked = Rows(rows.tokens, rows.lengths, prompt=Rows.of(given, 1).tokens.bool()).to(writer.device)
    return Round(marked, torch.tensor(reward.score([list(chat) for chat in messages], texts)))


def log_probs_and_values(model: Any, value: nn.Linear, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """For each position: log π of the answer token that follows it (0 where none does), the value of the text up to it,
    and whether an answer token follows; all (batch, time)."""
    hidden, layout = model.run(Batch(rows), [])
    labels = answer_labels(rows, layout)
    logits = widen_half(model.head(hidden))
    each = -nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    # errors of the value must not move the policy: both read the same hidden states
    return each, value(widen_half(hidden.detach())).squeeze(-1), labels != IGNORE


def token_rewards(own: Tensor, reference: Tensor, real: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """−β log(π / π_ref) of every answer token, and the answer's reward at the last one (batch, time)."""
    found = -beta * (own - reference) * real
    positions = torch.arange(real.shape[1], device=real.device)
    last = positions.masked_fill(~real, -1).amax(1, keepdim=True)  # −1: an empty answer has no token to reward
    return found + rewards[:, None] * (positions == last) * real


def advantages(rewards: Tensor, values: Tensor, real: Tensor, discount: float, decay: float) -> Tensor:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} − V_t, both 0 after the last token (batch, time)."""
    found = torch.zeros_like(rewards)
    after, following = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for at in reversed(range(rewards.shape[1])):
        delta = rewards[:, at] + discount * following - values[:, at]
        after = torch.where(real[:, at], delta + discount * decay * after, 0.0)
        following = torch.where(real[:, at], values[:, at], 0.0)
        found[:, at] = after
    return found


def surrogate(now: Tensor, before: Tensor, gains: Tensor, real: Tensor, clip: float) -> Tensor:
    """−E[min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)] over answer tokens, ρ = π / π_before (Schulman et al. 2017, eq. 7)."""
    ratio = (now - before).exp()
    each = torch.minimum(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)
    return -each[real].mean()
