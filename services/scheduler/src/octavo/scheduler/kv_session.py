"""The scheduler's side of one life of the KV manager: it outlives the link to the manager."""

from __future__ import annotations

from collections import deque

from octavo.common.errors import MessageGapError, ProtocolError
from octavo.common.messages.kv import KvReply, KvRequest, PoolOpened


class KvSession:
    """Keeps each message until it is answered, so that a new link can go on where the lost one ended.

    A life can be resumed once its first reply is here: only then is it certain that the manager has the pool as it was
    declared. Until then every opening starts over, with a new declaration.
    """

    def __init__(self) -> None:
        self.boot_epoch = 0
        """The life that the next opening asks to resume; 0 for none."""
        self.last_reply_no = 0
        self._opened_life = 0
        self._requests: deque[KvRequest] = deque()

    @property
    def has_unanswered(self) -> bool:
        return bool(self._requests)

    def on_opened(self, opened: PoolOpened) -> list[KvRequest] | None:
        """The messages to send again, or None if the pool is empty. Raises ProtocolError if that cannot be."""
        if not opened.boot_epoch:
            raise ProtocolError("the KV manager tells no boot epoch")
        if opened.is_resumed:
            last_sent = self.last_reply_no + len(self._requests)
            if opened.boot_epoch != self.boot_epoch or not self.last_reply_no <= opened.last_message_no <= last_sent:
                raise ProtocolError(
                    f"the KV manager resumes at message {opened.last_message_no} of life {opened.boot_epoch:x}; here it"
                    f" is life {self.boot_epoch:x}, reply {self.last_reply_no}, message {last_sent}"
                )
            return [request for request in self._requests if request.message_no > opened.last_message_no]
        self.start_over()
        self._opened_life = opened.boot_epoch
        return None

    def start_over(self) -> None:
        """Ask for an empty pool the next time."""
        self.boot_epoch = self.last_reply_no = 0
        self._requests.clear()

    def sent(self, request: KvRequest) -> None:
        self._requests.append(request)

    def is_news(self, reply: KvReply) -> bool:
        """Whether the reply is the next one; False for one that was received before. Raises MessageGapError."""
        if reply.message_no <= self.last_reply_no:
            return False
        if not self._requests or reply.message_no != self._requests[0].message_no:
            raise MessageGapError(f"reply {reply.message_no} of the KV manager after reply {self.last_reply_no}")
        self._requests.popleft()
        self.last_reply_no = reply.message_no
        self.boot_epoch = self._opened_life
        return True
