"""What a manager answers while another one leads, and its turns between standing by and leading.

Decides that every call is refused with UNAVAILABLE and the leader's address, that probes are told NOT_SERVING, and what
follows when a term begins or ends. `term.py` decides when that is. A manager that leads is `service.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import grpc.aio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ckpt_engine.addresses import check_free, join_address, split_address
from ckpt_engine.core.problems import CkptEngineError, unavailable
from ckpt_engine.manager.about import software_version
from ckpt_engine.manager.errors import problem_document, refuse
from ckpt_engine.manager.http_access import PROBLEM_TYPE
from ckpt_engine.manager.http_messages import answer
from ckpt_engine.manager.ledger_address import is_database
from ckpt_engine.manager.service import (
    SERVICES,
    ManagerConfig,
    ManagerServer,
    add_port,
    check_config,
    dialled,
    server_options,
    serving_http,
)
from ckpt_engine.manager.term import Term
from ckpt_engine.v1 import manager_pb2

log = logging.getLogger("ckpt_engine.manager")

PORT_SECONDS = 5.0
"""How long the ports of one part may take to be free for the next one."""


async def run_manager(config: ManagerConfig, stop: asyncio.Event) -> None:
    """Runs a manager until `stop` is set: alone on a file, or in turns with others on a database.

    Raises CkptEngineError if it cannot start; INTERNAL once its state machine has failed.
    """
    if not is_database(config.ledger):
        async with ManagerServer(config) as server:
            await server.serve(stop)
        return
    check_config(config)
    term = Term(str(config.ledger), config.deadlines.term, config.deadlines.ledger_busy)
    try:
        await term.prepare(config.cluster)
        deserted = False
        while not stop.is_set():
            async with standing_by(config, term) as config:
                if deserted:
                    await _pause(stop, config.deadlines.term)  # the others have their turn
                leads = await _take(config, term, stop)
            deserted = leads and await _lead(config, term, stop)
    finally:
        await term.close()


async def _lead(config: ManagerConfig, term: Term, stop: asyncio.Event) -> bool:
    """Leads until `stop` is set, the term is lost, or no member reaches this manager. Returns whether it was that."""
    deserted = False
    try:
        for address in filter(None, (config.listen, config.http)):
            await _free(address)
        async with ManagerServer(config, term) as server:
            await server.serve(stop)
            deserted = server.deserted
    except CkptEngineError as error:
        if term.held:
            raise
        log.warning("the term ended before this manager led: %s", error.problem.message)
    finally:
        await term.release()
    return deserted


@contextlib.asynccontextmanager
async def standing_by(config: ManagerConfig, term: Term) -> AsyncIterator[ManagerConfig]:
    """Answers as a manager that stands by. Yields the configuration with the ports that were taken."""
    refusing = Refusing(term)
    async with contextlib.AsyncExitStack() as undo:
        listen, http = config.listen, config.http
        await _free(listen)
        server = grpc.aio.server(options=server_options(config.deadlines))
        server.add_generic_rpc_handlers((refusing,))
        healthy = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the package fills it in at run time
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        listen = join_address(split_address(listen)[0], add_port(server, config))
        await server.start()
        for name in ("", *SERVICES):
            await healthy.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        undo.push_async_callback(server.stop, 0.1)
        if http:
            http = await undo.enter_async_context(serving_http(_application(refusing), http, config.security))
        yield replace(config, listen=listen, http=http)


async def _take(config: ManagerConfig, term: Term, stop: asyncio.Event) -> bool:
    """Asks for the term until this manager has it. Returns False once `stop` is set."""
    last_news = ""
    leader = dialled(config)
    while not stop.is_set():
        try:
            lead = await term.take(leader)
            if lead is None:
                return True
            level, news = logging.INFO, f"leader={lead.leader} term={lead.number}"
        except CkptEngineError as error:
            term.lead, level, news = None, logging.WARNING, error.problem.message
        if news != last_news:
            log.log(level, "standing by grpc=%s ledger=%s %s", leader, term.name, news)
        last_news = news
        await _pause(stop, term.pause)
    return False


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    """Waits for so long, or until `stop` is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)


async def _free(address: str) -> None:
    """Waits until an address can be bound: it was this process's own, in its part before. Raises as `check_free`."""
    end = asyncio.get_running_loop().time() + PORT_SECONDS
    while True:
        try:
            check_free(address)
        except CkptEngineError:
            if asyncio.get_running_loop().time() >= end:
                raise
            await asyncio.sleep(0.05)
        else:
            return


class Refusing(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # cannot be subscripted at run time
    """Refuses each call of the manager's services, and says which manager leads."""

    def __init__(self, term: Term) -> None:
        self._term = term
        self._methods = tuple(f"/{service}/" for service in SERVICES)

    def problem(self) -> CkptEngineError:
        """Why calls are refused here, and which manager leads."""
        lead = self._term.lead
        if lead is None or not lead.leader or lead.seconds <= 0:
            return unavailable("this manager stands by, and none leads yet: try again in a moment")
        return unavailable(f"this manager stands by: the one at {lead.leader} leads. Name both, as --manager A,B")

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """A handler that reads nothing, for calls of any shape."""
        if not handler_call_details.method.startswith(self._methods):
            return None

        async def handle(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
            await refuse(context, self.problem())

        return grpc.stream_stream_rpc_method_handler(handle)


def _application(refusing: Refusing) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        return await answer(
            manager_pb2.Health(
                status="standby", phase=refusing.problem().problem.message, software_version=software_version()
            )
        )

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
    async def anything(request: Request, path: str) -> Response:
        document = problem_document(refusing.problem().problem)
        return JSONResponse(document, status_code=document["status"], media_type=PROBLEM_TYPE)

    return app
