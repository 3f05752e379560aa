"""The paths of the server, and what answers each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from graphmod.serve.answers import Exchange, require_key, require_model
from graphmod.serve.errors import ApiError
from graphmod.serve.forms import ChatForm, CompletionForm
from graphmod.serve.service import Service

log = logging.getLogger("graphmod")

PAGE = Path(__file__).parent / "page.html"


def make_app(service: Service, alive: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    """The application that answers for `service`, within the context `alive` in a server."""
    chat, completions = ChatForm(), CompletionForm()
    page = PAGE.read_text(encoding="utf-8")

    async def post_chat(request: Request) -> Response:
        return await Exchange(service, chat, request).answer()

    async def post_completion(request: Request) -> Response:
        return await Exchange(service, completions, request).answer()

    async def get_models(request: Request) -> Response:
        require_key(service, request)
        service.require_ready()
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def get_model(request: Request) -> Response:
        require_key(service, request)
        service.require_ready()
        require_model(service, request.path_params["name"])
        return JSONResponse(_model(service))

    async def get_health(_: Request) -> Response:
        trouble = service.trouble
        return JSONResponse({"status": trouble or "ready"}, 200 if trouble is None else 503)

    async def get_metrics(_: Request) -> Response:
        text = service.metrics.text(await service.engine.counters())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def get_page(_: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'"})

    async def on_api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        if request.method == "OPTIONS" and error.status_code == 405:
            if "access-control-request-method" in request.headers:
                return _not_from(request.headers.get("origin", ""))
            return Response(status_code=204, headers={"allow": f"{dict(error.headers or {})['Allow']}, OPTIONS"})
        known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/models/NAME, GET /health, "
        known += "GET /metrics, and a page to try it at GET /"
        said = f"{request.method} {request.url.path} is not served; there are {known}"
        answer = ApiError(error.status_code, said).response()
        answer.headers.update(error.headers or {})
        return answer

    async def on_error(_: Request, error: Exception) -> Response:
        return ApiError(
            500, f"the server has failed: {type(error).__name__}: {error}", code="internal_error"
        ).response()

    # Starlette's routes: those of FastAPI look for what a function depends on, in a fifth of the time of a request.
    routes: list[BaseRoute] = [
        Route("/v1/chat/completions", post_chat, methods=["POST"]),
        Route("/v1/completions", post_completion, methods=["POST"]),
        Route("/v1/models", get_models),
        Route("/v1/models/{name:path}", get_model),
        Route("/health", get_health),
        Route("/metrics", get_metrics),
        Route("/", get_page),
    ]
    handlers: dict[Any, Any] = {ApiError: on_api_error, HTTPException: on_http_error, Exception: on_error}
    # Without FastAPI's own pages, which load scripts from elsewhere.
    hidden = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(routes=routes, exception_handlers=handlers, lifespan=alive, **hidden)
    if origins := service.settings.cors_origins:
        app.add_middleware(
            _Cors,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return app


class _Cors(CORSMiddleware):
    """Lets pages of some origins read answers."""

    def preflight_response(self, request_headers: Headers) -> Response:
        """What a browser is told that asks whether a page may send a request."""
        if not self.is_allowed_origin(request_headers["origin"]):
            return _not_from(request_headers["origin"])
        return super().preflight_response(request_headers)


def _not_from(origin: str) -> Response:
    said = f"pages of {origin} may not use this server; start it with serve.cors_origins=['{origin}']"
    return ApiError(403, said, code="origin_not_allowed").response()


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "graphmod",
        "max_model_len": service.engine.max_seq_len,
        "chat": service.chats,
    }
