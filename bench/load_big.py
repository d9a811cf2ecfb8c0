"""Peak memory of loading a large model: weights are mapped and taken as they are, so there is no second copy of them.

    python bench/load_big.py [--write]

Writes a random Llama of 1.1 billion parameters (TinyLlama's sizes, bfloat16, six shards) to a temporary folder. Each
way of loading runs in its own process, which loads the model and then touches every weight, since untouched pages take
no memory. The figure is the peak resident memory minus the memory before loading (python, torch, this package), divided
by the bytes of the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

PAGE = Path(__file__).parent.parent / "docs" / "results" / "load.md"
MOST = 1.15
WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB = 2048, 5632, 22, 32, 4, 32000
SHARDS = 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
CALLS = {
    "Hugging Face folder": "load('theirs')",
    "Hugging Face folder, to float32": "load('theirs', dtype='float32')",
    "our folder": "load('ours')",
    "`allyouneed import`": "load('theirs', as_stored=True).save('again')",
}
# run in a subprocess; the figures are the kernel's, in kB
PROGRAM = """
import json, sys, time
import torch
from safetensors.torch import save_file
from allyouneed.interop.hf import folder as hf
from allyouneed.interop.load import load

def memory(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

before, began = memory("VmRSS:"), time.perf_counter()
found = {call}
took = time.perf_counter() - began
if found is not None:
    sum(tensor.view(torch.uint8).max().item() for tensor in found.model.state_dict().values())
print(json.dumps({{"before": before, "peak": memory("VmHWM:"), "seconds": took}}))
"""


def make(folder: Path) -> int:
    """The bytes of the weights."""
    narrow = WIDTH * KV_HEADS // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes |= {f"{layer}.{norm}_layernorm.weight": (WIDTH,) for norm in ("input", "post_attention")}
        rows = {"q": WIDTH, "k": narrow, "v": narrow, "o": WIDTH}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (count, WIDTH) for name, count in rows.items()}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (HIDDEN, WIDTH) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (WIDTH, HIDDEN)}
    shapes["lm_head.weight"] = (VOCAB, WIDTH)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names, file_of, total = list(shapes), {}, 0
    share = -(-len(names) // SHARDS)
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = {
            name: torch.randn(shapes[name], dtype=torch.bfloat16)
            for name in names[number * share : (number + 1) * share]
        }
        save_file(part, folder / file, {"format": "pt"})
        file_of |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def measured(call: str, folder: Path) -> dict[str, float]:
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(call=call)], cwd=folder, capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        began = time.perf_counter()
        size = make(folder / "theirs")
        print(f"{size / 1e9:.2f} GB of weights, made in {time.perf_counter() - began:.0f} s")
        measured("load('theirs', as_stored=True).save('ours')", folder)
        rows, good = [], True
        for name, call in CALLS.items():
            found = measured(call, folder)
            there = size * (2 if "float32" in name else 1)
            ratio = (found["peak"] - found["before"]) / there
            good = good and ratio < MOST
            rows.append(
                f"| {name} | {there / 1e9:.2f} | {found['before'] / 1e9:.2f} | {found['peak'] / 1e9:.2f} | {ratio:.3f} "
                f"| {found['seconds']:.1f} |"
            )
            print(rows[-1])
    about = (__doc__ or "").split("[--write]")[1].strip()
    head = f"# Loading a large model\n\n```sh\npython bench/load_big.py --write\n```\n\n{about}\n"
    table = (
        "\n| what is loaded | weights, GB | before, GB | peak, GB | (peak − before) / weights | seconds |\n"
        "|---|---:|---:|---:|---:|---:|\n"
    )
    tail = (
        f"\ntorch {torch.__version__}. Wanted: below {MOST}. Seconds are one run's, files perhaps in the page cache.\n"
    )
    if given.write:
        PAGE.write_text(head + table + "\n".join(rows) + "\n" + tail, encoding="utf-8")
    if not good:
        raise SystemExit(f"a ratio is {MOST} or more")


if __name__ == "__main__":
    main()
