"""Text to token ids: owns the tokenizer and the threads that encode long texts.

Texts that only ask for their tokens go `aside`: they share one thread, however many there are, so that prompts do not
wait for them.

Special tokens: a completion's text gets what the tokenizer's post-processor adds, unless the request says
`add_special_tokens: false`. A chat gets exactly what its template writes, unless the request says
`add_special_tokens: true`. Token ids are used as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from octavo.gateway.chat_template import DEFAULT_OPTIONS, ChatTemplate, TemplateOptions, load_chat_template
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import FieldError
from octavo.gateway.reasoning import THINK

_MAX_CHARS_ON_LOOP = 4096  # about 2 ms of encoding
_CHARS_PER_MESSAGE = 32  # what a template writes around a message
_CHARS_PER_TOKEN = 4

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """The prompt that messages became."""

    token_ids: list[int]
    is_thinking: bool
    """It ends with `<think>`: reasoning comes next."""


class ModelTokenizer:
    """The tokenizer of the served model. Raises UnsupportedDecoderError if its text cannot be streamed."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None, num_threads: int = 2) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._thread_aside = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-aside")
        self.pieces = TokenPieces(tokenizer)
        """What each token adds to a text."""
        self._pieces_with: dict[frozenset[str], TokenPieces] = {frozenset(): self.pieces}

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, *, aside: bool = False) -> list[list[int]]:
        """Ids of each text. Long ones are encoded in a thread."""
        return await self._run(sum(map(len, texts)), lambda: self._encode(texts, add_special_tokens), aside)

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
        add_special_tokens: bool = False,
        *,
        aside: bool = False,
    ) -> EncodedChat:
        """The rendered messages as ids. Raises FieldError if the model has no template or it refuses them."""
        template = self.chat_template
        if template is None:
            raise FieldError("messages", "messages: this model has no chat template; use /v1/completions")

        def encode() -> EncodedChat:
            text = template.render(messages, options)
            return EncodedChat(self._encode([text], add_special_tokens)[0], text.rstrip().endswith(THINK))

        num_chars = sum(_CHARS_PER_MESSAGE + len(message["content"]) for message in messages)
        has_calls = bool(options.tools) or any("tool_calls" in message for message in messages)
        return await self._run(_MAX_CHARS_ON_LOOP + 1 if has_calls else num_chars, encode, aside)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, with special tokens; made aside."""
        decode: Callable[..., list[str]] = self._tokenizer.decode_batch
        return await self._run(
            _CHARS_PER_TOKEN * len(token_ids),
            lambda: decode([list(token_ids)], skip_special_tokens=False)[0],
            aside=True,
        )

    def pieces_with(self, marks: frozenset[str]) -> TokenPieces:
        """What each token adds to a text in which these special tokens are seen, although others are left out."""
        if marks not in self._pieces_with:
            self._pieces_with[marks] = TokenPieces(self._tokenizer, shown=marks)
        return self._pieces_with[marks]

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """Ids of a word as it is, and of it after a space, by which many tokenizers begin a word inside a text."""
        return {tuple(token_ids) for token_ids in self._encode([word, " " + word.removeprefix(" ")], False)}

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Unlike `encode`, which keeps Python's lock, the batch functions let other threads run.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    async def _run(self, num_chars: int, work: Callable[[], Result], aside: bool) -> Result:
        if num_chars <= _MAX_CHARS_ON_LOOP:
            return work()
        threads = self._thread_aside if aside else self._threads
        return await asyncio.get_running_loop().run_in_executor(threads, work)


def load_tokenizer(model: Path, num_threads: int = 2) -> ModelTokenizer:
    """The tokenizer and chat template in a model's folder.

    Raises FileNotFoundError if it has no tokenizer.json, ValueError for one that cannot be read.
    """
    path = model / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the model folder needs one")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no class for it
        raise ValueError(f"{path} is no tokenizer: {error}") from error
    return ModelTokenizer(tokenizer, load_chat_template(model), num_threads)
