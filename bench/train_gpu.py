"""Training on one GPU: ours against the named peers, in turns, in the same run (bf16).

    python bench/train_gpu.py translation --pairs pairs.tsv
    python bench/train_gpu.py gpt2
    python bench/train_gpu.py same

translation: transformer-base (512, 6 + 6, vocabulary 32k, dropout 0.1) on real sentence pairs. The peer is
torch.nn.Transformer, compiled, on the same sentences padded in batches of like length, as its users feed it; ours
reads packed rows through the product's own feed. Counted are real target tokens.
gpt2: 124M parameters, rows of 1,024 tokens without dropout. The peer is a plain GPT written as nanoGPT is (fused
qkv, SDPA, vocabulary 50,304, bf16 autocast, fused AdamW), compiled whole.
same: no speed; that updates replayed as a CUDA graph are those that are written.

Beside each speed: its share of the matrix ceiling measured in this run (model FLOPs only, 3 × forward), and peak
memory. Ours is what `allyouneed train` runs: Updates, Feed, Machine.

The peer of translation gets batches of four static shapes (LENGTHS, as many rows as make the tokens of a batch): its
compilation for shapes that change does not end. Each of its layers and its loss is compiled. Sentences longer than the
last of them are left out of its data, which favours it.

Several of these runs may compile side by side and measure one after another: `--meet FOLDER N` lets N of them wait for
each other before the first measures, and then for whoever is measuring.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from allyouneed.config import override, parse, preset_tree
from allyouneed.data.filters import Filters
from allyouneed.data.packing import PackedBatches, generator
from allyouneed.data.pairs import PairFiles
from allyouneed.data.store import Store
from allyouneed.data.tokenizers import TokenizerConfig, Vocabularies
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.model import Model
from allyouneed.tasks.causal_lm import CausalLM
from allyouneed.tasks.task import Task
from allyouneed.tasks.translation import PairItems, Translation, pair_encoding
from allyouneed.train.capture import Updates
from allyouneed.train.feed import Feed, Place, Update
from allyouneed.train.machine import Machine
from allyouneed.train.optimiser import Adam
from allyouneed.train.step import fetch

DEVICE = torch.device("cuda")
SMOOTHING = 0.1
PATIENCE = 60  # seconds to wait for others that compile
LENGTHS = (8, 12, 16, 24)  # of the peer's batches; 99% of the sentence pairs are no longer
MACHINE = Machine(DEVICE, bf16=True, compiled=True, why="")


def ceiling() -> float:
    """FLOP/s of a large bf16 matrix product."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        a @ b
    torch.cuda.synchronize()
    return 50 * 2 * 8192**3 / (time.perf_counter() - begin)


@dataclass
class Runner:
    """`turn(n)` trains for one turn and gives (real tokens, seconds)."""

    name: str
    turn: Callable[[int], tuple[int, float]]
    flops: float  # forward, of one real token
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # shares of its turns
    peak: int = 0  # of its first turn: what a recording holds is counted when it is made, and not again


@contextmanager
def measuring(meet: list[str] | None) -> Iterator[None]:
    """When all who compile are done, and nobody else measures."""
    if meet is None:
        yield
        return
    folder, count = Path(meet[0]), int(meet[1])
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.mkdtemp(dir=folder)
    begin = time.monotonic()
    while sum(path.is_dir() for path in folder.iterdir()) < count and time.monotonic() - begin < PATIENCE:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compare(runners: list[Runner], given: argparse.Namespace) -> None:
    """The first of them is ours."""
    runners = runners[:1] if given.alone else runners
    for runner in runners:  # which compiles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        runner.turn(0)
        runner.peak = torch.cuda.max_memory_allocated()
        print(f"{runner.name}: first turn {time.perf_counter() - begin:.0f} s", flush=True)
    with measuring(given.meet):
        top = ceiling()
        for turn in range(1, given.turns + 1):
            for runner in runners:
                tokens, seconds = runner.turn(turn)
                runner.speeds.append(tokens / seconds)
        report(runners, top)
        if given.profile:
            profiled(runners[0])


def report(runners: list[Runner], top: float) -> None:
    best = max(statistics.median(r.speeds) for r in runners[1:] or runners)
    print(f"\nmatrix ceiling {top / 1e12:.0f} TFLOP/s\n")
    print("| | tokens/s | lowest to highest | × best peer | share of ceiling | peak GiB |\n|---|---|---|---|---|---|")
    for r in runners:
        middle = statistics.median(r.speeds)
        share = 3 * r.flops * middle / top
        spread = f"{min(r.speeds):,.0f} – {max(r.speeds):,.0f}"
        print(
            f"| {r.name} | {middle:,.0f} | {spread} | {middle / best:.2f} | {share:.1%} | {r.peak / 2**30:.1f} |",
            flush=True,
        )


def profiled(runner: Runner) -> None:
    """Where the time of one more turn goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        _, seconds = runner.turn(0)
    kernels = [e for e in seen.key_averages() if e.self_device_time_total and e.device_type.name == "CUDA"]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1e6
    print(f"{runner.name}: {seconds:.2f} s, kernels {busy:.2f} s")
    for e in kernels[:28]:
        print(f"  {e.self_device_time_total / 1e3:9.2f} ms {e.count:6d} ×  {e.key[:110]}")


def timed(step: Callable[[], int], count: int) -> tuple[int, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    tokens = sum(step() for _ in range(count))
    torch.cuda.synchronize()
    return tokens, time.perf_counter() - begin


class Ours:
    """What the trainer does, step after step."""

    def __init__(self, tree: dict, task: Task, recorded: bool) -> None:
        self.config = parse(Model, tree)  # type: ignore[type-abstract]
        self.model, self.task = self.config.build().to(DEVICE).train(), task
        self.optimiser = Adam().build(self.model)
        MACHINE.speed_up(self.model)
        self.updates = Updates(self.model, task, self.optimiser, 1.0, MACHINE)
        self.updates.records &= recorded
        self.number = 0

    def step(self, update: Update) -> int:
        self.number += 1
        pending = self.updates.run(update, self.number, 1e-4)
        if self.number % 10 == 0:
            (now,) = fetch([pending])
            assert now.finite, now
        return update.tokens


# --- translation ------------------------------------------------------------------------------------------------------


class TorchTransformer(nn.Module):
    def __init__(self, vocab: int, width: int = 512, heads: int = 8, layers: int = 6, hidden: int = 2048) -> None:
        super().__init__()
        self.width = width
        self.tokens = nn.Embedding(vocab, width)
        nn.init.normal_(self.tokens.weight, std=width**-0.5)
        self.core = nn.Transformer(width, heads, layers, layers, hidden, 0.1, batch_first=True)
        for module in self.core.modules():  # the paper's dropout: neither on attention weights nor inside the FFN
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
            elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = 0.0
        self.dropout = nn.Dropout(0.1)
        angles = torch.arange(1024)[:, None] * 10000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], -1), persistent=False)

    def compiled(self) -> TorchTransformer:
        for layer in [*self.core.encoder.layers, *self.core.decoder.layers]:
            layer.compile(dynamic=False)
        self.embed, self.judge = torch.compile(self.embed, dynamic=False), torch.compile(self.judge, dynamic=False)
        return self

    def embed(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) * math.sqrt(self.width) + self.table[: tokens.shape[1]])

    def judge(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = (hidden @ self.tokens.weight.T.to(hidden.dtype)).flatten(0, 1).float()
        return cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, label_smoothing=SMOOTHING, reduction="sum")

    def forward(self, source: Tensor, source_pad: Tensor, target: Tensor, target_pad: Tensor, labels: Tensor) -> Tensor:
        time_target = target.shape[1]
        hidden = self.core(
            self.embed(source),
            self.embed(target),
            tgt_mask=torch.ones(time_target, time_target, dtype=torch.bool, device=target.device).triu(1),
            src_key_padding_mask=source_pad,
            tgt_key_padding_mask=target_pad,
            memory_key_padding_mask=source_pad,
            tgt_is_causal=True,
        )
        return self.judge(hidden, labels)


class Bucketed:
    """Sentence pairs in batches of like lengths, each of one of a few shapes: as users feed a compiled model."""

    def __init__(self, items: PairItems, tokens: int) -> None:
        self.items, self.tokens = items, tokens

    def batches(self, epoch: int) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """How many real target tokens, and what the model takes."""
        rng = generator(1, epoch)
        longest = np.maximum(*self.items.lengths(0)[:2])
        groups: list[tuple[int, np.ndarray]] = []
        for shorter, length in zip((0, *LENGTHS), LENGTHS, strict=False):
            members = rng.permutation(np.flatnonzero((longest > shorter) & (longest <= length)))
            rows = self.tokens // length
            groups += [(length, members[n : n + rows]) for n in range(0, len(members) - rows + 1, rows)]
        for number in rng.permutation(len(groups)):
            yield self.padded(*groups[number])

    def padded(self, length: int, members: np.ndarray) -> tuple[int, tuple[Tensor, ...]]:
        filled = self.items.fill(0, members)
        assert filled.labels is not None
        found: list[Tensor] = []
        for side, lengths in zip(filled.sides, self.items.lengths(0), strict=True):
            counts = torch.from_numpy(lengths[members].astype(np.int64))
            real = torch.arange(length) < counts[:, None]
            found += [self.spread(side.tokens, real, 0), ~real]
        labels = self.spread(filled.labels, real, IGNORE)
        return int((labels != IGNORE).sum()), tuple(tensor.pin_memory() for tensor in (*found, labels))

    def spread(self, values: np.ndarray, real: Tensor, empty: int) -> Tensor:
        return torch.full(real.shape, empty).masked_scatter_(real, torch.from_numpy(values))


def peer_turn(model: nn.Module, data: Bucketed, steps: int) -> Callable[[int], tuple[int, float]]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True)

    def turn(number: int) -> tuple[int, float]:
        # not timed: the peer's data costs it nothing; the first turn sees every shape
        prepared = list(islice(data.batches(number), steps)) if number else one_of_each(data)
        turns = iter(prepared)

        def step() -> int:
            tokens, inputs = next(turns)
            optimiser.zero_grad(set_to_none=True)
            given = [tensor.to(DEVICE, non_blocking=True) for tensor in inputs]
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(*given) / tokens
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            return tokens

        return timed(step, len(prepared))

    return turn


def one_of_each(data: Bucketed) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Two batches of every shape."""
    found: dict[int, list[tuple[int, tuple[Tensor, ...]]]] = {}
    for batch in data.batches(0):
        found.setdefault(batch[1][0].shape[1], []).append(batch)
        if len(found) == len(LENGTHS) and all(len(batches) > 1 for batches in found.values()):
            break
    return [batch for batches in found.values() for batch in batches[:2]]


def translation(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = [PairFiles(path=given.pairs)]
        vocabularies = Vocabularies.train(TokenizerConfig(vocab=32000), files)
        encoding = pair_encoding(vocabularies, max_tokens=given.row - 1)
        store = Store.build(Path(folder) / "store", files, Filters(), encoding)
        items = PairItems(store, vocabularies)
        packed = PackedBatches(items, (given.row, given.row), given.tokens // given.row, seed=1)
        size = 32000  # as it is written in papers; a smaller vocabulary just leaves rows unused
        tree = override(preset_tree("transformer-base"), [f"vocab={size}", "dropout=0.1"])
        ours = Ours(tree, Translation(smoothing=SMOOTHING), not given.written)
        flops = ours.config.cost(10).flops

        def own_turn(number: int) -> tuple[int, float]:
            waited = [0.0]
            with Feed(packed, Place(number, 0), 1, DEVICE) as feed:
                first = [next(feed) for _ in range(2)]  # the epoch is packed when the first one comes

                def step() -> int:
                    begin = time.perf_counter()
                    update = first.pop() if first else next(feed)
                    waited[0] += time.perf_counter() - begin
                    return ours.step(update)

                tokens, seconds = timed(step, given.steps if number else 8)
            if number:
                runners[0].waits.append(waited[0] / seconds)
            return tokens, seconds

        data = Bucketed(items, given.tokens)
        runners = [Runner("allyouneed, packed rows", own_turn, flops)]
        if not given.alone:
            compiled = TorchTransformer(size).to(DEVICE).train().compiled()
            call = peer_turn(compiled, data, given.steps)
            runners.append(Runner("torch.nn.Transformer compiled, padded", call, flops))
            if given.eager:
                call = peer_turn(TorchTransformer(size).to(DEVICE).train(), data, given.steps)
                runners.append(Runner("torch.nn.Transformer eager, padded", call, flops))
        print(f"{len(store):,} sentence pairs; {given.tokens} tokens a batch on each side, padding counted", flush=True)
        compare(runners, given)


# --- gpt2 -------------------------------------------------------------------------------------------------------------


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, self.heads, -1).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 in the manner of nanoGPT."""

    def __init__(self, vocab: int = 50304, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return cross_entropy(logits.view(-1, logits.shape[-1]).float(), labels.view(-1))


def gpt2(given: argparse.Namespace) -> None:
    vocab, rows, length = 50304, given.rows, 1024
    changes = [f"vocab={vocab}", "dropout=0.0", "decoder[0].mixer.dropout=0.0"]
    ours = Ours(override(preset_tree("gpt2"), changes), CausalLM(), not given.written)
    flops = ours.config.cost(length).flops
    pool = [torch.randint(0, 50257, (rows, length + 1)).pin_memory() for _ in range(8)]

    def own_turn(number: int) -> tuple[int, float]:
        count = [0]

        def step() -> int:
            text = pool[count[0] % len(pool)].to(DEVICE, non_blocking=True)
            count[0] += 1
            batch = Batch(Rows(text[:, :-1].contiguous()), labels=text[:, 1:].contiguous())
            return ours.step(Update([batch], [Place(0, 0)], rows * length, Place(0, 0)))

        return timed(step, given.steps if number else 8)

    peer = PlainGPT().to(DEVICE).train()
    call = torch.compile(peer)
    optimiser = torch.optim.AdamW(peer.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

    def their_turn(number: int) -> tuple[int, float]:
        count = [0]

        def step() -> int:
            text = pool[count[0] % len(pool)].to(DEVICE, non_blocking=True)
            count[0] += 1
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(text[:, :-1].contiguous(), text[:, 1:].contiguous())
            loss.backward()
            nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            return rows * length

        return timed(step, given.steps if number else 4)

    print(
        f"{rows} rows of {length} tokens, vocabulary {vocab}; ours has {ours.config.cost(length).parameters:,} weights"
    )
    runners = [Runner("allyouneed", own_turn, flops), Runner("a GPT as nanoGPT's, compiled", their_turn, flops)]
    compare(runners, given)


# --- recorded or written, the same ------------------------------------------------------------------------------------


def same(given: argparse.Namespace) -> None:
    """A small GPT-2 from the same weights over the same batches, both ways; without dropout they must agree."""
    changes = ["vocab=50304", "dropout=0.0", "decoder[0].mixer.dropout=0.0", "decoder[0].repeat=2"]
    text = [torch.randint(0, 50257, (4, 257), device=DEVICE) for _ in range(3)] * 4  # it learns them by heart
    losses = []
    for recorded in (False, True):
        torch.manual_seed(1)
        ours = Ours(override(preset_tree("gpt2"), changes), CausalLM(), recorded)
        pending = []
        for number, rows in enumerate(text, start=1):
            batch = Batch(Rows(rows[:, :-1].contiguous()), labels=rows[:, 1:].contiguous())
            update = Update([batch], [Place(0, 0)], 4 * 256, Place(0, 0))
            pending.append(ours.updates.run(update, number, 1e-3 / number))
        losses.append([one.loss for one in fetch(pending)])
        print("recorded" if recorded else "written ", " ".join(f"{loss:.4f}" for loss in losses[-1]))
    furthest = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
    print(f"furthest apart: {furthest:.1e} of a loss")
    assert furthest < 1e-3, "a recorded update is another one than the written"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["translation", "gpt2", "same"])
    parser.add_argument("--pairs", help="sentence pairs: a TSV file, .gz and .zst too")
    parser.add_argument("--tokens", type=int, default=24576, help="translation: tokens a batch, on each side")
    parser.add_argument("--rows", type=int, default=32, help="gpt2: rows a batch")
    parser.add_argument("--steps", type=int, default=40, help="of one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--row", type=int, default=128, help="translation: tokens of a packed row")
    parser.add_argument("--profile", action="store_true", help="where the time of ours goes, besides")
    parser.add_argument("--alone", action="store_true", help="leave out the peers")
    parser.add_argument("--eager", action="store_true", help="translation: the peer as it is written, besides")
    parser.add_argument("--written", action="store_true", help="ours without recording updates as a CUDA graph")
    parser.add_argument("--tune", action="store_true", help="let the compiler try more forms of every kernel")
    parser.add_argument("--meet", nargs=2, metavar=("FOLDER", "N"), help="measure when N such runs have compiled")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if given.tune:
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")
    {"translation": translation, "gpt2": gpt2, "same": same}[given.job](given)


if __name__ == "__main__":
    main()
