"""What a simulated worker's clients see of a model: a folder's tokenizer, or one of bytes and a few words."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from octavo.cli.model_cache import cached_folder
from octavo.cli.model_errors import ModelNotFoundError
from octavo.cli.models import PreparedModel, prepare_model, tokenizer_folder
from octavo.cli.progress import Progress
from octavo.worker.models.errors import ModelLoadError
from octavo.worker.simulated.profile import Profile

_VERSION = "1"
"""Part of the folder's cache key; to be raised when its content changes."""

_START, _END = "<|start|>", "<|end|>"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_WORDS = (
    "sheet folds into sixteen pages and block holds tokens while octavo reads every line by its own light until "
    "evening comes over harbour where small boats wait for morning tide then someone writes another letter"
)
"""Answers are drawn from these; no text is encoded as one."""


def prepare_simulated_model(profile: str, model: str | None, progress: Progress) -> PreparedModel:
    """The folder that `model` names, which needs no weights, or one made for the profile. Raises ModelError."""
    try:
        vocab_size = Profile.load(profile).model.vocab_size
    except ModelLoadError as error:
        raise ModelNotFoundError(str(error)) from error
    if model is None:
        name = f"simulated-{vocab_size}-{_VERSION}"
        return PreparedModel(
            cached_folder(name, lambda folder: _fill(folder, vocab_size), progress), Path(profile).stem
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return PreparedModel(tokenizer_folder(path.resolve()), path.resolve().name)
    return prepare_model(model, progress)


def _fill(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer, and a config.json of the profile's vocabulary, most of which has no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"\u0120{word}" for word in dict.fromkeys(_WORDS.split())]
    vocabulary = {text: token_id for token_id, text in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (_START, _END)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"eos_token": _END, "chat_template": _CHAT_TEMPLATE})
    _write(folder / "config.json", {"vocab_size": vocab_size, "eos_token_id": tokenizer.token_to_id(_END)})


def _write(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2), encoding="utf-8")
