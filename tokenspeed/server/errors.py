"""Failures as OpenAI's error body: {"error": {"message", "type", "param", "code"}}, whatever went wrong."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tokenspeed.errors import EngineDead, RequestError
from tokenspeed.server.client import GenerationClosed

logger = logging.getLogger(__name__)
MAX_MESSAGE = 1000  # characters of a message, so that no client gets its own megabytes back
MAX_PARAM = 100
RETRY_AFTER = {429: "1", 503: "2"}  # seconds


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> bytes:
    """JSON. ASCII only, so that no text a client sent can fail to encode."""
    error = dict(message=shorten(message, MAX_MESSAGE), type=error_type(status), param=param, code=code)
    if param is not None:
        error["param"] = shorten(param, MAX_PARAM)
    return json.dumps({"error": error}).encode()


def error_type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    if status == 503:
        return "service_unavailable_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def shorten(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def as_request_error(error: Exception) -> RequestError:
    """What a client is told. The text of an unforeseen error stays in the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDead):
        return RequestError("the engine has died; the server is going down", status=503, code="engine_dead")
    if isinstance(error, (GenerationClosed, ClientDisconnect)):
        return RequestError("the client has closed the connection", code="client_closed_request")
    return RequestError("internal error", status=500, code="internal_error")


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status in RETRY_AFTER:
        headers["retry-after"] = RETRY_AFTER[error.status]
    body = error_body(error.message, error.status, error.param, error.code)
    return Response(body, error.status, headers, media_type="application/json")


def error_event(error: Exception) -> bytes:
    """The end of a stream that failed: the error, then [DONE]."""
    told = as_request_error(error)
    return b"data: " + error_body(told.message, told.status, told.param, told.code) + b"\n\ndata: [DONE]\n\n"


def install_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return error_response(as_request_error(error))

    async def http(request: Request, error: Any) -> Response:
        where = f"{request.method} {request.url.path}"
        messages = {404: f"there is no route {where}", 405: f"the method of {where} is not allowed"}
        message = messages.get(error.status_code, str(error.detail))
        return error_response(RequestError(message, status=error.status_code), error.headers)

    async def unforeseen(request: Request, error: Exception) -> Response:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return error_response(as_request_error(error))

    for kind in (RequestError, EngineDead, GenerationClosed, ClientDisconnect):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unforeseen)
