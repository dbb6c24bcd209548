"""Says in a terminal why a request took as long as it did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_BAR_WIDTH = 24


def why_page(explanation: dict[str, Any]) -> Group:
    """An explanation as docs/api.md describes it."""
    parts: list[RenderableType] = []
    for prompt in explanation["prompts"]:
        parts.append(_head(prompt))
        for sequence in prompt["sequences"]:
            if prompt["num_choices"] > 1:
                parts.append(Text(f"choice {sequence['choice_index']}", style="bold"))
            parts += [Padding(part, (0, 0, 0, 2)) for part in _sequence(sequence)]
    return Group(*parts)


def _head(prompt: dict[str, Any]) -> Text:
    facts = [prompt["state"], f"{prompt['num_prompt_tokens']} prompt tokens"]
    for name, text in (("first_token_s", "first token"), ("ended_s", "end")):
        if prompt[name] is not None:
            facts.append(f"{text} after {_seconds(prompt[name])}")
    head = Text(f"request {prompt['id']}", style="bold") + Text("\n" + ", ".join(facts), style="not bold")
    if prompt["error"]:
        head.append(f"\n{prompt['error']['message']}", style="red")
    return head


def _sequence(sequence: dict[str, Any]) -> Iterator[RenderableType]:
    waits = {cause: seconds for cause, seconds in sequence["waited_s"].items() if seconds > 0}
    if waits:
        yield _bars("why it waited", {cause: (seconds, _seconds(seconds)) for cause, seconds in waits.items()})
    else:
        yield Text("it did not wait")
    if sequence["waits_for"]:
        yield Text(f"it waits now: {_words(sequence['waits_for'])}", style="yellow")
    for admission in sequence["admissions"]:
        blocks = admission["blocks"]
        title = f"blocks it got after {_seconds(admission['at_s'])}: {admission['num_blocks']}"
        yield _bars(title, {outcome: (count, str(count)) for outcome, count in blocks.items()})
        if evictors := admission.get("evicted_by"):
            yield Text(f"evicted for {', '.join(evictors)}", style="dim")
    for preemption in sequence["preemptions"]:
        yield Text(_preemption(preemption), style="yellow")
    if not sequence["preemptions"]:
        yield Text("nothing was taken from it")


def _preemption(preemption: dict[str, Any]) -> str:
    text = (
        f"preempted after {_seconds(preemption['at_s'])} ({_words(preemption['why'])}), by {preemption['kind']}: "
        f"{preemption['num_blocks']} blocks"
    )
    if preemption["cost_s"] is not None:
        text += f", which cost {_seconds(preemption['cost_s'])}"
    if preemption["back_after_s"] is not None:
        text += f", back after {_seconds(preemption['back_after_s'])}"
    return text


def _bars(title: str, values: dict[str, tuple[float, str]]) -> Table:
    """Largest first, each with its text and a bar."""
    table = Table(title=title, title_justify="left", title_style="", show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    most = max((value for value, _ in values.values()), default=0.0)
    for name, (value, text) in sorted(values.items(), key=lambda item: -item[1][0]):
        bar = "█" * max(1, round(_BAR_WIDTH * value / most)) if most else ""
        table.add_row(_words(name), text, Text(bar, style="cyan"))
    return table


def _words(name: str) -> str:
    return name.replace("_", " ")


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
