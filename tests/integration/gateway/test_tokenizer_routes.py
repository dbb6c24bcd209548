"""/tokenize, /detokenize, and routes that are refused in words."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.running_gateway import MAX_MODEL_LEN, TOKENIZER, VOCAB_SIZE, ids_of, running_gateway, says
from support.small_tokenizer import BOS, id_of

BOS_ID = id_of(TOKENIZER, BOS)
MESSAGES: Any = [{"role": "user", "content": "the fox"}]


async def test_text_becomes_tokens_and_text_again() -> None:
    async with running_gateway(says("x")) as gateway:
        tokens = (await gateway.post("/tokenize", model="m", prompt="the fox 한", return_token_strs=True)).json()
        bare = (await gateway.post("/tokenize", prompt="the fox 한", add_special_tokens=False)).json()
        text = (await gateway.post("/detokenize", tokens=tokens["tokens"])).json()
    assert tokens["tokens"] == [BOS_ID, *ids_of("the fox 한")]
    assert bare == {
        "count": len(bare["tokens"]),
        "max_model_len": MAX_MODEL_LEN,
        "tokens": ids_of("the fox 한"),
        "token_strs": None,
    }
    assert text == {"prompt": "<|bos|>the fox 한"}
    assert "".join(tokens["token_strs"]).startswith("<|bos|>the fox ")
    assert len(tokens["token_strs"]) == tokens["count"]


@pytest.mark.parametrize("num_tokens", [1, 4096, 4097, 8192, 10_000])
async def test_answers_of_any_length_are_whole(num_tokens: int) -> None:
    """They are written in slices."""
    ids = (ids_of("the fox 한") * num_tokens)[:num_tokens]
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    expected = TOKENIZER.encode(text, add_special_tokens=False)
    async with running_gateway(says("x")) as gateway:
        body = {"prompt": text, "add_special_tokens": False}
        bare = (await gateway.post("/tokenize", **body)).json()
        named = (await gateway.post("/tokenize", **body, return_token_strs=True)).json()
        back = (await gateway.post("/detokenize", tokens=expected.ids)).json()
    assert bare["tokens"] == named["tokens"] == expected.ids
    assert bare["count"] == len(expected.ids) == len(named["token_strs"])
    assert (bare["token_strs"], named["token_strs"][0]) == (None, TOKENIZER.decode(expected.ids[:1]))
    assert back == {"prompt": text}


async def test_messages_become_the_prompt_of_a_chat() -> None:
    async with running_gateway(says("x")) as gateway:
        tokens = (await gateway.post("/tokenize", messages=MESSAGES)).json()
        await gateway.post("/v1/chat/completions", messages=MESSAGES)
        long = (await gateway.post("/tokenize", prompt="the fox " * 4000, add_special_tokens=False)).json()
    assert tuple(tokens["tokens"]) == gateway.scheduler.submits[0].prompt_token_ids
    assert long["count"] == len(ids_of("the fox " * 4000)) > MAX_MODEL_LEN


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [5, VOCAB_SIZE]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens[0]"),
    ],
)
async def test_bad_requests_name_the_field(path: str, body: dict[str, Any], status: int, param: str) -> None:
    async with running_gateway(says("x")) as gateway:
        response = await gateway.post(path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_ids_that_only_pad_the_vocabulary_have_no_text() -> None:
    async with running_gateway(says("x")) as gateway:
        assert (await gateway.post("/detokenize", tokens=[VOCAB_SIZE - 1])).json() == {"prompt": ""}


async def test_embeddings_are_refused_in_words() -> None:
    async with running_gateway(says("x")) as gateway:
        with pytest.raises(openai.NotFoundError, match="no embedding") as raised:
            await gateway.openai.embeddings.create(model="m", input="x")
    assert raised.value.code == "unsupported_endpoint"
