"""The figures of a benchmark.

TTFT     request sent (or due) to first token
TPOT     (last token - first token) / (output tokens - 1), one value for each request with two tokens or more
ITL      gap between two chunks that carry tokens, shared out among the tokens of the later one
E2E      request sent (or due) to last token
goodput  as throughput, of the requests alone that met the SLO: TTFT and TPOT below the limits given
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds of one monotonic clock."""

    start_s: float
    end_s: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """(arrival, number of tokens) of each chunk that carried tokens."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""
    """Kind of failure; empty if there was none."""
    error_detail: str = ""
    """What the server or the connection said."""

    def add_tokens(self, now_s: float, num_tokens: int) -> None:
        self.chunks.append((now_s, num_tokens))
        self.num_output_tokens += num_tokens
        self.end_s = now_s

    @property
    def ttft_ms(self) -> float | None:
        return (self.chunks[0][0] - self.start_s) * 1e3 if self.chunks else None

    @property
    def tpot_ms(self) -> float | None:
        if self.num_output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1][0] - self.chunks[0][0]) * 1e3 / (self.num_output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.end_s - self.start_s) * 1e3

    def itl_ms(self) -> list[float]:
        """One value for each token after the first chunk."""
        values = []
        for (before_s, _), (now_s, num_tokens) in zip(self.chunks, self.chunks[1:], strict=False):
            values += [(now_s - before_s) * 1e3 / num_tokens] * num_tokens
        return values


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good; None sets no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def is_met(self, record: RequestRecord) -> bool:
        if record.error:
            return False
        return _below(record.ttft_ms, self.ttft_ms) and _below(record.tpot_ms, self.tpot_ms)


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class BenchReport:
    num_requests: int
    num_completed: int
    errors: dict[str, int]
    """Kind of failure to number of requests."""
    error_examples: dict[str, str]
    """Kind of failure to what was said the first time."""
    duration_s: float
    """First request sent to last one ended."""
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo: Slo
    num_within_slo: int
    goodput_requests_per_s: float
    goodput_tokens_per_s: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_report(records: Sequence[RequestRecord], slo: Slo) -> BenchReport:
    """Figures of the requests that completed; failed ones count as errors only. `records` must not be empty."""
    completed = [record for record in records if not record.error]
    good = [record for record in completed if slo.is_met(record)]
    duration_s = max(record.end_s for record in records) - min(record.start_s for record in records)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    num_prompt_tokens = sum(record.num_prompt_tokens for record in completed)
    num_output_tokens = sum(record.num_output_tokens for record in completed)
    return BenchReport(
        num_requests=len(records),
        num_completed=len(completed),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        error_examples={record.error: record.error_detail for record in reversed(records) if record.error},
        duration_s=duration_s,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_s=len(completed) * per_s,
        output_tokens_per_s=num_output_tokens * per_s,
        total_tokens_per_s=(num_prompt_tokens + num_output_tokens) * per_s,
        slo=slo,
        num_within_slo=len(good),
        goodput_requests_per_s=len(good) * per_s,
        goodput_tokens_per_s=sum(record.num_output_tokens for record in good) * per_s,
        ttft_ms=spread([ttft for record in completed if (ttft := record.ttft_ms) is not None]),
        tpot_ms=spread([tpot for record in completed if (tpot := record.tpot_ms) is not None]),
        itl_ms=spread([gap for record in completed for gap in record.itl_ms()]),
        e2e_ms=spread([record.e2e_ms for record in completed]),
    )


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and percentiles; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p99=percentile(ordered, 99),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks of ascending values: of 1, 2, 3, 4 the 50th is 2.5."""
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def render(report: BenchReport) -> RenderableType:
    """The report as tables for a terminal."""
    parts: list[RenderableType] = [_throughput_table(report), _latency_table(report)]
    if report.errors:
        kinds = "\n".join(f"  {count} x {kind}  {report.error_examples[kind]}" for kind, count in report.errors.items())
        parts.append(Text(f"{report.num_requests - report.num_completed} requests failed:\n{kinds}", style="red"))
    return Group(*parts)


def _throughput_table(report: BenchReport) -> Table:
    table = Table("", "value", title="Throughput", title_justify="left")
    table.columns[1].justify = "right"
    table.add_row("requests completed", f"{report.num_completed} of {report.num_requests}")
    table.add_row("duration", f"{report.duration_s:.2f} s")
    table.add_row("requests", f"{report.requests_per_s:.2f} /s")
    table.add_row("output tokens", f"{report.output_tokens_per_s:.1f} /s")
    table.add_row("total tokens", f"{report.total_tokens_per_s:.1f} /s")
    if report.slo.is_set:
        table.add_row("within the SLO", f"{report.num_within_slo} of {report.num_requests}")
        table.add_row("goodput, requests", f"{report.goodput_requests_per_s:.2f} /s")
        table.add_row("goodput, output tokens", f"{report.goodput_tokens_per_s:.1f} /s")
    return table


def _latency_table(report: BenchReport) -> Table:
    table = Table("ms", title="Latency", title_justify="left")
    for column in ("mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    named = {"TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms, "E2E": report.e2e_ms}
    for name, values in named.items():
        cells = ["-"] * 4 if values is None else [f"{value:.1f}" for value in asdict(values).values()]
        table.add_row(name, *cells)
    return table


def _below(value: float | None, limit: float | None) -> bool:
    """A request without the value, such as the TPOT of a single token, keeps every limit."""
    return limit is None or value is None or value < limit
