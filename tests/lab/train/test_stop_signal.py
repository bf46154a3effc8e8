"""A stop is asked for by a signal or by the clock, and only then."""

import os
import signal

import pytest

from softprune.lab.train.control import StopSignal


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_remembered_and_handlers_go_back(number: signal.Signals) -> None:
    inherited = signal.signal(number, signal.default_int_handler)  # nohup, say, ignores SIGHUP
    try:
        with StopSignal() as stop:
            assert stop.reason() is None
            os.kill(os.getpid(), number)
            assert stop.reason() == number.name
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, inherited)


def test_a_second_interrupt_is_immediate() -> None:
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_time_limit() -> None:
    assert StopSignal(3600).reason() is None
    assert StopSignal(0).reason() == "the time limit of 0 s"


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.reason() is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
