"""POST /v1/responses, and what can be asked of a stored response."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

import orjson
import structlog
from fastapi import APIRouter, Query, Request, Response
from pydantic import TypeAdapter

from octavo.common.errors import NotReadyError
from octavo.gateway.answer_schema import DeletedResponse, ItemList, ResponseBody
from octavo.gateway.body_reading import read_body
from octavo.gateway.cache_salt import salt_of
from octavo.gateway.chat_preparation import ChatPreparation
from octavo.gateway.config import GatewayConfig
from octavo.gateway.detokenization import TokenPieces
from octavo.gateway.http_errors import FieldError, renamed_fields
from octavo.gateway.openai_schema import ChatRequest
from octavo.gateway.openapi import answers, body_of
from octavo.gateway.request_account import RequestAccount, account_of
from octavo.gateway.request_body import json_object, validated
from octavo.gateway.response_format import ResponseFormat
from octavo.gateway.response_ids import RESPONSE_PREFIX
from octavo.gateway.response_store import ResponseStore
from octavo.gateway.responses_schema import CHAT_PARAMS, InputItem, ResponsesRequest, chat_fields, input_items

log = structlog.get_logger()

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])
_ID_PREFIXES = {"function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


class StoredResponses:
    """Responses with what they answer, as records of a store. A tenant sees its own only."""

    def __init__(self, config: GatewayConfig, store: ResponseStore) -> None:
        self._config, self._store = config, store

    async def keep(self, owner: RequestAccount, response: dict[str, Any], items: list[dict[str, Any]]) -> bool:
        """False if the store cannot be reached; the response is the client's all the same."""
        try:
            await self._store.put(
                self._key(owner, response["id"]), orjson.dumps({"response": response, "input": items})
            )
        except NotReadyError as error:
            log.error("response not stored", response_id=response["id"], reason=error.message)
            return False
        return True

    async def get(self, owner: RequestAccount, response_id: str, param: str = "response_id") -> dict[str, Any]:
        """The record, with `response` and `input`. Raises FieldError if there is none."""
        record = await self._store.get(self._key(owner, response_id))
        if record is None:
            raise _not_found(response_id, param)
        found: dict[str, Any] = orjson.loads(record)
        return found

    async def delete(self, owner: RequestAccount, response_id: str) -> None:
        """Raises FieldError if there is none."""
        if not await self._store.delete(self._key(owner, response_id)):
            raise _not_found(response_id, "response_id")

    def _key(self, owner: RequestAccount, response_id: str) -> str:
        return f"{salt_of(self._config, owner.tenant_name, None).hex()}:{response_id}"


def _not_found(response_id: str, param: str) -> FieldError:
    message = f"{param}: there is no response {response_id!r}, or it was not stored, or it has expired"
    return FieldError(param, message, "response_not_found", status=404)


def router(config: GatewayConfig, chats: ChatPreparation, pieces: TokenPieces, store: ResponseStore) -> APIRouter:
    """The routes."""
    routes = APIRouter()
    stored = StoredResponses(config, store)

    @routes.post(
        "/v1/responses", openapi_extra=body_of(ResponsesRequest), responses=answers(ResponseBody, streams=True)
    )
    async def create_response(request: Request) -> Response:
        body = validated(ResponsesRequest, json_object(await read_body(request, config.max_body_bytes)))
        items = [_with_id(item) for item in input_items(body)]
        if body.previous_response_id is not None:
            previous = await stored.get(account_of(request.scope), body.previous_response_id, "previous_response_id")
            items = [*previous["input"], *previous["response"]["output"], *items]
        with renamed_fields(CHAT_PARAMS):
            fields = chat_fields(body, _ITEMS.validate_python(items))
            chat = await chats.prepare(validated(ChatRequest, fields))

        async def keep(response: dict[str, Any]) -> bool:
            return await stored.keep(account_of(request.scope), response, items)

        response_id = RESPONSE_PREFIX + secrets.token_hex(16)
        answer_format = ResponseFormat(
            response_id, chat, body, None if body.store is False else keep, chats.num_tokens, pieces
        )
        return chats.response(request, chat, answer_format)

    @routes.get("/v1/responses/{response_id}", responses=answers(ResponseBody))
    async def retrieve_response(
        request: Request, response_id: str, stream: Literal["false"] = "false"
    ) -> dict[str, Any]:
        response: dict[str, Any] = (await stored.get(account_of(request.scope), response_id))["response"]
        return response

    @routes.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse))
    async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
        await stored.delete(account_of(request.scope), response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(request: Request, response_id: str) -> None:
        """A response that is under way ends with its connection; one that is stored has ended."""
        await stored.get(account_of(request.scope), response_id)
        message = "response_id: the response has ended; only one in the background could be cancelled"
        raise FieldError("response_id", message, "response_not_cancellable")

    @routes.get("/v1/responses/{response_id}/input_items", responses=answers(ItemList))
    async def list_input_items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> dict[str, Any]:
        items: list[dict[str, Any]] = (await stored.get(account_of(request.scope), response_id))["input"]
        return _page(items if order == "asc" else items[::-1], limit, after)

    return routes


def _with_id(item: InputItem) -> dict[str, Any]:
    """An input item as it is stored and listed."""
    kind = item.type or "message"
    fields = item.model_dump(exclude_none=True)
    item_id = item.id or _ID_PREFIXES.get(kind, "msg_") + secrets.token_hex(16)
    return {**fields, "type": kind, "id": item_id, "status": item.status or "completed"}


def _page(items: list[dict[str, Any]], limit: int, after: str | None) -> dict[str, Any]:
    first = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise FieldError("after", f"after: there is no item {after!r}", "invalid_value")
        first = ids.index(after) + 1
    page = items[first : first + limit]
    return {
        "object": "list",
        "data": [_listed(item) for item in page],
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": first + limit < len(items),
    }


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """Messages are listed with their content as parts."""
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        return {**item, "content": [{"type": kind, "text": item["content"]}]}
    return item
