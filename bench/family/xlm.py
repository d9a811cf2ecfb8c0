"""Translation language modelling (XLM): does the model look into the other language to fill a masked word?

    python bench/family/xlm.py            # two minutes on one core; writes docs/family/pictures/xlm.svg

Two languages of a small grammar with random nouns, adjectives and verbs, so that a masked word cannot be guessed from
its own sentence. Two equal models are trained on the same pairs: one reads each sentence alone (MLM), the other half of
the pairs as pairs (TLM). Both then fill masked words of unseen pairs, without and with the translation.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import yaml

import allyouneed as ayn

NOUNS = """猫 cat 狗 dog 鸟 bird 鱼 fish 马 horse 牛 cow 羊 sheep 鸡 hen 熊 bear 狼 wolf 虎 tiger 象 elephant 树 tree
花 flower 山 mountain 河 river 海 sea 湖 lake 路 road 桥 bridge 门 door 窗 window 桌 table 椅 chair 书 book
画 picture"""
ADJECTIVES = """红 red 绿 green 蓝 blue 黑 black 白 white 大 big 小 small 老 old 新 new 高 tall 快 fast 慢 slow 好 good
坏 bad"""
VERBS = "看 sees 爱 likes 跟 follows 找 finds 忘 forgets 绘 draws 躲 avoids 记 remembers"
PLACES = "昨天 yesterday 今天 today 早上 mornings 晚上 evenings"

Words = list[tuple[str, str]]


def words(text: str) -> Words:
    found = text.split()
    return list(zip(found[::2], found[1::2], strict=True))


def pair(dice: random.Random) -> tuple[str, str]:
    """(English, Chinese): the time stands last in one and first in the other, "的" follows an adjective."""
    (a, red), (b, blue) = (dice.choice(words(ADJECTIVES)) for _ in range(2))
    (n, cat), (m, dog) = (dice.choice(words(NOUNS)) for _ in range(2))
    (v, sees), (t, when) = dice.choice(words(VERBS)), dice.choice(words(PLACES))
    return f"the {red} {cat} {sees} the {blue} {dog} {when}", f"{t} {a} 的 {n} {v} {b} 的 {m}"


def train(scratch: Path, name: str, alone: float, steps: int) -> Any:
    layer = {"repeat": 2, "wiring": "pre-norm", "mixer": {"kind": "attention", "heads": 4}}
    model = {
        "kind": "encoder",
        "vocab": 1,
        "width": 96,
        "embed": {"positions": "sinusoidal", "types": 2},
        "encoder": [layer | {"channel": {"kind": "ffn", "hidden": 192}}],
    }
    recipe = {
        "task": {"kind": "translation-lm", "alone": alone, "share": 0.2},
        "model": model,
        "data": {"train": str(scratch / "pairs.tsv")},
        "tokenizer": {"vocab": 700},
        "batch": {"rows": 16, "row": 128},
        "steps": steps,
        "schedule": {"kind": "cosine", "peak": 0.004, "warmup": 100},
        "seed": 1,
        "output": str(scratch / name),
    }
    path = scratch / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return ayn.load(ayn.train(ayn.load_recipe(path)).model)


def accuracy(model: Any, pairs: list[tuple[str, str]], with_translation: bool, seed: int = 5) -> float:
    """Share of masked Chinese content words that come out right."""
    dice, asked = random.Random(seed), []
    known = {chinese for text in (NOUNS, ADJECTIVES, VERBS) for chinese, _ in words(text)}
    for english, chinese in pairs:
        tokens = chinese.split()
        at = dice.choice([n for n, word in enumerate(tokens) if word in known])
        masked = " ".join(["<mask>" if n == at else word for n, word in enumerate(tokens)])
        asked.append((f"{english}\t{masked}" if with_translation else f"\t{masked}", tokens[at]))
    found = model.fill_mask([text for text, _ in asked], top=1)
    right = [one[0][0].token.strip() == wanted for one, (_, wanted) in zip(found, asked, strict=True)]
    return sum(right) / len(right)


def draw(figures: dict[str, dict[str, float]], model: Any, example: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure((9, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 3])
    for at, (name, row) in enumerate(figures.items()):
        bars = left.bar([n + 0.38 * at for n in range(2)], [100 * value for value in row.values()], 0.36, label=name)
        left.bar_label(bars, fmt="%.0f")
    left.set_xticks([0.19, 1.19], ["sentence alone", "with its translation"])
    left.set_ylabel("masked words filled correctly, %")
    left.set_ylim(0, 112)
    left.legend(title="trained with", frameon=False, loc="upper left")
    run = model.inside(example)
    weights = run["encoder.1.mixer.weights"][0].amax(0)  # the largest of the heads
    tokens = [token.text.strip() or "·" for token in run.tokens["encoder"]]
    latin = [text if text.isascii() else f"#{n}" for n, text in enumerate(tokens)]  # fonts may lack Chinese
    right.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    right.set_xticks(range(len(latin)), latin, rotation=90, fontsize=7)
    right.set_yticks(range(len(latin)), latin, fontsize=7)
    right.set_title("last layer: row attends to column", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--picture", type=Path, default=Path("docs/family/pictures/xlm.svg"))
    given = parser.parse_args()
    dice = random.Random(0)
    pairs = [pair(dice) for _ in range(6000)]
    tests = [one for one in (pair(dice) for _ in range(400)) if one not in pairs]
    figures, models = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "pairs.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
        for name, alone in (("MLM", 0.999), ("MLM + TLM", 0.5)):
            models[name] = train(scratch, name, alone, given.steps)
            figures[name] = {str(both): accuracy(models[name], tests, both) for both in (False, True)}
        print("\n| trained with | masked word from its sentence alone | with the translation |\n|---|---:|---:|")
        for name, row in figures.items():
            print(f"| {name} | {row['False']:.1%} | {row['True']:.1%} |")
        english, chinese = tests[0]
        masked = " ".join(["<mask>" if n == 3 else word for n, word in enumerate(chinese.split())])
        print(f"\n{english}\n{chinese}\n{masked}: {models['MLM + TLM'].fill_mask(f'{english}	{masked}')[0][0]}")
        draw(figures, models["MLM + TLM"], f"{english}\t{masked}", given.picture)


if __name__ == "__main__":
    main()
