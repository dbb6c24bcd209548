"""Where chat templates run: jinja2's sandbox for values that cannot be changed, with a budget of time and text.

What a model's folder brings is code that its operator chose but may not have read. It reaches no attribute of Python,
changes nothing that it is given, and ends when the budget is spent. Each turn of a loop and each call looks at the
clock, and what is kept in a variable is looked at for its size.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_TIMEOUT_S = 2.0
MAX_CHARS = 64 * 2**20
"""Of a rendered text, of a text in a variable, and elements of a list in one."""
_MAX_BASE, _MAX_EXPONENT = 2**64, 64
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{5}|\*)")

_deadline_s: ContextVar[float] = ContextVar("deadline_s", default=float("inf"))


class BudgetExceededError(jinja2.TemplateError):
    """The template takes more than it may."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered by `render_bounded`."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["octavo_turns"] = _turns
        self.filters["octavo_kept"] = _kept

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "octavo_turns", [], [], None, None, lineno=loop.lineno)
        for assignment in tree.find_all(nodes.Assign):
            kept = nodes.Filter(assignment.node, "octavo_kept", [], [], None, None, lineno=assignment.lineno)
            assignment.node = kept
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = nodes.Filter(block.filter, "octavo_kept", [], [], None, None, lineno=block.lineno)
        return tree

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        """A function or macro, called by a template."""
        _look_at_clock()
        return super().call(context, function, *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation by which a few characters of source could make a value of any size."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_CHARS:
                    raise BudgetExceededError(f"the template repeats something {times} times")
        elif operator == "**":
            if not all(
                isinstance(value, int | float) and abs(value) <= limit
                for value, limit in ((left, _MAX_BASE), (right, _MAX_EXPONENT))
            ):
                raise BudgetExceededError(f"the template raises to a power above {_MAX_EXPONENT}, or a large number")
        elif isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise BudgetExceededError("the template formats to a width of five digits")
        return super().call_binop(context, operator, left, right)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text. Raises BudgetExceededError, and whatever a template can raise."""
    token = _deadline_s.set(time.monotonic() + RENDER_TIMEOUT_S)
    try:
        pieces: list[str] = []
        num_chars = 0
        for piece in template.generate(variables):
            num_chars += len(piece)
            if num_chars > MAX_CHARS:
                raise BudgetExceededError(f"the template writes more than {MAX_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _deadline_s.reset(token)


def _look_at_clock() -> None:
    if time.monotonic() > _deadline_s.get():
        raise BudgetExceededError(f"the template takes more than {RENDER_TIMEOUT_S:g} s")


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _look_at_clock()
        yield item


def _kept(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARS:
        raise BudgetExceededError(f"the template keeps a value of more than {MAX_CHARS} characters or elements")
    return value
