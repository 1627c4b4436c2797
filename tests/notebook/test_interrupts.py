"""What each press of ■ means, and how presses reach a wait."""

from __future__ import annotations

import os
import select
import signal
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firepool_nb.magics.interrupts import Action, InterruptListener, Presses

IGNORE, CANCEL, INTERRUPT, KILL, LEAVE = (
    Action.IGNORE, Action.CANCEL, Action.INTERRUPT, Action.KILL, Action.LEAVE,
)  # fmt: skip


@pytest.mark.parametrize(
    ("presses", "expected"),
    [
        ([(0, True)], [INTERRUPT]),
        ([(0, True), (3, True)], [INTERRUPT, KILL]),
        ([(0, True), (3, True), (6, True)], [INTERRUPT, KILL, LEAVE]),
        ([(0, True), (1, True), (1.9, True)], [INTERRUPT, IGNORE, IGNORE]),
        ([(0, True), (1, True), (2.5, True)], [INTERRUPT, IGNORE, KILL]),
        ([(0, True), (2, True)], [INTERRUPT, KILL]),
        ([(0, False)], [CANCEL]),
        ([(0, False), (1, False), (2, False)], [CANCEL, IGNORE, LEAVE]),
        ([(0, False), (3, True)], [CANCEL, LEAVE]),
        ([(0, True), (3, True), (4, True)], [INTERRUPT, KILL, IGNORE]),
        ([(0, True), (3, True), (6, True), (9, True)], [INTERRUPT, KILL, LEAVE, LEAVE]),
    ],
)
def test_what_a_press_means(presses: list[tuple[float, bool]], expected: list[Action]) -> None:
    decided = Presses()
    assert [decided.press(100 + at, running) for at, running in presses] == expected


def test_after_a_press_that_was_not_delivered_the_next_one_leaves() -> None:
    decided = Presses()
    assert decided.press(0, True) is INTERRUPT
    decided.undelivered()
    assert decided.press(1, True) is IGNORE
    assert decided.press(2.5, True) is LEAVE


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=12))
def test_the_wait_can_always_be_left(history: list[tuple[float, bool]]) -> None:
    decided, now = Presses(), 0.0
    for pause, running in history:
        now += pause
        decided.press(now, running)
    actions = []
    for _ in range(3):
        now += 2.0
        actions.append(decided.press(now, True))
    assert LEAVE in actions


@given(st.lists(st.floats(0, 1.99), max_size=12))
def test_a_burst_of_presses_never_kills(offsets: list[float]) -> None:
    decided = Presses()
    actions = [decided.press(at, True) for at in [0.0, *sorted(offsets)]]
    assert actions == [INTERRUPT] + [IGNORE] * len(offsets)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_press_wakes_the_wait_and_raises_nothing() -> None:
    with InterruptListener() as listener:
        timer = threading.Timer(0.05, press)
        timer.start()
        ready, _, _ = select.select([listener], [], [], 5)
        timer.join()
        assert ready == [listener]
        assert len(listener.take()) == 1
        assert listener.take() == []
        assert select.select([listener], [], [], 0)[0] == []


def test_where_nothing_can_be_torn_apart_a_press_raises() -> None:
    with InterruptListener() as listener:
        with pytest.raises(KeyboardInterrupt), listener.raising():  # noqa: PT012
            press()
            threading.Event().wait(5)
        press()
        assert len(listener.take()) == 1
        press()
        with pytest.raises(KeyboardInterrupt), listener.raising():
            raise AssertionError("a press from before counts too")


def test_the_handler_of_before_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with InterruptListener():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_listen_in_vain_and_without_harm() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def listen() -> None:
        with InterruptListener() as listener:
            seen.append((listener.take(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [([], before)]
