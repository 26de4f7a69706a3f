"""The HTTP side: routes, bodies, keys, server-sent events, and what ends a request early."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvspan.query.text import parse_json
from kvspan.query.write import dump_json
from kvspan.serve import answers, queries
from kvspan.serve.answers import Job
from kvspan.serve.errors import SERVER, APIError, to_api_error, unknown_model
from kvspan.serve.metrics import CONTENT_TYPE
from kvspan.serve.service import Admission, Service, shutting_down

CLIENT_LEFT = 499  # nginx's word for it; nobody gets to see it but the metrics
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must not hold events back
]
# A body that is too large is read on up to here, so that its sender gets to read the answer.
DISCARD_BYTES = 64 * 2**20
# From here on a body is parsed on a thread, so that others are answered meanwhile.
LARGE_BODY = 256 * 2**10

Read = Callable[[Service, Request, bytes], Awaitable[Job]]


def make_app(service: Service) -> Starlette:
    """The ASGI application of a server."""

    def post(path: str, read: Read) -> Route:
        return Route(path, Endpoint(service, path, read), methods=["POST"])

    async def health(request: Request) -> Response:
        alive, draining = service.engine.stats().alive, service.draining
        status = "ok" if alive and not draining else "draining" if alive else "dead"
        return JSONResponse({"status": status}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        service.check_key(request.headers.get("authorization"))
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    async def models(request: Request) -> Response:
        service.check_key(request.headers.get("authorization"))
        data = [_model(service, name) for name in service.settings.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(request: Request) -> Response:
        service.check_key(request.headers.get("authorization"))
        name = request.path_params["name"]
        if name not in service.settings.names:
            raise to_api_error(unknown_model(name, service.settings.names))
        return JSONResponse(_model(service, name))

    return Starlette(
        routes=[
            post("/v1/chat/completions", _read_chat),
            post("/v1/completions", _read_completion),
            post("/v1/query/execute", read_query),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            APIError: lambda request, error: error_response(error),
            HTTPException: _http_error,  # type: ignore[dict-item]
        },
    )


def _model(service: Service, name: str) -> dict[str, Any]:
    limit = service.capabilities().max_tokens
    owner = {"id": name, "object": "model", "created": service.started, "owned_by": "kvspan"}
    return {**owner, "max_model_len": limit}


async def _read_json(body: bytes) -> Any:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"the body is not UTF-8: byte {error.start}"
        raise APIError(400, problem, code="invalid_json") from None
    try:
        if len(body) > LARGE_BODY:
            return await asyncio.to_thread(parse_json, text)
        return parse_json(text)
    except Exception as error:
        raise APIError(400, str(error), code="invalid_json") from None


async def _read_chat(service: Service, request: Request, body: bytes) -> Job:
    return answers.chat(service, await _read_json(body))


async def _read_completion(service: Service, request: Request, body: bytes) -> Job:
    return answers.completion(service, await _read_json(body))


async def read_query(service: Service, request: Request, body: bytes) -> Job:
    return queries.query(service, body, request.query_params.multi_items())


def encode(value: Any) -> bytes:
    """Compact JSON of any depth."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError:
        return dump_json(value).encode()


def error_response(error: APIError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), error.status, headers)


def _http_error(request: Request, error: HTTPException) -> Response:
    what = f"{request.method} {request.url.path}"
    words = {404: f"no such endpoint: {what}", 405: f"method not allowed: {what}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    refused = APIError(error.status_code, words.get(error.status_code, error.detail), code=code)
    response = error_response(refused)
    response.headers.update(error.headers or {})
    return response


class Endpoint:
    """An ASGI application for one path: from the request to the last byte of its answer."""

    def __init__(self, service: Service, path: str, read: Read) -> None:
        self.service = service
        self.path = path
        self.read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, started = self.service.metrics, time.perf_counter()
        reply = _Reply(send)
        status = 500
        try:
            status = await self._answer(scope, receive, reply)
        except Exception as error:
            failure = to_api_error(error)
            if failure.code == "internal_error":
                traceback.print_exception(error, file=sys.stderr)
            status = failure.status
            await reply.fail(failure, Request(scope))
        finally:
            metrics.requests.labels(self.path, str(status)).inc()
            metrics.seconds.labels(self.path).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, reply: _Reply) -> int:
        service, request = self.service, Request(scope, receive)
        service.check_key(request.headers.get("authorization"))
        with service.admitted() as admission:
            try:
                body = await self._body(request, admission)
            except ClientDisconnect:
                return CLIENT_LEFT
            job = await self.read(service, request, body)
            admission.take(job.units - 1)
            return await self._run(job, admission, receive, reply)

    async def _body(self, request: Request, admission: Admission) -> bytes:
        settings = self.service.settings
        most = settings.max_body_bytes
        parts: list[bytes] = []

        async def read() -> int:
            size = 0
            async for part in request.stream():
                size += len(part)
                if size <= most:
                    parts.append(part)
                elif size > most + DISCARD_BYTES:
                    break
            return size

        reading = asyncio.ensure_future(read())
        admission.working(reading)
        await asyncio.wait([reading], timeout=settings.body_timeout)
        if admission.ended:
            raise shutting_down()
        if not reading.done():
            reading.cancel()
            limit = f"{settings.body_timeout:g} s"
            raise APIError(408, f"the body did not arrive within {limit}", code="timeout")
        if reading.result() > most:
            raise APIError(413, f"the body is larger than {most} bytes", code="request_too_large")
        return b"".join(parts)

    async def _run(self, job: Job, admission: Admission, receive: Receive, reply: _Reply) -> int:
        """Run a job until it is done, its time is up, or its client has left."""
        settings = self.service.settings
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        work = asyncio.ensure_future(job.run(events.put_nowait))
        work.add_done_callback(lambda _: events.put_nowait(None))
        admission.working(work)
        left = asyncio.ensure_future(_until_left(receive))
        left.add_done_callback(lambda _: work.cancel())
        deadline = time.monotonic() + settings.timeout
        try:
            while True:
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise APIError(
                        504,
                        f"no complete answer within {settings.timeout:g} s",
                        type=SERVER,
                        code="timeout",
                    )
                try:
                    wait = min(rest, settings.keep_alive) if job.stream else rest
                    event = await asyncio.wait_for(events.get(), wait)
                except TimeoutError:
                    if job.stream:
                        await reply.comment("keep-alive")
                    continue
                if event is None:
                    break
                await reply.event(encode(event))
            if left.done():
                return CLIENT_LEFT
            if admission.ended:
                raise shutting_down()
            answer = work.result()
            if job.stream:
                await reply.end()
            else:
                await reply.whole(encode(answer))
            return 200
        finally:
            work.cancel()
            left.cancel()
            await asyncio.gather(work, left, return_exceptions=True)


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Reply:
    """One answer on its way out: whole, or a stream that starts with its first event."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False
        self._ended = False

    async def whole(self, body: bytes) -> None:
        self._ended = True
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, data: bytes) -> None:
        await self._write(b"data: " + data + b"\n\n")

    async def comment(self, text: str) -> None:
        """Nothing for the reader; tells everybody in between that the stream is alive."""
        await self._write(f": {text}\n\n".encode())

    async def end(self) -> None:
        await self.event(b"[DONE]")
        await self._finish()

    async def fail(self, error: APIError, request: Request) -> None:
        """The error as a status, or as the last event of a stream that has begun."""
        if self._streaming:
            await self.event(encode(error.body()))
            await self._finish()
        elif not self._ended:
            self._ended = True
            await error_response(error)(request.scope, request.receive, self._send)

    async def _write(self, data: bytes) -> None:
        if not self._streaming:
            self._streaming = True
            start: Message = {"type": "http.response.start", "status": 200, "headers": EVENT_STREAM}
            await self._send(start)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
