"""The replies of one pool that its scheduler may not have got."""

from __future__ import annotations

from octavo.common.messages.kv import KvReply

MAX_KEPT_REPLIES = 4096
"""Replies that a scheduler may leave unacknowledged and still resume."""


class ReplyLog:
    """Keeps each reply until it is acknowledged, so that a repeated message gets the answer that it got before."""

    def __init__(self) -> None:
        self._replies: dict[int, KvReply] = {}
        self._last_dropped_no = 0

    def keep(self, reply: KvReply) -> None:
        self._replies[reply.message_no] = reply
        if len(self._replies) > MAX_KEPT_REPLIES:
            self.acknowledge(reply.message_no - MAX_KEPT_REPLIES)

    def acknowledge(self, reply_no: int) -> None:
        """Replies up to this one have arrived."""
        for number in range(self._last_dropped_no + 1, reply_no + 1):
            self._replies.pop(number, None)
        self._last_dropped_no = max(self._last_dropped_no, reply_no)

    def find(self, reply_no: int) -> KvReply | None:
        return self._replies.get(reply_no)

    def after(self, reply_no: int) -> list[KvReply] | None:
        """All later replies, oldest first; None if one of them is gone."""
        if reply_no < self._last_dropped_no:
            return None
        return [reply for number, reply in self._replies.items() if number > reply_no]
