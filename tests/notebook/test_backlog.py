"""Text that a stopped job printed faster than it can be shown."""

from __future__ import annotations

from firepool_nb.magics.backlog import Backlog


def text(number: int) -> dict[str, object]:
    return {"n": number, "name": "stdout", "text": "x" * 10}


def test_nothing_is_passed_over_unless_somebody_pressed_and_the_job_has_ended() -> None:
    backlog = Backlog(lambda: 10_000)
    assert not any(backlog.passes_over("stream", text(n), 100.0) for n in range(100))
    running = Backlog(lambda: None)
    running.pressed(0.0)
    assert not any(running.passes_over("stream", text(n), 10.0 + n) for n in range(100))


def test_a_stopped_flood_is_passed_over_to_its_end() -> None:
    backlog = Backlog(lambda: 1000)
    backlog.pressed(0.0)
    assert not backlog.passes_over("stream", text(1), 0.1)
    assert backlog.passes_over("stream", text(2), 1.0)
    assert not backlog.passes_over("display_data", {"n": 3, "data": {}}, 1.0)
    shown = [n for n in range(4, 1000) if not backlog.passes_over("stream", text(n), 1.0)]
    assert shown == list(range(990, 1000))
    assert "9,870 characters" in (backlog.note("j-1") or "")
    assert backlog.note("j-1") is None


def test_a_short_rest_is_shown() -> None:
    backlog = Backlog(lambda: 30)
    backlog.pressed(0.0)
    assert not any(backlog.passes_over("stream", text(n), 1.0) for n in range(30))
