"""Process-wide settings are changed in one module, and context managers restore them."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import allyouneed
import toy_models
from allyouneed.runtime import process
from waiting import PATIENCE

SOURCE = Path(allyouneed.__file__).parent
CALLS = re.compile(
    r"\bgc\.(enable|disable|freeze|unfreeze|set_threshold)|setswitchinterval|set_float32_matmul_precision|set_num_threads|set_num_interop_threads"
    r"|enable_cudnn_sdp|set_stance|set_sync_debug_mode"
    r"|os\.environ(\[[^]]*\] =|\.setdefault|\.update)|\"OMP_|simplefilter\(\"ignore\"\)"
)


def test_nothing_that_answers_enters_inference_mode_elsewhere() -> None:
    for path in [*SOURCE.glob("infer/**/*.py"), *SOURCE.glob("apps/**/*.py")]:
        assert "torch.inference_mode" not in path.read_text(encoding="utf-8"), f"{path}: use process.inference()"


def test_no_other_module_changes_them() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{number}: {line.strip()}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).as_posix() != "runtime/process.py"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if CALLS.search(line)
    ]
    assert not found


def test_the_switch_interval_is_restored_after_the_last_user(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.getswitchinterval()
    monkeypatch.setattr(process, "_switch_users", 0)  # a server of another test may use it
    monkeypatch.setattr(process, "_switch_interval", 0.0)
    sys.setswitchinterval(0.004)
    try:
        first, second = process.short_switch_interval(), process.short_switch_interval()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)  # not in the order of a stack: two servers in two threads
        assert sys.getswitchinterval() == pytest.approx(process.SWITCH_INTERVAL)
        second.__exit__(None, None, None)
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before)


def test_garbage_collection_is_rare_until_the_last_user_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_rare_users", 0)  # a server of another test may use it
    before = gc.get_threshold()
    try:
        gc.set_threshold(600, 7, 8)
        first, second = process.rare_gc(), process.rare_gc()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert gc.get_threshold() == process.RARE
        process.freeze_objects()
        assert gc.get_freeze_count() > 0
        second.__exit__(None, None, None)
        assert gc.get_threshold() == (600, 7, 8) and gc.get_freeze_count() == 0
    finally:
        gc.set_threshold(*before)


def test_attention_is_not_planned_while_any_thread_infers() -> None:
    planned, inside, leave = torch.backends.cuda.cudnn_sdp_enabled, threading.Event(), threading.Event()

    def stay() -> None:
        with process.inference():
            inside.set()
            leave.wait(PATIENCE)

    before = planned()
    thread = threading.Thread(target=stay)
    try:
        for usual in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(usual)
            with pytest.raises(KeyboardInterrupt), process.inference(), process.inference():
                assert torch.is_inference_mode_enabled() and not planned()
                raise KeyboardInterrupt
            assert planned() == usual and not torch.is_inference_mode_enabled()
        torch.backends.cuda.enable_cudnn_sdp(True)
        thread.start()
        assert inside.wait(PATIENCE)
        with process.inference():
            pass
        assert not planned()  # the other thread is still inside
        leave.set()
        thread.join(PATIENCE)
        assert planned()
    finally:
        leave.set()
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_what_was_frozen_is_freed_on_request_but_not_during_a_capture() -> None:
    class Node:
        pass

    one, other = Node(), Node()
    one.next, other.next = other, one  # type: ignore[attr-defined]
    alive = weakref.ref(one)
    process.freeze_objects()
    del one, other
    gc.collect()
    assert alive() is not None  # frozen: not visited
    with process.pause_gc():
        thread = threading.Thread(target=process.free_objects)
        thread.start()
        thread.join(0.1)
        assert thread.is_alive() and alive() is not None
    thread.join(20)
    assert alive() is None
    gc.unfreeze()


def test_warning_filters_are_restored() -> None:
    filters = list(warnings.filters)
    with process.ignore_warnings():
        warnings.warn("not shown", stacklevel=1)
    assert list(warnings.filters) == filters


def test_workers_get_their_threads() -> None:
    environment = process.worker_environment(3)
    assert environment["OMP_NUM_THREADS"] == "3" and "PATH" in environment


FORK = """
import os, sys
import torch
from allyouneed.errors import UserError
from allyouneed.infer.engine import Engine
from toy_models import BOS, EOS, PAD, random_model

engine = Engine(random_model(vocab=9000), BOS, EOS, PAD)
texts = [[5 + n, 6, 7, EOS] for n in range(30)]
torch.ones(4000, 4000) @ torch.ones(4000, 400)  # starts OpenMP's threads
answers = engine.generate(texts)
child = os.fork()
if not child:
    try:
        engine.generate(texts)
    except UserError as error:
        print(error)
    torch.set_num_threads(1)
    print(engine.generate(texts) == answers, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def test_a_forked_process_gets_an_error_instead_of_hanging() -> None:
    paths = os.pathsep.join([str(SOURCE.parent), str(Path(toy_models.__file__).parent)])
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert "this process was forked from one that had loaded a model, and its 2 OpenMP threads" in done.stdout, done
    assert done.stdout.endswith("True\n")
