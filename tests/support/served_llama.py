"""The tiny Llama with what a server needs beside the weights."""

from __future__ import annotations

import json
from pathlib import Path

from support.small_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_json
from support.tiny_models import TinyModel, save_tiny_model

TINY_VOCAB_SIZE = 512
TINY_MAX_LEN = 1024


def save_served_llama(folder: Path) -> TinyModel:
    """A random Llama of 3 layers with a byte-level tokenizer and a chat template."""
    tiny = save_tiny_model(
        "llama",
        folder,
        vocab_size=TINY_VOCAB_SIZE,
        max_position_embeddings=TINY_MAX_LEN,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    (folder / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tiny
