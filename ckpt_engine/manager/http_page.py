"""The page at `/`: its files, as they lie in the package, and what a browser may do with them.

They hold no facts, so they need no token; the page asks the routes of `/v1` for facts, with a token if the manager asks
for one. A browser runs the scripts that are named here and nothing else, and no text can become HTML in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html

FOLDER = "/page"
"""The path of all files except the page itself."""

FILES = {
    "/": ("index.html", "text/html"),
    f"{FOLDER}/icon.svg": ("icon.svg", "image/svg+xml"),
    f"{FOLDER}/page.css": ("page.css", "text/css"),
    f"{FOLDER}/parts.css": ("parts.css", "text/css"),
    **{
        f"{FOLDER}/{name}.js": (f"{name}.js", "text/javascript")
        for name in ("page", "asking", "dom", "words", "now", "operate", "parts", "updates", "opened", "pauses")
    },
}
"""By route: the file's name in the folder `page` beside this module, and its type."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

STATIC = "/static-offline-docs"
"""Where fastapi-offline has Swagger's files."""


def add_page(app: FastAPI) -> None:
    """Adds the page's routes."""
    folder = files("ckpt_engine.manager") / "page"
    contents = {name: (folder / name).read_bytes() for name, _ in FILES.values()}

    async def file(request: Request) -> Response:
        name, kind = FILES[request.url.path]
        return Response(contents[name], media_type=kind, headers={"content-security-policy": POLICY})

    for route in FILES:
        app.add_api_route(route, file, include_in_schema=False)


def add_docs(app: FastAPI) -> None:
    """Adds `/docs`; its policy names the one inline script by its digest."""
    page = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title=f"{app.title}: interface",
        swagger_js_url=f"{STATIC}/swagger-ui-bundle.js",
        swagger_css_url=f"{STATIC}/swagger-ui.css",
        swagger_favicon_url=f"{FOLDER}/icon.svg",
        swagger_ui_parameters={"tryItOutEnabled": False, "defaultModelsExpandDepth": 0},
    )
    scripts = re.findall(rb"<script>(.*?)</script>", bytes(page.body), re.DOTALL)
    digests = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in scripts)
    # Swagger sets styles on its elements, and its icons are data.
    policy = (
        f"default-src 'none'; script-src 'self' {digests}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page.body, media_type="text/html", headers={"content-security-policy": policy})
