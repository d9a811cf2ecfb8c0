"""Training on one GPU: ours against the named peers, in turns, in the same run (bf16).

    python bench/train/gpu.py translation --pairs pairs.tsv
    python bench/train/gpu.py gpt2
    python bench/train/gpu.py same
    python bench/train/gpu.py kernels
    python bench/train/gpu.py session --pairs pairs.tsv

translation: transformer-base (512, 6 + 6, vocabulary 32k, dropout 0.1) on real sentence pairs. The peer is
torch.nn.Transformer, compiled, on the same sentences padded in batches of like length, as its users feed it; ours
reads packed rows through the product's own feed. Counted are real target tokens.
gpt2: 124M parameters, rows of 1,024 tokens without dropout. The peer is a plain GPT written as nanoGPT is (fused
qkv, SDPA, vocabulary 50,304, bf16 autocast, fused AdamW), compiled whole.
same: no speed; that updates replayed as a CUDA graph are those that are written, with and without our fusions.
kernels: our kernels alone, cut in several ways: cross-entropy of a chunk of logits, besides by what the
compiler makes of the definition, and the backward passes that read once (runtime/cuda/fused_backward.py).
session: all of them in one call; they compile side by side and measure one after another (session.py).

`--fusions` (gpt2, same): ours without any, then with more and more of them, kernels cut in the fastest way first:
  ffn    activations, GELU by a sigmoid: backwards with the sums for the bias before them
  qkv    gradients of queries, keys and values laid side by side with the sums for their bias
  norms  layer norms backwards with their sums and what passes them by
  biases the last bias of a sub-layer goes into what passes its norm by
  end    the last norm compiled too
  products  matrix products by cuBLASLt's fastest algorithm, activations and their gradients as epilogues

Beside each speed: its share of the matrix ceiling measured in this run (model FLOPs only, 3 × forward), and peak
memory. Ours is what `allyouneed train` runs: Updates, Feed, Machine.

The peer of translation gets batches of four static shapes (LENGTHS, as many rows as make the tokens of a batch): its
compilation for shapes that change does not end. Each of its layers and its loss is compiled. Sentences longer than the
last of them are left out of its data, which favours it.

Several of these runs may compile side by side and measure one after another: `--meet FOLDER N` lets N of them wait for
each other before the first measures, and then for the one that is measuring.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import override, parse, preset_tree
from allyouneed.data.batches.packing import PackedBatches
from allyouneed.data.batches.store import Store
from allyouneed.data.files.filters import Filters
from allyouneed.data.files.pairs import PairFiles
from allyouneed.data.tokenizers.base import TokenizerConfig, Vocabularies
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.stack import Stack
from allyouneed.tasks.language.causal_lm import CausalLM
from allyouneed.tasks.task import Task
from allyouneed.tasks.translation.translation import PairItems, Translation, pair_encoding
from allyouneed.training.backend import Backend
from allyouneed.training.cuda.capture import CapturedUpdates
from allyouneed.training.optim.optimiser import Adam
from allyouneed.training.prefetch import DataPosition, Prefetcher, Update
from allyouneed.training.step import PendingStep, fetch_results
from bench.train.kernels import choose_backend, kernels
from bench.train.peers import SMOOTHING, Bucketed, PlainGPT, TorchTransformer, one_of_each
from bench.train.session import session
from bench.train.turns import DEVICE, Runner, Turn, compare, tell, timed

# fusions of the backward pass, the compiled final norm, and products by the fastest algorithm
FUSIONS = ("ffn", "qkv", "norms", "biases", "end", "products")
STAGES: tuple[tuple[str, ...], ...] = ((), ("ffn", "qkv"), ("norms",), ("biases", "end"), ("products",))
BACKEND = Backend(DEVICE, bf16=True, compiled=True, summary="")


class Ours:
    """What the trainer does, step after step."""

    def __init__(self, tree: dict, task: Task, recorded: bool, fusions: Sequence[str] = FUSIONS) -> None:
        self.config = parse(Model, tree)  # type: ignore[type-abstract]
        self.model, self.task = self.config.build().to(DEVICE).train(), task
        self.optimiser = Adam().build(self.model)
        BACKEND.compile_model(self.model, fusions=fusions)
        for module in self.model.modules():
            if "end" not in fusions and isinstance(module, Stack) and module.end is not None:
                module.end._compiled_call_impl = None
        self.updates = CapturedUpdates(self.model, task, self.optimiser, 1.0, BACKEND)
        self.updates.enabled &= recorded
        self.number = 0

    def run(self, update: Update, rate: float) -> PendingStep:
        self.number += 1
        return self.updates.run(update, self.number, rate)

    def step(self, update: Update) -> int:
        pending = self.run(update, 1e-4)
        if self.number % 10 == 0:
            (now,) = fetch_results([pending])
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
                host, gpu, last = 0.0, 0.0, torch.cuda.Event()
                with Prefetcher(packed, DataPosition(number, 0), 1, DEVICE) as feed:

                    def step() -> int:
                        nonlocal host, gpu
                        begin = time.perf_counter()
                        update = next(feed)
                        waited = time.perf_counter() - begin
                        host, gpu = host + waited, gpu + waited * last.query()  # which may have work left
                        tokens = ours.step(update)
                        last.record()
                        return tokens

                    for _ in range(10 if number else 0):  # a run has packed its epoch and filled its feed
                        step()
                    host = gpu = 0.0
                    tokens, seconds = timed(step, given.steps if number else 8)
                if number:
                    runners[0].waits.append((gpu / seconds, host / seconds))
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

    def own(recorded: bool, fusions: Sequence[str] = FUSIONS) -> Turn:
        ours = Ours(tree, CausalLM(), recorded, fusions)

        def train(tokens: Tensor, labels: Tensor) -> None:
            update = Update(
                [Batch(Rows(tokens), labels=labels)], [DataPosition(0, 0)], rows * length, DataPosition(0, 0)
            )
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
    if given.fusions:
        choose_backend()
        fusions: tuple[str, ...] = ()
        for more in STAGES:
            fusions += more
            name = "+ " + ", ".join(more) if more else "allyouneed, no fusions"
            runners.append(Runner(name, partial(own, not given.written, fusions), cost.flops))
    else:
        runners.insert(0, Runner("allyouneed", partial(own, not given.written), cost.flops))
    compare(runners, given)


# --- recorded or written, the same ------------------------------------------------------------------------------------


def same(given: argparse.Namespace) -> None:
    """A small GPT-2 from the same weights over the same batches, all ways; without dropout they must agree."""
    changes = ["vocab=50304", "dropout=0.0", "decoder[0].mixer.dropout=0.0", "decoder[0].repeat=2"]
    text = [torch.randint(0, 50257, (4, 257), device=DEVICE) for _ in range(3)] * 4  # it learns them by heart
    losses: dict[tuple[bool, bool], list[float]] = {}  # recorded, with fusions
    for fusions in ((), FUSIONS) if given.fusions else (FUSIONS,):
        for recorded in (False, True):
            torch.manual_seed(1)
            ours = Ours(override(preset_tree("gpt2"), changes), CausalLM(), recorded, fusions)
            pending = []
            for number, rows in enumerate(text, start=1):
                batch = Batch(Rows(rows[:, :-1].contiguous()), labels=rows[:, 1:].contiguous())
                pending.append(
                    ours.run(Update([batch], [DataPosition(0, 0)], 4 * 256, DataPosition(0, 0)), 1e-3 / number)
                )
            found = losses[recorded, bool(fusions)] = [one.loss for one in fetch_results(pending)]
            way = f"{'recorded' if recorded else 'written'}{', fusions' if fusions else ''}"
            print(f"{way:18s}", " ".join(f"{loss:.4f}" for loss in found), flush=True)

    def apart(one: tuple[bool, bool], other: tuple[bool, bool]) -> float:
        return max(abs(a - b) / a for a, b in zip(losses[one], losses[other], strict=True))

    recordings = [apart((False, fusions), (True, fusions)) for fusions in {fused for _, fused in losses}]
    lines = [f"recorded and written are at most {max(recordings):.1e} of a loss apart"]
    if given.fusions:  # other roundings: the head's gradient is added up in fp32
        lines.append(f"with and without fusions: {(rounding := apart((False, False), (False, True))):.1e}")
    tell(lines, given)
    assert max(recordings) < 1e-3, "a recorded update is another one than the written"
    assert not given.fusions or rounding < 5e-3, "an update with fusions is another one than without"


JOBS = {"same": same, "kernels": kernels, "gpt2": gpt2, "translation": translation}


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
    parser.add_argument("--fusions", action="store_true", help="ours without and with each of what makes it faster")
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
    torch._dynamo.config.recompile_limit = 64  # the same blocks with other fusions
    if given.tune:
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}")
    JOBS[given.job](given)


if __name__ == "__main__":
    main()
