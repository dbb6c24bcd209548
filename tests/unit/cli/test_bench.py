"""`octavo bench` against a server that answers by a script."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from support.scripted_openai_server import DONE, Answer, scripted_openai_server


def tokens(*token_ids: int) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "x", "token_ids": list(token_ids), "finish_reason": None}]}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


GOOD = Answer([tokens(1), tokens(2, 3, 4), tokens(5), usage(9, 5), DONE])


def bench(url: str, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "--url", url, *options], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


def test_every_request_asks_for_its_length_and_is_counted(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    with scripted_openai_server(GOOD) as server:
        options = ["-n", "6", "--concurrency", "3", "--input-len", "9", "--output-len", "5", "--json", str(report_file)]
        status, out, _ = bench(server.url, *options)
    assert status == 0
    assert "6 of 6" in out
    assert len(server.received) == 6
    body = server.received[0]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["stream"]) == ("scripted", 5, True, True)
    assert len(body["prompt"]) == 9

    content = json.loads(report_file.read_text())
    assert content["settings"]["model"] == "scripted"
    assert (content["report"]["num_prompt_tokens"], content["report"]["num_output_tokens"]) == (54, 30)


def test_a_server_that_lists_no_token_ids_is_counted_by_its_usage(tmp_path: Path) -> None:
    plain = {"choices": [{"index": 0, "text": "some words", "finish_reason": None}]}
    report_file = tmp_path / "report.json"
    with scripted_openai_server(Answer([plain, plain, usage(9, 7), DONE])) as server:
        status, _, _ = bench(server.url, "-n", "1", "--json", str(report_file))
    assert status == 0
    content = json.loads(report_file.read_text())
    assert content["report"]["num_output_tokens"] == 7
    assert content["settings"]["concurrency"] == 8, "the default, as it is used"


def test_requests_at_a_rate_come_when_they_are_due() -> None:
    with scripted_openai_server(GOOD) as server:
        status, out, _ = bench(server.url, "-n", "10", "--rate", "100", "--slo-ttft-ms", "10000")
    assert status == 0
    assert "10 of 10" in out
    assert "goodput" in out


def test_failures_are_counted_by_kind_and_end_with_status_1() -> None:
    refusal = Answer(status=429, body={"error": {"message": "too many requests wait"}})
    broken_off = Answer([tokens(1)])
    told = Answer([tokens(1), {"error": {"message": "the worker is gone"}}, DONE])
    with scripted_openai_server(refusal, broken_off, told, GOOD) as server:
        status, out, _ = bench(server.url, "-n", "4", "--concurrency", "1")
    assert status == 1
    assert "1 of 4" in out
    assert "3 requests failed" in out
    assert "1 x HTTP 429  the server answered 429: too many requests wait" in out
    assert "1 x stream broke off" in out
    assert "1 x error event  the worker is gone" in out


def test_a_request_that_takes_too_long_is_a_timeout() -> None:
    with scripted_openai_server(Answer([tokens(1), lambda: time.sleep(1.5), DONE])) as server:
        status, out, _ = bench(server.url, "-n", "1", "--timeout-s", "1")
    assert status == 1
    assert "1 x timeout" in out


@pytest.mark.parametrize(
    ("url", "complaint"),
    [("http://127.0.0.1:1", "no server answers at http://127.0.0.1:1"), ("localhost:8000", "is not an address")],
)
def test_a_server_that_is_not_there_is_told_with_what_to_do(url: str, complaint: str) -> None:
    status, out, err = bench(url)
    assert (status, out) == (1, "")
    assert complaint in err


def test_the_report_alone_can_be_printed_as_json(tmp_path: Path) -> None:
    with scripted_openai_server(GOOD) as server:
        status, out, err = bench(server.url, "-n", "2", "--json", "-")
        assert (status, json.loads(out)["report"]["num_completed"]) == (0, 2)
        assert "2 of 2" in err
        status, _, err = bench(server.url, "-n", "1", "--json", str(tmp_path / "nowhere" / "report.json"))
    assert status == 1
    assert "cannot be written to" in err


def test_version_as_json() -> None:
    result = CliRunner().invoke(app, ["version", "--json"])
    assert set(json.loads(result.stdout)) == {"version"}
