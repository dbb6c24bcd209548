"""Probes and scrapes of a service, over real HTTP."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest

from octavo.common import operations_http as module
from octavo.common.operations_http import operations_http


def get(port: int | None, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=10, trust_env=False)


async def test_a_service_that_runs_and_is_ready_says_so() -> None:
    with operations_http("127.0.0.1:0", lambda: "") as port:
        live = await asyncio.to_thread(get, port, "/health/live")
        ready = await asyncio.to_thread(get, port, "/health/ready")
        metrics = await asyncio.to_thread(get, port, "/metrics")
    assert (live.status_code, live.json()) == (200, {"status": "live"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
    assert metrics.status_code == 200
    assert "python_info" in metrics.text


async def test_one_that_is_not_ready_gives_the_reason_and_is_still_alive() -> None:
    with operations_http("127.0.0.1:0", lambda: "loading layer 3 of 30") as port:
        ready = await asyncio.to_thread(get, port, "/health/ready")
        live = await asyncio.to_thread(get, port, "/health/live")
    assert ready.status_code == 503
    assert ready.json() == {"status": "not ready", "reason": "loading layer 3 of 30"}
    assert live.status_code == 200


async def test_one_that_needs_a_restart_says_why_and_is_not_alive() -> None:
    with operations_http("127.0.0.1:0", lambda: "", lambda: "one step has lasted for 301 s") as port:
        live = await asyncio.to_thread(get, port, "/health/live")
    assert (live.status_code, live.json()["reason"]) == (503, "one step has lasted for 301 s")


async def test_an_event_loop_that_hangs_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIVE_TIMEOUT_S", 0.2)
    answers: list[httpx.Response] = []
    with operations_http("127.0.0.1:0", lambda: "") as port:
        asked = threading.Thread(target=lambda: answers.append(get(port, "/health/live")))
        asked.start()
        time.sleep(0.8)  # noqa: ASYNC251 the loop that this blocks is the one under test
        asked.join(5)
    assert answers[0].status_code == 503
    assert answers[0].json()["reason"] == "the event loop has not turned for 0.2 s"


async def test_other_paths_are_not_found_and_the_port_is_free_afterwards() -> None:
    with operations_http("127.0.0.1:0", lambda: "") as port:
        assert (await asyncio.to_thread(get, port, "/")).status_code == 404
    with operations_http(f"127.0.0.1:{port}", lambda: "") as again:
        assert again == port


async def test_an_address_that_is_taken_is_an_os_error() -> None:
    with operations_http("127.0.0.1:0", lambda: "") as port:
        second = operations_http(f"127.0.0.1:{port}", lambda: "")
        with pytest.raises(OSError, match="in use"):
            second.__enter__()


async def test_without_an_address_nothing_is_served() -> None:
    with operations_http(None, lambda: "") as port:
        assert port is None
