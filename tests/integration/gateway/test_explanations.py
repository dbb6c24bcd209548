"""GET /v1/requests/{id}/why."""

from __future__ import annotations

import asyncio

import pytest

from support.running_gateway import running_gateway, says


@pytest.mark.parametrize("asked_as", ["abc/1", "cmpl-abc/1", "chatcmpl-abc/1"])
async def test_a_request_is_explained_by_its_own_id_and_by_its_answers(asked_as: str) -> None:
    async with running_gateway(says("x")) as gateway:
        gateway.scheduler.explanations["abc/1"] = b'{"id":"abc/1","prompts":[]}'
        response = await gateway.http.get(f"/v1/requests/{asked_as}/why")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {"id": "abc/1", "prompts": []}


async def test_unknown_requests_are_not_found() -> None:
    async with running_gateway(says("x")) as gateway:
        response = await gateway.http.get("/v1/requests/cmpl-nobody/why")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("request_not_found", "request_id")
    assert "'cmpl-nobody' is unknown" in error["message"]


async def test_without_a_scheduler_the_answer_is_503() -> None:
    async with running_gateway(says("x")) as gateway:
        gateway.scheduler.is_away = True
        gateway.scheduler.drop_link()
        await asyncio.sleep(0.05)
        response = await gateway.http.get("/v1/requests/abc/why")
    assert response.status_code == 503


async def test_a_scheduler_that_goes_away_while_it_is_asked_ends_the_wait() -> None:
    async with running_gateway(says("x")) as gateway:
        gateway.scheduler.is_silent = True
        asked = asyncio.create_task(gateway.http.get("/v1/requests/abc/why"))
        await asyncio.sleep(0.05)
        gateway.scheduler.drop_link()
        response = await asked
    assert response.status_code == 503
