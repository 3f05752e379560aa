"""The paths of the server, and what answers each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from graphmod.serve.answers import Exchange, require_key, require_model
from graphmod.serve.errors import ApiError
from graphmod.serve.forms import ChatForm, CompletionForm
from graphmod.serve.service import Service

log = logging.getLogger("graphmod")

PAGE = Path(__file__).parent / "page.html"


def make_app(service: Service, alive: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """The application that answers for `service`, within the context `alive` in a server."""
    # Without its pages, which load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=alive)
    chat, completions = ChatForm(), CompletionForm()
    page = PAGE.read_text(encoding="utf-8")

    @app.post("/v1/chat/completions")
    async def post_chat(request: Request) -> Response:
        return await Exchange(service, chat, request).answer()

    @app.post("/v1/completions")
    async def post_completion(request: Request) -> Response:
        return await Exchange(service, completions, request).answer()

    @app.get("/v1/models")
    async def get_models(request: Request) -> Response:
        require_key(service, request)
        service.require_ready()
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def get_model(request: Request, name: str) -> Response:
        require_key(service, request)
        service.require_ready()
        require_model(service, name)
        return JSONResponse(_model(service))

    @app.get("/health")
    async def get_health() -> Response:
        trouble = service.trouble
        return JSONResponse({"status": trouble or "ready"}, 200 if trouble is None else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(
            service.metrics.text(await service.engine.counters()), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/")
    async def get_page() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'"})

    @app.exception_handler(ApiError)
    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health, GET /metrics"
        said = f"{request.method} {request.url.path} is not served; there are {known}"
        return ApiError(error.status_code, said).response()

    @app.exception_handler(Exception)
    async def on_error(_: Request, error: Exception) -> Response:
        return ApiError(
            500, f"the server has failed: {type(error).__name__}: {error}", code="internal_error"
        ).response()

    return app


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "graphmod",
        "max_model_len": service.engine.max_seq_len,
        "chat": service.chats,
    }
