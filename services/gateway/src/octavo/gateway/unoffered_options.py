"""Options of the OpenAI and vLLM APIs that Octavo does not offer.

Clients send them at values that change nothing; those pass. Any other value is refused by name, never ignored.
"""

from __future__ import annotations

from typing import Any

from octavo.gateway.http_errors import FieldError

IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Say nothing about the answer, so any value passes."""

_COMMON: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "guided_decoding_backend": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "lora_request": (),
    "vllm_xargs": ({},),
}

COMPLETION_OPTIONS: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "prompt_embeds": (),
    "suffix": ("",),
}
"""Values that pass, besides null."""

CHAT_OPTIONS: dict[str, tuple[Any, ...]] = {
    **_COMMON,
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "thinking_token_budget": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""The same for chat."""


def without_unoffered(body: dict[str, Any], options: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The body without these options. Raises FieldError for one whose value would change something."""
    kept = {}
    for name, value in body.items():
        if name in IGNORED:
            continue
        if name not in options:
            kept[name] = value
            continue
        if value is not None and not any(_is_same(value, neutral) for neutral in options[name]):
            raise FieldError(name, f"{name} is not supported", "unsupported_parameter")
    return kept


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and not merely as 0 equals False."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
