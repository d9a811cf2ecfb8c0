"""Garbage waits until nobody is to be disturbed any more."""

from __future__ import annotations

import gc
import threading

import pytest

from allyouneed.runtime.cuda.graphs import undisturbed


def test_garbage_waits_for_the_last_of_several_threads() -> None:
    assert gc.isenabled()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with undisturbed():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with undisturbed():
        assert not gc.isenabled()
        thread.start()
        inside.wait()
    assert not gc.isenabled()  # the other one is still there
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_what_fails_leaves_it_as_it_was_and_off_stays_off() -> None:
    with pytest.raises(RuntimeError), undisturbed():
        raise RuntimeError
    assert gc.isenabled()
    gc.disable()
    try:
        with undisturbed():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
