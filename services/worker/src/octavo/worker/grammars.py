"""Grammars that outputs must follow: owns what is compiled of them, and the threads that compile and match.

A mask takes some 0.1 ms, but a grammar may be made to take seconds for one. So nothing is computed on the thread that
runs the steps: a row whose mask is not there in time is not drawn, and the scheduler launches it again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import llguidance
import numpy as np
import structlog

from octavo.common.messages.step import GRAMMAR_FAILED, NOT_READY

log = structlog.get_logger()

NUM_THREADS = 4
MAX_COMPILED = 64
"""Grammars that are kept for later requests."""
WAIT_S = 0.003
"""For which a step waits for its masks, all together."""
TIMEOUT_S = 10.0
"""After which a grammar that still is not ready has failed."""

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


class GrammarError(Exception):
    """The grammar cannot be compiled, needs too much work, or does not allow the tokens."""


class Grammars:
    """The grammars of one model. `tokenizer` is its tokenizer.json, read when the first grammar comes."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._work: queue.SimpleQueue[tuple[Future[BoolArray], Matching, Sequence[int]]] = queue.SimpleQueue()
        for index in range(NUM_THREADS):
            # Daemons: an end of the process does not wait for a grammar.
            threading.Thread(target=self._serve, name=f"grammars-{index}", daemon=True).start()
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()

    def begin(self, grammar: str, output_token_ids: Sequence[int]) -> GrammarMatcher:
        """Compile the grammar in a thread, then read the output that there is."""
        return GrammarMatcher(self, grammar, output_token_ids)

    def submit(self, matcher: Matching, token_ids: Sequence[int]) -> Future[BoolArray]:
        """Read more tokens in a thread; gives which may follow, [vocab_size]."""
        future: Future[BoolArray] = Future()
        self._work.put((future, matcher, token_ids))
        return future

    def _serve(self) -> None:
        while True:
            future, matcher, token_ids = self._work.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(matcher.read(token_ids))
            except Exception as error:
                future.set_exception(error)

    def new_matcher(self, grammar: str) -> llguidance.LLMatcher:
        """At the beginning of the grammar. Takes what compiling takes; raises GrammarError."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled.deep_copy()
        compiled = llguidance.LLMatcher(self._loaded_tokenizer(), grammar, log_level=0)
        if compiled.is_error():
            raise GrammarError(compiled.get_error())
        with self._lock:
            self._compiled[grammar] = compiled
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return compiled.deep_copy()

    def _loaded_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        str(self._path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                    )
                except Exception as error:  # whatever its reader finds wrong
                    raise GrammarError(f"{self._path} cannot be used: {error}") from error
            return self._tokenizer

    def mask(self, matcher: llguidance.LLMatcher) -> BoolArray:
        """What may come next; the model's end-of-sequence ids where the grammar may end. Raises GrammarError."""
        bits = matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little").astype(bool)
        mask[self._eos_token_ids] = matcher.is_accepting()
        if not mask.any():
            raise GrammarError("no token can follow")
        return mask


class Matching:
    """One output in the threads' hands; one of them at a time."""

    def __init__(self, grammars: Grammars, grammar: str) -> None:
        self._grammars, self.grammar = grammars, grammar
        self._matcher: llguidance.LLMatcher | None = None

    def read(self, token_ids: Sequence[int]) -> BoolArray:
        """Read on; what may follow. Takes what it takes; raises GrammarError."""
        if self._matcher is None:
            self._matcher = self._grammars.new_matcher(self.grammar)
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(self._matcher.get_error() or "the output is not of the grammar")
        return self._grammars.mask(self._matcher)


class GrammarMatcher:
    """Follows the output of one slot. One thread calls."""

    def __init__(self, grammars: Grammars, grammar: str, output_token_ids: Sequence[int]) -> None:
        self._grammars = grammars
        self._matching = Matching(grammars, grammar)
        self._read(output_token_ids, num_read=len(output_token_ids))

    def _read(self, token_ids: Sequence[int], num_read: int) -> None:
        self._num_read = num_read
        self._mask = self._grammars.submit(self._matching, token_ids)
        self._deadline = time.monotonic() + TIMEOUT_S

    def tell(self, token_ids: Sequence[int], first: int) -> None:
        """Output tokens from the `first`-th on; those known already are passed over. Once the mask before was had."""
        if first + len(token_ids) > self._num_read:
            self._read(token_ids[self._num_read - first :], num_read=first + len(token_ids))

    def mask(self, wait_s: float) -> BoolArray | int:
        """Which tokens may come next, [vocab_size], or NOT_READY or GRAMMAR_FAILED."""
        try:
            return self._mask.result(wait_s)
        except TimeoutError:
            return NOT_READY if time.monotonic() < self._deadline else GRAMMAR_FAILED
        except GrammarError as error:
            log.info("grammar failed", error=str(error).split("\n", 1)[0])
            return GRAMMAR_FAILED
        except Exception:
            log.exception("grammar failed")
            return GRAMMAR_FAILED

    def close(self) -> None:
        """Nobody asks any more."""
        self._mask.cancel()
