"""What every hand-written fast path gains: a model with it and the same model without it, in turns, in the same run.

    python bench/family_speed/without.py                    # on a GPU: decoding, prefill, training, attention
    python bench/family_speed/without.py --device cpu       # decoding with rules of the CPU executor, training
    python bench/family_speed/without.py --only lsh,gau     # paths, models and kinds whose names contain one of these
    python bench/family_speed/without.py --list             # which there are, and what measures them
    python bench/family_speed/without.py --device cpu --tiny --gpu-paths    # rehearsal of what is for a GPU
    python bench/family_speed/without.py --page RUN.json … docs/results/without.md

The paths are found in the code; a new one is measured, or named as one that no model here has:

    rule      of the CPU executor (runtime/cpu/lower.py) or of a decode step (runtime/cuda/kernels.py): without it the
              part itself runs, in the mixed program or in the captured graph. Each model is measured without the rule
              of its mixer; other rules with the first model that has such a part
    kernel    of a module that asks `usable` before it runs one: without it, what runs on other devices
    fusion    of a training step (runtime/cuda/fused_backward.py, products.py)
    choice    of nn/ops/attention/select.py, and a few others: without it, what would be chosen instead

`decode`: one step of all rows in the middle of 32 prompt tokens and 128 new ones (CPU: 16 and 144). `prefill`: a whole
run of 512 prompt tokens and 8 new ones; `served`: the same by a server's scheduler; `blocks`: by one without graphs.
`train`: a step of `allyouneed train`, half of the layers, 8,192 tokens (CPU: forward and backward). `attend`: forward
and backward of attention alone, against torch's own kernels.

A gain is the median over turns that follow each other of the time without a path over that with it. `goes`: less than
1.1 at every size. On a CPU times are processor time of one thread, so that other load on the machine counts little. On
a GPU: without_gpu.py. `--save` names the file of the results.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

import allyouneed.infer.cuda_graph
import allyouneed.nn
import allyouneed.runtime.cuda
from allyouneed import kernels
from allyouneed.config import parse
from allyouneed.infer.decoding.topk import greedy_tokens
from allyouneed.kernels.cpu import build as native
from allyouneed.kernels.cpu import selective_scan
from allyouneed.lab.mixer_sizes import CPU, TINY, SkeletonSizes, mixers, settings, tree
from allyouneed.nn.batch import Batch, Rows
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.linear.ternary import pack_model
from allyouneed.nn.mixers import rnn
from allyouneed.nn.mixers.attention import longnet
from allyouneed.nn.models.base import Model
from allyouneed.nn.models.precision import quantize
from allyouneed.nn.ops.attention import select
from allyouneed.runtime.cpu.executor import CpuExecutor
from allyouneed.runtime.cpu.lower import lower
from allyouneed.runtime.cuda import decode_step, mixer_kernels
from allyouneed.runtime.cuda.fused_backward import FUSIONS
from allyouneed.runtime.cuda.kernels import make_kernel
from allyouneed.runtime.program import Unsupported
from allyouneed.runtime.rules import Rules
from bench.family_speed import train_cpu
from bench.family_speed.page import fill, markdown

assert decode_step  # registers all rules
LEAST = 1.1  # gain of a path that stays
MOST = 4.0  # seconds of all turns of one size, but for three

# --- paths, and how to do without them --------------------------------------------------------------------------------

Off = Callable[[], AbstractContextManager[Any]]


def rules_of(rules: Rules) -> dict[str, Callable[..., Any]]:
    """By name; a rule may hold for several classes."""
    return {f"rule {rule.__name__}": rule for rule in map(rules.found.get, rules.classes())}


def without_rule(rules: Rules, rule: Callable[..., Any]) -> AbstractContextManager[Any]:
    return patch.object(rules, "found", {kind: found for kind, found in rules.found.items() if found is not rule})


def without(*changes: tuple[Any, str, Any]) -> AbstractContextManager[Any]:
    stack = ExitStack()
    for owner, name, value in changes:
        stack.enter_context(patch.object(owner, name, value))
    return stack


def never(*_: Any) -> bool:
    return False


def nothing(*_: Any) -> None:
    return None


ASKS = ("usable", "usable_without_grad")


@cache
def askers() -> dict[str, Any]:
    """The modules that ask whether kernels run, by name."""
    found = {}
    for package in (allyouneed.nn, allyouneed.runtime.cuda, allyouneed.infer.cuda_graph):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            if any(getattr(module, name, None) is getattr(kernels, name) for name in ASKS):
                found[info.name.removeprefix("allyouneed.")] = module
    return found


def without_kernels(*names: str) -> AbstractContextManager[Any]:
    """`module:function`: only where that function asks, in code that no compiler reads."""
    changes: list[tuple[Any, str, Any]] = []
    for name in names:
        module, _, function = name.partition(":")
        for asks in (one for one in ASKS if hasattr(askers()[module], one)):
            answer = partial(_asked_elsewhere, getattr(kernels, asks), function) if function else never
            changes.append((askers()[module], asks, answer))
    return without(*changes)


def _asked_elsewhere(known: Callable[[Any], bool], function: str, x: Any) -> bool:
    return sys._getframe(1).f_code.co_name != function and known(x)


# what measures the modules that ask; mixers ask only whether a compiler may trace them, as it may their kernels
KERNELS = {
    "nn.ops.retention + nn.mixers.retention": "train retention",
    "nn.ops.wkv + nn.mixers.rwkv": "train rwkv",
    "nn.ops.selective_scan + nn.mixers.state_space.mamba": "train mamba",
    "nn.ops.ssd + nn.mixers.state_space.mamba2": "train mamba2",
    "nn.mixers.state_space.convolution": "train mamba2",
    "nn.mixers.performer": "train performer",
    "nn.ops.cross_entropy": "train attention",
    "nn.ops.attention.decode:copy_blocks": "served attention",
    "nn.ops.attention.decode:decode_attention": "decode attention, decode window",
    "nn.states.paged": "blocks attention",
    "nn.positions.rotary": "prefill attention",
    "nn.ops.experts": "prefill experts",
    "nn.linear.ternary": "decode bitnet-packed, prefill bitnet-packed",
    "infer.cuda_graph.device_search": "decode attention",
    "infer.cuda_graph.device_beams": "beams attention",
    "runtime.cuda.kernels:is_narrow": "decode attention",
    "runtime.cuda.kernels:add_norm": "decode attention, decode ffn",
}
COVERED = {
    "nn.ops.attention.short_rows": "choices",
    "nn.ops.attention.tiled": "choices",
    "nn.channels.moe": "nn.ops.experts",
    "runtime.cuda.mixer_kernels": "rules",
    "runtime.cuda.bias_gradients": "fusions",
}


def apart(joint: Callable[..., Any], *given: Any) -> Any:
    """Several maps of one input, each by a launch of its own."""
    with patch.object(mixer_kernels, "is_narrow", never):
        return joint(*given)


def unpacked(make: Any, queries: TokenLayout, keys: TokenLayout) -> Any:
    """Packed rows under a mask instead of sentence by sentence; `make` is what would select for one."""
    given = dict(zip(make.__code__.co_freevars, (cell.cell_contents for cell in make.__closure__), strict=True))
    return select._general(given["pattern"], queries, keys, given["score_mod"])


def choices(cuda: bool) -> dict[str, tuple[str, Off]]:
    """What measures them, and how to do without."""
    if cuda:
        whole = (select, "tiled", lambda pattern, layout, _: select.block_sparse_or_dense(pattern, layout, layout))
        by_flex = (select, "tiled_or_flex", lambda pattern, layout: select.flex(pattern, layout, layout))
        joint = (mixer_kernels, "joint", partial(apart, mixer_kernels.joint))
        return {
            "choice short rows": ("train plain-packed, train translation", partial(without, (select, "SHORT", 0))),
            "choice tiled, biases": ("train t5", partial(without, whole)),
            "choice tiled, patterns": ("train bigbird, train sparse, train dilated", partial(without, by_flex)),
            "choice dilated segments": (
                "train longnet", partial(without, (longnet.LongNetAttention, "dilated", nothing))
            ),
            "joint maps": ("decode retention, decode rwkv, decode mla", partial(without, joint)),
            "overlapping launches": ("decode attention", partial(without, (kernels, "OVERLAP", False))),
        }  # fmt: skip
    sparse = [(owner, "MIN_BLOCK_SPARSE_SCORES", 1 << 62) for owner in (select, longnet)]
    return {
        "choice packed": ("train packed", partial(without, (select, "attend_packed", unpacked))),
        "choice block-sparse": ("train window, train longnet", partial(without, *sparse)),
        "kernels.cpu.rnn": ("train lstm, train gru, train gru-reset", partial(without, (rnn, "fused_rnn", nothing))),
        "kernels.cpu.selective_scan": ("train mamba", partial(without, (selective_scan, "selective_scan", nothing))),
        "kernels.cpu.build:top_k": ("decode attention", partial(without, (native, "top_k", nothing))),
    }


def fusions() -> dict[str, tuple[str, ...]]:
    """What is left without each of them; the biases need the norms."""
    every = (*FUSIONS, "products")
    gone = {name: {name, "biases"} if name == "norms" else {name} for name in every}
    left = {f"fusion {name}": tuple(one for one in every if one not in gone[name]) for name in every}
    return left | {"fusions but products": ("products",), "fusions": ()}


def off(path: str, cuda: bool) -> Off:
    kind, _, name = path.partition(" ")
    if kind == "rule":
        rules = make_kernel if cuda else lower
        return partial(without_rule, rules, rules_of(rules)[path])
    return partial(without_kernels, *name.split(" + ")) if kind == "kernel" else choices(cuda)[path][1]


# --- models -----------------------------------------------------------------------------------------------------------


def models(s: SkeletonSizes) -> dict[str, dict[str, Any]]:
    """Those of the family, and some for parts that it does not have."""
    attention, plain = mixers(s)["attention"], {"kind": "attention", "heads": s.heads}
    layer = {
        "repeat": s.layers // 2,
        "wiring": "pre-norm",
        "mixer": plain,
        "channel": {"kind": "ffn", "hidden": s.hidden},
    }
    writes = layer | {"mixer": plain | {"pattern": "causal"}, "cross": plain}
    stacks = {"kind": "encoder-decoder", "encoder": [layer], "decoder": [writes]}
    common = {"vocab": s.vocab, "width": s.width, "embed": {"tied": True}}
    return settings(s) | {
        "ffn": gpt2(s),
        "translation": stacks | common,
        "scale-norm": tree(s, attention, norm="scale"),
        "batch-norm": tree(s, attention, norm="batch"),
        "ista": tree(s, mixers(s)["mssa"], {"kind": "ista"}),
        "gru-reset": tree(s, {"kind": "gru", "reset": "before"}),
        "conv-ffn": tree(s, attention, {"kind": "conv-ffn", "hidden": s.hidden // 2, "sees": "past"}),
    }


def gpt2(s: SkeletonSizes) -> dict[str, Any]:
    """Biases, LayerNorm, learned positions."""
    mixer = {"kind": "attention", "heads": s.heads, "pattern": "causal"}
    keys = tree(s, mixer, {"kind": "ffn", "hidden": s.hidden * 3 // 2, "activation": "gelu-tanh"}, norm="layer")
    return keys | {"embed": {"tied": True, "positions": {"kind": "learned", "length": 1024}}}


def build(keys: dict[str, Any], device: str, stored: str = "bf16") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = parse(Model, keys).build().eval()  # type: ignore[type-abstract]
    packs = keys.get("linear") == "bit"
    if stored == "bf16":
        model = model.to(torch.bfloat16)
        if packs:
            pack_model(model)
        return model
    return quantize(model, "ternary-int8" if packs else stored) if stored == "int8" else model


class Job(NamedTuple):
    """What one process measures."""

    kind: str  # decode, beams, prefill, served, blocks, train, attend
    model: str
    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind:8s} {self.model:24s} {', '.join(self.paths)}"


def rule_models(rules: Rules, s: SkeletonSizes) -> list[tuple[str, str]]:
    """Each model without the rule of its mixer, other rules with the first model that has such a part."""
    names, found, first = {rule: name for name, rule in rules_of(rules).items()}, dict[tuple[str, str], None](), {}
    for name, keys in models(s).items():
        with torch.device("meta"):
            model: Any = parse(Model, keys).build()  # type: ignore[type-abstract]
        stack = model.second if hasattr(model, "second") else model.decoder
        own = stack.blocks[0].sublayers
        if "mixer" in own and (rule := rules.get(own["mixer"])) is not None:
            found[names[rule], name] = None
        for rule in filter(None, map(rules.get, model.modules())):
            first.setdefault(names[rule], name)
    measured = {path for path, _ in found}
    return [*found, *((path, name) for path, name in first.items() if path not in measured)]


def all_jobs(s: SkeletonSizes, cuda: bool, only: list[str]) -> list[Job]:
    rules = make_kernel if cuda else lower
    pairs = [(path, f"decode {name}") for path, name in rule_models(rules, s)]
    unmeasured = set(rules_of(rules)) - {path for path, _ in pairs}
    asked = {path: text for path, (text, _) in choices(cuda).items()}
    if cuda:
        asked |= {f"kernel {path}": text for path, text in KERNELS.items()} | dict.fromkeys(
            fusions(), "train gpt2, train translation"
        )
        known = {name.partition(":")[0] for path in KERNELS for name in path.split(" + ")} | set(COVERED)
        unmeasured |= set(askers()) - known
    for path in sorted(unmeasured):
        print(f"{path}: no model here has it", flush=True)
    grouped: dict[str, list[str]] = {}
    for path, work in [*pairs, *((path, work) for path, text in asked.items() for work in text.split(", "))]:
        if not only or any(part in f"{work} {path}" for part in only):
            grouped.setdefault(work, []).append(path)
    return [Job(*work.split(), tuple(paths[at : at + 3])) for work, paths in grouped.items()
            for at in range(0, len(paths), 3)]  # fmt: skip


# --- measuring --------------------------------------------------------------------------------------------------------

Turn = Callable[[], float]  # seconds of a step


@dataclass
class Found:
    """`times`: seconds of a step by size and path, "" with all paths. `gains`: by path and size, median and
    quartiles."""

    times: dict[str, dict[str, float]] = field(default_factory=dict)
    gains: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def measure(self, size: str, turns: dict[str, Turn], rounds: int) -> None:
        for turn in turns.values():
            turn()
        found: list[dict[str, float]] = []
        begun = time.monotonic()
        while len(found) < rounds and (len(found) < 3 or time.monotonic() - begun < MOST):
            found.append({name: turn() for name, turn in turns.items()})
        self.times[size] = {name: statistics.median(one[name] for one in found) for name in turns}
        for name in filter(None, turns):
            low, middle, high = statistics.quantiles([one[name] / one[""] for one in found], n=4)
            self.gains.setdefault(name, {})[size] = [middle, low, high]

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """One failure does not end the others."""
        try:
            yield
        except Exception as failure:
            where = traceback.extract_tb(failure.__traceback__)[-1]
            text = f"{type(failure).__name__}: {str(failure)[:300]} ({Path(where.filename).name}:{where.lineno})"
            self.failed[name] = text


def variants(job: Job, cuda: bool) -> dict[str, Off]:
    return {"": nullcontext} | {path: off(path, cuda) for path in job.paths}


def within(doing_without: Off, turn: Turn) -> float:
    with doing_without():
        return turn()


@dataclass
class CpuDecoding:
    s: SkeletonSizes
    executor: Any
    rows: int
    reads: bool  # a source
    steps: int = 1 << 62

    def restart(self) -> None:
        tokens = torch.randint(3, self.s.vocab, (self.rows, self.s.given), generator=torch.Generator().manual_seed(0))
        self.states = self.executor.start(Rows(tokens) if self.reads else self.rows)
        self.executor.advance(Rows(tokens), self.states)
        self.tokens, self.steps = torch.full((self.rows, 1), 3), 0

    def turn(self, steps: int = 12) -> float:
        if self.steps + steps > self.s.new:
            self.restart()
        began = time.process_time()
        for _ in range(steps):
            hidden = self.executor.advance(Rows(self.tokens), self.states)[:, -1]
            self.tokens = greedy_tokens(self.executor.head(hidden))[0][:, None]
        self.steps += steps
        return (time.process_time() - began) / steps


def decode_cpu(job: Job, s: SkeletonSizes, rounds: int) -> Found:
    found, library = Found(), native.wait_for_build()
    assert library is not None, native.status()
    for stored in ("fp32", "int8"):
        model = build(models(s)[job.model], "cpu", stored)
        for rows in s.rows:
            turns: dict[str, Turn] = {}
            for path, doing_without in variants(job, False).items():
                with found.guarded(path), doing_without():
                    try:
                        executor: Any = CpuExecutor(model, library)
                    except Unsupported:
                        executor = model
                    turns[path] = partial(
                        within, doing_without, CpuDecoding(s, executor, rows, hasattr(model, "encoder")).turn
                    )
            with torch.inference_mode():
                found.measure(f"{stored} {rows}", turns, rounds)
    return found


def training_cpu(job: Job, s: SkeletonSizes, rounds: int) -> Found:
    found, small = Found(), replace(train_cpu.SIZES, layers=2) if s.width == CPU.width else s
    name = "attention" if job.model == "packed" else job.model
    for rows, length in ((train_cpu.ROWS, train_cpu.TIME), (1, 2048)):
        trained = train_cpu.Trained(models(small)[name], rows, length)
        if job.model == "packed":
            given, segments = trained.batch, torch.arange(length).expand(rows, -1) // 32 + 1
            trained.batch = Batch(Rows(given.rows.tokens, segments=segments), labels=given.labels)
        turns = {path: partial(within, one, trained.step) for path, one in variants(job, False).items()}
        found.measure(f"{rows} × {length}", turns, rounds)
    return found


# --- the report -------------------------------------------------------------------------------------------------------


def verdicts(results: list[dict[str, Any]]) -> dict[str, tuple[str, float]]:
    """By path: whether it stays, and its largest gain."""
    best: dict[str, float] = {}
    for one in (one for one in results if one["kind"] != "attend"):
        for path, sizes in one["gains"].items():
            best[path] = max([best.get(path, 0.0), *(middle for middle, *_ in sizes.values())])
    return {path: ("stays" if gain >= LEAST else "goes", gain) for path, gain in best.items()}


def table(results: list[dict[str, Any]]) -> str:
    known, body = verdicts(results), []
    for one in results:
        for path, sizes in one["gains"].items():
            verdict = known[path][0] if one["kind"] != "attend" else ""
            body.append([path, f"{one['kind']} {one['model']}", shown(sizes), verdict])
        body += [[path, f"{one['kind']} {one['model']}", why, ""] for path, why in one["failed"].items()]
    return markdown(["path", "measured by", "gain by size", ""], sorted(body, key=lambda row: (row[3], row[0])))


def shown(sizes: dict[str, list[float]]) -> str:
    return "; ".join(f"{size}: {middle:.2f} ({low:.2f}–{high:.2f})" for size, (middle, low, high) in sizes.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--gpu-paths", action="store_true", help="those for a GPU, wherever this is")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--list", action="store_true", help="measure nothing")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=450, help="on a GPU: measure nothing later")
    parser.add_argument("--at-once", type=int, default=14, help="processes that compile side by side")
    parser.add_argument("--save", type=Path, metavar="JSON")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="for what the processes say")
    parser.add_argument("--page", type=Path, nargs="+", metavar="PATH", help="JSON files of runs, and the page")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.page:
        *files, page = given.page
        fill(page, {path.stem: table(json.loads(path.read_text("utf-8"))) for path in files})
        return
    cuda = given.device == "cuda" or given.gpu_paths
    s = (SkeletonSizes() if cuda else CPU) if not given.tiny else replace(TINY, new=24 if cuda else 144)
    if cuda:
        from bench.family_speed import without_gpu
    if given.child:
        kind, model, paths = json.loads(given.child)
        without_gpu.child(Job(kind, model, tuple(paths)), s, given.device, given.rounds)
        return
    only = [part for part in given.only.split(",") if part]
    jobs = all_jobs(s, cuda, only)
    if given.list:
        print("\n".join(map(str, jobs)))
        return
    results: list[dict[str, Any]] = []

    def note(job: Job, found: Found) -> None:
        results.append(job._asdict() | vars(found))
        if given.save:
            given.save.write_text(json.dumps(results, indent=1))
        for path, text in [*((path, shown(sizes)) for path, sizes in found.gains.items()), *found.failed.items()]:
            print(f"{job.kind:8s} {job.model:24s} {path:44s} {text}", flush=True)

    if cuda:
        without_gpu.side_by_side(jobs, only, given, note)
    else:
        torch.set_num_threads(1)
        for job in jobs:
            found = Found()
            with found.guarded("all"):
                found = {"decode": decode_cpu, "train": training_cpu}[job.kind](job, s, given.rounds)
            note(job, found)
    for path, (verdict, gain) in sorted(verdicts(results).items(), key=lambda one: one[1]):
        print(f"{verdict:6s} {gain:5.2f} {path}")


if __name__ == "__main__":
    main()
