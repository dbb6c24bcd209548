"""Text to token ids: owns the tokenizer and the threads that encode long texts.

Special tokens: a completion's text gets what the tokenizer's post-processor adds, unless the request says
`add_special_tokens: false`. A chat gets exactly what its template writes. Token ids are used as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Tokenizer

from octavo.gateway.chat_template import ChatTemplate, load_chat_template
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import FieldError

_MAX_CHARS_ON_LOOP = 4096  # about 2 ms of encoding
_CHARS_PER_MESSAGE = 32  # what a template writes around a message

Result = TypeVar("Result")


class ModelTokenizer:
    """The tokenizer of the served model. Raises UnsupportedDecoderError if its text cannot be streamed."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None, num_threads: int = 2) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self.pieces = TokenPieces(tokenizer)
        """What each token adds to a text."""

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text. Long ones are encoded in a thread."""
        return await self._run(sum(map(len, texts)), lambda: self._encode(texts, add_special_tokens))

    async def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the rendered messages. Raises FieldError if the model has no template or it refuses them."""
        template = self._chat_template
        if template is None:
            raise FieldError("messages", "messages: this model has no chat template; use /v1/completions")
        num_chars = sum(_CHARS_PER_MESSAGE + len(message["content"]) for message in messages)
        return await self._run(num_chars, lambda: self._encode([template.render(messages)], False)[0])

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # Unlike `encode`, which keeps Python's lock, the batch functions let other threads run.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    async def _run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        if num_chars <= _MAX_CHARS_ON_LOOP:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def load_tokenizer(model: Path, num_threads: int = 2) -> ModelTokenizer:
    """The tokenizer and chat template in a model's folder. Raises FileNotFoundError if it has no tokenizer.json."""
    path = model / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; the model folder needs one")
    return ModelTokenizer(Tokenizer.from_file(str(path)), load_chat_template(model), num_threads)
