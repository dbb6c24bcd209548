"""What /openapi.json says of routes that read and write their bodies themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.gateway.answer_schema import AnthropicErrorBody, ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_SSE: dict[str, Any] = {"text/event-stream": {}}
_ERRORS = {
    400: "A field is wrong, or not supported.",
    401: "No API key was sent, or one that is not known.",
    403: "The API key does not allow this.",
    404: "There is no such model, response or route.",
    408: "The body has not come in time, or the request has not ended within its `timeout`.",
    413: "The body is too large.",
    429: "Too much is waiting; try again later.",
    500: "The server failed.",
    503: "The server cannot answer now; try again later.",
}

_bodies: dict[str, type[BaseModel]] = {}


def body_of(body: type[BaseModel]) -> dict[str, Any]:
    """A route's JSON body, for `openapi_extra`."""
    _bodies[body.__name__] = body
    reference = {"$ref": _REFERENCE.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def answers(answer: type[BaseModel] | None = None, *, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """What a route answers when all is well, for `responses`."""
    content = {"content": _SSE} if streams else {}
    return {200: {"description": "The answer.", **({"model": answer} if answer is not None else {}), **content}}


def errors(body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """What routes answer otherwise, for `responses`."""
    return {status: {"description": text, "model": body} for status, text in _ERRORS.items()}


ANTHROPIC_ERRORS = errors(AnthropicErrorBody)


def describe(app: FastAPI) -> None:
    """Make the application's OpenAPI schema complete."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in _bodies.values()], ref_template=_REFERENCE)
            components = schema.setdefault("components", {}).setdefault("schemas", {})
            components |= bodies["$defs"]
            for unused in ("HTTPValidationError", "ValidationError"):
                components.pop(unused, None)
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
