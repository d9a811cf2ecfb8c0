"""InstructGPT in miniature: supervised tuning, a reward model, and three ways to use preferences.

    PYTHONPATH=src python bench/family/instructgpt.py [FOLDER]

Greetings: "Greet Domun." is answered in one of 16 ways, all equally often in the data of the supervised model. Somebody
likes some ways better than others (a score from 0 to 6, which no model sees) and compares pairs of answers, with the
noise of a Bradley-Terry model; a quarter of the rejected answers greet somebody else. A reward model learns from the
comparisons; best-of-n and PPO use it, DPO learns from the comparisons directly. For each it prints the mean score of
answers about new names, the share that greet the right name, and the divergence from the supervised model in nats;
docs/family/pictures/instructgpt.svg plots score against divergence. The seed is fixed.
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

import allyouneed as ayn
from allyouneed.nn.batch import Rows
from allyouneed.tasks.feedback.dpo import answer_log_probs
from allyouneed.training.ppo import PPOOptions, ppo
from bench.family.common import CHAT_MODEL, short_run, write_chats

HELLO = ("Hey", "Hi", "Hello", "Good day")  # worth 0, 1, 2, 3
END = (".", "!", ", my friend.", ", how are you?")  # worth 0, 1, 2, 3
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
WRONG = 0.25  # of the rejected answers greet somebody else
BEST_OF = (1, 2, 4, 8, 16)
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "family" / "pictures" / "instructgpt.svg"


def answer(name: str, style: tuple[int, int]) -> str:
    return f"{HELLO[style[0]]} {name}{END[style[1]]}"


def score(text: str, name: str) -> float | None:
    """What the answer is worth; None if it does not greet this name in a known way."""
    found = re.fullmatch(f"({'|'.join(HELLO)}) {name}({'|'.join(map(re.escape, END))})", text)
    return None if found is None else HELLO.index(found[1]) + END.index(found[2])


def write_data(folder: Path, dice: random.Random, names: list[str]) -> None:
    def style() -> tuple[int, int]:
        return dice.randrange(4), dice.randrange(4)

    chats = []
    for _ in range(4000):
        name = dice.choice(names)
        turns = [("user", f"Greet {name}."), ("assistant", answer(name, style()))]
        chats.append([{"role": role, "content": text} for role, text in turns])
    write_chats(folder / "chats.jsonl", chats)
    for file, count in (("train.jsonl", 3000), ("valid.jsonl", 300)):
        lines = []
        while len(lines) < count:
            name, one, other = dice.choice(names), style(), style()
            better = dice.random() < 1 / (1 + math.exp(sum(other) - sum(one)))
            chosen, rejected = (one, other) if better else (other, one)
            pair = {"chosen": answer(name, chosen), "rejected": answer(name, rejected)}
            if dice.random() < WRONG:
                pair["rejected"] = answer(dice.choice(names), rejected)
            if pair["chosen"] == pair["rejected"]:
                continue
            lines.append(json.dumps({"prompt": f"Greet {name}."} | pair) + "\n")
        (folder / file).write_text("".join(lines), encoding="utf-8")


def train(folder: Path, name: str, task: Any, data: dict[str, str], steps: int, rate: float, **keys: Any) -> Any:
    return short_run(
        folder / name,
        steps,
        task=task,
        data={split: str(folder / file) for split, file in data.items()},
        batch={"rows": 16, "row": 64},
        schedule={"kind": "constant", "peak": rate, "warmup": 20},
        validate={"every": steps, "sentences": 0},
        **keys,
    )


def divergence(model: Any, reference: Any, chats: list[tuple[str, str]]) -> float:
    """Mean of log π(y|x) − log π_ref(y|x) over answers that π has drawn."""
    template, pad = model.chat_template, model.tokenizer.pad
    total = 0.0
    for prompt, text in chats:
        messages = [{"role": "user", "content": prompt}]
        given, written = template.prompt(messages), template.answer(messages, text)
        rows = Rows.of([[*given, *written]], pad)
        rows = Rows(rows.tokens, prompt=torch.tensor([[True] * len(given) + [False] * len(written)]))
        with torch.no_grad():
            total += float(answer_log_probs(model.model, rows, 1) - answer_log_probs(reference.model, rows, 1))
    return total / len(chats)


def main(folder: Path) -> None:
    began, dice = time.process_time(), random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = dice.sample([(a, b) for a in SYLLABLES for b in SYLLABLES], 1100)
    names = [f"{a}{b}n".capitalize() for a, b in pairs]
    known, new = names[:1000], names[1000:]
    write_data(folder, dice, known)
    start = str(folder / "supervised/model")
    both = {"train": "train.jsonl", "valid": "valid.jsonl"}
    data = {"train": "chats.jsonl"}
    train(folder, "supervised", "chat", data, 300, 0.003, model=CHAT_MODEL, tokenizer={"vocab": 330})
    reward_run = train(folder, "reward", "preference", both, 250, 0.001, start=start)
    train(folder, "dpo", {"kind": "dpo", "beta": 0.5}, both, 120, 0.0001, start=start)
    reward, supervised = ayn.load(folder / "reward/model"), ayn.load(start)
    options = PPOOptions(steps=60, batch=32, beta=0.3, rate=0.0003, max_length=24)
    learning = ppo(start, reward, [f"Greet {name}." for name in known], folder / "ppo/model", options)

    prompts = [(f"Greet {name}.", name) for name in new]
    print(f"\nreward model: {reward_run.scores['valid']['accuracy']:.1f} % of held-out comparisons ordered as labelled")
    first, last = (sum(step.reward for step in some) / 10 for some in (learning[:10], learning[-10:]))
    print(f"PPO: mean reward {first:.2f} in the first ten rounds, {last:.2f} in the last ten")
    print(f"{'':<14} score of 6   right name   divergence")
    points: dict[str, list[tuple[float, float]]] = {}
    drawn = [
        supervised.chat_full(p, best=BEST_OF[-1], first=n, top_p=1.0).candidates for n, (p, _) in enumerate(prompts)
    ]
    rewards = [reward.score([prompt] * len(texts), texts) for (prompt, _), texts in zip(prompts, drawn, strict=True)]
    for count in BEST_OF:
        texts = [max(zip(r[:count], t[:count], strict=True))[1] for r, t in zip(rewards, drawn, strict=True)]
        nats = math.log(count) - (count - 1) / count  # of best-of-n, at most (Nakano et al. 2021, appendix I)
        show("supervised" if count == 1 else f"best of {count}", texts, prompts, nats, points, "best of n")
    for name in ("dpo", "ppo"):
        model = ayn.load(folder / name / "model")
        texts = [model.chat(prompt, first=n, top_p=1.0) for n, (prompt, _) in enumerate(prompts)]
        nats = divergence(model, supervised, [(p, text) for (p, _), text in zip(prompts, texts, strict=True)])
        show(name.upper(), texts, prompts, nats, points, name.upper())
    draw(points)
    print(f"{time.process_time() - began:.0f} s of CPU; the picture is in {PICTURE}")


def show(
    label: str,
    texts: list[str],
    prompts: list[tuple[str, str]],
    nats: float,
    points: dict[str, list[tuple[float, float]]],
    line: str,
) -> None:
    """An answer that does not greet the name is worth nothing."""
    scores = [score(text, name) for text, (_, name) in zip(texts, prompts, strict=True)]
    mean = sum(one or 0 for one in scores) / len(scores)
    right = 100 * sum(one is not None for one in scores) / len(scores)
    print(f"{label:<14} {mean:10.2f} {right:10.1f} % {nats:9.2f} nats")
    points.setdefault(line, []).append((nats, mean))


def draw(points: dict[str, list[tuple[float, float]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "instructgpt"
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(5, 3))
    for (name, places), marker in zip(points.items(), "oDs", strict=True):
        axes.plot(*zip(*places, strict=True), marker=marker, label=name, markersize=5)
    axes.axhline(6, color="#b0b0b0", linewidth=0.8)
    axes.set(xlabel="divergence from the supervised model, nats", ylabel="score of answers", ylim=(2.5, 6.3))
    axes.legend(loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/family/instructgpt"))
