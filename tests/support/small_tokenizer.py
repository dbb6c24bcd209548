"""A small byte-level BPE tokenizer with a ChatML-like template, made in milliseconds."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from octavo.gateway.chat_template import ChatTemplate
from octavo.gateway.tokenization import ModelTokenizer

CORPUS = [
    "Count: 1 2 3 4 5 6 7 8 9 10 and then on and on until the end of the count.",
    "The quick brown fox jumps over the lazy dog while the cat watches the fox.",
    "An octavo sheet folds into sixteen pages; a block holds sixteen tokens.",
    "def fold(sheet):\n    return [page for page in sheet]\n",
]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TOOL_CHAT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call></tool_call>.<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{# </think> #}{% if thinks %}<think>\n{% endif %}"
)
"""Takes tools, and lets the model think up to a `</think>`; with the variable `thinks`, the prompt has `<think>`."""

BOS, EOS, IM_START = "<|bos|>", "<|im_end|>", "<|im_start|>"


@functools.cache
def byte_level_json() -> str:
    """tokenizer.json of the small tokenizer. It adds `<|bos|>` in front of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[BOS, EOS, IM_START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return str(tokenizer.to_str())


def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer.from_str(byte_level_json())


def model_tokenizer(chat_template: str = CHAT_TEMPLATE) -> ModelTokenizer:
    """With a chat template."""
    return ModelTokenizer(byte_level_tokenizer(), ChatTemplate(chat_template, {"bos_token": BOS}))


def byte_ids(text: str) -> list[int]:
    """One token for each UTF-8 byte of the text."""
    tokenizer = byte_level_tokenizer()
    return byte_token_ids(tokenizer, text.encode())


def byte_token_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    alphabet = _byte_to_char()
    return [id_of(tokenizer, alphabet[byte]) for byte in data]


def id_of(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token that must exist."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def _byte_to_char() -> dict[int, str]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)}
