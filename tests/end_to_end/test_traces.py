"""A request's trace goes through all services, in a tree of true times."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest

from octavo.cli.models import PreparedModel
from support.clusters import H200, ServerSettings, running_cluster, wait_until
from support.trace_collector import collecting_traces

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
NAMES = ("POST /v1/completions", "scheduler", "queue", "prefill", "decode", "worker")


def test_a_request_is_traced_from_the_callers_span_to_the_workers_steps(
    simulated_model: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * position) % 300 + 5 for position in range(50)]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    settings = ServerSettings(simulated=H200, num_blocks=300, max_model_len=2048)
    with collecting_traces() as collector:
        for service in ("GATEWAY", "SCHEDULER", "WORKER"):
            monkeypatch.setenv(f"OCTAVO_{service}_OTLP_ENDPOINT", collector.url)
        with (
            running_cluster(simulated_model, settings) as cluster,
            httpx.Client(base_url=cluster.url, timeout=60, trust_env=False) as http,
        ):
            kept = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            assert http.post("/v1/completions", json=body, headers={**kept, "x-request-id": "r-1"}).status_code == 200
            dropped = {"traceparent": f"00-{'b' * 32}-{CALLER}-00"}
            assert http.post("/v1/completions", json=body, headers=dropped).status_code == 200
            assert http.post("/v1/completions", json=body, headers={"traceparent": "nonsense"}).status_code == 200
            wait_until(lambda: all(collector.named(name, TRACE) for name in NAMES), 20, lambda: str(collector.spans))
        assert collector.spans
    found = {name: collector.named(name, TRACE) for name in NAMES}
    assert [len(spans) for spans in found.values()] == [1] * len(NAMES)
    root, scheduler, queue, prefill, decode, worker = (spans[0] for spans in found.values())
    assert {root.service, scheduler.service, worker.service} == {"octavo-gateway", "octavo-scheduler", "octavo-worker"}
    assert root.parent_id == CALLER
    assert scheduler.parent_id == root.span_id
    assert {queue.parent_id, prefill.parent_id, decode.parent_id, worker.parent_id} == {scheduler.span_id}
    order = [root.start_ns, scheduler.start_ns, queue.end_ns, prefill.end_ns, decode.end_ns, root.end_ns]
    slack_ns = 20_000_000  # clocks of one machine, read in different processes and for events of the step before
    assert all(earlier <= later + slack_ns for earlier, later in pairwise(order)), order
    assert queue.end_ns == prefill.start_ns
    assert prefill.end_ns == decode.start_ns
    assert root.attributes["octavo.request_id"] == scheduler.attributes["octavo.request_id"] == "r-1"
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]) == (50, 8)
    assert worker.attributes["octavo.computed_tokens"] >= 50 + 7
    assert 0 < worker.attributes["octavo.step_seconds"] <= (worker.end_ns - worker.start_ns) / 1e9 + 1
    assert {span.trace_id for span in collector.spans if span.trace_id == "b" * 32} == set()
    begun_here = {span.trace_id for span in collector.spans} - {TRACE}
    assert len(begun_here) == 1
