"""Questions to a scheduler: owns those that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools

from octavo.common.errors import NotReadyError
from octavo.common.links import Link
from octavo.common.messages.generation import Explain, Explained, GatewayMessage, SchedulerMessage

_ANSWER_TIMEOUT_S = 5.0
_NUM_QUERY_NOS = 2**31


class SchedulerQueries:
    """Of one client; the answers come back over the link that is there then."""

    def __init__(self) -> None:
        self._nos = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}

    async def explain(self, link: Link[GatewayMessage, SchedulerMessage], request_id: str, salt_head: bytes) -> bytes:
        """See `SchedulerClient.explain`."""
        query_no = next(self._nos) % _NUM_QUERY_NOS
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[query_no] = answer
        try:
            link.send(Explain(query_no, request_id, salt_head))
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise NotReadyError(f"the scheduler has not answered within {_ANSWER_TIMEOUT_S} s") from None
        finally:
            self._waiting.pop(query_no, None)

    def on_answer(self, message: Explained) -> None:
        """One that nobody waits for any more is dropped."""
        answer = self._waiting.get(message.query_no)
        if answer is not None and not answer.done():
            answer.set_result(message.explanation)

    def fail(self, error: NotReadyError) -> None:
        """Nobody will answer those that wait."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
