"""One choice of a request on its way to the client: owns the text and the tokens that are not sent yet.

Text leaves as soon as it is certain: no character of it is incomplete, and none may belong to a stop string. Where
tokens are listed beside the text (log-probabilities or token ids are asked for), text leaves at borders of tokens
only, so that the listed tokens decode to exactly the text beside them. The last delta of a choice lists all tokens
that are left, also those whose text a stop string cut off; hence the lists add up to `num_tokens`.

A token that ends the choice (end-of-sequence, or one of the request's stop token ids) is counted and listed, and has
no text unless the request includes the stop in the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.common.errors import ProtocolError
from octavo.common.messages.generation import ChoiceFinished, FinishReason, TokenLogprobs
from octavo.gateway.detokenization import IncrementalDetokenizer, TokenPieces
from octavo.gateway.plain_texts import PlainTexts, plain_texts
from octavo.gateway.prompt_record import PromptRecord
from octavo.gateway.stop_strings import StopMatcher, StopStrings

_NO_TOKENS: tuple[OutputToken, ...] = ()
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class OutputRules:
    """What is the same for all choices of a request."""

    pieces: TokenPieces
    skip_special_tokens: bool
    stops: StopStrings | None
    ending_token_ids: frozenset[int]
    """Ids that end a choice."""
    lists_tokens: bool
    """Tokens are listed beside the text."""
    includes_stop: bool = False
    """The text has the stop string, or the token, that ends it."""
    min_tokens: int = 0
    """Stop strings that one of so many first tokens completes do not count."""
    spaces_between_special_tokens: bool = True
    echoes_prompt: bool = False
    lists_prompt: bool = False
    """Tokens of an echoed prompt are listed as well."""
    drops_output: bool = False
    """The text has nothing but the prompt."""


@dataclass(frozen=True, slots=True)
class OutputToken:
    """One listed token."""

    token_id: int
    logprobs: TokenLogprobs | None
    piece: bytes | None
    """Bytes that it adds to the text; None if it has no text."""
    text_offset: int
    """Characters of the choice's text before it."""
    end: int
    """Characters of the text that must have been sent for all of this token's text to be out."""
    is_border: bool
    """The text may be cut after it: it does not end inside a character."""
    is_prompt: bool = False


class Delta(NamedTuple):
    """What is new for the client."""

    text: str
    tokens: Sequence[OutputToken]
    """Empty unless the request lists tokens."""
    finish_reason: str | None
    stop_reason: str | int | None
    """The stop string or the stop token id that ended the choice."""


class ChoiceOutput:
    """Takes tokens, gives deltas."""

    __slots__ = (
        "_detokenizer",
        "_echo",
        "_finish_reason",
        "_flowing",
        "_matcher",
        "_num_chars",
        "_rules",
        "_stop_reason",
        "_unlisted",
        "_unsent_text",
        "first_token_s",
        "is_closed",
        "last_token_s",
        "num_tokens",
    )

    def __init__(self, rules: OutputRules, prompt: PromptRecord | None = None) -> None:
        """`prompt` is known when the first token comes. The text begins with it, if the rules say so, and no stop
        string is found there."""
        self._rules = rules
        self._detokenizer = IncrementalDetokenizer(
            rules.pieces, rules.skip_special_tokens, rules.spaces_between_special_tokens
        )
        self._matcher = StopMatcher(rules.stops) if rules.stops is not None else None
        self._unsent_text = ""
        self._unlisted: deque[OutputToken] = deque()
        self._num_chars = 0
        """Characters of the text so far, sent or not; kept up where tokens are listed."""
        self._flowing: PlainTexts | None = None
        """Texts that may leave at once; None while something is held back, or tokens are listed."""
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self.num_tokens = 0
        """Tokens that count as output."""
        self.is_closed = False
        """Its last delta was taken."""
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        """When a token first and last came; for those who measure."""
        self._echo = prompt if rules.echoes_prompt else None

    @property
    def finish_reason(self) -> str | None:
        """Why it has ended, or will end with its next delta."""
        return self._finish_reason

    @property
    def is_finished(self) -> bool:
        """No more tokens are taken. By a stop string, this comes before the scheduler's own word."""
        return self._finish_reason is not None

    def pass_on(self, token_id: int) -> str | None:
        """Take the next token and give its text, if that may leave at once; None if it is to be pushed."""
        if self._flowing is None or (text := self._flowing[token_id]) is None:
            return None
        self.num_tokens += 1
        return text

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        """Take the next token; one after the end, from a step that was under way, is dropped."""
        if (text := self.pass_on(token_id)) is not None:
            self._unsent_text += text
            return
        rules = self._rules
        if self._finish_reason is not None or rules.drops_output:
            return
        self._flowing = None
        if self._echo is not None:
            self._begin()
        self.num_tokens += 1
        start = self._num_chars
        is_ending = token_id in rules.ending_token_ids
        has_text = rules.includes_stop or not is_ending
        if has_text:
            self._append(self._detokenizer.push(token_id), may_stop=not is_ending)
        if rules.lists_tokens:
            is_inside = self._detokenizer.is_inside_character
            piece = self._detokenizer.piece or None if has_text else None
            start = min(start, self._num_chars)
            self._unlisted.append(
                OutputToken(token_id, logprobs, piece, start, self._num_chars + is_inside, not is_inside)
            )

    def finish(self, end: ChoiceFinished) -> None:
        """Take the scheduler's last word; after a stop string it changes nothing."""
        if self._finish_reason is not None:
            return
        if end.reason not in _FINISH_REASONS:
            raise ProtocolError("the scheduler aborted a choice that nobody gave up")
        self._begin()
        self._flowing = None
        self._append(self._detokenizer.flush())
        if self._finish_reason is None:
            is_cut = self._rules.drops_output
            self._finish_reason = "length" if is_cut else _FINISH_REASONS[end.reason]
            self._stop_reason = None if is_cut else end.stop_token_id

    def _begin(self) -> None:
        """Write the prompt, once."""
        if self._echo is None:
            return
        prompt, self._echo = self._echo, None
        for index, token_id in enumerate(prompt.token_ids):
            start = self._num_chars
            text = self._detokenizer.push(token_id)
            self._unsent_text += text
            self._num_chars += len(text)
            if self._rules.lists_prompt:
                is_inside = self._detokenizer.is_inside_character
                piece, end = self._detokenizer.piece or None, self._num_chars + is_inside
                self._unlisted.append(
                    OutputToken(token_id, prompt.logprobs[index], piece, start, end, not is_inside, is_prompt=True)
                )

    def _append(self, text: str, *, may_stop: bool = True) -> None:
        if not text:
            return
        self._unsent_text += text
        self._num_chars += len(text)
        if self._matcher is None:
            return
        match = self._matcher.feed(text, counts=may_stop and self.num_tokens > self._rules.min_tokens)
        if match is not None:
            num_cut = len(text) - match.end + (0 if self._rules.includes_stop else len(match.stop))
            self._unsent_text = self._unsent_text[: len(self._unsent_text) - num_cut]
            self._num_chars -= num_cut
            self._finish_reason, self._stop_reason = "stop", match.stop

    def take(self) -> Delta | None:
        """What may be sent at this point, or None if that is nothing."""
        if self._finish_reason is not None:
            self.is_closed = True
            delta = Delta(self._unsent_text, list(self._unlisted), self._finish_reason, self._stop_reason)
            self._unsent_text = ""
            self._unlisted.clear()
            return delta
        num_held = self._matcher.num_held_chars if self._matcher is not None else 0
        if self._rules.lists_tokens:
            return self._take_tokens(self._num_chars - num_held)
        text = self._cut(len(self._unsent_text) - num_held)
        if self._flowing is None and not num_held and self._detokenizer.is_steady:
            rules = self._rules
            self._flowing = plain_texts(rules.pieces, rules.skip_special_tokens, rules.stops, rules.ending_token_ids)
        return Delta(text, _NO_TOKENS, None, None) if text else None

    def _take_tokens(self, certain_end: int) -> Delta | None:
        """The longest run of tokens that ends at a border, at most `certain_end` characters into the text."""
        num_tokens = 0
        for index, token in enumerate(self._unlisted):
            if token.end > certain_end:
                break
            if token.is_border:
                num_tokens = index + 1
        if not num_tokens:
            return None
        tokens = [self._unlisted.popleft() for _ in range(num_tokens)]
        num_unsent_after = self._num_chars - tokens[-1].end
        return Delta(self._cut(len(self._unsent_text) - num_unsent_after), tokens, None, None)

    def _cut(self, num_chars: int) -> str:
        if num_chars == len(self._unsent_text):
            text, self._unsent_text = self._unsent_text, ""
            return text
        text, self._unsent_text = self._unsent_text[:num_chars], self._unsent_text[num_chars:]
        return text
