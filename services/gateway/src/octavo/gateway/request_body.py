"""From the bytes of a body to its fields, as strictly as JSON allows: 1 is not true, 1.0 is no count, "1" no number."""

from __future__ import annotations

from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from octavo.gateway.http_errors import FieldError

MAX_DEPTH = 200  # what reads or writes a body recursively gets along with that
MAX_VALUES = 65_536
"""Values in a body, those in lists of token ids not counted."""
_LONG_FIELDS = ("prompt", "tokens", "allowed_token_ids")

Body = TypeVar("Body", bound=BaseModel)


class RequestBody(BaseModel):
    """What bodies, and objects in them, have in common."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True
    )


def json_object(body: bytes) -> dict[str, Any]:
    """The object that a body is. Raises FieldError."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise FieldError(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise FieldError(None, "the body is not a JSON object", "invalid_json")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH and _is_too_deep(value):
        raise FieldError(None, f"the body is nested more than {MAX_DEPTH} levels deep", "invalid_json")
    if body.count(b",") >= MAX_VALUES and _has_too_many(value):
        message = f"the body has more than {MAX_VALUES} values, those of {', '.join(_LONG_FIELDS)} not counted"
        raise FieldError(None, message, "too_many_values")
    return value


def _has_too_many(body: dict[str, Any]) -> bool:
    """Before anything looks at each of them: a wrong one may cost as much as an error report."""
    level: list[Any] = [{name: value for name, value in body.items() if name not in _LONG_FIELDS}]
    num_values = 0
    while level and num_values <= MAX_VALUES:
        num_values += sum(map(len, level))
        level = _containers_in(level)
    return num_values > MAX_VALUES


def _containers_in(containers: list[Any]) -> list[Any]:
    return [
        child
        for container in containers
        for child in (container.values() if isinstance(container, dict) else container)
        if isinstance(child, dict | list)
    ]


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = _containers_in(level)
        if not level:
            return False
    return True


def validated(body_class: type[Body], values: dict[str, Any]) -> Body:
    """The values as a request. Raises FieldError for the first field that is wrong."""
    try:
        return body_class.model_validate(values)
    except ValidationError as error:
        raise _first_problem(error, values) from None


def _first_problem(error: ValidationError, values: dict[str, Any]) -> FieldError:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    field = problems[0]["loc"][:1]
    # Where a value may be of several kinds, the kind that was followed deepest is the one that was meant, or the one
    # that it is of.
    problem = max(
        (p for p in problems if p["loc"][:1] == field),
        key=lambda p: (len(p["loc"]), not p["type"].endswith("_type")),
    )
    is_missing = problem["type"] == "missing"
    param = _path(problem["loc"], values, is_missing)
    if problem["type"] == "extra_forbidden":
        return FieldError(param, f"{param} is not a known field", "unknown_parameter")
    return FieldError(
        param, f"{param}: {problem['msg']}", "missing_required_parameter" if is_missing else "invalid_value"
    )


def _path(loc: tuple[int | str, ...], values: Any, is_missing: bool) -> str | None:
    """`messages[0].content`. Of a field that may be of several kinds, pydantic's `loc` also has the kind it tried."""
    path = ""
    for place, part in enumerate(loc, start=1):
        if isinstance(part, int):
            path += f"[{part}]"
            values = values[part] if isinstance(values, list) and part < len(values) else None
        elif isinstance(values, dict) and (part in values or (is_missing and place == len(loc))):
            path += f".{part}"
            values = values.get(part)
    return path.lstrip(".") or None
