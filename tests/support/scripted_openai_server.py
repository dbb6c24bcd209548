"""An OpenAI-compatible server that answers with given lines, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = "[DONE]"


@dataclass
class Answer:
    """One answer to a POST: a stream of events if the status is 200, else a JSON body."""

    events: Sequence[Any] = (DONE,)
    """JSON values, DONE, or functions to call between events."""
    status: int = 200
    body: Any = None


@dataclass
class ScriptedOpenAiServer:
    """Gives the answers in turn, the last one for ever, and keeps the bodies that it was sent."""

    url: str
    answers: list[Answer] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)

    def next_answer(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@contextmanager
def scripted_openai_server(*answers: Answer) -> Iterator[ScriptedOpenAiServer]:
    """A server on a free port of the loopback interface, whose only model is called scripted."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send_json(200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            script.received.append(json.loads(self.rfile.read(length)))
            answer = script.next_answer()
            if answer.status != 200:
                self._send_json(answer.status, answer.body)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for event in answer.events:
                self._send_event(event)

        def _send_event(self, event: Any | Callable[[], None]) -> None:
            if callable(event):
                event()
                return
            data = event if event == DONE else json.dumps(event)
            self.wfile.write(f"data: {data}\n\n".encode())
            self.wfile.flush()

        def _send_json(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that hangs up is part of the story

    server = Server(("127.0.0.1", 0), Handler)
    script = ScriptedOpenAiServer(f"http://127.0.0.1:{server.server_port}", list(answers))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def piece(text: str) -> dict[str, Any]:
    """An event of a chat completion that carries text."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
