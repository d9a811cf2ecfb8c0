"""How far the fast decoding modes deviate from exact decoding, in which every request is computed alone.

    python bench/decode/drift.py [--folder MODEL …] [--models base gpt2 llama retention rwkv bit] [--write]

Named models have three layers of these shapes and random weights; a FOLDER is a trained model (`allyouneed demo` leaves
one) with texts of its own kind. Every text is continued greedily alone, which is the exact result. Then

1. the same tokens are scored again in each mode: the largest and the mean difference of the scores, relative to their
   standard deviation;
2. the texts are decoded in each mode: the share of equal texts, and the first position of a difference.

And the cost of exact mode: tokens per second of 64 concurrent requests, batched and exact.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import allyouneed as ayn
from allyouneed.cli.tour import dates
from allyouneed.config import override, preset_tree
from allyouneed.folder import Folder
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.infer.scheduler import Scheduler
from allyouneed.infer.speculative.drafts import PromptLookup
from allyouneed.nn.batch import Rows
from allyouneed.nn.models.precision import quantize
from allyouneed.nn.states.paged import BlockPool, PagedStates

PAGE = Path(__file__).parents[2] / "docs/results/drift.md"
MARK = "<!-- tables: bench/decode/drift.py -->"
PAD, BOS, EOS, VOCAB, TEXTS, FEW, NEW = 0, 1, 2, 4000, 64, 16, 8
Table = list[list[str]]


def stack(mixer: dict[str, Any], **keys: Any) -> dict[str, Any]:
    layer = {"repeat": 3, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 2048}} | keys
    return {"kind": "decoder", "vocab": VOCAB, "width": 512, "embed": {"tied": False}, "decoder": [layer]}


MODELS: dict[str, dict[str, Any]] = {
    "base": override(preset_tree("transformer-base"), [f"vocab={VOCAB}", "encoder[0].repeat=3", "decoder[0].repeat=3"]),
    "gpt2": override(preset_tree("gpt2"), [f"vocab={VOCAB}", "decoder[0].repeat=3"]),
    "llama": override(preset_tree("llama-15m"), [f"vocab={VOCAB}", "decoder[0].repeat=3"]),
    "retention": stack({"kind": "retention", "heads": 8}),
    "rwkv": stack({"kind": "rwkv"}, channel={"kind": "rwkv-channel", "hidden": 2048}),
    "bit": stack({"kind": "attention", "heads": 8, "pattern": "causal", "positions": "rotary"}) | {"linear": "bit"},
}


@dataclass
class Subject:
    """A model, its inputs (sources or prompts) and its decoding options."""

    name: str
    model: Any
    texts: list[list[int]]
    options: dict[str, Any]

    @property
    def reads(self) -> bool:
        return hasattr(self.model, "encode")

    def engine(self, model: Any = None, exact: bool = False) -> Engine:
        return Engine(model or self.model, exact=exact, budget=1 << 20, **self.options)

    def few(self) -> Subject:
        """A subset, for modes that run one request at a time."""
        return replace(self, texts=self.texts[:FEW])

    def decoding(self) -> Decoding:
        return Decoding(method="greedy", max_length=NEW, extra=NEW)

    def requests(self) -> list[Request]:
        if self.reads:
            return [Request([self.options["bos"]], NEW, (n,), text) for n, text in enumerate(self.texts)]
        return [Request(text, NEW, (n,)) for n, text in enumerate(self.texts)]


def made_up(name: str) -> Subject:
    torch.manual_seed(0)
    model: Any = ayn.build(MODELS[name]).eval()
    dice = Random(0)
    texts = [[dice.randrange(3, VOCAB) for _ in range(dice.randrange(4, 48))] for _ in range(TEXTS)]
    return Subject(name, model, texts, {"bos": BOS, "eos": EOS, "pad": PAD, "forbidden": [PAD, BOS, EOS]})


def trained(path: Path) -> Subject:
    """The date model of `allyouneed demo`."""
    folder = Folder.load(path)
    both = folder.tokenizers
    texts = [[*both.source.encode(text), both.source.eos] for text, _ in dates.generate(TEXTS, seed=9)]
    names = {"bos": both.target.bos, "eos": both.target.eos, "pad": both.source.pad}
    return Subject(f"{path.parent.name} (trained)", folder.model.eval(), texts, names)


# --- 1. scores --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def scores(
    subject: Subject, model: Any, script: list[list[int]], rows: int, piece: int = 1 << 20, pool: bool = False
) -> list[Tensor]:
    """Scores of the next token (tokens, vocab) of every text along a fixed script."""
    found: list[list[Tensor]] = [[] for _ in script]
    for first in range(0, len(script), rows):
        some = subject.requests()[first : first + rows]
        states = model.start(Rows.of([one.source for one in some], PAD) if subject.reads else len(some))  # type: ignore[misc]
        states = PagedStates(states, BlockPool(1 << 12)) if pool else states
        last, read = torch.empty(0), [0] * len(some)
        head: list[Tensor | None] = [None] * len(some)
        while any(at < len(one.prompt) for at, one in zip(read, some, strict=True)):
            parts = [one.prompt[at : at + piece] for at, one in zip(read, some, strict=True)]
            last = model.advance(Rows.of(parts, PAD), states, last=True)[:, 0]
            read = [at + len(part) for at, part in zip(read, parts, strict=True)]
            for row, (part, one) in enumerate(zip(parts, some, strict=True)):
                if part and read[row] == len(one.prompt):
                    head[row] = last[row]
        hidden = torch.stack([one for one in head if one is not None])
        for place in range(NEW):
            for row, logits in enumerate(model.head(hidden).float()):
                if place < len(script[first + row]):
                    found[first + row].append(logits)
            new = [(script[first + row] + [EOS] * NEW)[place] for row in range(len(some))]
            hidden = model.advance(Rows(torch.tensor(new)[:, None]), states)[:, -1]
    return [torch.stack(one) for one in found]


@torch.inference_mode()
def at_once(subject: Subject, model: Any, script: list[list[int]]) -> list[Tensor]:
    """The whole text in one pass, without states."""
    from allyouneed.nn.batch import Batch

    found = []
    for one, tokens in zip(subject.requests(), script, strict=True):
        rows = Rows(torch.tensor([[*one.prompt, *tokens[:-1]]]))
        source = Rows(torch.tensor([list(one.source)])) if one.source is not None else None
        found.append(model.logits(Batch(rows, source))[0, len(one.prompt) - 1 :].float())
    return found


def apart(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[str]:
    scale = torch.cat(list(truth)).std()
    gaps = [(one - other).abs() / scale for one, other in zip(found, truth, strict=True)]
    largest, mean = max(float(gap.max()) for gap in gaps), float(torch.cat([gap.flatten() for gap in gaps]).mean())
    return [f"{largest:.1e}", f"{mean:.1e}"]


# --- 2. texts ---------------------------------------------------------------------------------------------------------


def decode(engine: Engine, subject: Subject, rows: int = TEXTS, **options: Any) -> list[list[int]]:
    found: list[list[int]] = []
    for first in range(0, len(subject.texts), rows):
        some = subject.texts[first : first + rows]
        answers = (engine.generate if subject.reads else engine.complete)(some, subject.decoding(), **options)
        found += [best[0].tokens for best in answers]
    return found


def scheduled(engine: Engine, subject: Subject, pool: bool = False) -> list[list[int]]:
    scheduler = Scheduler(engine.runner, rows=16, budget=24, pool=BlockPool(1 << 12) if pool else None)
    states = []
    for request in subject.requests():
        states.append(scheduler.submit(request, subject.decoding()))
        scheduler.step()
    scheduler.run()
    return [state.answer[0].tokens for state in states if state.answer is not None]


def alike(found: list[list[int]], truth: list[list[int]]) -> list[str]:
    other = [both for both in zip(found, truth, strict=True) if both[0] != both[1]]
    first = [next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), NEW) for both in other]
    return [f"{1 - len(other) / len(truth):.1%}", str(1 + min(first)) if first else ""]


# --- both -------------------------------------------------------------------------------------------------------------


def shrunken(subject: Subject, score_mod: str) -> Any:
    return quantize(deepcopy(subject.model), score_mod).eval()


def measured(subject: Subject) -> tuple[Table, list[str]]:
    """Rows of the table, and the cost of exact mode: tokens per processor second, batched and exact."""
    plain, exact, some = subject.engine(), subject.engine(exact=True), subject.few()
    truth = decode(plain, subject, rows=1)
    script = [one or [EOS] for one in truth]
    reference, few = scores(subject, subject.model, script, 1), script[:FEW]
    spent: dict[str, float] = {}

    def timed(name: str, act: Callable[[], list[list[int]]]) -> list[list[int]]:
        begin = time.process_time()
        found = act()
        spent[name] = time.process_time() - begin
        return found

    DecodingSpec = tuple[str, Callable[[], list[Tensor]] | None, Callable[[], list[list[int]]] | None]
    ways: list[DecodingSpec] = [
        ("exact, 64 requests", None, lambda: timed("exact", lambda: decode(exact, subject))),
        ("exact, scheduler", None, lambda: scheduled(exact, some)),
        ("batch of 8", lambda: scores(subject, subject.model, script, 8), lambda: decode(plain, subject, 8)),
        (
            "batch of 64",
            lambda: scores(subject, subject.model, script, 64),
            lambda: timed("together", lambda: decode(plain, subject)),
        ),
        ("chunked prefill, 8 tokens", lambda: scores(some, subject.model, few, 1, piece=8), None),
        ("full forward, no cache", lambda: at_once(some, subject.model, few), None),
        ("scheduler", None, lambda: scheduled(plain, subject)),
        (
            "paged KV cache",
            lambda: scores(subject, subject.model, script, 8, pool=True),
            lambda: scheduled(plain, subject, True),
        ),
        ("speculative (lookup)", None, lambda: decode(plain, some, draft=PromptLookup())),
    ]
    for score_mod in ("bf16", "ternary" if subject.name == "bit" else "int8"):
        model = shrunken(subject, score_mod)
        ways.append(
            (
                f"{score_mod}, batch of 8",
                lambda model=model: scores(subject, model, script, 8),  # type: ignore[misc]
                lambda model=model: decode(subject.engine(model), subject, 8),  # type: ignore[misc]
            )
        )
    table: Table = []
    for name, by_scores, by_texts in ways:
        found = by_scores() if by_scores is not None else []
        gaps = apart(found, reference[: len(found)]) if found else ["", ""]
        tokens = by_texts() if by_texts is not None else []
        table.append([subject.name, name, *gaps, *(alike(tokens, truth[: len(tokens)]) if tokens else ["", ""])])
        print(*table[-1], sep=" | ", flush=True)
    rates = [sum(map(len, truth)) / spent[name] for name in ("together", "exact")]
    return table, [subject.name, *(f"{rate:.0f}" for rate in rates), f"{rates[0] / rates[1]:.1f}"]


def markdown(head: str, table: Table) -> str:
    names = head.split(" | ")
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, nargs="*", default=[], help="trained date models")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    given = parser.parse_args()
    head = "model | mode | largest Δ | mean Δ | identical texts | first differing token"
    makers = [(made_up, name) for name in given.models] + [(trained, path) for path in given.folder]
    rows: Table = []
    costs: Table = []
    for make, what in makers:
        subject = make(what)  # type: ignore[arg-type]
        more, cost = measured(subject)
        rows += more
        costs.append(cost)
    where = f"torch {torch.__version__}, {platform.machine()}, threads: {torch.get_num_threads()}"
    tables = f"""{where}; {TEXTS} texts, at most {NEW} new tokens each.

{markdown(head, rows)}

## Cost of exact mode

{markdown(f"model | batch of {TEXTS}, tokens/s | exact, tokens/s | ratio", costs)}
"""
    print(tables)
    if given.write:
        before = PAGE.read_text(encoding="utf-8").split(MARK)[0] if PAGE.exists() else ""
        PAGE.write_text(f"{before}{MARK}\n\n{tables}", encoding="utf-8")


if __name__ == "__main__":
    main()
