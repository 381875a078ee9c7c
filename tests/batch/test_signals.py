"""A signal between an image and its record waits for the record."""

from __future__ import annotations

import os
import signal

import pytest

from mmaccel.batch.signals import hold_signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_waits_for_the_end_of_the_block(name: str) -> None:
    number = getattr(signal, name)
    done: list[str] = []

    def stop(*_: object) -> None:
        done.append("stopped")
        raise KeyboardInterrupt

    before = signal.signal(number, stop)
    try:
        with pytest.raises(KeyboardInterrupt), hold_signals():
            os.kill(os.getpid(), number)
            done.append("recorded")
        assert signal.getsignal(number) is stop
    finally:
        signal.signal(number, before)
    assert done == ["recorded", "stopped"]


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with hold_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
