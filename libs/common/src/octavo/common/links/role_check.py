"""What a server over TLS lets the holder of a certificate do, by the role in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Any

import grpc
import structlog

from octavo.common.roles import Role

log = structlog.get_logger()


async def require_role(context: Any, allowed: Collection[Role]) -> None:
    """End a call over TLS with PERMISSION_DENIED unless the caller's certificate speaks for one of these roles."""
    shown = {name.decode(errors="replace") for name in context.auth_context().get("x509_subject_alternative_name", ())}
    if shown.isdisjoint(role.certificate_name for role in allowed):
        named = ", ".join(sorted(shown)) or "nobody"
        log.warning("caller refused", peer=context.peer(), certificate=named, allowed=sorted(allowed))
        wanted = " or ".join(sorted(role.certificate_name for role in allowed))
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"this is for {wanted}; the certificate is of {named}")


class UnaryCallGate(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Lets holders of some roles make the calls of one request: all but the stream, whose handler looks for itself.

    Answers in several parts are to be written to the context, not yielded.
    """

    def __init__(self, allowed: Collection[Role]) -> None:
        self._allowed = allowed

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The handler, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler  # type: ignore[no-any-return]

        answer = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def checked(request: Any, context: Any) -> Any:
            await require_role(context, self._allowed)
            return await answer(request, context)

        as_handler = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return as_handler(checked, handler.request_deserializer, handler.response_serializer)
