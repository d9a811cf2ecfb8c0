"""Speculative decoding on CPU: seconds per token with and without a draft, same model, interleaved.

    python bench/decode/speculative.py TEXT [--pairs FILE …] [--count 24] [--write]

Processor seconds of one thread, so that other load on the machine does not count. Models have random weights and
generate a given script; each pass costs as much as with trained weights.

1. Draft model: GPT-2 (124M) generates TEXT (.txt, .gz), and a GPT of two layers, 192 wide, with the same vocabulary is
   its draft. How often the two agree is set; the speedup is measured.
2. Prompt lookup: a transformer of base size reads the first column of FILE (TSV) and generates the second.
3. The cost of a pass over several tokens and of trimming them, by the kind of state.
"""

from __future__ import annotations

import argparse
import gzip
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import allyouneed as ayn
from allyouneed.config import override, preset_tree
from allyouneed.data.tokenizers.base import Tokenizer, TokenizerConfig, train
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.infer.speculative.stats import DraftStats, total_stats
from allyouneed.nn.batch import Rows

PAGE = Path(__file__).parents[2] / "docs/results/speculative.md"
VOCAB, NEW, GIVEN = 2000, 64, 24
SMALL = ["width=192", "decoder[0].mixer.heads=3", "decoder[0].channel.hidden=768", "decoder[0].repeat=2"]
Table = list[list[str]]


def read_text(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found = act()
    return time.process_time() - begin, found


# --- models that follow a script --------------------------------------------------------------------------------------


class Scripted(nn.Module):
    """Generates a script at the cost of the model: the next token is one more feature of the hidden state, which the
    head reads. One text at a time. `right`: the share of tokens that follow the script."""

    def __init__(self, model: Any, right: float = 1.0) -> None:
        super().__init__()
        self.model, self.config, self.right, self.script = model, model.config, right, list[int]()

    def set_script(self, script: Sequence[int]) -> None:
        dice = Random(1)
        self.script = [token if dice.random() < self.right else (token + 1) % 300 + 3 for token in script]

    def start(self, source: Rows) -> Any:
        return self.model.start(source)

    def advance(self, new: Rows, states: Any, last: bool = False) -> Tensor:
        at = states.lengths[0]
        hidden = self.model.advance(new, states)
        tokens = torch.tensor(self.script)[torch.arange(at, at + hidden.shape[1]).clamp(max=len(self.script) - 1)]
        both = torch.cat([hidden, tokens.to(hidden)[None, :, None]], -1)
        return both[:, -1:] if last else both

    def head(self, both: Tensor) -> Tensor:
        scores: Tensor = self.model.head(both[..., :-1])
        return scores.scatter_add(-1, both[..., -1:].long(), scores.new_full((*scores.shape[:-1], 1), 1e4))


def compare_drafts(
    name: str, batches: Sequence[Any], drafts: dict[str, Draft], ask: Callable[[Any, Draft | None], Any]
) -> Table:
    """Each batch with every draft in turn."""
    cases: dict[str, Draft | None] = {"none": None, **drafts}
    spent, stats, counts = dict.fromkeys(cases, 0.0), dict.fromkeys(cases, DraftStats()), dict.fromkeys(cases, 0)
    ask(batches[0], None)
    for batch in batches:
        for case, draft in cases.items():
            took, answers = seconds(lambda batch=batch, draft=draft: ask(batch, draft))
            spent[case] += took
            stats[case] += total_stats(answers) or DraftStats()
            counts[case] += sum(len(h.log_probs) for best in answers for h in best)
    table = []
    for case in cases:
        each, plain = spent[case] / counts[case], spent["none"] / counts["none"]
        found = stats[case]
        right = f"{found.right / found.guessed:.0%}" if found.guessed else ""
        rate = f"{(found.passes + found.right) / found.passes:.2f}" if found.passes else "1.00"
        table.append([name, case, right, rate, f"{1000 * each:.1f}", f"{plain / each:.2f}"])
        print(*table[-1], sep=" | ", flush=True)
    return table


# --- 1. draft model ---------------------------------------------------------------------------------------------------


def measure_draft_model(text: str, count: int) -> Table:
    tokenizer = train(TokenizerConfig(vocab=VOCAB), text.splitlines())
    ids, dice = tokenizer.encode(text), Random(0)
    texts = [ids[at : at + GIVEN + NEW] for at in (dice.randrange(len(ids) - GIVEN - NEW) for _ in range(count))]
    torch.manual_seed(0)
    large = Scripted(ayn.build("gpt2").eval())
    small = ayn.build(override(preset_tree("gpt2"), SMALL)).eval()
    decoding = Decoding(method="greedy", max_length=NEW, min_length=NEW)
    table: Table = []
    for right in (0.5, 0.7, 0.9):
        drafter = Scripted(small, right)
        engines = [Engine(model, 1, 2, 0, limit=1024) for model in (large, drafter)]

        def ask(tokens: list[int], draft: Draft | None, both: Any = (large, drafter), engine: Any = engines[0]) -> Any:
            for model in both:
                model.set_script(tokens[1:])
            found = engine.complete([tokens[:GIVEN]], decoding, draft=draft)
            assert found[0][0].tokens == tokens[GIVEN:], "the script"
            return found

        drafts: dict[str, Draft] = {f"model, {n} ahead": DraftModel(engines[1].runner, n) for n in (2, 4, 7)}
        table += compare_drafts(f"agree on {right:.0%}", texts, drafts, ask)
    return table


# --- 2. prompt lookup -------------------------------------------------------------------------------------------------


def measure_lookup(path: Path, count: int) -> Table:
    lines = [line.split("\t")[:2] for line in read_text(path).splitlines() if line.count("\t")]
    tokenizer: Tokenizer = train(TokenizerConfig(vocab=8000), [text for line in lines for text in line])
    torch.manual_seed(0)
    model = Scripted(ayn.build("transformer-base").eval())
    engine = Engine(model, tokenizer.bos, tokenizer.eos, tokenizer.pad)
    pairs = [[[*ids, tokenizer.eos] for ids in tokenizer.encode_batch(line)] for line in lines]
    some = Random(0).sample([pair for pair in pairs if len(pair[1]) > 8], count)
    decoding = Decoding(method="greedy")

    def ask(pair: list[list[int]], draft: Draft | None) -> Any:
        model.set_script(pair[1])
        found = engine.generate(pair[:1], decoding, draft=draft)
        assert [*found[0][0].tokens, tokenizer.eos] == pair[1], "the script"
        return found

    drafts: dict[str, Draft] = {f"lookup, {n} ahead": PromptLookup(n) for n in (4, 8, 16)}
    return compare_drafts(path.name.split(".")[0], some, drafts, ask)


# --- 3. trimming ------------------------------------------------------------------------------------------------------


def read(model: Any, new: Rows, states: Any) -> None:
    model.head(model.advance(new, states))


def measure_trimming() -> Table:
    table: Table = []
    kinds: dict[str, Any] = {
        "attention": {"kind": "attention", "heads": 12, "pattern": "causal", "positions": "rotary"},
        "window": {"kind": "attention", "heads": 12, "pattern": "causal & window(128)", "positions": "rotary"},
        "retention": {"kind": "retention", "heads": 12},
        "rwkv": {"kind": "rwkv"},
    }
    for name, mixer in kinds.items():
        block = {"repeat": 12, "wiring": "pre-norm", "mixer": mixer, "channel": {"kind": "ffn", "hidden": 3072}}
        model: Any = ayn.build({"kind": "decoder", "vocab": 50257, "width": 768, "decoder": [block]}).eval()
        best = [9.0, 9.0, 9.0]
        with torch.inference_mode():
            for _ in range(5):
                states = model.start(1)
                model.advance(Rows(torch.randint(3, 50000, (1, 200))), states)
                for at, count in enumerate((1, 5)):
                    new = Rows(torch.randint(3, 50000, (1, count)))
                    best[at] = min(best[at], seconds(partial(read, model, new, states))[0])
                best[2] = min(best[2], seconds(partial(states.trim, [202]))[0])
        table.append([name, *(f"{1000 * one:.1f}" for one in best), f"{(best[1] + best[2]) / best[0]:.2f}"])
        print(*table[-1], sep=" | ", flush=True)
    return table


# --- the page ---------------------------------------------------------------------------------------------------------


def markdown(head: str, table: Table) -> str:
    names = head.split(" | ")
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="text that GPT-2 generates")
    parser.add_argument("--pairs", type=Path, nargs="*", default=[], help="TSV: source, target")
    parser.add_argument("--count", type=int, default=24, help="texts per file")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    head = "case | draft | accepted | tokens per pass | ms per token | speedup"
    back = markdown("state | 1 token, ms | 5 tokens, ms | trimming 3, ms | both / 1 token", measure_trimming())
    texts = [row for path in options.pairs for row in measure_lookup(path, options.count)]
    models = measure_draft_model(read_text(options.text), options.count)
    tables = f"""{MACHINE.format(torch.__version__, platform.processor() or platform.machine())}

## Draft model

{markdown(head, models)}

## Prompt lookup

{markdown(head.replace("case", "file"), texts)}

## Cost of a pass by kind of state

{back}
"""
    print(tables)
    if options.write:
        before = PAGE.read_text(encoding="utf-8").split(MARK)[0] if PAGE.exists() else ""
        PAGE.write_text(f"{before}{MARK}\n\n{tables}", encoding="utf-8")


MARK = "<!-- tables: bench/decode/speculative.py -->"
MACHINE = "Processor seconds of one thread; torch {}; {}."

if __name__ == "__main__":
    main()
