"""Refuses calls without a valid token before their message is read.

gRPC reads a unary call's message before its handler runs, and all of it before it checks its size.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
import grpc.aio

from ckpt_engine.core.problems import CkptEngineError
from ckpt_engine.manager.access import Access
from ckpt_engine.manager.errors import refuse


class ServiceDoor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # cannot be subscripted at run time
    """Guards some services; others (health, reflection) are open to every caller."""

    def __init__(self, access: Access, services: Iterable[str]) -> None:
        self._access = access
        self._methods = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Returns the call's own handler, or one that refuses it and reads nothing."""
        if handler_call_details.method.startswith(self._methods):
            try:
                self._access.of_metadata(handler_call_details.invocation_metadata or ())
            except CkptEngineError as error:
                return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: CkptEngineError) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await refuse(context, error)

    # A handler of streams reads only what it asks for.
    return grpc.stream_stream_rpc_method_handler(handle)
