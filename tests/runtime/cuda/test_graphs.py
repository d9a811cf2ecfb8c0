"""Garbage collection is paused while a graph is captured."""

from __future__ import annotations

import gc
import threading

import pytest

from allyouneed.runtime.process import pause_gc


def test_gc_resumes_after_the_last_of_several_threads() -> None:
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with pause_gc():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with pause_gc():
        assert not gc.isenabled()
        thread.start()
        inside.wait()
    assert not gc.isenabled()  # the other thread still pauses it
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_resumes_gc_and_a_disabled_gc_stays_disabled() -> None:
    with pytest.raises(RuntimeError), pause_gc():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with pause_gc():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
