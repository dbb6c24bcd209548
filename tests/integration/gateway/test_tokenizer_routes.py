"""/tokenize, /detokenize, and routes that are refused in words."""

from __future__ import annotations

from typing import Any

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
        response = await gateway.post("/v1/embeddings", model="m", input="x")
        version = (await gateway.http.get("/version")).json()
        model = (await gateway.http.get("/v1/models/m")).json()
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert "no embedding" in error["message"]
    assert set(version) == {"version"}
    assert (model["id"], model["object"]) == ("m", "model")
