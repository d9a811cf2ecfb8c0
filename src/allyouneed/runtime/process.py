"""Everything that changes the state of the whole process, in one place. torch is imported on use."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any

from allyouneed.errors import UserError

RARE = 20_000, 10, 10  # new objects before a collection of the young ones (Python: 700), and these before older ones
MIN_FILES, MAX_FILES = 64, 65_536  # open files: a command needs about 30, a server one for each connection
SWITCH_INTERVAL = 5e-4  # seconds; a tenth of Python's default

HANG_UP: int | None = getattr(signal, "SIGHUP", None)  # the terminal was closed; None: no such signal here

_gc_lock, _gc_users, _gc_was_enabled = threading.Condition(), 0, False
_rare_users, _thresholds = 0, gc.get_threshold()
_switch_lock, _switch_users, _switch_interval = threading.Lock(), 0, 0.0
_inference_lock, _inference_users, _has_cudnn_attention = threading.Lock(), 0, False


def use_passive_openmp() -> None:
    """Call it before torch is loaded: on a busy machine, OpenMP threads that spin while waiting are ten times
    slower."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system allows, or refuse to work with too few."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
        if soft < most and soft != resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    except (ImportError, OSError, ValueError):  # not on this system
        return
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        raise UserError(f"this process may open {soft} files; it needs {MIN_FILES} (ulimit -n {MIN_FILES})")


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a subprocess that is timed: this many OpenMP threads, spinning while they wait."""
    return os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "active"}


def server_environment(threads: int) -> dict[str, str]:
    """The environment of one of several server processes: this many OpenMP threads, unless the user has set them."""
    return {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)


class ModelProcess:
    """The process that first loaded or called a model."""

    pid: int | None = None


def refuse_after_fork() -> None:
    """Called before a model is loaded or computes. OpenMP's threads do not survive a fork: with more than one, the
    child would wait for them for ever."""
    pid = os.getpid()
    if ModelProcess.pid is None:
        ModelProcess.pid = pid
    elif ModelProcess.pid != pid:
        import torch

        if (threads := torch.get_num_threads()) > 1:
            raise UserError(
                f"this process was forked from one that had loaded a model, and its {threads} OpenMP threads do not "
                "exist here; load the model after the fork, start processes with multiprocessing's 'spawn', or call "
                "torch.set_num_threads(1) here"
            )


def set_threads(count: int) -> None:
    """Threads of torch's CPU kernels, for benchmark workers that share a machine."""
    import torch

    torch.set_num_threads(count)


def allow_tf32() -> None:
    """fp32 matrix products on tensor cores: training in bf16 needs no more precision elsewhere."""
    import torch

    torch.set_float32_matmul_precision("high")


def disable_compilation() -> None:
    """Disable it for the rest of the process, after compiling has failed once."""
    import torch

    torch.compiler.set_stance("force_eager")


def run_eagerly() -> AbstractContextManager[None]:
    """Inside, compiled modules run eagerly: many shapes, each used once. Where nothing has been compiled, torch's
    compiler is not imported for it: that takes seconds."""
    import torch

    from allyouneed.torch_private import compiler_is_loaded

    if not compiler_is_loaded():
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def pause_gc() -> Iterator[None]:
    """No collection while any thread is inside: freeing an old CUDA graph or its memory invalidates a running capture,
    and a collection stalls the launch of kernels."""
    global _gc_users, _gc_was_enabled
    with _gc_lock:
        if _gc_users == 0:
            _gc_was_enabled = gc.isenabled()
            gc.disable()
        _gc_users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_users -= 1
            if _gc_users == 0:
                _gc_lock.notify_all()
                if _gc_was_enabled:
                    gc.enable()


@contextmanager
def rare_gc() -> Iterator[None]:
    """Collections are rare while any thread is inside: each stops all threads for as long as it takes to visit every
    object, and a server makes and drops thousands of objects, few of them in cycles, with every wave of requests."""
    global _rare_users, _thresholds
    with _gc_lock:
        if _rare_users == 0:
            _thresholds = gc.get_threshold()
            gc.set_threshold(*RARE)
        _rare_users += 1
    try:
        yield
    finally:
        with _gc_lock:
            _rare_users -= 1
            if _rare_users == 0:
                gc.set_threshold(*_thresholds)
                gc.unfreeze()


def freeze_objects() -> None:
    """Collections skip the objects that exist now: a model and the libraries have some hundred thousand, which live on,
    and visiting them takes a fifth of a second."""
    gc.freeze()


def free_objects() -> None:
    """Free what nothing refers to, frozen objects as well; waits for `pause_gc`. The others are frozen."""
    with _gc_lock:
        _gc_lock.wait_for(lambda: _gc_users == 0)
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Threads switch ten times as often while any is inside, so that launching updates or decode steps does not wait
    for the thread that builds batches or answers clients."""
    global _switch_users, _switch_interval
    with _switch_lock:
        if _switch_users == 0:
            _switch_interval = sys.getswitchinterval()
            sys.setswitchinterval(SWITCH_INTERVAL)
        _switch_users += 1
    try:
        yield
    finally:
        with _switch_lock:
            _switch_users -= 1
            if _switch_users == 0:
                sys.setswitchinterval(_switch_interval)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Inside, the model runs without dropout. Switching visits every module, so it is done for one that trains only."""
    refuse_after_fork()
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


@contextmanager
def inference(model: Any = None) -> Iterator[None]:
    """torch.inference_mode, without cuDNN's attention while any thread is inside: it is planned anew, for 35 ms, for
    each number of keys that it has not seen, and every text has others. Other kernels of torch need no plan. Inside, a
    `model` that trains runs without dropout."""
    import torch

    if ModelProcess.pid != os.getpid():
        refuse_after_fork()
    global _inference_users, _has_cudnn_attention
    with _inference_lock:
        if _inference_users == 0:
            _has_cudnn_attention = torch.backends.cuda.cudnn_sdp_enabled()
            torch.backends.cuda.enable_cudnn_sdp(False)
        _inference_users += 1
    trains = model is not None and model.training
    try:
        if trains:
            model.eval()
        with torch.inference_mode():
            yield
    finally:
        if trains:
            model.train()
        with _inference_lock:
            _inference_users -= 1
            if _inference_users == 0:
                torch.backends.cuda.enable_cudnn_sdp(_has_cudnn_attention)


@contextmanager
def stop_signals_handled(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside, the signals that end a server call `handler`, in the main thread. A hang-up that is ignored (`nohup`)
    stays so."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            hang_up = [] if HANG_UP is None or signal.getsignal(HANG_UP) is signal.SIG_IGN else [HANG_UP]
            for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
                stack.callback(signal.signal, number, signal.signal(number, handler))
        yield


@contextmanager
def ignore_warnings() -> Iterator[None]:
    """Ignore the warnings of libraries that do not concern the user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def forbid_cuda_sync() -> Iterator[None]:
    """Inside, synchronising with the device is an error."""
    import torch

    before = torch.cuda.get_sync_debug_mode()
    with ignore_warnings():  # it warns that the check is incomplete
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
