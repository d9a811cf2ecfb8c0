"""PPO: its equations, and that a policy learns what is rewarded without leaving its reference too far."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allyouneed as ayn
from allyouneed.data.chat.template import BUILT_IN, FILE
from allyouneed.errors import UserError
from allyouneed.interop.save import build_folder
from allyouneed.train.ppo import PPOOptions, advantages, ppo, surrogate, token_rewards
from toy_texts import DECODER


def test_advantages_are_the_discounted_sum_of_errors() -> None:
    """Schulman et al. 2016, eq. 16, written out: A_t = Σ_l (γλ)^l δ_{t+l}, over the tokens of the answer alone."""
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 7, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    spans, discount, decay = ((2, 7), (1, 4)), 0.9, 0.8
    real = torch.tensor([[begin <= at < end for at in range(7)] for begin, end in spans])
    found = advantages(rewards * real, values, real, discount, decay)
    for row, (begin, end) in enumerate(spans):
        following = [*values[row, begin + 1 : end].tolist(), 0.0]
        errors = [
            rewards[row, at] + discount * after - values[row, at]
            for at, after in zip(range(begin, end), following, strict=True)
        ]
        for at in range(begin, end):
            expected = sum((discount * decay) ** n * error for n, error in enumerate(errors[at - begin :]))
            torch.testing.assert_close(found[row, at], expected)
    assert not found[~real].any()


def test_rewards_and_the_clipped_surrogate() -> None:
    """Ouyang et al. 2022, eq. 2, token by token; Schulman et al. 2017, eq. 7."""
    own, reference = torch.tensor([[-1.0, -2.0, -3.0, 0.0]]), torch.tensor([[-1.5, -1.0, -3.0, 0.0]])
    real = torch.tensor([[False, True, True, False]])
    found = token_rewards(own, reference, real, torch.tensor([5.0]), beta=0.5)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.5, 5.0, 0.0]]))  # −β·(−2 + 1); the reward at the last one
    assert not token_rewards(own, reference, torch.zeros_like(real), torch.tensor([5.0]), 0.5).any()
    before = torch.zeros(1, 4)
    now = torch.tensor([[9.0, 1.5, 0.5, 9.0]]).log()
    gains = torch.tensor([[9.0, 2.0, -3.0, 9.0]])
    # min(1.5·2, 1.2·2) and min(0.5·−3, 0.8·−3)
    torch.testing.assert_close(surrogate(now, before, gains, real, 0.2), torch.tensor(-(1.2 * 2 - 0.8 * 3) / 2))


def test_a_policy_learns_what_is_rewarded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = ayn.train_tokenizer(["say a word"], 280)
    start = build_folder(ayn.build(DECODER, vocab=tokenizer.size), tokenizer, "chat")
    start.originals[FILE] = BUILT_IN["plain"].encode()
    start.save(tmp_path / "start")
    short: Any = SimpleNamespace(score=lambda prompts, texts: [-float(len(text.encode())) for text in texts])
    options = PPOOptions(steps=14, batch=16, passes=2, beta=0.01, rate=0.01, max_length=6)
    history = ppo(tmp_path / "start", short, ["say a word", "a word"], tmp_path / "model", options)
    assert sum(step.reward for step in history[-3:]) > sum(step.reward for step in history[:3]) + 3
    assert history[0].divergence == pytest.approx(0, abs=1e-5) and history[-1].divergence > 0.1
    tuned, before = ayn.load(tmp_path / "model"), ayn.load(tmp_path / "start")
    assert isinstance(tuned.chat("a word"), str)
    assert any(not torch.equal(a, b) for a, b in zip(tuned.model.parameters(), before.model.parameters(), strict=True))
    fewer = options.model_copy(update={"steps": 3})
    again = ppo(tmp_path / "start", short, ["say a word", "a word"], tmp_path / "again", fewer)
    assert again == history[:3]  # the seed decides
    with pytest.raises(UserError, match="needs prompts"):
        ppo(tmp_path / "start", short, [], tmp_path / "model")
