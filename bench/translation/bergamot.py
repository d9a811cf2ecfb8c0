"""Models of Bergamot and Firefox: our engine against Bergamot's own, on the same file, greedy, in turns.

    python3.10 -m venv peer && peer/bin/pip install bergamot==0.4.5           # it has no wheels for later Pythons
    python bench/translation/bergamot.py --model FOLDER --peer peer/bin/python --texts sentences.txt [--rounds 5]

Printed: seconds for all sentences, the best of the rounds; how many translations are the same, sentence by sentence;
and in how many every word has the same log-probability. Both run with the shortlist and without it.

Activations are rounded to int8: where the last bit of a float decides how, engines go different ways from there on, as
Bergamot's own does between batches.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHORTLIST = re.compile(r"^shortlist:\n(?:[ \t]+- .*\n?)+", re.M)
EXTRA = "\nmax-length-break: 128\nmini-batch-words: 1024\nssplit-mode: paragraph\nalignment: soft\n"
SCORE = re.compile(r'x-bergamot-word-score="([^"]+)"')


def peer(folder: Path) -> None:
    """In the peer's Python: answers requests of the form {"texts": […], "scores": bool}, a line each."""
    import types

    site = next(path for path in sys.path if path.endswith("site-packages"))
    package: Any = types.ModuleType("bergamot")  # its __init__ asks a server for a list of models
    package.__path__ = [f"{site}/bergamot"]
    sys.modules["bergamot"] = package
    from bergamot import _bergamot as native  # type: ignore[import-not-found]

    config = next(folder.glob("*.yml")).read_text()
    for file in folder.iterdir():
        config = config.replace(file.name, str(file))
    config = config.replace("relative-paths: true", "relative-paths: false") + EXTRA
    settings = native.ServiceConfig()
    settings.numWorkers, settings.cacheSize = 1, 0
    service = native.Service(settings)
    models = {"shortlist": service.modelFromConfig(config), "all": service.modelFromConfig(SHORTLIST.sub("", config))}
    print("ready", flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        options = native.ResponseOptions(qualityScores=given["scores"], HTML=given["scores"])
        began = time.perf_counter()
        found = service.translate(models[given["model"]], native.VectorString(given["texts"]), options)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "texts": [answer.target.text for answer in found]}), flush=True)


class Peer:
    def __init__(self, python: str, folder: Path) -> None:
        command = [python, __file__, "--serve", str(folder.resolve())]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def __call__(self, model: str, texts: list[str], scores: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"model": model, "texts": texts, "scores": scores}) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def compare(arguments: argparse.Namespace) -> None:
    import torch

    from allyouneed.infer.decoding.options import Decoding
    from allyouneed.infer.request import Request
    from allyouneed.interop.load import load

    torch.set_num_threads(1)
    import allyouneed

    folder, model = load(arguments.model), allyouneed.load(arguments.model)
    source, target = folder.tokenizers.source, folder.tokenizers.target
    texts = [line for line in Path(arguments.texts).read_text("utf-8").splitlines() if line.strip()]
    requests = [
        Request([target.bos], 4 * len(ids) + 20, (n,), source=[*ids, source.eos])
        for n, ids in enumerate(map(source.encode, texts))
    ]

    def ours(name: str) -> list[Any]:
        decoding = Decoding(method="greedy", shortlist=name == "shortlist")
        return [found[0] for found in model.engine.decode(requests, decoding)]

    theirs = Peer(arguments.peer, Path(arguments.model))
    labels = {"all": "all tokens", "shortlist": "shortlist"}
    answers = {name: ours(name) for name in labels}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name in labels:
            began = time.perf_counter()
            ours(name)
            seconds["ours", name].append(time.perf_counter() - began)
            seconds["theirs", name].append(theirs(name, texts)["seconds"])
    best = {which: min(times) for which, times in seconds.items()}
    tokens = sum(len(answer.tokens) + 1 for answer in answers["all"])
    print(f"{len(texts)} sentences, {tokens:,} tokens of ours, one thread")
    for name, label in labels.items():
        mine, other = best["ours", name], best["theirs", name]
        print(f"ours, {label:18} {mine:7.2f} s   {tokens / mine:8,.0f} tokens/s")
        print(f"Bergamot, {label:14} {other:7.2f} s   ratio {other / mine:.2f}")
    written = {name: [target.decode(answer.tokens) for answer in some] for name, some in answers.items()}
    alone = {name: [theirs(name, [text])["texts"][0] for text in texts] for name in ("all", "shortlist")}
    together = theirs("all", texts)["texts"]

    def same(first: list[str], second: list[str]) -> str:
        return f"{sum(a == b for a, b in zip(first, second, strict=True))} of {len(texts)} translations the same"

    for name, label in labels.items():
        print(f"ours and Bergamot, {label}: {same(written[name], alone[name])}")
    print(f"Bergamot with and without a shortlist: {same(alone['all'], alone['shortlist'])}")
    print(f"Bergamot, sentences alone and in batches: {same(alone['all'], together)}")
    for name, label in labels.items():
        exact = 0
        for text, answer in zip(texts, answers[name], strict=True):
            html = theirs(name, [text.replace("&", "&amp;").replace("<", "&lt;")], scores=True)["texts"][0]
            scores, found = [float(score) for score in SCORE.findall(html)], word_scores(answer, target.tokens)
            close = (abs(a - b) <= 1e-4 + 1e-3 * abs(b) for a, b in zip(found, scores, strict=False))
            exact += len(scores) == len(found) and all(close)
        print(f"log-probabilities, {label}: {exact} of {len(texts)} translations the same in every word")


def word_scores(answer: Any, pieces: Callable[[list[int]], list[str]]) -> list[float]:
    """The mean log-probability of each word's tokens."""
    words: list[list[float]] = []
    for piece, score in zip(pieces(answer.tokens), answer.log_probs, strict=False):
        if piece.startswith("▁") or not words:
            words.append([])
        words[-1].append(score)
    return [sum(word) / len(word) for word in words]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of Bergamot")
    parser.add_argument("--peer", help="a Python that has the package bergamot")
    parser.add_argument("--texts", help="a sentence in each line")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        os.environ["OMP_NUM_THREADS"] = "1"
        peer(given.serve)
    else:
        compare(given)
