"""Our Triton kernels against the plain definitions in double precision: outputs, states, gradients, on odd sizes. Those
of decoding have no gradients, but leave keys and values where they belong.

    python bench/check/kernels.py                                   on a GPU
    TRITON_INTERPRET=1 python bench/check/kernels.py --device cpu   anywhere, by Triton's interpreter

A figure is ‖found − exact‖ / ‖exact‖. Exit code 1 when one is too large.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # for bench.*

from bench.check.attention import packed_rows, performers, tiled_attentions
from bench.check.banded import bands
from bench.check.bias_gradients import slopes
from bench.check.cross_entropy import entropies
from bench.check.decoding import decoding
from bench.check.deferred import deferred
from bench.check.dilated import dilated
from bench.check.distances import distances
from bench.check.experts import experts
from bench.check.gated import gated_units
from bench.check.index_sums import index_sums
from bench.check.interpreter import prepare_interpreter
from bench.check.mixers import mixers
from bench.check.packed_convolution import packed_convolutions
from bench.check.recurrences import sums
from bench.check.report import Check
from bench.check.state_spaces import state_spaces
from bench.check.ternary import ternary

JOBS = {
    "sums": sums,
    "rows": packed_rows,
    "state-spaces": state_spaces,
    "experts": experts,
    "ternary": ternary,
    "decoding": decoding,
    "mixers": mixers,
    "deferred": deferred,
    "dilated": dilated,
    "entropies": entropies,
    "slopes": slopes,
    "attention": tiled_attentions,
    "performer": performers,
    "gated": gated_units,
    "index-sums": index_sums,
    "distances": distances,
    "banded": bands,
    "packed-convolution": packed_convolutions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--only", choices=list(JOBS), help="recurrent mixers; Mamba; decoding; cross-entropy; backward passes"
    )
    parser.add_argument("--models", default="", help="names of models whose decode steps to check, by commas")
    given = parser.parse_args()
    if given.device == "cpu":
        prepare_interpreter()
    check = Check(given.device, [name for name in given.models.split(",") if name])
    for name, job in JOBS.items():
        if given.only in (None, name):
            job(check, given.device == "cuda")
    return int(check.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
