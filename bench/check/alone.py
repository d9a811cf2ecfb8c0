"""A part of kernels.py that can also be run alone: checks, then times on a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def alone(text: str | None, job: Callable[[Any, bool], None], times: Callable[[], None]) -> int:
    """The exit code: 1 when a result differs."""
    from bench.check.interpreter import prepare_interpreter
    from bench.check.report import Check

    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    given = parser.parse_args()
    if given.device == "cpu":
        prepare_interpreter()
    check = Check(given.device)
    job(check, given.device == "cuda")
    if given.device == "cuda":
        times()
    return int(check.wrong > 0)
