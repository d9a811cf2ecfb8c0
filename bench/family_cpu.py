"""Decoding on CPU: tokens per second of every token mixer in one skeleton, relative to attention in the same run.

    python bench/family_cpu.py                                  # fp32, bf16 and int8, 1 and 16 rows
    python bench/family_cpu.py retention rwkv --stored int8     # some mixers (attention is always measured)
    python bench/family_cpu.py --contexts                       # against the length of the context, 1k to 16k
    python bench/family_cpu.py --page docs/results/family-speed.md      # both, with the plot beside the page

The skeleton: 6 pre-norm layers of width 256, 4 heads, FFN of 1,024, vocabulary of 8,000; only the mixer differs, and
for rows that end in "channel", the channel mixer or the linear maps. Random weights; a step is one new token of every
row, from token ids to logits. Models take turns; the best turn of each counts. `--processor` is for a shared machine:
one thread, and processor time instead of wall-clock time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from allyouneed.config import parse
from allyouneed.kernels.cpu import build as native
from allyouneed.nn.batch import Rows
from allyouneed.nn.mixers.convolution import RecentTokens
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.nn.states.kv_cache import KVCache
from allyouneed.nn.states.recurrent import Recurrent
from allyouneed.nn.states.window import WindowKVCache
from allyouneed.runtime.cpu.executor import CpuExecutor, cpu_executor

WIDTH, LAYERS, HEADS, HIDDEN, VOCAB = 256, 6, 4, 1024, 8000
PROMPT, STEPS = 16, 24  # tokens before the first measured one, and measured in a turn
AIM = 0.7
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
LONG = (  # of the models, those whose speed is measured against the context
    "attention",
    "attention, 1 kv head",
    "attention, window(256)",
    "attention, ALiBi",
    "attention, Shaw",
    "mla",
    "retention",
    "gated-retention",
    "rwkv",
    "gru",
    "convolution",
)

CAUSAL = {"kind": "attention", "heads": HEADS, "pattern": "causal"}
SLIDING = {"heads": HEADS, "size": 7, "sees": "past"}
FFN = {"kind": "ffn", "hidden": HIDDEN}
LATENT = {"kv_rank": 64, "nope_width": 64, "rope_width": 32, "value_width": 64}


def attention(**keys: Any) -> dict[str, Any]:
    return {"mixer": CAUSAL | keys}


# name: what differs from the skeleton with attention
MODELS: dict[str, dict[str, Any]] = {
    "attention": attention(),
    "attention, rotary": attention(positions="rotary"),
    "attention, 1 kv head": attention(kv_heads=1),
    "attention, window(256)": attention(pattern="causal & window(256)"),
    "attention, sparse(16)": attention(pattern="causal & (window(16) | strided(16))"),
    "attention, window or global": attention(pattern="causal & (window(256) | global(1))"),
    "attention, ALiBi": attention(positions="alibi"),
    "attention, T5 buckets": attention(positions="buckets"),
    "attention, Shaw": attention(positions={"kind": "shaw", "distance": 16}),
    "attention, Transformer-XL": attention(positions="transformer-xl"),
    "attention, qk norm": attention(qk_norm="rms"),
    "attention, additive scores": attention(scores="additive"),
    "mla": {"mixer": {"kind": "mla", "heads": HEADS, "pattern": "causal", **LATENT}},
    "retention": {"mixer": {"kind": "retention", "heads": HEADS}},
    "gated-retention": {"mixer": {"kind": "gated-retention", "heads": HEADS}},
    "rwkv": {"mixer": {"kind": "rwkv"}},
    "gru": {"mixer": {"kind": "gru"}},
    "lstm": {"mixer": {"kind": "lstm"}},
    "convolution": {"mixer": {"kind": "convolution", "size": 3, "sees": "past"}},
    "convolution, separable": {"mixer": {"kind": "convolution", "size": 7, "sees": "past", "separable": True}},
    "lightweight-convolution": {
        "mixer": {"kind": "lightweight-convolution", "heads": HEADS, "size": 7, "sees": "past"}
    },
    "dynamic-convolution": {"mixer": {"kind": "dynamic-convolution", "heads": HEADS, "size": 7, "sees": "past"}},
    "performer": {"mixer": {"kind": "performer", "heads": HEADS}},
    "mamba": {"mixer": {"kind": "mamba"}},
    "mamba2": {"mixer": {"kind": "mamba2", "heads": 8}},
    "s4": {"mixer": {"kind": "s4"}},
    "infini": {"mixer": {"kind": "infini", "heads": HEADS, "segment": 256}},
    "gau": {"mixer": {"kind": "gau", "pattern": "causal"}},
    "mssa": {"mixer": {"kind": "mssa", "heads": HEADS, "pattern": "causal"}},
    "longnet": {"mixer": {"kind": "longnet", "heads": HEADS, "segments": [256, 1024], "dilations": [1, 4]}},
    "lsh": {"mixer": {"kind": "lsh", "heads": HEADS, "chunk": 64, "buckets": 16}},
    "lsra": {"mixer": {"kind": "lsra", "heads": HEADS, "size": 7, "pattern": "causal"}},
    "synthesizer": {"mixer": {"kind": "synthesizer", "heads": HEADS, "length": 256, "pattern": "causal"}},
    "synthesizer, random": {
        "mixer": {"kind": "synthesizer", "heads": HEADS, "length": 256, "pattern": "causal", "synthesis": "random"}
    },
    "experts, 2 of 8 (channel)": {
        "mixer": CAUSAL,
        "channel": {"kind": "moe", "experts": 8, "top": 2, "expert": {"kind": "ffn", "hidden": HIDDEN // 2}},
    },
    "rwkv, rwkv-channel (channel)": {"mixer": {"kind": "rwkv"}, "channel": {"kind": "rwkv-channel", "hidden": HIDDEN}},
    "attention, BitNet (channel)": {"mixer": CAUSAL, "linear": {"kind": "bit"}},
}


class Case(NamedTuple):
    name: str
    stored: str
    rows: int


def build(name: str, stored: str) -> Any:
    entry = {"channel": FFN} | MODELS[name]
    layer = {"repeat": LAYERS, "wiring": "pre-norm", "mixer": entry["mixer"], "channel": entry["channel"]}
    tree = {"kind": "decoder", "vocab": VOCAB, "width": WIDTH, "decoder": [layer]}
    if "linear" in entry:
        tree["linear"] = entry["linear"]
        stored = "ternary-int8" if stored == "int8" else stored
    torch.manual_seed(0)
    model: Any = parse(Model, tree).build().eval()  # type: ignore[type-abstract]
    return model if stored == "fp32" else quantize(model, stored)


class Decoding:
    """One model that has read `context` tokens, and decodes."""

    def __init__(self, case: Case, context: int) -> None:
        self.model, self.case, self.context = build(case.name, case.stored), case, context
        self.executor = cpu_executor(self.model)
        self.restart()

    def restart(self) -> None:
        rows = self.case.rows
        self.states = self.executor.start(rows)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, VOCAB, (rows, PROMPT), generator=generator)
        self.executor.advance(Rows(tokens), self.states)
        self.tokens = torch.full((rows, 1), 3)
        if self.context > PROMPT:
            pretend(self.states, self.context)

    def turn(self, steps: int, clock: Any) -> float:
        """Seconds of a step."""
        began = clock()
        for _ in range(steps):
            hidden = self.executor.advance(Rows(self.tokens), self.states)[:, -1]
            self.tokens = self.executor.head(hidden).argmax(-1, keepdim=True)
        return (clock() - began) / steps

    @property
    def path(self) -> str:
        """What computes it."""
        if not isinstance(self.executor, CpuExecutor):
            return "torch"
        calls = self.executor.decoder.calls
        return f"{len(calls)} calls" if calls else "native"


def pretend(states: Any, context: int) -> None:
    """As if the rows had read so many tokens: caches of that length, filled with random numbers."""
    for layer in states.layers:
        for state in layer.values():
            if isinstance(state, WindowKVCache):
                state.lengths = torch.full_like(state.lengths, context)
                state.written, state.end = state.lengths, min(context, state.first + state.ring)
                slots = state.end + 1
            elif isinstance(state, KVCache):
                state.end = slots = context
                state.drop_spare()
            elif isinstance(state, Recurrent):
                state.since = context - (state.lengths - state.since)
                state.lengths = torch.full_like(state.lengths, context)
                continue
            elif isinstance(state, RecentTokens):
                state.lengths = torch.full_like(state.lengths, context)
                state.oldest = state.lengths - state.size
                continue
            else:
                raise TypeError(f"{type(state).__name__} has no length to pretend")
            rows, heads, _, width = state.keys.shape
            state.keys = torch.randn(rows, heads, slots, width)
            state.values = torch.randn(rows, heads, slots, state.values.shape[3])
    states.lengths = [context] * len(states.lengths)


def measure(running: list[Decoding], rounds: int, steps: int, clock: Any) -> dict[Case, tuple[float, str]]:
    """Tokens per second of the best turn, and what computed it."""
    best = {one.case: float("inf") for one in running}
    for one in running:
        one.turn(4, clock)
    for _ in range(rounds):
        for one in running:
            best[one.case] = min(best[one.case], one.turn(steps, clock))
    return {one.case: (one.case.rows / best[one.case], one.path) for one in running}


def survey(names: list[str], kinds: list[str], rows: list[int], rounds: int, clock: Any) -> list[str]:
    """The table of all mixers with a short context."""
    columns = [(kind, count) for kind in kinds for count in rows]
    found: dict[Case, tuple[float, str]] = {}
    for kind, count in columns:
        found |= measure([Decoding(Case(name, kind, count), PROMPT) for name in names], rounds, STEPS, clock)
    heads = [f"{kind} b{count}" for kind, count in columns]
    table = [f"| tokens/s (of attention's) | {' | '.join(heads)} | executor |", "|---" * (len(heads) + 2) + "|"]
    for name in names:
        cells = []
        for kind, count in columns:
            speed = found[Case(name, kind, count)][0]
            share = speed / found[Case("attention", kind, count)][0]
            cells.append(f"{speed:,.0f} ({share:.2f}{'' if share >= AIM else ' ↓'})")
        paths = dict.fromkeys(found[Case(name, kind, count)][1] for kind, count in columns)
        table.append(f"| {name} | {' | '.join(cells)} | {', '.join(paths)} |")
    return table


def curve(names: list[str], contexts: list[int], rounds: int, clock: Any) -> dict[str, list[float]]:
    """Tokens per second of one row in fp32 against the tokens read before."""
    found: dict[str, list[float]] = {name: [] for name in names}
    running = [Decoding(Case(name, "fp32", 1), PROMPT) for name in names]
    for context in contexts:
        for one in running:
            one.context = context
            one.restart()
        for case, (speed, _) in measure(running, rounds, 8, clock).items():
            found[case.name].append(speed)
        print(context, {name: round(speeds[-1]) for name, speeds in found.items()}, flush=True)
    return found


def plot(
    found: dict[str, list[float]], contexts: list[int], path: Path, label: str = "tokens/s, one row, fp32"
) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "family"  # the same file for the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for number, (name, speeds) in enumerate(found.items()):
        style = "-" if number < 10 else "--"
        axes.plot(contexts, speeds, style, marker="o", markersize=3, label=name, color=f"C{number % 10}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{count // 1024}k" for count in contexts])
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), handlelength=4)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


PAGE = """# Speed of every mixer

The same skeleton with another mixer: what does a step of decoding cost?

## CPU

```sh
python bench/family_cpu.py{flags} --page docs/results/family-speed.md
```

Six pre-norm layers of width 256, 4 heads, FFN of 1,024, vocabulary of 8,000, random weights. A step is one new token of
every row, from ids to logits. Models take turns; the best turn counts. {how}. In brackets: the share of attention's
speed in the same run; ↓ marks shares below {aim}. *native*: all parts have instructions of the interpreter; *calls*:
torch computes so many parts of a step ([decoding](../decoding.md#cpu-executor)). Rows that end in *(channel)* change
the channel mixer or the linear maps.

{table}

LSTM and GRU have int8 weights and float activations in int8 models. BitNet in the int8 columns is stored as
`ternary-int8`: its maps are ternary, read as int8, embedding and vocabulary head int8. Experts are those of the same
active size: 2 of 8 with half of the FFN's features each.

### Against the length of the context

{contexts}

![decode speed against context](family-speed-cpu.svg)

One row in fp32; caches have that length and random contents. Attention reads keys and values of all tokens, MLA a
latent of each; windows, recurrences and convolutions read a state of constant size.

"""
GPU = "## GPU\n"  # the rest of the page, which bench/family_gpu.py measures


def context_table(found: dict[str, list[float]], contexts: list[int]) -> str:
    heads = " | ".join(f"{count // 1024}k" for count in contexts)
    rows = [f"| tokens/s | {heads} |", "|---" * (len(contexts) + 1) + "|"]
    rows += [f"| {name} | {' | '.join(f'{speed:,.0f}' for speed in speeds)} |" for name, speeds in found.items()]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--stored", default="fp32,bf16,int8", help="precisions of the weights, separated by commas")
    parser.add_argument("--rows", default="1,16", help="batch sizes, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor", action="store_true", help="one thread, processor time")
    parser.add_argument("--contexts", action="store_true", help="against the length of the context only")
    parser.add_argument("--page", type=Path, help="write the result page to this file, and the plot beside it")
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    if options.processor:
        torch.set_num_threads(1)
    native.wait_for_build()
    chosen = [name for name in MODELS if name == "attention" or not options.names or name in options.names]
    table: list[str] = []
    with torch.inference_mode():
        if not options.contexts:
            rows = [int(count) for count in options.rows.split(",")]
            table = survey(chosen, options.stored.split(","), rows, options.rounds, clock)
            print("\n".join(table), flush=True)
        if not options.contexts and not options.page:
            return
        long = [name for name in chosen if options.names or name in LONG]
        found = curve(long, list(CONTEXTS), max(2, options.rounds // 2), clock)
    print(context_table(found, list(CONTEXTS)))
    if options.page:
        how = "One thread, processor time" if options.processor else f"{torch.get_num_threads()} threads"
        flags = " --processor" if options.processor else ""
        text = PAGE.format(
            flags=flags, how=how, aim=AIM, table="\n".join(table), contexts=context_table(found, list(CONTEXTS))
        )
        _, _, gpu = options.page.read_text("utf-8").partition(GPU) if options.page.is_file() else ("", "", "")
        options.page.write_text(text + GPU + (gpu or "\nNot measured yet.\n"), encoding="utf-8")
        plot(found, list(CONTEXTS), options.page.with_name("family-speed-cpu.svg"))


if __name__ == "__main__":
    main()
