"""Checks that need a GPU: FlexAttention over block masks equals the dense mask, gradients included (packed rows, long
rows of sparse patterns in any token order, LongNet's joined branches); small models of many presets give the same
forward and backward pass as on CPU; every registered part decodes by a captured step with the logits of the plain path
on CPU, one token of a row or several at once; decoding with CUDA graphs gives the answers of the plain engine on CPU,
by every method, with drafts, logits processors and stop conditions; the first answers of a process are those of later
calls (first_calls.py). `kernels.py` checks our own kernels.

    python bench/check/gpu.py [packed] [padded] [equal] [models] [steps] [graphs] [first] [--seconds 90]
    python bench/check/gpu.py steps graphs --only mamba,mla      names that contain one of these
    python bench/check/gpu.py graphs --methods lookup,model      only speculative decoding; also: processor, bias, stop
    python bench/check/gpu.py steps graphs --processes 14        all cases: they compile side by side
    python bench/check/gpu.py steps graphs --device cpu --tiny   rehearsal, without captures, of a few cases

Exits with 1 if anything differs or fails.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from allyouneed.config import parse, preset_tree
from allyouneed.nn.batch import Rows
from allyouneed.nn.common import Common
from allyouneed.nn.context import TokenLayout
from allyouneed.nn.mixers.attention.longnet import LongNet, LongNetAttention
from allyouneed.nn.models.base import Model
from allyouneed.nn.ops.attention.block_sparse import BlockSparse
from allyouneed.nn.ops.attention.dense import AttentionFn, DenseAttention, ScoreMod, dense_mask
from allyouneed.nn.ops.attention.flex import FLEX_BLOCK, Flex
from allyouneed.nn.ops.attention.select import block_layouts
from allyouneed.nn.patterns.core import Pattern

SPARSE = [
    "causal & window(100)",
    "causal & (window(64) | prefix(4))",
    "dilated(20, 7)",
    "causal & (window(32) | strided(32))",
    "causal & (block(64) | fixed(64, 4))",
    "block-window(64, 2) | global-prefix(64) | random-blocks(64, 2, 0)",
    "window(50) | chosen",
    "causal | prompt",
]
MODELS = [
    *("reformer", "rwkv-4-169m", "retnet-1.3b", "yoco-3b", "performer", "infini", "crate-tiny", "retro"),
    *("linformer-base", "synthesizer", "lite-transformer", "transformer-xl-base", "xlnet-base", "rnnsearch", "convs2s"),
    *("bigbird-base", "longformer-base", "bitnet-b1.58-2b", "switch-base-8", "deepseek-v2-lite"),
]


def packed(lengths: list[list[int]], row: int) -> TokenLayout:
    """Rows of sentences of these lengths, padded to `row`."""
    segments = torch.zeros(len(lengths), row, dtype=torch.long)
    for number, sentences in enumerate(lengths):
        at = 0
        for segment, length in enumerate(sentences, 1):
            segments[number, at : at + length] = segment
            at += length
    return TokenLayout.of(Rows(segments.cuda(), segments=segments.cuda()))


def padded(lengths: list[int]) -> TokenLayout:
    """Rows of these lengths, with some chosen tokens and a prompt."""
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    marked = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.01
    prompt = torch.arange(tokens.shape[1])[None] < torch.tensor([[40 * n + 7] for n in range(len(lengths))])
    return TokenLayout.of(Rows(tokens, torch.tensor(lengths), chosen=marked, prompt=prompt).to("cuda"))


def dense(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
    return DenseAttention(dense_mask(pattern, queries, keys), queries.positions, keys.positions)


def flex(pattern: Pattern, queries: TokenLayout, keys: TokenLayout) -> AttentionFn:
    return Flex(block_layouts(pattern, queries, keys, FLEX_BLOCK, rounded=True), lambda: dense(pattern, queries, keys))


def report(
    name: str, found: AttentionFn, expected: AttentionFn, queries: TokenLayout, keys: TokenLayout, dtype: torch.dtype
) -> None:
    """Largest difference where the query is a real token, relative to the largest value."""
    torch.manual_seed(0)
    shapes = [(2, 4, queries.time, 64), (2, 4, keys.time, 64), (2, 4, keys.time, 64)]
    inputs = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for shape in shapes]
    real = torch.ones(1, 1, 1, 1, device="cuda") > 0 if queries.real is None else queries.real[:, None, :, None]
    results = []
    for execute in (found, expected):
        out = execute(*inputs, 0.0, ScoreMod(0.125)).where(real, 0)
        results.append([out, *torch.autograd.grad((out.float() * out.float().cos()).sum(), inputs)])
    names = ("output", "grad q", "grad k", "grad v")
    values = [float(((a - b).abs().max() / b.abs().max()).detach()) for a, b in zip(*results, strict=True)]
    limit = 5e-3 if dtype == torch.float32 else 2e-2  # fp32 products run in tf32 inside the kernel
    shown = "  ".join(f"{name} {value:.1e}" for name, value in zip(names, values, strict=True))
    print(f"{name:66s} {dtype!s:15s} {shown}  {'ok' if max(values) < limit else 'DIFFERS'}", flush=True)


def model(name: str) -> None:
    """One fp32 training step of a shrunk preset on GPU against the same on CPU."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from shrink import batch_for, shrink

    config = shrink(parse(Model, preset_tree(name)))  # type: ignore[type-abstract]
    torch.manual_seed(0)
    own, batch, found = config.build(), batch_for(config), []
    for module, key in ((own, "cpu"), (copy.deepcopy(own).cuda(), "cuda")):
        losses: list[torch.Tensor] = []
        hidden = module(batch.to(key), losses)
        (hidden.sin().sum() + sum(losses)).backward()
        slopes = [p.grad.flatten().cpu() for p in module.parameters() if p.grad is not None]
        found.append((hidden.detach().cpu(), torch.cat(slopes)))
    values = [float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True)]
    good = max(values) < 1e-4  # false for nan too
    print(
        f"model {name:30s} output {values[0]:.1e}  gradients {values[1]:.1e}  {'ok' if good else 'DIFFERS'}", flush=True
    )


def models() -> None:
    for name in Options.share(MODELS):
        try:
            model(name)
        except Exception as failure:  # check the others as well
            print(f"model {name:30s} FAILED: {type(failure).__name__}: {str(failure)[:300]}", flush=True)


# --- decoding ---------------------------------------------------------------------------------------------------------

# ‖found − exact‖ / ‖exact‖ of the logits, against the plain path in double precision
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 8e-2}
# a rounded number may decide otherwise in half precision: a bucket, an expert, a ternary weight, a halting step
DISCRETE = ("lsh", "moe", "bit", "act")


class Options:
    """Options of the command line."""

    seconds, device, tiny = 90.0, "cuda", False
    only: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    part, parts = 0, 1  # of the cases, which several processes share
    begun = time.perf_counter()

    @classmethod
    def wants(cls, name: str) -> bool:
        return not cls.only or any(word in name for word in cls.only)

    @classmethod
    def wants_method(cls, name: str) -> bool:
        return not cls.methods or any(word in name for word in cls.methods)

    @classmethod
    def share(cls, names: Sequence[str]) -> Sequence[str]:
        return names[cls.part :: cls.parts]

    @classmethod
    def late(cls, share: float = 1.0) -> bool:
        return time.perf_counter() - cls.begun > share * cls.seconds


def captured(step: Callable[[], None]) -> Callable[[], None]:
    if Options.device == "cpu":
        return step
    from allyouneed.infer.cuda_graph.prefill import capture_warm

    return capture_warm(step, tries=1).replay


def steps() -> None:
    """Every registered part: a captured step in fp32, and of each kind in bf16, against the plain path on CPU in double
    precision. Those of each kind come first; they take at most two thirds of the time."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from allyouneed.runtime.cuda.capture import step_blockers
    from any_part import CASES, case, first_of_each_kind
    from static_steps import SOURCES, decode_both, decode_many

    first = {*first_of_each_kind(("mixer", "cross mixer"))}
    first |= {name for name in CASES if not name.startswith(("mixer", "cross mixer"))}
    names = [name for name in CASES if not name.startswith("encoder") and Options.wants(name)]
    names.sort(key=lambda name: name not in first)
    names = list(Options.share(names[:: max(1, len(names) // 12)] if Options.tiny else names))
    worst, wrong, blocked, done = dict.fromkeys(BOUNDS, 0.0), 0, 0, 0
    for name in names:
        if Options.late(2 / 3):
            print(f"steps: no time left for {len(names) - done} of {len(names)} cases", flush=True)
            break
        done += 1
        exact: Any = case(name)
        if list(step_blockers(exact)):
            blocked += 1
            continue
        for dtype, bound in BOUNDS.items():
            if dtype is torch.bfloat16 and name not in first:
                continue
            try:
                other = copy.deepcopy(exact).to(Options.device, dtype)
                for decode in (decode_both, decode_many) if name in first else (decode_both,):
                    with torch.no_grad():
                        decoded = decode(exact, other, SOURCES, captured)
                    found, wanted = decoded.found.double(), decoded.wanted
                    error = float((found - wanted).norm() / wanted.norm())
                    loose = dtype is torch.bfloat16 and any(word in name for word in DISCRETE)
                    worst[dtype] = worst[dtype] if loose else max(worst[dtype], error)
                    if not (error < bound or loose) or decoded.before != decoded.after:
                        wrong += 1
                        print(f"steps {name[:76]:76s} {decode.__name__} {str(dtype)[6:]} {error:.1e}  DIFFERS",
                              flush=True)  # fmt: skip
            except Exception as failure:  # check the others as well
                wrong += 1
                print(f"steps {name[:70]:70s} {str(dtype)[6:]} FAILED {type(failure).__name__}: {str(failure)[:200]}",
                      flush=True)  # fmt: skip
    found_text = ", ".join(f"{str(dtype)[6:]} {error:.1e}" for dtype, error in worst.items())
    print(f"steps: {done - blocked} cases captured, {blocked} not, {wrong} wrong; largest error: {found_text}"
          f"  {'ok' if not wrong else 'DIFFERS'}", flush=True)  # fmt: skip


def cuda_graphs() -> None:
    """fp32: the same tokens as the plain engine on CPU; bf16: how many answers are equal."""
    sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
    from allyouneed.infer.speculative.drafts import DraftModel
    from graph_runner import DECODINGS, MODELS, decode_in_slots, drafts_of, engine_of, make_requests, ruled, token_lists

    wrong = count = 0
    names = Options.share([name for name in (*MODELS, "seen-prompt") if Options.wants(name)])
    for name in names:
        engine = engine_of(name, **({"bidirectional_prompt": True} if name == "seen-prompt" else {}))
        requests, drafts = make_requests(engine, 5 if Options.tiny else 19), drafts_of(engine)
        specs = {method: engine.runner.spec(decoding) for method, decoding in DECODINGS.items()}
        for method in ("greedy", "draws", "penalties"):
            specs |= {f"{method}, {kind}": engine.runner.spec(DECODINGS[method], draft=d) for kind, d in drafts.items()}
        cases = {method: (spec, requests) for method, spec in specs.items()} | ruled(engine, requests)
        cases = {method: case for method, case in cases.items() if Options.wants_method(method)}
        count += len(cases)
        plain = {method: token_lists(engine.decode(asked, spec)) for method, (spec, asked) in cases.items()}
        for dtype in (torch.float32, torch.bfloat16):
            engine.model.to(Options.device, dtype)
            for draft in drafts.values():
                if isinstance(draft, DraftModel):
                    draft.runner.model.to(Options.device, dtype)
            for method, (spec, asked) in cases.items():
                if Options.late() or (dtype is torch.bfloat16 and method not in ("greedy", "beam")):
                    continue
                try:
                    # the first prefills are plain, the second ones captured, the third ones replayed
                    turns = 3 if dtype is torch.float32 and method in ("greedy", "beam") else 1
                    found = [token_lists(decode_in_slots(engine, asked, spec)) for _ in range(turns)]
                except Exception as failure:
                    wrong += 1
                    print(f"graphs {name:14s} {method:17s} FAILED {type(failure).__name__}: {str(failure)[:200]}",
                          flush=True)  # fmt: skip
                    continue
                same = min(sum(a == b for a, b in zip(plain[method], one, strict=True)) for one in found)
                good = same == len(requests) or dtype is torch.bfloat16
                wrong += not good
                if not good or dtype is torch.bfloat16:
                    print(f"graphs {name:14s} {method:17s} {str(dtype)[6:]} {same} of {len(requests)}"
                          f"{'' if good else '  DIFFERS'}", flush=True)  # fmt: skip
    print(f"graphs: {count} cases of {', '.join(names)}, {wrong} wrong"
          f"{', out of time' if Options.late() else ''}  {'ok' if not wrong else 'DIFFERS'}", flush=True)  # fmt: skip


def packed_rows() -> None:
    target = packed([[100, 27, 90], [33, 64, 100, 40]], 256)
    source = packed([[80, 50, 126], [20, 60, 100, 70]], 256)
    for dtype in (torch.float32, torch.bfloat16):
        for text in (SPARSE[3], SPARSE[5]):  # several token orders, and random blocks
            pattern = Pattern.from_text(text)
            report(f"packed: {text}", flex(pattern, target, target), dense(pattern, target, target), target, target,
                   dtype)  # fmt: skip
        module = LongNet(heads=4, head_width=64, segments=(32, 128), dilations=(1, 4)).build(Common(width=256))
        assert isinstance(module, LongNetAttention)
        report("packed: LongNet", module.select(target, target), module.dense(target, target), target, target, dtype)
        for text, queries, keys in (
            ("full", source, source),
            ("causal", target, target),
            ("causal & window(16)", target, target),
            ("full", target, source),
        ):
            pattern = Pattern.from_text(text)
            found, expected = flex(pattern, queries, keys), dense(pattern, queries, keys)
            report(f"packed: {text}", found, expected, queries, keys, dtype)


def first_calls() -> None:
    """See first_calls.py: two processes for each mixer, those whose weights torch moves first."""
    sys.path.append(str(Path(__file__).parents[2]))  # for bench.*
    from bench.check.first_calls import check_all, mixers

    names = [name for name in mixers() if Options.wants(name)]
    names = list(Options.share(names[:: max(1, len(names) // 3)] if Options.tiny else names))
    check_all(names, Options.device, 1 if Options.parts > 1 else 12, Options.late)


def sparse(kind: str, layout: TokenLayout) -> None:
    for text in SPARSE:
        pattern = Pattern.from_text(text)
        found, expected = flex(pattern, layout, layout), dense(pattern, layout, layout)
        report(f"{kind}: {text}", found, expected, layout, layout, torch.float32)
        tiled = BlockSparse(block_layouts(pattern, layout, layout, 64))
        report(f"{kind}, gathered: {text}", tiled, expected, layout, layout, torch.float32)
    config = LongNet(heads=4, head_width=64, segments=(128, 512), dilations=(1, 4))
    module = config.build(Common(width=256))
    assert isinstance(module, LongNetAttention)
    found, expected = module.select(layout, layout), module.dense(layout, layout)
    report(f"{kind}: LongNet", found, expected, layout, layout, torch.float32)


CHECKS = {
    "packed": packed_rows,
    "padded": lambda: sparse("padded", padded([1100, 700])),
    "equal": lambda: sparse("equal", TokenLayout.of(Rows(torch.zeros(1, 1024, dtype=torch.long, device="cuda")))),
    "models": models,
    "steps": steps,
    "graphs": cuda_graphs,
    "first": first_calls,
}


class Findings:
    """Passes on what is printed, and counts what is wrong."""

    def __init__(self) -> None:
        self.out, self.wrong = sys.stdout, 0

    def write(self, text: str) -> int:
        self.wrong += text.count("DIFFERS") + text.count("FAILED")
        return self.out.write(text)

    def flush(self) -> None:
        self.out.flush()


def side_by_side(processes: int) -> int:
    """Run the command in several processes, each with a share of the cases; how many of them failed. A failed assertion
    on the device ends the checks of its process alone."""
    command = [sys.executable, *sys.argv]
    children = [
        subprocess.Popen([*command, "--processes", "1", "--part", f"{part}/{processes}"], stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True)
        for part in range(processes)
    ]  # fmt: skip

    def repeat(part: int, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            print(f"{part:2d} {line}", end="", flush=True)

    threads = [threading.Thread(target=repeat, args=each) for each in enumerate(children)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = sum(child.wait() != 0 for child in children)
    print(f"{processes} processes, {failed} with differences or failures  {'ok' if not failed else 'DIFFERS'}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=", ".join(CHECKS))
    parser.add_argument("--seconds", type=float, default=90, help="of the checks of decoding, together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="words in the names of cases and models, separated by commas")
    parser.add_argument("--methods", default="", help="words in the names of decoding methods, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="few cases, to rehearse")
    parser.add_argument("--processes", type=int, default=1, help="that share the cases")
    parser.add_argument("--part", default="0/1", help="this process's share: its number, and of how many")
    given = parser.parse_args()
    if unknown := [check for check in given.checks if check not in CHECKS]:
        parser.error(f"unknown check {unknown[0]!r} (known: {', '.join(CHECKS)})")
    Options.seconds, Options.device, Options.tiny = given.seconds, given.device, given.tiny
    Options.only, Options.methods = (
        tuple(word for word in given_words.split(",") if word) for given_words in (given.only, given.methods)
    )
    Options.part, Options.parts = map(int, given.part.split("/"))
    if given.processes > 1:
        sys.exit(bool(side_by_side(given.processes)))
    sys.stdout = found = Findings()  # type: ignore[assignment]
    for check in given.checks or CHECKS:
        if check == "steps":
            Options.begun = time.perf_counter()
        CHECKS[check]()
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
