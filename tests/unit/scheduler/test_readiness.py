"""What the scheduler says while a peer is away, silent, or at one step for too long (ops-374)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from octavo.common.errors import LinkClosedError
from octavo.scheduler.launcher import LaunchedStep
from octavo.scheduler.readiness import Readiness


@dataclass
class FakePeer:
    name: str
    is_quiet: bool = False


@pytest.fixture
def peers() -> Any:
    return FakePeer("worker"), FakePeer("KV manager")


@pytest.fixture
def readiness(peers: Any) -> Readiness:
    """Both were reached at 100 s."""
    made = Readiness(peers, 100.0)
    assert made.why_not(100.0, None) == "not connected to the worker yet"
    for peer in peers:
        made.came_back(peer)
    assert made.why_not(100.0, None) == ""
    return made


def step(launched_at: float, num_tokens: int) -> LaunchedStep:
    return LaunchedStep(1, [], launched_at, num_tokens, 0)


def test_a_short_absence_is_not_told_and_a_long_one_is(readiness: Readiness, peers: Any) -> None:
    readiness.went_away(peers[0], LinkClosedError("worker lost"), 110.0, can_resume=True)
    assert readiness.why_not(111.9, None) == ""
    assert readiness.why_not(112.1, None) == "worker lost"
    readiness.went_away(peers[0], LinkClosedError("worker away: refused"), 113.0, can_resume=True)
    assert readiness.why_not(113.0, None) == "worker away: refused"
    assert readiness.longest_absence(115.0) == (5.0, "worker away: refused")
    readiness.came_back(peers[0])
    assert readiness.why_not(115.0, None) == ""
    assert readiness.longest_absence(115.0) == (0.0, "")


def test_what_cannot_be_resumed_is_told_at_once_and_until_it_is_back(readiness: Readiness, peers: Any) -> None:
    readiness.went_away(peers[1], LinkClosedError("refused"), 110.0, can_resume=False)
    readiness.went_away(peers[1], LinkClosedError("KV manager away"), 110.1, can_resume=True)
    assert readiness.why_not(110.2, None) == "KV manager away"


@pytest.mark.parametrize("index", [0, 1])
def test_a_silent_peer_is_named_as_long_as_it_is_silent(index: int, readiness: Readiness, peers: Any) -> None:
    peers[index].is_quiet = True
    assert readiness.why_not(103.0, None) == f"the {peers[index].name} gives no sign of life"
    peers[index].is_quiet = False
    assert readiness.why_not(103.1, None) == ""


def test_a_step_that_does_not_end_is_told_after_a_time_that_grows_with_its_tokens(readiness: Readiness) -> None:
    decode, prefill = step(110.0, 8), step(110.0, 2048)
    assert readiness.why_not(114.1, decode) == ""
    assert readiness.why_not(114.2, decode) == "the worker has been at one step for over 4 s"
    assert readiness.why_not(154.0, prefill) == ""
    assert readiness.why_not(155.1, prefill) == "the worker has been at one step for over 45 s"


def test_steps_that_wait_for_one_another_are_no_hang(readiness: Readiness) -> None:
    """Both were launched together; the second begins when the first, of 40 s, ends."""
    readiness.step_ended(150.0)
    assert readiness.why_not(153.0, step(110.0, 8)) == ""
    assert "one step" in readiness.why_not(154.5, step(110.0, 8))
