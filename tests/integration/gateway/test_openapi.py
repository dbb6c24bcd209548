"""What /openapi.json says is what the routes do: fuzzed by schemathesis, no request makes a 500."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from support.gateway_thread import gateway_in_thread
from support.running_gateway import running_gateway, says
from support.small_tokenizer import TOOL_CHAT_TEMPLATE, byte_level_json

TEXT = '<think>Hm.</think>So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CHECKED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")  # for grammars
    settings: Any = {"chat_template": TOOL_CHAT_TEMPLATE, "max_model_len": 1024, "model": folder}
    with gateway_in_thread(says(TEXT), **settings) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


def fuzz(api: Any, max_examples: int) -> set[str]:
    """Call every route with what its schema allows, and with what it forbids. The routes."""
    called = set()
    for found in api.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @settings(
                max_examples=max_examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def call(case: Any) -> None:
                case.call_and_validate(checks=CHECKED, timeout=120)

            call()
        called.add(operation.label)
    return called


def test_no_request_breaks_a_route(api: Any) -> None:
    assert {"POST /v1/responses", "GET /metrics", "POST /v1/messages/count_tokens"} < fuzz(api, max_examples=10)


@pytest.mark.full
def test_no_request_of_many_breaks_a_route(api: Any) -> None:
    assert len(fuzz(api, max_examples=200)) > 20


def test_every_route_says_what_it_takes_and_answers(api: Any) -> None:
    names = set(api.raw_schema["components"]["schemas"])
    for path, operations in api.raw_schema["paths"].items():
        for method, operation in operations.items():
            assert set(operation["responses"]) >= {"200", "400", "404", "500", "503"}, (method, path)
            if method == "post" and not path.endswith(("cancel", "embeddings")):
                [body] = operation["requestBody"]["content"].values()
                assert body["schema"]["$ref"].removeprefix("#/components/schemas/") in names


async def test_the_reference_needs_nothing_from_elsewhere() -> None:
    """Scripts of others would run where the page at /ui keeps its keys."""
    async with running_gateway(says("x")) as gateway:
        page = await gateway.http.get("/docs")
        schema = (await gateway.http.get("/openapi.json")).json()
        assert [(await gateway.http.get(path)).status_code for path in ("/redoc", "/docs/oauth2-redirect")] == [
            404,
            404,
        ]
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert not re.search(r"<script|https?://|src=", page.text)
    shown = set(re.findall(r'id="(\w+)"', page.text))
    assert shown == set(schema["components"]["schemas"])
    assert set(re.findall(r'href="#(\w+)"', page.text)) <= shown
    for path in schema["paths"]:
        assert f"</span> {path}</code>" in page.text
    assert "<code>stop</code></td>\n<td>string or list of string</td><td>The text ends before" in page.text
