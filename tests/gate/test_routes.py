"""Which route is for whom: nothing that only looks like an open route, or like none at all, gets past the gate."""

import socket

import httpx
import pytest
from fastapi import APIRouter, FastAPI, WebSocket
from starlette.routing import Mount

from ckpt_engine.gate.directory import EngineDirectory
from ckpt_engine.gate.gate import ROUTES_ROUTE, Gate
from ckpt_engine.gate.page import EnginePage
from ckpt_engine.gate.routes import EngineRoutes, RouteAccess, listed, route_of
from ckpt_engine.v1 import weights_pb2
from ckpt_engine_adapters.reference.gate import ReferenceGate
from ckpt_engine_adapters.sglang.gate import SglangGate
from ckpt_engine_adapters.vllm.gate import VllmGate
from tests.gate.server import serve

IDENTITY = weights_pb2.Identity(lineage="run", version=12, root=b"\x05" * 32)
CONTROL = ("/pause", "/below/pause", "/each/7/pause", "/mounted/pause", "/included/pause")


class SmallGate(Gate):
    open_routes = frozenset({"/health", "/metrics", "/metrics/"})
    generation_routes = frozenset({"/generate", "/v1/models/{model:path}", "/stream"})
    control_routes = frozenset({"/pause", "/below/", "/each/{number}/pause", "/mounted/pause", "/included/pause"})


@pytest.fixture
def reached() -> list[str]:
    return []


def application(reached: list[str], root_path: str = "") -> FastAPI:
    """Notes which of its endpoints has been called. root_path: as vLLM sets it, on the application."""
    app = FastAPI(root_path=root_path)

    def note(route: str):
        async def endpoint() -> dict[str, str]:
            reached.append(route)
            return {}

        return endpoint

    methods = ["GET", "HEAD", "OPTIONS", "POST", "PUT"]
    for route in ("/health", "/generate", "/pause", "/below/pause", "/each/{number}/pause", "/new_one"):
        app.add_api_route(route, note(route), methods=methods)
    app.add_api_route("/v1/models/{model:path}", note("model"), methods=methods)
    below = FastAPI()
    below.add_api_route("/pause", note("/mounted/pause"), methods=methods)
    app.mount("/mounted", below)
    included = APIRouter()
    included.add_api_route("/included/pause", note("/included/pause"), methods=methods)
    app.include_router(included)

    @app.websocket("/pause")
    async def stream(websocket: WebSocket) -> None:
        reached.append("websocket")

    app.add_middleware(SmallGate)
    return app


@pytest.fixture
def directory(directory: EngineDirectory) -> EngineDirectory:
    """Of an engine whose weights are whole."""
    EnginePage(directory.page).claim(0, 1).clean(1, IDENTITY)
    return directory


def attacks(root: str) -> list[str]:
    """Ways of writing a control route, of which some reach it where nobody looks."""
    found = []
    for route in ("/pause", "/mounted/pause"):
        encoded = "".join(f"%{ord(letter):02x}" for letter in route[1:])
        for path in (route, f"{route}/", f"{route}//", f"/{route}", f"{route}%0A", f"{route}%0a/", f"/{encoded}"):
            found += [path, root + path, f"{root}/{path}", root + root + path, f"{root}%2F{path[1:]}"]
        found += [
            f"/health/..{route}",
            f"/generate/../{route}",
            f"/.{route}",
            route.upper(),
            f"{route};x",
            f"{route}?x",
        ]
        found += [f"/health%00{route}", f"{root}/health/..{route}", f"/metrics/..{route}", f"{route}%20", f"{route}#"]
    return found


@pytest.mark.filterwarnings("ignore:The `root_path` parameter")
@pytest.mark.parametrize(
    ("root", "server_root"), [("/api", ""), ("/api/", ""), ("/", ""), ("/health", ""), ("", "/api"), ("/api", "/api")]
)
def test_no_way_of_writing_a_control_route_reaches_it_without_the_token(directory, reached, root, server_root) -> None:
    app, root = application(reached, root), root or server_root
    with serve(app, server_root) as url, httpx.Client() as client:
        port = int(url.rsplit(":", 1)[1])
        for path in attacks(root):
            assert status_of_raw(port, path) != 200, path
        for route in CONTROL:
            for method in ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE"):
                assert client.request(method, url + route).status_code == 403, (method, route)
        assert set(reached) <= {"model"}
        given = {"x-ckpt-engine-token": directory.token()}
        reachable = [route for route in CONTROL if route != "/mounted/pause"]  # FastAPI looks below the root path
        for route in reachable:
            assert client.post(url + route, headers=given).status_code == 200, route
        assert client.post(url + "/generate").status_code == 200


def status_of_raw(port: int, target: str) -> int:
    """Of a request whose target is sent as it is; no client has tidied it up. 0: the server hung up."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        answer = connection.makefile("rb").readline()
    return int(answer.split()[1]) if answer else 0


def test_a_route_that_nobody_classified_is_for_the_agent_only(directory, reached) -> None:
    with serve(application(reached)) as url, httpx.Client(base_url=url) as client:
        refused = client.post("/new_one")
        assert refused.status_code == 403
        assert "does not know the route /new_one" in refused.json()["detail"]
        assert reached == []
        given = {"x-ckpt-engine-token": directory.token()}
        assert client.post("/new_one", headers=given).status_code == 200
        assert client.get(ROUTES_ROUTE).status_code == 403
        routes = client.get(ROUTES_ROUTE, headers=given).json()
    assert {route for route, access in routes.items() if access == "control"} >= {"/mounted/pause", "/included/pause"}
    assert routes["/new_one"] == "unknown"
    assert routes["/health"] == "open"
    assert routes["/v1/models/{model:path}"] == "gated"


async def test_websockets_to_control_routes_are_refused(directory, reached) -> None:
    app, sent = application(reached), []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    for path in ("/pause", "/below/pause", "/new_one"):
        scope = {"type": "websocket", "path": path, "headers": [], "query_string": b"", "client": None, "scheme": "ws"}
        await app(scope, receive, send)
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)] * 3
    assert reached == []


async def test_what_is_neither_http_nor_websocket_is_refused(directory) -> None:
    async def inner(scope, receive, send):
        raise AssertionError("it went through")

    with pytest.raises(ValueError, match="webtransport"):
        await Gate(inner)({"type": "webtransport", "path": "/pause", "headers": []}, None, None)


def test_the_strictest_class_counts_and_what_is_in_none_is_unknown() -> None:
    routes = EngineRoutes({"/x", "/a/{b}", "/docs/"}, {"/x", "/a/c", "/"}, {"/a/c", "/docs/secret", "/x/{y}/z"})
    told = {path: routes.of(path) for path in ("/x", "/a/b", "/a/c", "/docs/", "/docs/secret/", "/x/1/z", "/x/1/2/z")}
    assert told == {
        "/x": RouteAccess.GATED,
        "/a/b": RouteAccess.OPEN,
        "/a/c": RouteAccess.CONTROL,
        "/docs/": RouteAccess.OPEN,
        "/docs/secret/": RouteAccess.CONTROL,
        "/x/1/z": RouteAccess.CONTROL,
        "/x/1/2/z": RouteAccess.UNKNOWN,
    }
    assert routes.of("/") is RouteAccess.GATED
    assert routes.of("") is RouteAccess.GATED
    assert routes.of("/x\n") is RouteAccess.UNKNOWN


@pytest.mark.parametrize(
    ("path", "root", "route"),
    [
        ("/pause", "", "/pause"),
        ("/pause", "/api", "/pause"),
        ("/api/pause", "/api", "/pause"),
        ("/api", "/api", "/"),
        ("/apipause", "/api", "/apipause"),
        ("/api//pause", "/api/", "/pause"),
        ("/api/pause", "/api/", "/api/pause"),
        ("//pause", "/", "/pause"),
    ],
)
def test_the_root_path_is_taken_away_as_the_framework_does(path, root, route) -> None:
    from starlette._utils import get_route_path

    scope = {"type": "http", "path": path, "root_path": root}
    assert route_of(scope) == route
    assert (get_route_path(scope) or "/") == route


def test_an_old_framework_that_routes_by_the_whole_path_is_thought_of() -> None:
    """Under the root path /v1 the path /v1/pause is the route /pause to a new one, and itself to an old one."""
    routes = EngineRoutes({"/pause"}, set(), {"/v1/pause"})
    assert routes.of_request({"path": "/v1/pause", "root_path": "/v1"}) == ("/v1/pause", RouteAccess.CONTROL)
    assert routes.of_request({"path": "/pause", "root_path": "/v1"}) == ("/pause", RouteAccess.OPEN)


@pytest.mark.parametrize("gate", [ReferenceGate, VllmGate, SglangGate])
def test_no_route_of_an_engine_has_two_classes(gate: type[Gate]) -> None:
    classes = (gate.open_routes, gate.generation_routes, gate.control_routes)
    assert sum(map(len, classes)) == len(frozenset().union(*classes))
    assert "/health" in gate.open_routes


@pytest.mark.parametrize(
    ("gate", "route"),
    [
        (VllmGate, "/inference/v1/abort_requests"),
        (VllmGate, "/collective_rpc"),
        (VllmGate, "/fault_tolerance/apply"),
        (VllmGate, "/v1/load_lora_adapter"),
        (VllmGate, "/adapters/x"),
        (SglangGate, "/scale_elastic_ep"),
        (SglangGate, "/update_weights_from_tensor"),
        (SglangGate, "/hicache/storage-backend/clear"),
        (SglangGate, "/dumper/anything"),
        (ReferenceGate, "/ckpt_engine/install"),
    ],
)
def test_what_changes_an_engine_is_a_control_route(directory, gate: type[Gate], route: str) -> None:
    assert EngineRoutes(gate.open_routes, gate.generation_routes, gate.control_routes | {"/ckpt_engine/"}).of(
        route
    ) is (RouteAccess.CONTROL)


def test_every_route_of_the_reference_engine_has_a_class() -> None:
    from ckpt_engine_adapters.reference.routes import ModelFacts, create_app

    app = create_app(None, ModelFacts("", "", "", "", 1, 1, (), 1))  # type: ignore[arg-type]
    gate = ReferenceGate
    routes = EngineRoutes(gate.open_routes, gate.generation_routes, gate.control_routes | {"/ckpt_engine/"})
    assert [route for route in listed(app) if routes.of(route) is RouteAccess.UNKNOWN] == []


def test_a_mount_without_routes_of_its_own_is_listed() -> None:
    async def metrics(scope, receive, send):
        raise AssertionError("it is only listed")

    app = FastAPI(openapi_url=None)
    app.routes.append(Mount("/metrics", metrics))
    assert list(listed(app)) == ["/metrics/"]
