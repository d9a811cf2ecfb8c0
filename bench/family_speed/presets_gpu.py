"""Decoding speed of the presets at their own sizes on a GPU, bf16, random weights: every one that writes text token by
token and fits into the memory, smallest first. Tokens per second alone and with 64 rows, as in gpu.py: captured decode
steps in the middle of 128 new tokens after 32 given ones (encoder-decoders read a source of 32). Share of copying: the
time in which the declared bytes would be copied, of the measured time.

    python bench/family_speed/presets_gpu.py                              # all that fits into 150 seconds
    python bench/family_speed/presets_gpu.py --only gpt2,mixtral-8x7b
    python bench/family_speed/presets_gpu.py --device cpu --tiny          # rehearsal, presets made small
    python bench/family_speed/presets_gpu.py --page RUN.json docs/results/family-speed.md

`--save PATH` writes the results as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse, preset_names, preset_tree, tree_of
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.request import Request
from allyouneed.lab.mixer_sizes import TINY, SkeletonSizes
from allyouneed.nn.linear.ternary import pack_model
from allyouneed.nn.models.base import Model
from allyouneed.runtime.report import cuda_choice
from bench.family_speed.gpu import Bench, copy_speed, declared, reported, time_steps
from bench.family_speed.page import fill, markdown

KINDS = ("decoder", "decoder-decoder", "encoder-decoder")
OTHERS = {"mask-predict"}  # writes all tokens at once
ROWS = (1, 64)
LARGE = 8e9  # parameters
LENGTHS = {"tensorized-transformer": 28}  # of texts that a mixer's own weights limit


def chosen(only: list[str], tiny: bool) -> dict[str, dict[str, Any]]:
    """Trees of the presets that read and write tokens, smallest first."""
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for name in only or preset_names():
        config: Any = parse(Model, preset_tree(name))  # type: ignore[type-abstract]
        if config.kind not in KINDS or name in OTHERS or not reads_tokens(config):
            continue
        if tiny:
            sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))
            from shrink import shrink

            config = shrink(config)
        found[name] = config.cost(1).parameters, tree_of(config, full=True)
    return {name: tree for name, (_, tree) in sorted(found.items(), key=lambda item: item[1][0])}


def reads_tokens(config: Any) -> bool:
    return (
        config.kind != "encoder-decoder" or getattr(config.source_embed or config.embed, "kind", "tokens") == "tokens"
    )


def build(bench: Bench, tree: dict[str, Any], size: int) -> Any:
    """A large model in bf16 from the start: it does not fit in single precision, which some initialisations need."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if size > LARGE else before)
    try:
        with torch.device(bench.device):
            model = parse(Model, tree).build().to(torch.bfloat16).eval()  # type: ignore[type-abstract]
    finally:
        torch.set_default_dtype(before)
    if tree["linear"] == {"kind": "bit"}:
        pack_model(model)
    return model


def measure(bench: Bench, name: str, tree: dict[str, Any]) -> None:
    config: Any = parse(Model, tree)  # type: ignore[type-abstract]
    size = config.cost(1).parameters
    if bench.device.type == "cuda" and 2.2 * size > torch.cuda.mem_get_info()[0]:
        bench.note(name, parameters=size, reason="does not fit into the memory")
        return
    model = build(bench, tree, size)
    choice = cuda_choice(model)
    bench.note(name, parameters=size, executor=str(choice))
    if choice.blockers:
        bench.note(name, reason=str(choice))
        print(f"{name:26s} not captured: {choice}", flush=True)
        return
    engine = Engine(model, bos=1, eos=2, pad=0, limit=config.limit, budget=64 * 1024)
    given, new = bench.sizes.given, bench.sizes.new
    if (limit := LENGTHS.get(name, config.limit)) is not None:
        given, new = min(given, limit // 4), min(new, limit // 2)
    for rows in ROWS:
        run_once(engine, config, rows, given, new)
        runner = next(reversed(engine.graphs.kept.values()))
        context = given + new // 2
        step = time_steps(bench, runner, context, 0.15)
        reads, _ = declared(model, tree, rows, context)
        bench.note(name, **{f"b{rows}": rows / step, f"b{rows} share": reads / step / bench.copied})
    found = bench.results[name]
    shown = "  ".join(f"b{rows} {found[f'b{rows}']:>9,.0f} ({found[f'b{rows} share']:.0%})" for rows in ROWS)
    print(f"{name:26s} {size / 1e6:>8,.0f}M {shown}", flush=True)


def run_once(engine: Engine, config: Any, rows: int, given: int, new: int) -> None:
    """A whole run, which captures what is timed."""
    vocab = config.vocabs
    spec = engine.runner.spec(Decoding(method="greedy", min_length=new, max_length=new))
    requests = []
    for row in range(rows):
        if config.kind == "encoder-decoder":
            source = [3 + (7 * row + n) % (vocab.source - 3) for n in range(given)]
            requests.append(Request([1], new, (row,), source))
        else:
            requests.append(Request([3 + (7 * row + n) % (vocab.target - 3) for n in range(given)], new, (row,)))
    batch = engine.graphs.batch([RequestState(request, spec, new) for request in requests])
    with torch.inference_mode():
        while batch.active:
            batch.step()
    batch.close()


def table(results: dict[str, Any]) -> str:
    body = [
        [name, f"{one['parameters'] / 1e6:,.0f} M", *(f"{one[f'b{rows}']:,.0f}" for rows in ROWS),
         *(f"{one[f'b{rows} share']:.0%}" for rows in ROWS)]
        for name, one in results.items() if f"b{ROWS[-1]}" in one
    ]  # fmt: skip
    head = ["preset", "parameters", *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS)]
    text = markdown([*head, "share of copying, 1 row", f"{ROWS[-1]} rows"], body)
    left = {name: one.get("reason") or one.get("failed") for name, one in results.items() if f"b{ROWS[-1]}" not in one}
    return text + "".join(f"\n\n{name}: {why}." for name, why in left.items() if why)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=150, help="start nothing that would end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the results there as JSON")
    parser.add_argument("--page", type=Path, nargs=2, metavar="PATH", help="JSON of a run, and the page for its table")
    given = parser.parse_args()
    if given.page:
        run, page = given.page
        fill(page, {"gpu-presets": table(json.loads(run.read_text("utf-8"))["results"])})
        return 0
    bench = Bench(torch.device(given.device), TINY if given.tiny else SkeletonSizes(), given.seconds, save=given.save)
    bench.copied = copy_speed(bench)
    for name, tree in chosen([name for name in given.only.split(",") if name], given.tiny).items():
        if bench.left < 8:
            print(f"{name:26s} no time left", flush=True)
            continue
        with reported(bench, name):
            measure(bench, name, tree)
    print("", table(bench.results), f"\ncopy {bench.copied / 1e12:.2f} TB/s, torch {torch.__version__}", sep="\n")
    return int(any("failed" in found for found in bench.results.values()))


if __name__ == "__main__":
    sys.exit(main())
