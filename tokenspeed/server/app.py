"""The web application: which path leads where, who may call it, and what the server says about itself."""

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.config import Resolved
from tokenspeed.errors import RequestError
from tokenspeed.metrics import CONTENT_TYPE, Metrics, accept_length
from tokenspeed.server.client import EngineClient
from tokenspeed.server.errors import error_response, install_error_handlers
from tokenspeed.server.lifecycle import Lifecycle
from tokenspeed.server.openai import Api
from tokenspeed.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

GUARDED = ("/v1", "/tokenize", "/detokenize", "/server_info")
API_KEY_VARIABLE = "TOKENSPEED_API_KEY"

Handler = Callable[[Request], Awaitable[Response]]


class Server(FastAPI):
    """The application with what its process needs to reach."""

    api: Api
    lifecycle: Lifecycle
    metrics: Metrics


def create_app(client: EngineClient, resolved: Resolved, lifecycle: Lifecycle | None = None) -> Server:
    """Routes over `client`. Whoever runs the application moves `lifecycle`; at first it is starting."""
    app = Server(
        title="tokenspeed", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False
    )
    app.lifecycle = lifecycle or Lifecycle()
    app.api = Api(client, resolved, app.lifecycle)
    app.metrics = Metrics(resolved.names[0], lambda: client.stats)
    client.observer = app.metrics
    install_error_handlers(app)
    _add_api_routes(app, app.api)
    _add_status_routes(app, client, resolved)
    if key := resolved.config.api_key or os.environ.get(API_KEY_VARIABLE):
        app.add_middleware(ApiKeyGuard, key=key)
    return app


def _add_api_routes(app: FastAPI, api: Api) -> None:
    def post(path: str, handler: Handler, body: type) -> None:
        schema = body.model_json_schema(ref_template=f"#/components/schemas/{body.__name__}/$defs/{{model}}")
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        bodies[body.__name__] = schema
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            openapi_extra={"requestBody": {"content": content, "required": True}},
        )

    bodies: dict[str, Any] = {}
    post("/v1/chat/completions", api.chat, ChatRequest)
    post("/v1/completions", api.completions, CompletionRequest)
    post("/tokenize", api.tokenize, TokenizeRequest)
    post("/detokenize", api.detokenize, DetokenizeRequest)
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{model:path}", api.model, methods=["GET"])
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        document.setdefault("components", {}).setdefault("schemas", {}).update(bodies)
        return document

    app.openapi = openapi


def _add_status_routes(app: Server, client: EngineClient, resolved: Resolved) -> None:
    async def health(request: Request) -> Response:
        lifecycle = app.lifecycle
        if lifecycle.healthy:
            return JSONResponse({"status": "ready"})
        body = {"status": lifecycle.state, "reason": lifecycle.reason}
        return JSONResponse(body, 503, {"retry-after": "2"})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def server_info(request: Request) -> Response:
        return JSONResponse(describe(app, client, resolved))

    async def metrics(request: Request) -> Response:
        return Response(app.metrics.render(), media_type=CONTENT_TYPE)

    for path in ("/health", "/ready", "/ping"):
        for method in ("GET", "HEAD"):
            app.add_api_route(path, health, methods=[method], operation_id=f"{method.lower()}_{path[1:]}")
    app.add_api_route("/version", version, methods=["GET"])
    app.add_api_route("/server_info", server_info, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"])


def describe(app: Server, client: EngineClient, resolved: Resolved) -> dict[str, Any]:
    """What runs here. `engine` is what the worker reported: dtype, memory, size of the KV pool."""
    first = resolved.shapes[0] if resolved.shapes else None
    return {
        "version": __version__,
        "status": app.lifecycle.state,
        "model": resolved.config.model,
        "served_model_name": list(resolved.names),
        "max_model_len": resolved.max_model_len,
        "vocab_size": app.api.vocab_size,
        "speculative_algorithm": None if resolved.method == "none" else resolved.method.upper(),
        "speculative_draft_model_path": resolved.config.draft or resolved.draft_dir,
        "speculative_num_steps": first and first.steps,
        "speculative_eagle_topk": first and first.topk,
        "speculative_num_draft_tokens": first and first.nodes,
        "speculation": {"method": resolved.method, "shapes": [str(shape) for shape in resolved.shapes]},
        "engine": app.api.info,
        "internal_states": [{"avg_spec_accept_length": accept_length(client.stats)}],
    }


class ApiKeyGuard:
    """Lets requests to guarded paths pass only with `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app = app
        self._digest = hashlib.sha256(key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_guarded(scope["path"]) and not self._has_key(scope):
            error = RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_guarded(self, path: str) -> bool:
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in GUARDED)

    def _has_key(self, scope: Scope) -> bool:
        """Digests have one length and are compared in constant time, so time tells nothing about the key."""
        given = b"".join(value for name, value in scope["headers"] if name == b"authorization")
        scheme, _, key = given.partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(key.strip()).digest(), self._digest)
        return scheme.lower() == b"bearer" and same
