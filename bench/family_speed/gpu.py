"""Decoding speed of every mixer in one skeleton on a GPU, bf16: tokens per second alone and at 64 rows against
attention in the same run, at 1k to 64k tokens of context, and against other libraries.

    python bench/family_speed/gpu.py                                    # all that fits into 150 seconds
    python bench/family_speed/gpu.py --only mixers,long --seconds 90
    python bench/family_speed/gpu.py --only retention,rwkv,mla          # some mixers
    python bench/family_speed/gpu.py --only attention,long-longnet      # one, and another at long contexts
    python bench/family_speed/gpu.py --only peers --seconds 400         # Hugging Face and flash-linear-attention
    python bench/family_speed/gpu.py --device cpu --tiny                # rehearsal
    python bench/family_speed/gpu.py --page RUN.json … docs/results/family-speed.md     # tables and plot of these runs

The skeleton: 12 layers of width 768, 12 heads, a gated channel of 2048, vocabulary 32k, rotary positions where a mixer
takes them; mixers of about equal parameters (sizes.py). A run decodes through the engine's graph runner: 32
prompt tokens, 128 new ones. Tokens per second count decode steps alone, replayed at the middle of that text; `with
prompt` is the whole run, prefill included, and so are peers and ours beside them, in turns. `long`: steps at 1k to 64k
tokens of context, which are not prefilled: what a step costs depends on its shapes only. Mixers that cut the text into
segments stand in the middle of one. Where memory does not suffice for all rows, the last context has fewer.

Declared bytes are those of the cost functions (`allyouneed describe`): the weights that the tokens use, once, and each
row's state. `share` is what they say of the measured time, at the speed of copying memory. States are compared with the
bytes that were allocated. `--save PATH` writes the results as JSON.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from allyouneed.config import parse
from allyouneed.infer.cuda_graph.runner import GraphRunner
from allyouneed.infer.decoding.base import RequestState
from allyouneed.infer.decoding.options import Decoding
from allyouneed.infer.engine import Engine
from allyouneed.infer.model_runner import ModelRunner
from allyouneed.infer.request import Request
from allyouneed.lab.mixer_sizes import (
    BOUNDED,
    CONSTANT,
    OTHERS,
    STATED,
    TINY,
    SkeletonSizes,
    latent_sizes,
    middle,
    mixers,
    ratios,
    variants,
)
from allyouneed.nn.linear.ternary import pack_model
from allyouneed.nn.models.base import Model
from allyouneed.nn.sublayer import Mixer
from allyouneed.runtime.report import cuda_choice
from bench.family_speed.page import long_table, peer_table, short, table, write_gpu

FIRST = (
    "attention",
    "experts",
    "mla",
    "retention",
    "gated-retention",
    "rwkv",
    "rwkv-both",
    "performer",
    "mamba2",
    "gau",
)
LONG = ("attention", "grouped-queries", "mla", *CONSTANT, "window", "longnet", "yoco")  # before all others
LEAST = 3

# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    device: torch.device
    sizes: SkeletonSizes
    seconds: float
    begun: float = field(default_factory=time.perf_counter)
    results: dict[str, Any] = field(default_factory=dict)
    copied: float = 0.0  # bytes per second of a copy
    locked: Any = None
    save: Path | None = None

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.begun)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, turn: Callable[[], Any], least: float) -> float:
        """Seconds per call: the median of calls that take at least `least` seconds together."""
        found: list[float] = []
        while not found or sum(found) < least:
            start = time.perf_counter()
            turn()
            self.wait()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def lock(self) -> None:
        """Others that compile beside this one wait until it has measured."""
        if self.locked is not None:
            fcntl.flock(self.locked, fcntl.LOCK_EX)

    def unlock(self) -> None:
        if self.locked is not None:
            fcntl.flock(self.locked, fcntl.LOCK_UN)

    def build(self, keys: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            model: Any = parse(Model, keys).build().to(torch.bfloat16).eval()  # type: ignore[type-abstract]
        if keys.get("linear") == "bit":
            pack_model(model)
        return model

    def note(self, name: str, **values: Any) -> None:
        self.results.setdefault(name, {}).update(values)
        if self.save is not None:
            self.save.write_text(json.dumps({"sizes": asdict(self.sizes), "results": self.results}, indent=1))

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def reported(bench: Bench, name: str) -> Iterator[None]:
    """One failure does not end the others."""
    try:
        yield
    except Exception as failure:
        where = traceback.extract_tb(failure.__traceback__)[-1]
        text = f"{type(failure).__name__}: {str(failure)[:200]} ({Path(where.filename).name}:{where.lineno})"
        bench.note(name, failed=text)
        print(f"{name:26s} FAILED {text}", flush=True)
    finally:
        bench.free()


def requests(bench: Bench, rows: int) -> list[Request]:
    s = bench.sizes
    return [Request([3 + (7 * row + n) % (s.vocab - 3) for n in range(s.given)], s.new, (row,)) for row in range(rows)]


def decode(bench: Bench, engine: Engine, rows: int) -> None:
    """Through the graph runner, as the engine does on a GPU."""
    s = bench.sizes
    decoding = Decoding(method="greedy", min_length=s.new, max_length=s.new)
    spec, given = engine.runner.spec(decoding), requests(bench, rows)
    states = [RequestState(request, spec, s.new) for request in given]
    batch = engine.graphs.batch(states)
    with torch.inference_mode():
        while batch.active:
            batch.step()
    batch.close()


def decode_plain(bench: Bench, engine: Engine, rows: int) -> None:
    s = bench.sizes
    engine.decode(requests(bench, rows), Decoding(method="greedy", min_length=s.new, max_length=s.new))


def declared(model: Any, keys: dict[str, Any], rows: int, context: float) -> tuple[float, float]:
    """Bytes that a step has to read, and those of the states, by the cost functions. A token reads as many weights as
    it has multiply-adds; `rows` of them read no weight twice."""
    config = parse(Model, keys)  # type: ignore[type-abstract]
    cost, alone = config.cost(max(1, int(context))), config.cost(1)
    weights = [*model.parameters(), *model.buffers()]
    stored = sum(weight.numel() * weight.itemsize for weight in weights)
    states = rows * cost.state_bytes(max(1, int(context)), next(model.parameters()).itemsize, captured=True)
    return stored * min(1.0, rows * alone.flops / 2 / alone.parameters) + states, states


def measure(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    s = bench.sizes
    model = bench.build(keys)
    choice = cuda_choice(model)
    captured = not choice.blockers
    engine = Engine(model, bos=1, eos=2, pad=0, budget=64 * 1024)
    run = decode if captured else decode_plain
    bench.note(name, captured=captured, executor=str(choice), parameters=sum(p.numel() for p in model.parameters()))
    for rows in s.rows:
        first = bench.timed(lambda rows=rows: run(bench, engine, rows), 0)  # compiles and captures
        slow = first > 4 and not captured
        taken = first if slow else bench.timed(lambda rows=rows: run(bench, engine, rows), 0.2)
        step, context = taken / s.new, s.given + s.new / 2
        bench.note(name, **{f"b{rows} with prompt": rows * s.new / taken, f"b{rows} first": first})
        if captured:
            runner = next(reversed(engine.graphs.kept.values()))
            step = time_steps(bench, runner, int(context), 0.15)
        reads, _ = declared(model, keys, rows, context)
        share = reads / step / bench.copied if bench.copied else 0.0
        bench.note(name, **{f"b{rows}": rows / step, f"b{rows} share": share})
        if captured:
            states = declared(model, keys, runner.states.rows, runner.states.capacity)[1]
            bench.note(name, **{f"b{rows} state bytes": runner.states.bytes, f"b{rows} state declared": states})
    found = bench.results[name]
    shown = "  ".join(f"b{n} {found[f'b{n}']:>9,.0f} ({found[f'b{n} with prompt']:,.0f} with prompt)" for n in s.rows)
    first = " + ".join(f"{found[f'b{n} first']:.1f}" for n in s.rows)
    weighed = "weights {:.2f} of attention's, model {:.2f}".format(*ratios(s, keys))
    how = f"{weighed}, captured, first run {first} s" if captured else "PLAIN: " + str(choice)[:120]
    print(f"{name:26s} {shown}  {how}", flush=True)


def time_steps(bench: Bench, runner: GraphRunner, context: int, least: float) -> float:
    """Seconds of a step of all rows with `context` tokens read, in runs of eight as the engine launches them."""

    def turn() -> None:
        for _ in range(2):
            runner.launch(8)
        runner.states.device_lengths.fill_(context)

    with torch.inference_mode():
        runner.states.device_lengths.fill_(context)
        turn()
        bench.wait()
        return bench.timed(turn, least) / 16


def measure_long(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    """Steps at growing contexts: of all rows, but of as many as fit at the last context."""
    s = bench.sizes
    model = bench.build(keys)
    if cuda_choice(model).blockers:
        return
    spec = ModelRunner(model, bos=1, eos=2, pad=0).spec(Decoding(method="greedy", max_length=s.new))
    contexts = [s.long >> halvings for halvings in range(6, -1, -1)]
    ends = {context: fitting(bench, model, keys, context) for context in contexts[-2:]}
    groups = [contexts] if len(set(ends.values())) == 1 else [contexts[:-1], contexts[-1:]]
    speeds: dict[int, float] = {}
    for group in groups:
        count, ahead = ends[group[-1]], middle(s, name)
        with torch.inference_mode():
            runner = GraphRunner(model, spec, count, group[-1] + ahead + 64, 0)
        speeds |= {context: count / time_steps(bench, runner, context + ahead, 0.1) for context in group}
        del runner
        bench.free()
    stated = min(contexts[-2], STATED)
    reads = declared(model, keys, ends[stated], stated)[0] / ends[stated] * speeds[stated]
    bench.note(
        name, **{"long rows": ends, "long": speeds[stated], "long share": reads / bench.copied, "by context": speeds}
    )
    shown = ", ".join(f"{short(context)}: {speed:,.0f}" for context, speed in speeds.items())
    fewer = f", {ends[contexts[-1]]} at the last" if len(groups) > 1 else ""
    print(f"{name:26s} {ends[stated]} rows{fewer}; tokens/s by context: {shown}", flush=True)


def fitting(bench: Bench, model: Any, keys: dict[str, Any], context: int) -> int:
    """Rows whose states fit at this context, at most the largest number."""
    most = bench.sizes.rows[-1]
    if bench.device.type != "cuda":
        return most
    each = declared(model, keys, 1, context + 64)[1]
    return max(1, min(most, int(0.85 * torch.cuda.mem_get_info()[0] // max(each, 1))))


def copy_speed(bench: Bench) -> float:
    """Bytes read and written per second by a large copy."""
    size = 1 << (31 if bench.device.type == "cuda" else 22)
    a, b = torch.zeros(2, size, dtype=torch.uint8, device=bench.device)
    bench.timed(lambda: b.copy_(a), 0)
    return 2 * size / bench.timed(lambda: b.copy_(a), 0.05)


# --- other libraries --------------------------------------------------------------------------------------------------


def hugging_face(bench: Bench, name: str) -> Any:
    """A model of the same sizes: (module, whether a static cache can be compiled)."""
    import transformers

    s = bench.sizes
    common = {"vocab_size": s.vocab, "hidden_size": s.width, "num_hidden_layers": s.layers, "tie_word_embeddings": True,
              "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    heads = {"num_attention_heads": s.heads, "num_key_value_heads": s.heads, "max_position_embeddings": 1024}
    ours = mixers(s)
    if name == "mla":
        config: Any = transformers.DeepseekV2Config(
            **common, **heads, intermediate_size=s.hidden, **latent_sizes(s), q_lora_rank=None,
            first_k_dense_replace=s.layers, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
            moe_intermediate_size=8,
        )  # fmt: skip
        return transformers.DeepseekV2ForCausalLM(config), True
    if name == "experts":
        config = transformers.MixtralConfig(
            **common, **heads, intermediate_size=s.hidden // 2, num_local_experts=8, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(config), True
    if name == "rwkv":
        hidden = variants(s)["rwkv-both"]["decoder"][0]["channel"]["hidden"]
        config = transformers.RwkvConfig(**common, context_length=1024, intermediate_size=hidden)
        return transformers.RwkvForCausalLM(config), False
    from fla.models import GLAConfig, GLAForCausalLM, RetNetConfig, RetNetForCausalLM

    kinds = {"retention": (RetNetConfig, RetNetForCausalLM), "gated-retention": (GLAConfig, GLAForCausalLM)}
    make, cls = kinds[name]
    widths = {f"expand_{part[0]}": s.heads * ours[name][f"{key}_width"] / s.width
              for part, key in (("key", "head"), ("value", "value"))}  # fmt: skip
    sizes = {"num_heads": s.heads, "intermediate_size": s.hidden, "use_cache": True}
    return cls(make(**common, **sizes, **widths)), False


# the peer's model, and ours
PEERS = {"mla": "mla", "experts": "experts", "rwkv": "rwkv-both", "retention": "retention",
         "gated-retention": "gated-retention"}  # fmt: skip
KINDS = {"mixers", "long", "peers", *(f"peer-{name}" for name in PEERS)}
PEER_SECONDS = 45  # what one needs to compile and run


def measure_peer(bench: Bench, name: str, keys: dict[str, Any]) -> None:
    """The peer and ours in turns: whole runs, prefill included."""
    s = bench.sizes
    torch.manual_seed(0)
    with torch.device(bench.device):
        model, static = hugging_face(bench, name)
    model = model.to(torch.bfloat16).eval()
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": s.new, "max_new_tokens": s.new}
    if static and bench.device.type == "cuda":
        options["cache_implementation"] = "static"  # which also compiles the step
    engine = Engine(bench.build(keys), bos=1, eos=2, pad=0, budget=64 * 1024)
    for rows in s.rows:
        tokens = torch.tensor([request.prompt for request in requests(bench, rows)], device=bench.device)
        mask = torch.ones_like(tokens)

        def theirs(tokens: Any = tokens, mask: Any = mask) -> None:
            with torch.inference_mode():
                model.generate(tokens, attention_mask=mask, **options)

        first = bench.timed(theirs, 0)
        bench.timed(lambda rows=rows: decode(bench, engine, rows), 0)  # compiles and captures
        bench.lock()
        turns = 3 if 3 * first < bench.left / 2 or static else 1
        both: list[Callable[[], Any]] = [theirs, lambda rows=rows: decode(bench, engine, rows)]
        taken = [[bench.timed(one, 0) for one in both] for _ in range(turns)]
        bench.unlock()
        peer, ours = (rows * s.new / statistics.median(one) for one in zip(*taken, strict=True))
        bench.note(f"peer {name}", **{f"b{rows}": peer, f"b{rows} first": first, f"b{rows} ours": ours})
        print(f"peer {name:21s} b{rows} {peer:>9,.0f} tokens/s, ours {ours:,.0f}: {ours / peer:.1f}× "
              f"(first call {first:.0f} s)", flush=True)  # fmt: skip


# --- the report -------------------------------------------------------------------------------------------------------


def report(bench: Bench) -> None:
    results = bench.results
    parts = (table(bench.sizes, [results]), long_table(bench.sizes, [results])[0], peer_table(bench.sizes, [results]))
    print("", *(part for part in parts if part), sep="\n\n")
    base = results.get("attention", {}).get("long")
    for name in CONSTANT if base else ():
        if ratio := results.get(name, {}).get("long", 0) / base:
            print(f"{name:26s} {ratio:5.1f} × attention at {short(STATED)} (asked: {LEAST})")
    for name in (name for name, values in results.items() if "failed" in values):
        print(f"{name:26s} failed: {results[name]['failed'][:120]}")
    used = time.perf_counter() - bench.begun
    print(f"\ncopy {bench.copied / 1e12:.2f} TB/s, {used:.0f} s, torch {torch.__version__}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="mixers,long,peers", help="mixers, long, long-NAME, peers, peer-NAME, or names of models"
    )
    parser.add_argument("--seconds", type=float, default=140, help="start nothing that would end later")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse")
    parser.add_argument("--lock", help="a file: runs that share it compile peers side by side, and measure in turn")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the results there as JSON")
    parser.add_argument(
        "--page", type=Path, nargs="+", metavar="PATH", help="JSON files of runs, and the page that gets their tables"
    )
    given = parser.parse_args()
    if given.page:
        *files, page = given.page
        write_gpu(files, page)
        return 0
    bench = Bench(torch.device(given.device), TINY if given.tiny else SkeletonSizes(), given.seconds, save=given.save)
    bench.locked = open(given.lock, "w") if given.lock else None  # noqa: SIM115
    bench.copied = copy_speed(bench)
    models, only = variants(bench.sizes), given.only.split(",")
    for unknown in set(Mixer.known()) - set(models) - OTHERS:
        print(f"{unknown:26s} has no sizes here: add it to mixers()", flush=True)
    for wrong in set(only) - set(models) - KINDS - {f"long-{name}" for name in models}:
        parser.error(f"unknown model {wrong!r} (known: mixers, long, peers, {', '.join(models)})")
    chosen = [name for name in models if "mixers" in only or name in only]
    chosen = ["attention", *(name for name in chosen if name != "attention")] if chosen else []
    first = [name for name in FIRST if name in chosen]
    for name in [*first, *(one for one in chosen if one not in first)]:
        if bench.left < 8:
            print(f"{name:26s} no time left", flush=True)
            continue
        with reported(bench, name):
            measure(bench, name, models[name])
    others = [name for name in models if name not in (*LONG, *BOUNDED, "identity", "experts", "bitnet-packed")]
    for name in (name for name in (*LONG, *others) if "long" in only or f"long-{name}" in only):
        if bench.left < 6:
            print(f"{name:26s} no time left", flush=True)
            continue
        with reported(bench, name):
            measure_long(bench, name, models[name])
    for name in (name for name in PEERS if "peers" in only or f"peer-{name}" in only):
        if bench.left > (PEER_SECONDS if bench.device.type == "cuda" else 0):
            with reported(bench, f"peer {name}"):
                measure_peer(bench, name, models[PEERS[name]])
    report(bench)
    return int(any("failed" in found for name, found in bench.results.items() if not name.startswith("peer")))


if __name__ == "__main__":
    sys.exit(main())
