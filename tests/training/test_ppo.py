"""PPO: its equations, and that a policy learns what is rewarded without leaving its reference too far."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

import allyouneed as ayn
from allyouneed.cli import main
from allyouneed.data.chat.template import BUILT_IN, FILE
from allyouneed.errors import UserError
from allyouneed.infer.predictors.reward import RewardModel
from allyouneed.interop.save import build_folder
from allyouneed.training.ppo import PPOOptions, PPOTuner, advantages, ppo, surrogate, token_rewards
from allyouneed.training.reporting.log import read_log
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


# --- as a command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """start: a chat model; reward: a reward model; prompts.jsonl."""
    folder = tmp_path_factory.mktemp("ppo")
    torch.manual_seed(0)
    tokenizer = ayn.train_tokenizer(["say a word"], 280)
    scoring = DECODER | {"head": {"kind": "classes", "labels": 1, "pool": "last"}}
    for name, tree, task in (("start", DECODER, "chat"), ("reward", scoring, "preference")):
        made = build_folder(ayn.build(tree, vocab=tokenizer.size), tokenizer, task, [""] * (task == "preference"))
        made.originals[FILE] = BUILT_IN["plain"].encode()
        made.save(folder / name)
    (folder / "prompts.jsonl").write_text('{"prompt": "say a word"}\n{"prompt": ""}\n{"prompt": "a word"}\n')
    return folder


def written(folders: Path, output: Path, **keys: Any) -> Path:
    tree = {
        "start": "start",
        "task": {"kind": "ppo", "reward": "reward", "batch": 16, "beta": 0.01, "rate": 0.02, "max_length": 6},
        "data": {"train": "prompts.jsonl", "valid": {"path": "prompts.jsonl"}},
        "steps": 8,
        "save": {"every": 2, "keep": 2},
        "average": 0,
        "device": "cpu",
        "output": str(output),
    }
    path = folders / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(tree | keys))
    return path


def rewards(run: Path) -> list[float]:
    return [entry["reward"] for entry in read_log(run / "log.jsonl") if "reward" in entry]


def test_a_recipe_raises_the_reward_and_resumes(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RewardModel, "score", lambda _, prompts, texts: [-float(len(t.encode())) for t in texts])
    recipe, run = written(folders, tmp_path / "whole"), tmp_path / "whole"
    with pytest.raises(SystemExit) as stopped:
        main(["train", str(recipe)])
    said = capsys.readouterr().err
    assert not stopped.value.code and "training prompts: 3 read, 2 kept" in said and "step 8/8  reward" in said
    found = rewards(run)
    assert len(found) == 8 and sum(found[-3:]) > sum(found[:3]) + 2, found
    tuned = ayn.load(run / "model")
    assert isinstance(tuned.chat("a word"), str) and tuned.folder.task["kind"] == "chat"
    assert "- trained on: 2 prompts, 128 answers in 8 steps" in (run / "model" / "README.md").read_text()
    assert ayn.train(ayn.load_recipe(recipe)).already

    real, rounds = PPOTuner.round, list[int]()

    def killed(self: PPOTuner, step: int, prompts: Any) -> Any:
        if step == 6 and not rounds:
            rounds.append(step)
            raise RuntimeError("killed")
        return real(self, step, prompts)

    monkeypatch.setattr(PPOTuner, "round", killed)
    again = ayn.load_recipe(written(folders, tmp_path / "again"))
    with pytest.raises(RuntimeError, match="killed"):
        ayn.train(again)
    assert ayn.train(again).steps == 8  # from the checkpoint after round 4
    assert rewards(tmp_path / "again") == found and "resuming the run" in capsys.readouterr().err
    for a, b in zip(ayn.load(tmp_path / "again/model").model.parameters(), tuned.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"task": "ppo"}, "task.reward: ppo requires it"),
        ({"task": {"kind": "ppo", "reward": "nowhere"}}, "nowhere"),
        ({"task": {"kind": "ppo", "reward": "start"}}, "is a model for chat, not a reward model"),
        ({"start": None, "model": "gpt2"}, "ppo tunes a trained model; set 'start'"),
        ({"schedule": {"kind": "constant", "peak": 0.1}}, "'schedule' has no effect on ppo; remove it"),
        ({"data": {"train": "empty.jsonl"}}, "none of the training prompts is usable"),
    ],
    ids=str,
)
def test_impossible_recipes_are_refused(keys: dict[str, Any], said: str, folders: Path, tmp_path: Path) -> None:
    (folders / "empty.jsonl").write_text('{"prompt": []}\n')
    with pytest.raises(UserError) as caught:
        ayn.train(ayn.load_recipe(written(folders, tmp_path / "run", **keys)))
    assert said in str(caught.value)
