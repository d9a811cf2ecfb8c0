"""What guessing ahead is worth on CPU: seconds a token with a draft and without, of the same model, in turns.

    python bench/speculative.py TEXT [--pairs FILE …] [--count 24] [--write]

Processor seconds of one thread, so that other people's work on the machine does not count. Models have random weights
and are told what to say, token by token; each pass costs what it costs.

1. A smaller model guesses: GPT-2 (124M) writes TEXT (.txt, .gz), and a GPT of two layers, 192 wide, with the same
   vocabulary guesses. How often two models agree is theirs; here it is set, and what is measured is what it brings.
2. The text itself is looked up: a transformer of base size reads the first column of FILE (TSV) and writes the second,
   as a model would that always finds the reference.
3. What a pass over several tokens costs and what taking them back costs, by the kind of state.
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
from allyouneed.infer.speculative.decode import DraftStats, total_stats
from allyouneed.infer.speculative.drafts import Draft, DraftModel, PromptLookup
from allyouneed.nn.batch import Rows

PAGE = Path(__file__).parents[1] / "docs/results/speculative.md"
VOCAB, NEW, GIVEN = 2000, 64, 24
SMALL = ["width=192", "decoder[0].mixer.heads=3", "decoder[0].channel.hidden=768", "decoder[0].repeat=2"]
Table = list[list[str]]


def opened(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    found = act()
    return time.process_time() - begin, found


# --- models that are told what to say ---------------------------------------------------------------------------------


class Told(nn.Module):
    """A model that says what it is told, and takes as long as ever: the token goes with the hidden state, one more
    feature, to the head. One text at a time. With `right` below 1, so often it says something else."""

    def __init__(self, model: Any, right: float = 1.0) -> None:
        super().__init__()
        self.model, self.config, self.right, self.script = model, model.config, right, list[int]()

    def tell(self, script: Sequence[int]) -> None:
        dice = Random(1)
        self.script = [token if dice.random() < self.right else (token + 1) % 300 + 3 for token in script]

    def start(self, source: Rows) -> Any:
        return self.model.start(source)

    def advance(self, new: Rows, states: Any, last: bool = False) -> Tensor:
        at = states.lengths[0]
        hidden = self.model.advance(new, states)
        says = torch.tensor(self.script)[torch.arange(at, at + hidden.shape[1]).clamp(max=len(self.script) - 1)]
        both = torch.cat([hidden, says.to(hidden)[None, :, None]], -1)
        return both[:, -1:] if last else both

    def head(self, both: Tensor) -> Tensor:
        scores: Tensor = self.model.head(both[..., :-1])
        return scores.scatter_add(-1, both[..., -1:].long(), scores.new_full((*scores.shape[:-1], 1), 1e4))


def compared(
    name: str, batches: Sequence[Any], drafts: dict[str, Draft], ask: Callable[[Any, Draft | None], Any]
) -> Table:
    """Each batch in every way, one after the other."""
    ways: dict[str, Draft | None] = {"none": None, **drafts}
    spent, went, said = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, DraftStats()), dict.fromkeys(ways, 0)
    ask(batches[0], None)
    for batch in batches:
        for way, draft in ways.items():
            took, answers = seconds(lambda batch=batch, draft=draft: ask(batch, draft))
            spent[way] += took
            went[way] += total_stats(answers) or DraftStats()
            said[way] += sum(len(h.log_probs) for best in answers for h in best)
    table = []
    for way in ways:
        each, plain = spent[way] / said[way], spent["none"] / said["none"]
        how = went[way]
        right = f"{how.right / how.guessed:.0%}" if how.guessed else ""
        rate = f"{(how.passes + how.right) / how.passes:.2f}" if how.passes else "1.00"
        table.append([name, way, right, rate, f"{1000 * each:.1f}", f"{plain / each:.2f}"])
        print(*table[-1], sep=" | ", flush=True)
    return table


# --- 1. a smaller model -----------------------------------------------------------------------------------------------


def guessed_by_a_model(text: str, count: int) -> Table:
    tokenizer = train(TokenizerConfig(vocab=VOCAB), text.splitlines())
    ids, dice = tokenizer.encode(text), Random(0)
    texts = [ids[at : at + GIVEN + NEW] for at in (dice.randrange(len(ids) - GIVEN - NEW) for _ in range(count))]
    torch.manual_seed(0)
    large = Told(ayn.build("gpt2").eval())
    small = ayn.build(override(preset_tree("gpt2"), SMALL)).eval()
    way = Decoding(method="greedy", max_length=NEW, min_length=NEW)
    table: Table = []
    for right in (0.5, 0.7, 0.9):
        guesser = Told(small, right)
        engines = [Engine(model, 1, 2, 0, limit=1024) for model in (large, guesser)]

        def ask(tokens: list[int], draft: Draft | None, both: Any = (large, guesser), engine: Any = engines[0]) -> Any:
            for model in both:
                model.tell(tokens[1:])
            found = engine.complete([tokens[:GIVEN]], way, draft=draft)
            assert found[0][0].tokens == tokens[GIVEN:], "it says what it is told"
            return found

        drafts: dict[str, Draft] = {f"model, {n} ahead": DraftModel(engines[1], n) for n in (2, 4, 7)}
        table += compared(f"agree on {right:.0%}", texts, drafts, ask)
    return table


# --- 2. the text itself -----------------------------------------------------------------------------------------------


def looked_up(path: Path, count: int) -> Table:
    lines = [line.split("\t")[:2] for line in opened(path).splitlines() if line.count("\t")]
    tokenizer: Tokenizer = train(TokenizerConfig(vocab=8000), [text for line in lines for text in line])
    torch.manual_seed(0)
    model = Told(ayn.build("transformer-base").eval())
    engine = Engine(model, tokenizer.bos, tokenizer.eos, tokenizer.pad)
    pairs = [[[*ids, tokenizer.eos] for ids in tokenizer.encode_batch(line)] for line in lines]
    some = Random(0).sample([pair for pair in pairs if len(pair[1]) > 8], count)
    way = Decoding(method="greedy")

    def ask(pair: list[list[int]], draft: Draft | None) -> Any:
        model.tell(pair[1])
        found = engine.generate(pair[:1], way, draft=draft)
        assert [*found[0][0].tokens, tokenizer.eos] == pair[1], "it says what it is told"
        return found

    drafts: dict[str, Draft] = {f"lookup, {n} ahead": PromptLookup(n) for n in (4, 8, 16)}
    return compared(path.name.split(".")[0], some, drafts, ask)


# --- 3. taking back ---------------------------------------------------------------------------------------------------


def read(model: Any, new: Rows, states: Any) -> None:
    model.head(model.advance(new, states))


def taken_back() -> Table:
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
    parser.add_argument("text", type=Path, help="what GPT-2 writes")
    parser.add_argument("--pairs", type=Path, nargs="*", default=[], help="TSV: what is read, what is written")
    parser.add_argument("--count", type=int, default=24, help="texts of each file")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    head = "case | draft | accepted | tokens per pass | ms per token | speedup"
    back = markdown("state | 1 token, ms | 5 tokens, ms | trimming 3, ms | both / 1 token", taken_back())
    texts = [row for path in asked.pairs for row in looked_up(path, asked.count)]
    models = guessed_by_a_model(opened(asked.text), asked.count)
    tables = f"""{MACHINE.format(torch.__version__, platform.processor() or platform.machine())}

## Draft model

{markdown(head, models)}

## Prompt lookup

{markdown(head.replace("case", "file"), texts)}

## Cost of a pass by kind of state

{back}
"""
    print(tables)
    if asked.write:
        before = PAGE.read_text(encoding="utf-8").split(MARK)[0] if PAGE.exists() else ""
        PAGE.write_text(f"{before}{MARK}\n\n{tables}", encoding="utf-8")


MARK = "<!-- tables: bench/speculative.py -->"
MACHINE = "Processor seconds of one thread; torch {}; {}."

if __name__ == "__main__":
    main()
