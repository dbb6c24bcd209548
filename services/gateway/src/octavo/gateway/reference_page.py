"""The page at /docs: the routes and bodies of /openapi.json as HTML, without scripts or anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment
from markupsafe import Markup, escape

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #8884; }
h3 { margin: 2rem 0 .25rem; } code { font-size: .95em; } .method { text-transform: uppercase; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ api.info.title }}: HTTP API</title><style>{{ style }}</style></head>
<body>
<h1>{{ api.info.title }} {{ api.info.version }}</h1>
<p>The routes of this server, and the JSON that they take and give. For programs:
<a href="/openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>
<table>
<tr><th>route</th><th>takes</th><th>gives</th></tr>
{% for path, operations in api.paths.items() %}{% for method, operation in operations.items() %}
<tr><td><code><span class="method">{{ method }}</span> {{ path }}</code><br>
{{ operation.description or operation.summary }}</td><td>
{%- for parameter in operation.parameters or [] if parameter.in == "query" %}
<code>?{{ parameter.name }}</code>: {{ type_of(parameter.schema) }}<br>
{%- endfor %}
{%- if operation.requestBody %}{{ body_of(operation.requestBody) }}{% endif %}</td>
<td>{{ body_of(operation.responses["200"]) }}</td></tr>
{% endfor %}{% endfor %}
</table>
<h2>Bodies</h2>
{% for name, schema in api.components.schemas.items() %}
<h3 id="{{ name }}">{{ name }}</h3>
<p>{{ schema.description }}</p>
{% if schema.properties %}<table>
<tr><th>field</th><th>type</th><th>meaning</th></tr>
{% for field, value in schema.properties.items() %}
<tr><td><code>{{ field }}</code>{% if field in (schema.required or []) %} (required){% endif %}</td>
<td>{{ type_of(value) }}</td><td>{{ value.description }}</td></tr>
{% endfor %}</table>{% else %}<p>{{ type_of(schema) }}</p>{% endif %}
{% endfor %}
</body>
</html>
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def router(app: FastAPI) -> APIRouter:
    """The route."""
    routes = APIRouter(include_in_schema=False)
    page = ""

    @routes.get("/docs")
    async def show_reference() -> HTMLResponse:
        nonlocal page
        page = page or reference_page(app.openapi())
        return HTMLResponse(page, headers=_HEADERS)

    return routes


def reference_page(api: dict[str, Any]) -> str:
    """An OpenAPI document as HTML."""
    environment = Environment(autoescape=True, trim_blocks=True)
    return environment.from_string(_PAGE).render(api=api, style=Markup(_STYLE), type_of=_type_of, body_of=_body_of)


def _body_of(message: dict[str, Any]) -> Markup:
    """What a request or an answer carries: the schema of its JSON, or its media types."""
    content: dict[str, Any] = message.get("content", {})
    known = [_type_of(media["schema"]) for media in content.values() if media.get("schema")]
    streams = [escape("server-sent events")] if "text/event-stream" in content else []
    return Markup(", or ").join([*known, *streams])


def _type_of(schema: dict[str, Any]) -> Markup:
    """In words, with links to the bodies that it names."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    kinds = schema.get("anyOf") or schema.get("oneOf")
    if kinds:
        return Markup(" or ").join(_type_of(kind) for kind in kinds if kind.get("type") != "null")
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(", ").join(Markup("<code>{}</code>").format(value) for value in values)
    if "items" in schema:
        return Markup("list of {}").format(_type_of(schema["items"]))
    return escape(schema.get("type", "any"))
