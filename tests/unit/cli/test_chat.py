"""`octavo chat` against a server that answers by a script."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner, Result

from octavo.cli.api_client import ServerError
from octavo.cli.chat import ChatSettings, Conversation
from octavo.cli.main import app
from support.scripted_openai_server import DONE, Answer, piece, scripted_openai_server


def chat(url: str, *options: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", "--url", url, *options], input=typed)


HELLO = Answer([piece("Hel"), piece("lo."), DONE])
BYE = Answer([piece("Good"), piece("bye."), DONE])


def test_once_prints_the_answer_and_nothing_else() -> None:
    with scripted_openai_server(HELLO) as server:
        result = chat(server.url, "--once", "Hi", "--system", "Be brief.", "--max-tokens", "9", "--temperature", "0")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello.\n", "")
    [body] = server.received
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert (body["model"], body["max_completion_tokens"], body["temperature"]) == ("scripted", 9, 0.0)
    assert "seed" not in body


def test_each_message_carries_the_conversation_so_far() -> None:
    with scripted_openai_server(HELLO, BYE) as server:
        result = chat(server.url, typed="Hi\nBye\n/exit\nnot sent\n")
    assert result.exit_code == 0
    assert "Hello." in result.stdout and "Goodbye." in result.stdout
    assert [message["content"] for message in server.received[1]["messages"]] == ["Hi", "Hello.", "Bye"]
    assert len(server.received) == 2


def test_reset_forgets_all_but_the_system_message() -> None:
    with scripted_openai_server(HELLO, BYE) as server:
        result = chat(server.url, "--system", "Be brief.", typed="Hi\n/reset\nBye\n")
    assert result.exit_code == 0  # the end of the input ends the chat
    assert [message["content"] for message in server.received[1]["messages"]] == ["Be brief.", "Bye"]


def test_an_unknown_command_is_explained_and_not_sent() -> None:
    with scripted_openai_server(HELLO) as server:
        result = chat(server.url, typed="/restart\n\n/exit\n")
    assert "/restart is no command" in result.stdout
    assert server.received == []


def test_a_refusal_is_told_and_the_chat_goes_on() -> None:
    refusal = Answer(status=400, body={"error": {"message": "the prompt is too long"}})
    with scripted_openai_server(refusal, HELLO) as server:
        result = chat(server.url, typed="a long story\nHi\n/exit\n")
    assert result.exit_code == 0
    assert "the server answered 400: the prompt is too long" in result.stderr
    assert server.received[1]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(status=503, body={"error": {"message": "no model is loaded"}}), "answered 503: no model is loaded"),
        (Answer(status=502, body="a proxy's page"), "answered 502"),
        (Answer([piece("Hel")]), "broke the answer off"),
        (Answer([piece("Hel"), {"error": {"message": "the worker is gone"}}]), "the worker is gone"),
    ],
)
def test_once_ends_with_status_1_if_there_is_no_whole_answer(answer: Answer, complaint: str) -> None:
    with scripted_openai_server(answer) as server:
        result = chat(server.url, "--once", "Hi")
    assert result.exit_code == 1
    assert complaint in result.stderr


def test_a_server_that_is_not_there_is_told_with_what_to_do() -> None:
    result = chat("http://127.0.0.1:1", "--once", "Hi")
    assert result.exit_code == 1
    assert "no server answers at http://127.0.0.1:1. Start one with octavo serve" in result.stderr


@pytest.fixture
def heeds_control_c() -> Iterator[None]:
    """Whoever started the tests may have Ctrl-C ignored."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("heeds_control_c")
def test_control_c_stops_the_answer_and_not_the_chat() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)

    with scripted_openai_server(Answer([interrupt, piece("Once upon a time"), DONE]), HELLO) as server:
        result = chat(server.url, typed="A story\nHi\n/exit\n")
    assert result.exit_code == 0
    assert "(stopped)" in result.stdout and "Hello." in result.stdout
    assert "Once upon a time" not in result.stdout


def test_the_part_of_a_stopped_answer_that_came_is_remembered() -> None:
    with scripted_openai_server(HELLO, BYE) as server:
        conversation = Conversation(ChatSettings(server.url), "scripted")
        answer = conversation.ask("Hi")
        assert next(answer) == "Hel"
        answer.close()
        assert "".join(conversation.ask("Bye")) == "Goodbye."
    assert [message["content"] for message in server.received[1]["messages"]] == ["Hi", "Hel", "Bye"]


def test_a_message_without_an_answer_is_forgotten() -> None:
    with scripted_openai_server(Answer(status=500, body={"error": {"message": "a bug"}})) as server:
        conversation = Conversation(ChatSettings(server.url), "scripted")
        with pytest.raises(ServerError, match="a bug"):
            list(conversation.ask("Hi"))
        assert conversation.messages == []


def test_json_has_the_answer_its_usage_and_its_times() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    with scripted_openai_server(
        Answer([piece("Hel"), piece("lo."), end, {"choices": [], "usage": usage}, DONE])
    ) as server:
        result = chat(server.url, "--once", "Hi", "--json")
        assert server.received[0]["stream_options"] == {"include_usage": True}
    answer = json.loads(result.stdout)
    assert (answer["content"], answer["finish_reason"], answer["usage"]) == ("Hello.", "stop", usage)
    assert answer["model"] == "scripted"
    assert 0 < answer["first_text_s"] <= answer["duration_s"]


def test_json_of_a_conversation_is_a_line_for_each_answer() -> None:
    with scripted_openai_server(HELLO, BYE) as server:
        result = chat(server.url, "--json", typed="Hi\nBye\n")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["content"] for line in lines] == ["Hello.", "Goodbye."]


def test_json_of_a_failure_is_an_error_and_a_missing_key_is_explained() -> None:
    refusal = Answer(status=401, body={"error": {"message": "no API key was sent"}})
    with scripted_openai_server(refusal) as server:
        result = chat(server.url, "--once", "Hi", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"].endswith("Set OCTAVO_API_KEY to a key of the server")
