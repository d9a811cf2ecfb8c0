"""Ctrl-C works even where the exception gets lost, and torchrun ends no process that has something to report."""

import os
import signal
import threading

import pytest

from allyouneed.training.signals import StopRequest, reraise_lost_interrupt


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.01)  # it is heard between two instructions


def test_a_swallowed_interrupt_is_raised_at_the_end():
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), reraise_lost_interrupt():
        try:
            press()
        except KeyboardInterrupt:
            done.append("went on")
    assert done and signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_stops_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), reraise_lost_interrupt():
        press()
        done.append("went on")
    assert not done


def test_other_threads_and_calls_without_a_signal_are_unaffected():
    with reraise_lost_interrupt():
        pass
    failed = []

    def other() -> None:
        try:
            with reraise_lost_interrupt():
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert not failed


def test_a_background_job_is_stopped_by_a_second_signal_too():
    """A shell starts it with SIGINT ignored."""
    said, before = list[str](), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), StopRequest(said.append) as stop:
            press()
            assert stop.requested and len(said) == 1
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("single", [True, False])
def test_after_an_error_a_process_of_several_is_not_ended_before_it_has_reported_it(single: bool):
    """torchrun sends SIGTERM to the other processes when one has died."""
    ended, said, interrupt = [], list[str](), signal.getsignal(signal.SIGINT)
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
    try:
        with pytest.raises(RuntimeError), StopRequest(said.append, single):
            raise RuntimeError("Connection closed by peer")
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, interrupt)
    assert ended == [True] * single and not said
