"""WebGPT in a closed world: what browsing, a reward model and best-of-n add to a model that cannot know the answers.

    PYTHONPATH=src python bench/family/webgpt.py [FOLDER]

Every world is a set of generated pages about people that do not exist: six facts each. A model is trained on recorded
sessions in other worlds (behaviour cloning); three in ten were recorded carelessly: they look up another fact than the
one asked for. A reward model learns from pairs of a careful and a careless session to the same question. Both then face
a world that is new: its facts are drawn anew. The model without browsing is trained on the questions and
answers of the same training worlds. It prints figures and draws docs/family/pictures/webgpt.svg; the seed is fixed.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

import allyouneed as ayn
from allyouneed.apps.browse.agent import choose
from allyouneed.apps.browse.browser import Browser, Session
from allyouneed.apps.browse.pages import TextPage
from bench.family.common import CHAT_MODEL, short_run, write_chats

KINDS = ("river", "colour", "animal", "street", "stone", "song")
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
CARELESS = 0.3
SAMPLES = (1, 2, 4, 8)
PICTURE = Path(__file__).resolve().parents[2] / "docs" / "family" / "pictures" / "webgpt.svg"

Fact = tuple[str, str, str]  # kind, name, value


class World:
    """People with two names, several of a family; a page each."""

    def __init__(self, dice: random.Random, names: list[str], people: int = 60) -> None:
        families, self.facts = dice.sample(names, people // 3), dict[str, dict[str, str]]()
        while len(self.facts) < people:
            name = f"{dice.choice(names)} {dice.choice(families)}"
            self.facts[name] = {kind: dice.choice(names) for kind in KINDS}
        pages = []
        for name, facts in self.facts.items():
            lines = [f"The {kind} of {name} is {value}." for kind, value in facts.items()]
            pages.append(TextPage(name, (name, *dice.sample(lines, len(lines))), f"{name}.txt"))
        self.browser = Browser(pages, lines=3, results=5)

    def questions(self, dice: random.Random) -> list[Fact]:
        """One about each person whose page a search for the family shows."""
        asked = []
        for name, facts in self.facts.items():
            found = self.browser.search(name.split()[1], self.browser.results)
            if name in [self.browser.pages[page].title for page in found]:
                kind = dice.choice(KINDS)
                asked.append((kind, name, facts[kind]))
        return asked

    def recorded(self, fact: Fact, looked_up: str) -> Session:
        """The session of somebody who looks up this kind of fact, which may not be the one asked for."""
        name = fact[1]
        session = self.browser.session(question(fact))
        value = self.facts[name][looked_up]
        for command in (
            f"search {name.split()[1]}",
            f"open {name}",
            f"find {looked_up}",
            f"quote The {looked_up} of {name} is {value}.",
            f"answer {value} [1]",
        ):
            session.step(command)
        assert session.supported
        return session


def question(fact: Fact) -> str:
    return f"What is the {fact[0]} of {fact[1]}?"


def record(folder: Path, dice: random.Random, names: list[str], worlds: int) -> None:
    """sessions.jsonl, answers.jsonl (without browsing) and comparisons.jsonl of the training worlds."""
    sessions, answers, comparisons = [], [], []
    for _ in range(worlds):
        world = World(dice, names)
        for fact in world.questions(dice):
            other = dice.choice([kind for kind in KINDS if kind != fact[0]])
            careful, careless = world.recorded(fact, fact[0]), world.recorded(fact, other)
            sessions.append((careless if dice.random() < CARELESS else careful).messages)
            answers.append([careful.messages[0], {"role": "assistant", "content": f"answer {fact[2]}"}])
            pair = {"chosen": careful.with_quotes(), "rejected": careless.with_quotes()}
            comparisons.append(json.dumps({"prompt": question(fact)} | pair) + "\n")
    write_chats(folder / "sessions.jsonl", sessions)
    write_chats(folder / "answers.jsonl", answers)
    (folder / "comparisons.jsonl").write_text("".join(comparisons), encoding="utf-8")


def train(folder: Path, name: str, task: str, data: str, steps: int, row: int, **keys: Any) -> Any:
    run = short_run(
        folder / name,
        steps,
        task=task,
        data={"train": str(folder / data)},
        batch={"rows": 16, "row": row},
        schedule={"kind": "constant", "peak": 0.003, "warmup": 50},
        **keys,
    )
    return ayn.load(run.model)


def main(folder: Path) -> None:
    began, dice = time.process_time(), random.Random(1)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{a}{b}n".capitalize() for a, b in dice.sample([(a, b) for a in SYLLABLES for b in SYLLABLES], 150)]
    record(folder, dice, names, worlds=100)
    new = {"model": CHAT_MODEL, "tokenizer": {"vocab": 900}}
    policy = train(folder, "policy", "chat", "sessions.jsonl", steps=320, row=256, **new)
    closed = train(folder, "closed", "chat", "answers.jsonl", steps=120, row=64, **new)
    reward = train(folder, "reward", "preference", "comparisons.jsonl", 90, 128, start=str(folder / "policy/model"))

    world = World(random.Random(2), names)
    facts = world.questions(random.Random(3))
    asked, wanted = [question(fact) for fact in facts], [fact[2] for fact in facts]

    def right(sessions: list[Session]) -> float:
        return 100 * sum(session.text == value for session, value in zip(sessions, wanted, strict=True)) / len(wanted)

    guesses = [closed.chat(text, method="greedy").removeprefix("answer ") for text in asked]
    figures = {"without browsing": 100 * sum(map(str.__eq__, guesses, wanted)) / len(wanted)}
    drawn = world.browser.ask_many(policy, [text for text in asked for _ in range(SAMPLES[-1])], temperature=1.0)
    groups = [drawn[at : at + SAMPLES[-1]] for at in range(0, len(drawn), SAMPLES[-1])]
    for count in SAMPLES:
        label = "browsing" if count == 1 else f"browsing, best of {count}"
        figures[label] = right([choose(group[:count], reward) for group in groups])
    greedy = world.browser.ask_many(policy, asked)
    tried = [message["content"] for session in drawn for message in session.messages if message["role"] == "tool"]
    refused = sum(text == "that text is not on this page" for text in tried)
    cited = [quote for session in drawn for quote in session.cited]
    real = sum(map(world.browser.is_real, cited))
    kept = sum(len(session.quotes) for session in drawn)

    print(f"\n{len(asked)} questions about a new world of {len(world.browser.pages)} pages")
    for name, share in figures.items():
        print(f"  {name:<24} {share:5.1f} % right")
    print(f"  {'browsing, greedy':<24} {right(greedy):5.1f} % right")
    print(f"  quotes it tried to take: {kept + refused}, on the page: {kept} ({100 * kept / (kept + refused):.1f} %)")
    print(f"  quotes cited in answers: {len(cited)}, real: {real} ({100 * real / max(len(cited), 1):.1f} %)")
    print(f"  answers that cite a real quote: {100 * sum(s.supported for s in drawn) / len(drawn):.1f} %")
    print(f"\n{asked[0]}")
    for message in greedy[0].messages[1:]:
        print(f"  {message['role']:<9} " + message["content"].replace("\n", " / "))
    draw(figures)
    print(f"{time.process_time() - began:.0f} s of CPU; the picture is in {PICTURE}")


def draw(figures: dict[str, float]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "webgpt"
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=(6, 2.6))
    bars = axes.barh(list(figures), list(figures.values()), color=["#b0b0b0", *["#4477aa"] * (len(figures) - 1)])
    axes.bar_label(bars, fmt="%.0f %%", padding=3)
    axes.set(xlim=(0, 110), xlabel="right answers in a new world, %")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/family/webgpt"))
