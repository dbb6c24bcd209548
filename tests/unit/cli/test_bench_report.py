"""The figures of a benchmark, on requests whose times are written down."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from octavo.cli.bench_report import RequestRecord, Slo, make_report, percentile, render, spread


def request(
    ttft_ms: float, tpot_ms: float, num_tokens: int, start_s: float = 0.0, num_prompt_tokens: int = 10
) -> RequestRecord:
    """A request whose tokens come one by one, `tpot_ms` apart."""
    record = RequestRecord(start_s)
    for index in range(num_tokens):
        record.add_tokens(start_s + (ttft_ms + index * tpot_ms) / 1e3, 1)
    record.num_prompt_tokens = num_prompt_tokens
    return record


def failed(error: str, detail: str = "") -> RequestRecord:
    return RequestRecord(0.0, end_s=1.0, error=error, error_detail=detail)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 0) == 1.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    hundred = spread([float(value) for value in range(100, -1, -1)])
    assert hundred is not None
    assert (hundred.mean, hundred.p50, hundred.p90, hundred.p99) == (50.0, 50.0, 90.0, 99.0)
    assert spread([]) is None


def test_the_times_of_one_request() -> None:
    record = request(ttft_ms=200, tpot_ms=20, num_tokens=100, start_s=5.0)
    assert record.ttft_ms == pytest.approx(200)
    assert record.tpot_ms == pytest.approx(20)
    assert record.itl_ms() == pytest.approx([20] * 99)
    # The end-to-end latency is TTFT plus TPOT for each token; the first token is the one that TTFT covers.
    assert record.e2e_ms == pytest.approx(200 + 99 * 20)


def test_tokens_that_come_together_are_counted_each() -> None:
    record = RequestRecord(start_s=0.0)
    record.add_tokens(0.100, 1)
    record.add_tokens(0.190, 3)
    record.add_tokens(0.200, 1)
    assert record.num_output_tokens == 5
    assert record.tpot_ms == pytest.approx(25)  # 100 ms for the four tokens after the first
    assert record.itl_ms() == pytest.approx([30, 30, 30, 10])


def test_a_single_token_has_no_time_per_output_token_and_keeps_its_limit() -> None:
    record = request(ttft_ms=50, tpot_ms=0, num_tokens=1)
    assert record.tpot_ms is None
    assert Slo(ttft_ms=100, tpot_ms=1).is_met(record)
    assert not Slo(ttft_ms=50, tpot_ms=1).is_met(record)


def test_throughput_counts_from_the_first_request_to_the_last_end() -> None:
    records = [request(500, 10, 51, start_s=10.0), request(500, 10, 51, start_s=11.0)]  # the second ends at 12.0
    report = make_report(records, Slo())
    assert report.duration_s == pytest.approx(2.0)
    assert report.requests_per_s == pytest.approx(1.0)
    assert report.output_tokens_per_s == pytest.approx(51)
    assert report.total_tokens_per_s == pytest.approx(61)


def test_if_30_percent_of_the_tokens_break_the_slo_goodput_is_70_percent_of_throughput() -> None:
    slo = Slo(ttft_ms=1000, tpot_ms=50)
    good = [request(ttft_ms=900, tpot_ms=40, num_tokens=100) for _ in range(7)]
    late = [request(ttft_ms=1100, tpot_ms=40, num_tokens=100) for _ in range(2)]
    slow = [request(ttft_ms=900, tpot_ms=60, num_tokens=100)]
    report = make_report([*good, *late, *slow], slo)
    assert report.num_within_slo == 7
    assert report.goodput_tokens_per_s == pytest.approx(0.7 * report.output_tokens_per_s)


def test_of_three_configurations_the_one_with_the_best_goodput_is_not_the_fastest() -> None:
    """A 12,000 tokens/s with 4,000 good, B 9,500 with 9,200, C 6,000 with 6,000: B is best."""
    slo = Slo(ttft_ms=1000, tpot_ms=50)

    def goodput(tokens_per_s: int, good_tokens_per_s: int, ttft_ms: float, tpot_ms: float) -> float:
        """Of a second's load: requests of 100 tokens, the bad ones with a TTFT of 3.2 s."""
        records = [request(ttft_ms, tpot_ms, 100) for _ in range(good_tokens_per_s // 100)]
        records += [request(3200, tpot_ms, 100) for _ in range((tokens_per_s - good_tokens_per_s) // 100)]
        report = make_report(records, slo)
        return report.goodput_tokens_per_s / report.output_tokens_per_s * tokens_per_s

    a, b, c = goodput(12_000, 4_000, 900, 28), goodput(9_500, 9_200, 700, 42), goodput(6_000, 6_000, 400, 18)
    assert (round(a), round(b), round(c)) == (4_000, 9_200, 6_000)
    assert b > c > a


def test_failed_requests_are_counted_by_kind_and_in_nothing_else() -> None:
    refused = [failed("HTTP 429", "too many requests wait"), failed("HTTP 429", "the same again")]
    report = make_report([request(100, 10, 11), *refused, failed("timeout")], Slo(ttft_ms=1000))
    assert (report.num_requests, report.num_completed, report.num_within_slo) == (4, 1, 1)
    assert report.errors == {"HTTP 429": 2, "timeout": 1}
    assert report.error_examples == {"HTTP 429": "too many requests wait", "timeout": ""}
    assert report.num_output_tokens == 11


def test_a_run_in_which_all_failed_is_still_a_report() -> None:
    report = make_report([failed("ConnectError")], Slo())
    assert (report.ttft_ms, report.tpot_ms, report.e2e_ms) == (None, None, None)
    assert report.output_tokens_per_s == 0
    assert "1 x ConnectError" in rendered([failed("ConnectError")], Slo())


def test_the_table_shows_goodput_where_there_is_an_slo() -> None:
    records = [request(100, 10, 11)]
    assert "goodput" not in rendered(records, Slo())
    text = rendered(records, Slo(ttft_ms=1000))
    assert "goodput" in text
    assert [name for name in ("TTFT", "TPOT", "ITL", "E2E", "p99") if name not in text] == []


def test_the_report_is_plain_json() -> None:
    content = json.loads(json.dumps(make_report([request(100, 10, 11)], Slo(tpot_ms=50)).to_json()))
    assert content["ttft_ms"]["p99"] == pytest.approx(100)
    assert content["slo"] == {"ttft_ms": None, "tpot_ms": 50}


def rendered(records: Sequence[RequestRecord], slo: Slo) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(render(make_report(records, slo)))
    return capture.get()
