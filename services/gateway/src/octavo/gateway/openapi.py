"""What /openapi.json says of routes that read their bodies themselves."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_of(body: type[BaseModel]) -> dict[str, Any]:
    """A route's JSON body."""
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
