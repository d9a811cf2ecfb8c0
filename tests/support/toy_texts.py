"""Text that is small but real-looking, and runs that learn it in a second or two."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

import allyouneed as ayn
from allyouneed.training import Recipe, load_recipe
from toy_images import describer, towers, vit, write_pictures
from toy_sounds import hearer, listener, write_sounds

WHO = {"the cat": "猫", "a dog": "狗", "my friend": "朋友", "the old man": "老人", "a child": "孩子", "她": "她"}
DOES = {"sees": "看见", "likes": "喜欢", "follows": "跟着", "hears": "听见"}
WHAT = {"the sea": "大海", "a bird": "小鸟", "the moon": "月亮", "some bread": "面包", "the house": "房子"}
GOOD, BAD = ["wonderful", "very good", "great fun", "好看"], ["terrible", "very bad", "a bore", "难看"]
NAMES, PLACES = ["Anna", "Otto Weber", "Li Na", "王芳"], ["Paris", "New York", "Ulm", "上海"]

ATTENTION = {"kind": "attention", "heads": 2}
LAYER = {"wiring": "pre-norm", "mixer": ATTENTION, "channel": {"kind": "ffn", "hidden": 64}}
BODY: dict[str, Any] = {"vocab": 1, "width": 32, "embed": {"positions": "sinusoidal"}}
ENCODER = BODY | {"kind": "encoder", "encoder": [LAYER]}
DECODER = BODY | {"kind": "decoder", "decoder": [LAYER | {"mixer": ATTENTION | {"pattern": "causal"}}]}
TWICE = BODY | {
    "kind": "decoder-decoder",
    "first": [LAYER | {"mixer": {"kind": "gated-retention", "heads": 2}}],
    "second": [{"wiring": "pre-norm", "cross": ATTENTION | {"pattern": "causal"}, "channel": LAYER["channel"]}],
}
INTERLEAVED = DECODER | {
    "kind": "interleaved",
    "image": {
        "encoder": {"width": 8, "embed": {"kind": "patches", "image": 8, "patch": 4}, "encoder": [LAYER]},
        "resampler": {"kind": "attentive-pooling", "slots": 2, "heads": 2},
    },
}
PREFIX = BODY | {"kind": "decoder", "decoder": [LAYER | {"mixer": ATTENTION | {"pattern": "causal | prompt"}}]}
BOTH = BODY | {
    "kind": "encoder-decoder",
    "encoder": [LAYER],
    "decoder": [LAYER | {"mixer": ATTENTION | {"pattern": "causal"}, "cross": ATTENTION}],
}
LANGUAGES = ENCODER | {"embed": {**BODY.get("embed", {}), "types": 2}}
WHOLE = BOTH | {"decoder": [LAYER | {"cross": ATTENTION}]}
SYNCHRONOUS = BOTH | {"decoder": [LAYER | {"mixer": {"kind": "synchronous", "heads": 2}, "cross": ATTENTION}]}
BEHAVIOR = BODY | {
    "kind": "encoder",
    "embed": {"kind": "behavior"},
    "encoder": [LAYER | {"wiring": "post-norm"}],
    "head": {"kind": "click", "hidden": [16]},
}
PERMUTED = BODY | {
    "kind": "encoder",
    "embed": {"asks": True},
    "encoder": [LAYER | {"mixer": ATTENTION | {"pattern": "permuted", "positions": "xlnet"}}],
}
RECIPE: dict[str, Any] = {
    "tokenizer": {"vocab": 360},
    "batch": {"rows": 8, "row": 64},
    "schedule": {"kind": "constant", "peak": 0.005, "warmup": 10},
    "steps": 60,
    "save": {"every": 60, "keep": 1},
    "average": 0,
    "validate": {"every": 60, "sentences": 1},
    "device": "cpu",
    "precision": "fp32",
    "output": "run",
}


class Listener:
    """A console that nobody looks at but the test."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, width=400, highlight=False)

    @property
    def text(self) -> str:
        return self.file.getvalue()


def sentence(dice: random.Random) -> str:
    return f"{dice.choice(list(WHO))} {dice.choice(list(DOES))} {dice.choice(list(WHAT))}."


def documents(count: int, dice: random.Random) -> str:
    return "\n\n".join(" ".join(sentence(dice) for _ in range(dice.randint(1, 12))) for _ in range(count)) + "\n"


def labelled(count: int, dice: random.Random) -> str:
    """label<TAB>text, as most data sets have it."""
    rows = []
    for _ in range(count):
        label = dice.choice(["pos", "neg"])
        said = dice.choice(GOOD if label == "pos" else BAD)
        rows.append(f"{label}\t{sentence(dice)} the film is {said}.\n")
    return "".join(rows)


def asked(count: int, dice: random.Random) -> str:
    """question<TAB>text<TAB>answer; some texts do not answer their question."""
    rows = []
    for _ in range(count):
        names, places = dice.sample(NAMES, 3), [dice.choice(PLACES) for _ in range(3)]
        facts = [f"{name} lives in {place}." for name, place in zip(names, places, strict=True)]
        right = dice.randrange(3)
        known = dice.random() < 0.8
        text = " ".join(fact for number, fact in enumerate(facts) if known or number != right)
        rows.append(f"where does {names[right]} live?\t{text}\t{places[right] if known else ''}\n")
    return "".join(rows)


def several(count: int, dice: random.Random) -> str:
    """text<TAB>labels: of what the sentences are about, none for some."""
    rows = []
    for _ in range(count):
        about = dice.sample(list(WHAT), dice.randint(0, 2))
        said = " ".join(f"{dice.choice(list(WHO))} {dice.choice(list(DOES))} {what}." for what in about) or "yes."
        rows.append(f"{said}\t{'|'.join(what.split()[-1] for what in about)}\n")
    return "".join(rows)


def tagged(count: int, dice: random.Random) -> str:
    """A word a line, its tag behind it."""
    sentences = []
    for _ in range(count):
        name, place = dice.choice(NAMES).split(), dice.choice(PLACES).split()
        words = [(w, "B-PER" if n == 0 else "I-PER") for n, w in enumerate(name)]
        words += [(w, "O") for w in dice.choice(["lives in", "comes from", "is not at home in"]).split()]
        words += [(w, "B-LOC" if n == 0 else "I-LOC") for n, w in enumerate(place)] + [(".", "O")]
        sentences.append("".join(f"{word} {tag}\n" for word, tag in words))
    return "\n".join(sentences)


def scored(count: int, dice: random.Random) -> str:
    """score<TAB>text<TAB>text: one point for each of who, does and what that is the same."""
    rows = []
    for _ in range(count):
        one = [dice.choice(list(WHO)), dice.choice(list(DOES)), dice.choice(list(WHAT))]
        other = [
            dice.choice([word, dice.choice(list(words))]) for word, words in zip(one, (WHO, DOES, WHAT), strict=True)
        ]
        score = sum(a == b for a, b in zip(one, other, strict=True))
        rows.append(f"{score}\t{' '.join(one)}\t{' '.join(other)}\n")
    return "".join(rows)


def translated(count: int, dice: random.Random) -> str:
    rows = []
    for _ in range(count):
        who, does, what = dice.choice(list(WHO)), dice.choice(list(DOES)), dice.choice(list(WHAT))
        rows.append(f"{who} {does} {what}\t{WHO[who]}{DOES[does]}{WHAT[what]}\n")
    return "".join(rows)


def misspelt(count: int, dice: random.Random) -> str:
    """text with a mistake<TAB>the same text without; every third has none."""
    rows = []
    for _ in range(count):
        right = sentence(dice)
        wrong = right.replace(" the ", " teh ", 1) if dice.random() < 0.4 else right.replace("s ", " ", 1)
        rows.append(f"{right if dice.random() < 0.3 else wrong}\t{right}\n")
    return "".join(rows)


def chats(count: int, dice: random.Random) -> str:
    """Two turns each; the answers are Chinese words."""
    lines = []
    for _ in range(count):
        who, what = dice.choice(list(WHO)), dice.choice(list(WHAT))
        turns = [("user", who), ("assistant", WHO[who]), ("user", what), ("assistant", WHAT[what])]
        lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return "".join(lines)


def comparisons(count: int, dice: random.Random) -> str:
    """Good words are preferred to bad ones."""
    rows = [{"prompt": sentence(dice), "chosen": dice.choice(GOOD), "rejected": dice.choice(BAD)} for _ in range(count)]
    return "".join(json.dumps(row) + "\n" for row in rows)


def pieces(count: int, dice: random.Random) -> str:
    """Texts in pieces, each with an answer, a Chinese word; tests/tasks/test_interleaved.py has images and sounds."""
    lines = []
    for _ in range(count):
        who, what = dice.choice(list(WHO)), dice.choice(list(WHAT))
        lines.append(json.dumps({"pieces": [f"{who} ", {"text": what}], "answer": WHO[who]}) + "\n")
    return "".join(lines)


def impressions(count: int, dice: random.Random) -> str:
    """A log of clicks: people click what is good."""
    rows = ["items,item,place,click\n"]
    for _ in range(count):
        seen = " ".join(dice.choices("abcdefgh", k=dice.randint(0, 6)))
        shown = dice.choice("abcdefgh")
        rows.append(f"{seen},{shown},{dice.choice(PLACES)},{int(shown in 'aceg')}\n")
    return "".join(rows)


WRITERS = {"txt": documents, "labelled.tsv": labelled, "conll": tagged, "scored.tsv": scored, "pairs.tsv": translated}
WRITERS |= {"chats.jsonl": chats, "comparisons.jsonl": comparisons, "log.csv": impressions, "pieces.jsonl": pieces}
WRITERS |= {"misspelt.tsv": misspelt, "asked.tsv": asked, "several.tsv": several}


def write_all(folder: Path) -> Path:
    """train.txt, valid.txt, train.labelled.tsv, …"""
    for name, writer in WRITERS.items():
        for split, count in (("train", 300), ("valid", 30)):
            (folder / f"{split}.{name}").write_text(writer(count, random.Random(f"{split} {name}")), encoding="utf-8")
    for split, count in (("train", 300), ("valid", 30)):
        write_pictures(folder, split, count)
        write_sounds(folder, split, count)
    return folder


# what a task reads, the keys of its recipe, and those of its data entries
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "causal-lm": ("txt", {"task": "causal-lm", "model": DECODER}, {}),
    "causal-lm decoder-decoder": ("txt", {"task": "causal-lm", "model": TWICE}, {}),
    "prefix-lm": ("pairs.tsv", {"task": "prefix-lm", "model": PREFIX}, {}),
    "prefix-lm text": ("txt", {"task": {"kind": "prefix-lm", "reads": "text"}, "model": PREFIX}, {}),
    "masked-lm": ("txt", {"task": "masked-lm", "model": ENCODER}, {}),
    "masked-lm words": ("txt", {"task": {"kind": "masked-lm", "whole_word": True}, "model": ENCODER}, {}),
    "masked-lm next sentence": (
        "txt",
        {"task": {"kind": "masked-lm", "pairs": "next-sentence"}, "model": LANGUAGES},
        {},
    ),
    "masked-lm order": (
        "txt",
        {"task": {"kind": "masked-lm", "pairs": "sentence-order", "whole_word": True}, "model": LANGUAGES},
        {},
    ),
    "translation-lm": ("pairs.tsv", {"task": "translation-lm", "model": LANGUAGES}, {}),
    "replaced-token": ("txt", {"task": "replaced-token", "model": ENCODER}, {}),
    "permutation-lm": ("txt", {"task": "permutation-lm", "model": PERMUTED}, {}),
    "span-corruption": ("txt", {"task": {"kind": "span-corruption", "sentinels": 8}, "model": BOTH}, {}),
    "denoising": ("txt", {"task": "denoising", "model": BOTH}, {}),
    "translation": ("pairs.tsv", {"task": "translation", "model": BOTH}, {}),
    "seq2seq": ("pairs.tsv", {"task": "seq2seq", "model": BOTH}, {}),
    "seq2seq decoder": ("pairs.tsv", {"task": "seq2seq", "model": PREFIX}, {}),
    "summarisation": ("pairs.tsv", {"task": "summarisation", "model": BOTH}, {}),
    "correction": ("misspelt.tsv", {"task": "correction", "model": BOTH}, {}),
    "mask-predict": ("pairs.tsv", {"task": "mask-predict", "model": WHOLE}, {}),
    "ctc-translation": ("pairs.tsv", {"task": "ctc-translation", "model": ENCODER}, {}),
    "synchronous-translation": ("pairs.tsv", {"task": "synchronous-translation", "model": SYNCHRONOUS}, {}),
    "classification": ("labelled.tsv", {"task": "classification", "model": ENCODER}, {"columns": [1, 0]}),
    "classification several": (
        "several.tsv",
        {"task": {"kind": "classification", "several": True}, "model": ENCODER},
        {},
    ),
    "classification decoder": ("labelled.tsv", {"task": "classification", "model": DECODER}, {"columns": [1, 0]}),
    "question-answering": (
        "asked.tsv",
        {"task": {"kind": "question-answering", "unanswerable": True}, "model": LANGUAGES},
        {},
    ),
    "tagging": ("conll", {"task": "tagging", "model": ENCODER}, {}),
    "similarity": (
        "scored.tsv",
        {"task": {"kind": "similarity", "range": [0, 3]}, "model": ENCODER},
        {"columns": [1, 2, 0]},
    ),
    "contrastive": ("pairs.tsv", {"task": "contrastive", "model": ENCODER}, {}),
    "reranking": ("pairs.tsv", {"task": {"kind": "reranking", "negatives": 2}, "model": LANGUAGES}, {}),
    "interleaved": ("pieces.jsonl", {"task": "interleaved", "model": INTERLEAVED}, {}),
    "chat": ("chats.jsonl", {"task": "chat", "model": DECODER}, {}),
    "preference": ("comparisons.jsonl", {"task": "preference", "model": DECODER}, {}),
    "click": ("log.csv", {"task": "click", "model": BEHAVIOR}, {"features": ["place"]}),
    "image-classification": ("images.tsv", {"task": "image-classification", "model": vit(LAYER)}, {}),
    "image-text": ("captions.tsv", {"task": "image-text", "model": towers(LAYER)}, {}),
    "captioning": ("captions.tsv", {"task": "captioning", "model": describer(LAYER, ATTENTION)}, {}),
    "audio-classification": ("sounds.tsv", {"task": "audio-classification", "model": hearer(LAYER)}, {}),
    "transcription": (
        "transcripts.tsv",
        {"task": {"kind": "transcription", "sound": {"seconds": 1}}, "model": listener(LAYER, ATTENTION)},
        {},
    ),
    "transcription ctc": ("transcripts.tsv", {"task": "transcription", "model": hearer(LAYER, vocab=1)}, {}),
    "dpo": ("comparisons.jsonl", {"task": "dpo", "model": DECODER}, {}),
}


WITHOUT_TEXTS = ("image-classification", "audio-classification")
MEDIA = ("images.tsv", "captions.tsv", "sounds.tsv", "transcripts.tsv")  # read by models that read no tokens


def recipe(folder: Path, texts: Path, run: str, *changes: str, **keys: Any) -> Recipe:
    """The recipe of one of the runs, with these keys changed, in a file of its own in `folder`."""
    name, own, entry = RUNS[run]
    data: dict[str, Any] = {split: {"path": str(texts / f"{split}.{name}"), **entry} for split in ("train", "valid")}
    if name != "txt":
        data["max_tokens"] = 48
    tree = RECIPE | own | keys
    if run in WITHOUT_TEXTS:
        del tree["tokenizer"], data["max_tokens"]
    if run == "dpo" and "start" not in keys:  # it tunes a trained model; new weights will do
        tokenizer = ayn.train_tokenizer((texts / f"train.{name}").read_text().splitlines(), 360)
        start = ayn.save(ayn.build(DECODER, vocab=tokenizer.size), tokenizer, folder / "start", max_tokens=48)
        tree["start"] = str(start)
    if "start" in tree:  # a model folder, which brings its own
        del tree["model"], tree["tokenizer"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"data": data} | tree, sort_keys=False, allow_unicode=True), encoding="utf-8")
    return load_recipe(path, changes)
