"""Text to token ids."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from octavo.gateway.http_errors import FieldError
from octavo.gateway.tokenization import ModelTokenizer, load_tokenizer
from support.small_tokenizer import BOS, byte_level_json, byte_level_tokenizer, id_of, model_tokenizer

RAW = byte_level_tokenizer()
BOS_ID = id_of(RAW, BOS)


async def test_completion_gets_the_start_token_unless_it_is_switched_off() -> None:
    tokenizer = model_tokenizer()
    [with_start] = await tokenizer.encode(["the fox"], add_special_tokens=True)
    [without] = await tokenizer.encode(["the fox"], add_special_tokens=False)
    assert with_start == [BOS_ID, *without]


async def test_chat_has_the_start_token_of_its_template_only() -> None:
    ids = (await model_tokenizer().encode_chat([{"role": "user", "content": "the fox"}])).token_ids
    assert ids.count(BOS_ID) == 1
    assert RAW.decode(ids, skip_special_tokens=False) == (
        "<|bos|><|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_chat_needs_a_template() -> None:
    with pytest.raises(FieldError, match="no chat template"):
        await ModelTokenizer(byte_level_tokenizer()).encode_chat([{"role": "user", "content": "x"}])


async def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    raw = byte_level_tokenizer()
    raw.enable_truncation(3)
    raw.enable_padding(length=64)
    [ids] = await ModelTokenizer(raw).encode(["one two three four"], add_special_tokens=False)
    assert ids == RAW.encode("one two three four", add_special_tokens=False).ids


async def test_long_text_does_not_hold_up_the_loop() -> None:
    tokenizer, num_turns = model_tokenizer(), 0
    encoding = asyncio.create_task(tokenizer.encode(["the quick brown fox " * 20_000], add_special_tokens=False))
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    [ids] = await encoding
    assert RAW.decode(ids) == "the quick brown fox " * 20_000
    assert num_turns > 10, "the loop stood still while the text was encoded"


async def test_prompts_do_not_wait_for_texts_that_only_ask_for_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, go_on = model_tokenizer(), threading.Event()
    encode = ModelTokenizer._encode

    def slowly(self: ModelTokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        if texts[0].startswith("slow"):
            assert go_on.wait(20)
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(ModelTokenizer, "_encode", slowly)
    slow = [asyncio.create_task(tokenizer.encode(["slow" * 5000], False, aside=True)) for _ in range(5)]
    message = {"role": "user", "content": "fast" * 5000}
    async with asyncio.timeout(10):
        await tokenizer.encode([message["content"]], False)
        await tokenizer.encode_chat([message])
    assert not any(task.done() for task in slow)
    go_on.set()
    assert len(await asyncio.gather(*slow)) == 5


def test_model_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


async def test_tokenizer_is_read_from_the_model_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    ids = (await load_tokenizer(tmp_path).encode_chat([{"role": "user", "content": "the fox"}])).token_ids
    assert ids == RAW.encode("the fox", add_special_tokens=False).ids
