"""Training on one GPU: ours against the named peers, in turns, in the same run (bf16).

    python bench/train_gpu.py translation --pairs pairs.tsv
    python bench/train_gpu.py gpt2
    python bench/train_gpu.py same
    python bench/train_gpu.py loss
    python bench/train_gpu.py session --pairs pairs.tsv

translation: transformer-base (512, 6 + 6, vocabulary 32k, dropout 0.1) on real sentence pairs. The peer is
torch.nn.Transformer, compiled, on the same sentences padded in batches of like length, as its users feed it; ours
reads packed rows through the product's own feed. Counted are real target tokens.
gpt2: 124M parameters, rows of 1,024 tokens without dropout. The peer is a plain GPT written as nanoGPT is (fused
qkv, SDPA, vocabulary 50,304, bf16 autocast, fused AdamW), compiled whole.
same: no speed; that updates replayed as a CUDA graph are those that are written, with and without our levers.
loss: a chunk of logits judged by our kernel, cut in several ways, and by what the compiler makes of the definition.
session: all of them in one call; they compile side by side and measure one after another (train_session.py).

`--levers` (gpt2, same): ours without any, then with one more of them at a time, and with all as a recording:
  kernel    cross-entropy and its gradient by our kernel
  in-place  products are added to the gradient of the head as they are made
  gelu      GELU by a sigmoid instead of tanh
  halves    cross-entropy in half as many chunks

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
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn

from allyouneed.config import override, parse, preset_tree
from allyouneed.data.filters import Filters
from allyouneed.data.packing import PackedBatches
from allyouneed.data.pairs import PairFiles
from allyouneed.data.store import Store
from allyouneed.data.tokenizers import TokenizerConfig, Vocabularies
from allyouneed.kernels import usable
from allyouneed.nn import crossentropy
from allyouneed.nn.batch import IGNORE, Batch, Rows
from allyouneed.nn.feedforward import FFNModule, shorter_gelu_tanh
from allyouneed.nn.model import Model
from allyouneed.tasks.causal_lm import CausalLM
from allyouneed.tasks.task import Task
from allyouneed.tasks.translation import PairItems, Translation, pair_encoding
from allyouneed.train.capture import Updates
from allyouneed.train.feed import Feed, Place, Update
from allyouneed.train.machine import Machine
from allyouneed.train.optimiser import Adam
from allyouneed.train.step import Pending, fetch
from train_peers import SMOOTHING, Bucketed, PlainGPT, TorchTransformer, one_of_each
from train_session import session

DEVICE = torch.device("cuda")
LEVERS = ("kernel", "in-place", "gelu", "halves")
CHUNK = crossentropy.GPU_CHUNK_BYTES
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


Turn = Callable[[int], tuple[int, float]]  # trains for one turn and gives (real tokens, seconds)


@dataclass
class Runner:
    """`make` builds the model, when its turn has come: what is in memory then is not its own."""

    name: str
    make: Callable[[], Turn]
    flops: float  # forward, of one real token
    peer: bool = False
    turn: Turn | None = None
    speeds: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # shares of its turns
    peak: int = 0  # of its first turn: what a recording holds is counted when it is made, and not again


@contextmanager
def measuring(given: argparse.Namespace) -> Iterator[None]:
    """When all who compile are done, and nobody else measures."""
    if given.meet is None:
        yield
        return
    folder, count = Path(given.meet[0]), int(given.meet[1])
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.mkdtemp(dir=folder)
    begin = time.monotonic()
    while sum(path.is_dir() for path in folder.iterdir()) < count and time.monotonic() - begin < given.patience:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compare(runners: list[Runner], given: argparse.Namespace) -> None:
    runners = [r for r in runners if not (r.peer and given.alone)]
    for runner in runners:  # which compiles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        runner.turn = runner.make()
        runner.turn(0)
        runner.peak = torch.cuda.max_memory_allocated() - before
        print(f"{runner.name}: first turn {time.perf_counter() - begin:.0f} s", flush=True)
    with measuring(given):
        top = ceiling()
        for number in range(1, given.turns + 1):
            for runner in runners:
                assert runner.turn is not None
                tokens, seconds = runner.turn(number)
                runner.speeds.append(tokens / seconds)
            print(f"turn {number}: " + ", ".join(f"{r.speeds[-1]:,.0f}" for r in runners), flush=True)
            tell(report(runners, top), given, aloud=number == given.turns)
        if given.profile:
            profiled(runners[-1] if runners[-1].name.startswith("allyouneed") else runners[0])


def report(runners: list[Runner], top: float) -> list[str]:
    best = max(statistics.median(r.speeds) for r in [r for r in runners if r.peer] or runners)
    lines = [
        f"matrix ceiling {top / 1e12:.0f} TFLOP/s",
        "",
        "| | tokens/s | lowest to highest | × best peer | share of ceiling | peak GiB | waits for data |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in runners:
        middle = statistics.median(r.speeds)
        share = 3 * r.flops * middle / top
        spread = f"{min(r.speeds):,.0f} – {max(r.speeds):,.0f}"
        waits = f"{statistics.median(r.waits):.1%}" if r.waits else "–"
        lines.append(
            f"| {r.name} | {middle:,.0f} | {spread} | {middle / best:.3f} | {share:.1%} | {r.peak / 2**30:.1f} "
            f"| {waits} |"
        )
    return lines


def tell(lines: list[str], given: argparse.Namespace, aloud: bool = True) -> None:
    """On the screen, and where the one who asked looks for it."""
    if aloud:
        print("\n" + "\n".join(lines) + "\n", flush=True)
    if given.save is not None:
        Path(given.save).write_text("\n".join(lines) + "\n", encoding="utf-8")


def profiled(runner: Runner) -> None:
    """Where the time of one more turn goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        assert runner.turn is not None
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
    """What the trainer does, step after step. `levers`: None is all that the product has."""

    def __init__(self, tree: dict, task: Task, recorded: bool, levers: Sequence[str] | None = None) -> None:
        self.config = parse(Model, tree)  # type: ignore[type-abstract]
        self.model, self.task, self.levers = self.config.build().to(DEVICE).train(), task, levers
        for module in self.model.modules() if "gelu" in (levers or ()) else ():
            if isinstance(module, FFNModule):
                module.activation = shorter_gelu_tanh
        self.optimiser = Adam().build(self.model)
        MACHINE.speed_up(self.model)
        self.updates = Updates(self.model, task, self.optimiser, 1.0, MACHINE)
        self.updates.records &= recorded
        self.number = 0

    def run(self, update: Update, rate: float) -> Pending:
        self.number += 1
        if self.levers is not None:  # others that take turns with this one have other ones
            crossentropy.KERNEL, crossentropy.IN_PLACE = "kernel" in self.levers, "in-place" in self.levers
            crossentropy.GPU_CHUNK_BYTES = CHUNK * (1 + ("halves" in self.levers))
        return self.updates.run(update, self.number, rate)

    def step(self, update: Update) -> int:
        pending = self.run(update, 1e-4)
        if self.number % 10 == 0:
            (now,) = fetch([pending])
            assert now.finite, now
        return update.tokens


# --- translation ------------------------------------------------------------------------------------------------------


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
        flops = parse(Model, tree).cost(10).flops  # type: ignore[type-abstract]

        def own() -> Turn:
            ours = Ours(tree, Translation(smoothing=SMOOTHING), not given.written)

            def turn(number: int) -> tuple[int, float]:
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

            return turn

        def peer(compiled: bool) -> Turn:
            model = TorchTransformer(size).to(DEVICE).train()
            return peer_turn(model.compiled() if compiled else model, data, given.steps)

        data = Bucketed(items, given.tokens)
        runners = [Runner("allyouneed, packed rows", own, flops)]
        runners.append(Runner("torch.nn.Transformer compiled, padded", lambda: peer(True), flops, peer=True))
        if given.eager:
            runners.append(Runner("torch.nn.Transformer eager, padded", lambda: peer(False), flops, peer=True))
        print(f"{len(store):,} sentence pairs; {given.tokens} tokens a batch on each side, padding counted", flush=True)
        compare(runners, given)


# --- gpt2 -------------------------------------------------------------------------------------------------------------


def gpt2(given: argparse.Namespace) -> None:
    vocab, rows, length = 50304, given.rows, 1024
    changes = [f"vocab={vocab}", "dropout=0.0", "decoder[0].mixer.dropout=0.0"]
    tree = override(preset_tree("gpt2"), changes)
    cost = parse(Model, tree).cost(length)  # type: ignore[type-abstract]
    pool = [torch.randint(0, 50257, (rows, length + 1)).pin_memory() for _ in range(8)]

    def turns(train: Callable[[Tensor, Tensor], None]) -> Turn:
        def turn(number: int) -> tuple[int, float]:
            texts = cycle(pool)

            def step() -> int:
                text = next(texts).to(DEVICE, non_blocking=True)
                train(text[:, :-1].contiguous(), text[:, 1:].contiguous())
                return rows * length

            return timed(step, given.steps if number else 8)

        return turn

    def own(recorded: bool, levers: Sequence[str] | None) -> Turn:
        ours = Ours(tree, CausalLM(), recorded, levers)

        def train(tokens: Tensor, labels: Tensor) -> None:
            update = Update([Batch(Rows(tokens), labels=labels)], [Place(0, 0)], rows * length, Place(0, 0))
            ours.step(update)

        return turns(train)

    def peer() -> Turn:
        model = PlainGPT().to(DEVICE).train()
        call = torch.compile(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused=True)

        def train(tokens: Tensor, labels: Tensor) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(tokens, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        return turns(train)

    print(f"{rows} rows of {length} tokens, vocabulary {vocab}; ours has {cost.parameters:,} weights", flush=True)
    runners = [Runner("a GPT as nanoGPT's, compiled", peer, cost.flops, peer=True)]
    if not crossentropy._adds_wide(DEVICE, torch.bfloat16):
        print("this torch adds no bf16 products to fp32: 'in-place' does nothing", flush=True)
    if given.levers:
        # as written they share one memory; a recording keeps what it needs to itself
        for count in range(len(LEVERS) + 1):
            name = f"+ {LEVERS[count - 1]}" if count else "allyouneed as written, no levers"
            runners.append(Runner(name, partial(own, False, LEVERS[:count]), cost.flops))
        runners.append(Runner("allyouneed recorded, no levers", partial(own, True, ()), cost.flops))
        runners.append(Runner("allyouneed recorded, all levers", partial(own, True, LEVERS), cost.flops))
    else:
        runners.insert(0, Runner("allyouneed", partial(own, not given.written, None), cost.flops))
    compare(runners, given)


# --- recorded or written, the same ------------------------------------------------------------------------------------


def same(given: argparse.Namespace) -> None:
    """A small GPT-2 from the same weights over the same batches, all ways; without dropout they must agree."""
    changes = ["vocab=50304", "dropout=0.0", "decoder[0].mixer.dropout=0.0", "decoder[0].repeat=2"]
    text = [torch.randint(0, 50257, (4, 257), device=DEVICE) for _ in range(3)] * 4  # it learns them by heart
    losses: dict[tuple[bool, bool], list[float]] = {}  # recorded, with levers
    for levers in ((), LEVERS) if given.levers else (None,):
        for recorded in (False, True):
            torch.manual_seed(1)
            ours = Ours(override(preset_tree("gpt2"), changes), CausalLM(), recorded, levers)
            pending = []
            for number, rows in enumerate(text, start=1):
                batch = Batch(Rows(rows[:, :-1].contiguous()), labels=rows[:, 1:].contiguous())
                pending.append(ours.run(Update([batch], [Place(0, 0)], 4 * 256, Place(0, 0)), 1e-3 / number))
            found = losses[recorded, bool(levers)] = [one.loss for one in fetch(pending)]
            way = f"{'recorded' if recorded else 'written'}{', levers' if levers else ''}"
            print(f"{way:18s}", " ".join(f"{loss:.4f}" for loss in found), flush=True)

    def apart(one: tuple[bool, bool], other: tuple[bool, bool]) -> float:
        return max(abs(a - b) / a for a, b in zip(losses[one], losses[other], strict=True))

    recordings = [apart((False, levers), (True, levers)) for levers in {with_levers for _, with_levers in losses}]
    lines = [f"recorded and written are at most {max(recordings):.1e} of a loss apart"]
    if given.levers:  # other roundings: the head's gradient is added up in fp32
        lines.append(f"with and without levers: {(rounding := apart((False, False), (False, True))):.1e}")
    tell(lines, given)
    assert max(recordings) < 1e-3, "a recorded update is another one than the written"
    assert not given.levers or rounding < 5e-3, "an update with levers is another one than without"


# --- the loss by itself -----------------------------------------------------------------------------------------------


def loss(given: argparse.Namespace) -> None:
    """One chunk of GPT-2's logits: reading it once and writing it once is the least that can be done."""
    from allyouneed.kernels.crossentropy import Cut, judge

    rows, vocab = 8192, 50304
    logits = torch.randn(rows, vocab, device=DEVICE, dtype=torch.bfloat16)
    assert usable(logits)
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    losses, least = torch.empty(2, rows, device=DEVICE), 2 * logits.nbytes

    def by(cut: Cut) -> Callable[[], object]:
        return lambda: judge(logits, labels, IGNORE, None, 0.0, None, vocab, *losses, cut=cut)

    ways: dict[str, Callable[[], object]] = {
        f"our kernel, {cut.piece} scores by {cut.warps} warps": by(cut)
        for cut in (Cut(), Cut(4096, 8), Cut(16384, 16), Cut(16384, 32), Cut(8192, 32))
    }
    ways["the compiled definition"] = lambda: crossentropy._compiled_judged()(logits, labels, None, 0.0, None)
    ways["a copy"] = lambda: torch.neg(logits, out=logits)
    for work in ways.values():
        work()
    lines = [
        f"cross-entropy of {rows} × {vocab} in bf16",
        "",
        "| | ms | GB/s of one reading and one writing |",
        "|---|---|---|",
    ]
    with measuring(given):
        for name, work in ways.items():
            work()
            _, seconds = timed(lambda work=work: int(work() is None), 20)  # type: ignore[misc]
            lines.append(f"| {name} | {seconds / 20 * 1e3:.3f} | {least * 20 / seconds / 1e9:,.0f} |")
        tell(lines, given)


JOBS = {"same": same, "loss": loss, "gpt2": gpt2, "translation": translation}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=[*JOBS, "session"])
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
    parser.add_argument("--levers", action="store_true", help="ours without and with each of what makes it faster")
    parser.add_argument("--limit", type=float, default=200.0, help="session: seconds that it may take in all")
    parser.add_argument("--save", help="a file for the table")
    parser.add_argument("--tune", action="store_true", help="let the compiler try more forms of every kernel")
    parser.add_argument("--meet", nargs=2, metavar=("FOLDER", "N"), help="measure when N such runs have compiled")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for the others")
    given = parser.parse_args()
    if given.job == "session":
        return session(Path(__file__), given)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    if given.tune:
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")
    JOBS[given.job](given)


if __name__ == "__main__":
    main()
