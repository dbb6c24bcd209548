"""Writes the tables of docs/*.md that say what the code declares: request fields, options, errors, settings, metrics.

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`. Run: python docs/generate_reference.py
With --check nothing is written, and the exit status is 1 if a file is not current.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import prometheus_client
from annotated_types import BaseMetadata
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from octavo.common.errors import OctavoError
from octavo.common.links import Address
from octavo.common.service_config import ServiceConfig
from octavo.gateway.anthropic_schema import MessagesRequest
from octavo.gateway.config import GatewayConfig
from octavo.gateway.http_errors import kind_of
from octavo.gateway.metrics import EventHistogram
from octavo.gateway.openai_schema import (
    BranchOptions,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonSchemaFormat,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
)
from octavo.gateway.responses_schema import ResponsesRequest
from octavo.gateway.tokenizer_schema import TokenizeRequest
from octavo.gateway.unoffered_options import CHAT_OPTIONS, COMPLETION_OPTIONS, IGNORED
from octavo.kvmanager.config import KvManagerConfig
from octavo.kvmanager.metrics import KvMetrics
from octavo.kvmanager.pool import PoolSettings
from octavo.kvmanager.server import KvManagerServer
from octavo.scheduler.config import SchedulerConfig
from octavo.scheduler.core import SchedulerCore
from octavo.scheduler.core_settings import CoreSettings
from octavo.scheduler.metrics import SchedulerCollector
from octavo.worker.config import WorkerConfig

DOCS = Path(__file__).parent
_SECTION = re.compile(r"(<!-- generated: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table."""
    cells = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in cells)


# Requests.


def request_fields(body: type[BaseModel], without: type[BaseModel] | None = None) -> str:
    """Fields of a request body, in the order of their declaration; `without` leaves out what is as in a base class."""
    properties = body.model_json_schema()["properties"]
    left_out = without.model_fields if without is not None else {}
    rows = [
        (f"`{name}`", _json_type(schema), " ".join(schema.get("description", "See below.").split()))
        for name, schema in properties.items()
        if name not in left_out or name in body.__annotations__
    ]
    return table(("field", "type", "meaning"), rows)


def _json_type(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words. null, which every optional field takes, is left out."""
    branches = [branch for branch in schema.get("anyOf", [schema]) if branch.get("type") != "null"]
    return " or ".join(_one_json_type(branch) for branch in branches)


def _one_json_type(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return f"`{str(schema['const']).lower()}`"
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_json_type(schema['items'])}"
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    limits = [
        f"at least {_power(low)}" if low is not None else f"above {above}" if above is not None else "",
        f"at most {_power(high)}" if high is not None else f"below {_power(below)}" if below is not None else "",
    ]
    if "maxLength" in schema:
        limits = [f"{schema['minLength']} to {schema['maxLength']} characters"]
    text = ", ".join(limit for limit in limits if limit)
    return f"{kind}, {text}" if text else str(kind)


def _power(number: float) -> str:
    """2**64 is easier to read than its twenty digits."""
    powers = {2**31 - 1: "2^31 - 1", -(2**31): "-2^31", 2**64: "2^64", -(2**63): "-2^63", 1 << 63: "2^63"}
    return powers.get(int(number), f"{number:g}") if abs(number) > 2**30 else f"{number:g}"


def options_that_pass(options: dict[str, tuple[Any, ...]]) -> str:
    """Options of other servers, with the values besides null that change nothing."""
    rows = [
        (f"`{name}`", ", ".join(f"`{_json(value)}`" for value in accepted) or "null only")
        for name, accepted in sorted(options.items())
    ]
    return table(("option", "accepted"), rows)


def _json(value: Any) -> str:
    return json.dumps(value)


def ignored_options() -> str:
    return ", ".join(f"`{name}`" for name in sorted(IGNORED)) + "\n"


def errors() -> str:
    """Every error class of the services, as a client of the gateway sees it."""
    rows = []
    for error in _tree(OctavoError):
        kind = kind_of(error)
        message = "withheld" if kind.withholds_message else "shown"
        retry = "yes" if kind.is_retryable else ""
        code = kind.code or "null"
        name, reason = f"`{error.__name__}`", f"`{error.reason}`"
        rows.append((name, reason, str(kind.status), kind.type, code, message, retry))
    return table(("class", "reason between services", "status", "type", "code", "message", "Retry-After"), rows)


def _tree(root: type[OctavoError]) -> list[type[OctavoError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


# Settings.


def settings(config: type[ServiceConfig]) -> str:
    """The settings of one service, without those that all services have."""
    common = {} if config is ServiceConfig else ServiceConfig.model_fields
    prefix = config.model_config.get("env_prefix") or "OCTAVO_<SERVICE>_"
    rows = [
        (
            f"`--{name.replace('_', '-')}`",
            f"`{prefix}{name.upper()}`",
            _default(field),
            " ".join(" ".join(part.split()) for part in (field.description or "", _limits(field)) if part),
        )
        for name, field in config.model_fields.items()
        if name not in common
    ]
    return table(("flag", "environment", "default", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value is None or value == "":
        return "unset"
    if isinstance(value, list):
        return ", ".join(f"`{item}`" for item in value if isinstance(item, Address))
    return f"`{value if isinstance(value, str) else _json(value)}`"


def _limits(field: FieldInfo) -> str:
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    limits = [
        f"{text} {getattr(item, sign):g}"
        for item in field.metadata
        if isinstance(item, BaseMetadata)
        for sign, text in signs.items()
        if hasattr(item, sign)
    ]
    return f"({', '.join(limits)})" if limits else ""


# Metrics.


def process_metrics(module_name: str) -> str:
    """The metrics that a module of a service declares."""
    module = __import__(module_name, fromlist=["*"])
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram, EventHistogram)
    declared = [value for value in vars(module).values() if isinstance(value, kinds)]
    roots = [metric for metric in declared if not getattr(metric, "_labelvalues", ())]
    return _metric_rows([(next(iter(metric.describe())), metric) for metric in roots])


def collected_metrics(collector: Any) -> str:
    """The metrics that a collector reads at a scrape."""
    return _metric_rows([(family, family) for family in collector.collect()])


def _metric_rows(metrics: Iterable[tuple[Any, Any]]) -> str:
    rows = []
    for family, owner in metrics:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in getattr(owner, "_labelnames", ()))
        rows.append((f"`{name}`", family.type, labels, family.documentation))
    return table(("metric", "kind", "labels", "meaning"), rows)


SECTIONS: dict[str, Callable[[], str]] = {
    "choice of a token": lambda: inspect.getdoc(GenerationRequest).split("\n\n", 1)[1] + "\n",
    "fields of both": lambda: request_fields(GenerationRequest),
    "fields of structured outputs": lambda: request_fields(StructuredOutputs),
    "fields of response format": lambda: request_fields(ResponseFormat),
    "fields of json schema": lambda: request_fields(JsonSchemaFormat),
    "fields of completions": lambda: request_fields(CompletionRequest, GenerationRequest),
    "fields of branch": lambda: request_fields(BranchOptions),
    "fields of chat": lambda: request_fields(ChatRequest, GenerationRequest),
    "fields of stream options": lambda: request_fields(StreamOptions),
    "fields of messages": lambda: request_fields(MessagesRequest),
    "fields of responses": lambda: request_fields(ResponsesRequest),
    "fields of tokenize": lambda: request_fields(TokenizeRequest),
    "options of completions": lambda: options_that_pass(COMPLETION_OPTIONS),
    "options of chat": lambda: options_that_pass(
        {name: accepted for name, accepted in CHAT_OPTIONS.items() if COMPLETION_OPTIONS.get(name) != accepted}
    ),
    "ignored options": ignored_options,
    "errors": errors,
    "settings of all services": lambda: settings(ServiceConfig),
    "settings of the gateway": lambda: settings(GatewayConfig),
    "settings of the scheduler": lambda: settings(SchedulerConfig),
    "settings of the kvmanager": lambda: settings(KvManagerConfig),
    "settings of the worker": lambda: settings(WorkerConfig),
    "metrics of the gateway": lambda: process_metrics("octavo.gateway.metrics"),
    "metrics of the scheduler": lambda: collected_metrics(SchedulerCollector(SchedulerCore(CoreSettings()))),
    "metrics of the kvmanager": lambda: collected_metrics(KvMetrics(KvManagerServer(PoolSettings(), boot_epoch=1))),
    "metrics of the worker": lambda: process_metrics("octavo.worker.metrics"),
}


def rendered(text: str) -> str:
    """The text with every generated section made anew. Raises KeyError for a section that nothing generates."""
    return _SECTION.sub(lambda match: f"{match[1]}\n{SECTIONS[match[2]]()}\n{match[3]}", text)


def main() -> None:
    stale = []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        current = rendered(text)
        if current != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(current, encoding="utf-8")
    if stale and "--check" in sys.argv:
        print(f"not current: {', '.join(stale)}; run make docs", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
