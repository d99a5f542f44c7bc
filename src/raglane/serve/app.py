"""The HTTP application of ``raglane serve``: whole sequences, live streams over WebSocket, and the Open Inference
Protocol. The extra ``serve`` installs its dependencies.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any
from urllib.parse import urlsplit

import prometheus_client
from fastapi import FastAPI, Path, Request, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocketDisconnect

from raglane._utils.checks import check_count
from raglane._utils.messages import message, quote, quote_all, shorten
from raglane.errors import ArgumentError, RaglaneError
from raglane.report.page import render
from raglane.runs.run import Run
from raglane.serve.engine import Engine
from raglane.serve.live import Clients, Conversation, RefusedError, Sequences, codes_of, live
from raglane.serve.served import Served, error_text, to_json

log = logging.getLogger("raglane.serve")

_OPEN = ("/", "/health", "/v2/health/live", "/v2/health/ready")  # need no token
_HEALTH = _OPEN[1:]  # answered while the server closes
_PROTOCOL = "raglane"  # of WebSockets, next to which browsers send a token
_LONGEST_REASON = 120  # bytes of the reason in a close frame, of 123


class PredictRequest(BaseModel):
    """Whole sequences, or a table, and options of ``Run.predict``."""

    sequences: list[Any] | None = Field(None, description="lists of frames, lists of tokens, or texts")
    table: dict[str, list[Any]] | None = Field(None, description="columns by name, in place of sequences")
    model: str | None = Field(None, description="the name of a model; default: the only one")
    probabilities: bool = False
    top: int = 1
    horizon: int = 1


class InferTensor(BaseModel):
    """A tensor of the Open Inference Protocol."""

    name: str = "frames"
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: str
    data: list[Any]


class InferRequest(BaseModel):
    """A request of the Open Inference Protocol."""

    id: str | None = None
    inputs: Annotated[list[InferTensor], Field(min_length=1, max_length=1)]
    parameters: dict[str, Any] = {}
    outputs: list[dict[str, Any]] | None = None


def create_app(
    models: Mapping[str, Run | Engine],
    *,
    token: str | None = None,
    client_streams: int = 256,
    max_message: int = 4 * 2**20,
    origins: Sequence[str] = (),
    **options: Any,
) -> FastAPI:
    """Return an application that serves models; ``raglane serve`` runs it with uvicorn.

    Args:
        models: runs, or engines of other modules, by name.
        token: clients must send it as ``Authorization: Bearer TOKEN``; None for none.
        client_streams: the most live streams of a client address.
        max_message: the most bytes of a request or of a message.
        origins: the addresses of other sites whose pages may use the server, e.g. ``"https://example.org"``.
        **options: of the engines of runs, e.g. ``slots``; see :class:`raglane.serve.Engine`.

    Raises:
        ArgumentError: an argument is invalid.

    Example:
        >>> from raglane.serve.app import create_app
        >>> app = create_app({"lstm": Engine(rl.nn.LSTM(3, 4).eval(), slots=100)})
    """
    if not models:
        raise ArgumentError(message("models", "none", "at least one model", "pass e.g. {'vowels': run}"))
    served = {name: Served(name, model, **options) for name, model in models.items()}
    return Server(served, token, check_count("client_streams", client_streams), max_message, origins).app()


class Server:
    """The routes of an application, and what they share."""

    def __init__(
        self,
        served: Mapping[str, Served],
        token: str | None,
        client_streams: int,
        max_message: int,
        origins: Sequence[str],
    ) -> None:
        self.served, self.max_message = served, check_count("max_message", max_message)
        self._token = None if token is None else token.encode()
        self._origins = origins
        self.clients = Clients(client_streams)
        self._sequences = Sequences(self.clients)
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_EngineStatistics(self))
        self._requests = prometheus_client.Counter(
            "raglane_requests", "Requests over HTTP", ("route", "status"), registry=self._registry
        )
        self._times = prometheus_client.Histogram(
            "raglane_request_seconds", "Times of requests over HTTP", ("route",), registry=self._registry
        )

    def app(self) -> FastAPI:
        """Return the application."""
        text = "Predictions of recurrent networks: whole sequences, and live streams with the same bits."
        app = FastAPI(title="Raglane", version=_version(), description=text, lifespan=self._lifespan)
        app.state.server = self
        plain: dict[str, Any] = {"response_class": JSONResponse}
        app.get("/", response_class=HTMLResponse, include_in_schema=False)(self.page)
        app.get("/health", **plain)(self.health)
        app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        app.post("/predict", **plain)(self.predict)
        app.websocket("/stream")(self.stream)
        app.get("/v2", **plain)(self.about)
        app.get("/v2/health/live", **plain)(self.is_live)
        app.get("/v2/health/ready", **plain)(self.is_ready)
        app.get("/v2/models/{name}", **plain)(self.model)
        app.get("/v2/models/{name}/ready", **plain)(self.model_is_ready)
        app.post("/v2/models/{name}/infer", **plain)(self.infer)
        app.add_exception_handler(RequestValidationError, self._invalid)
        app.add_exception_handler(HTTPException, self._failed)
        app.add_exception_handler(RaglaneError, self._failed)
        app.add_exception_handler(Exception, self._failed)
        app.add_middleware(_Guard, server=self)
        return app

    @asynccontextmanager
    async def _lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        for one in self.served.values():
            one.start()
        try:
            yield
        finally:
            for one in self.served.values():
                one.stop()

    # Who may call.

    def refusal(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> RefusedError | None:
        """Return why a connection is refused: pages of other sites, and clients without the token."""
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host") and origin not in self._origins:
            return RefusedError(
                403, 4403, message("origin", quote(origin), "this server", "set --origin to allow the site")
            )
        if self._token is None or (scope["type"] == "http" and scope["path"] in _OPEN):
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        sent = [given.strip()] if kind.lower() == "bearer" else []
        sent += [name.removeprefix("bearer.") for name in scope.get("subprotocols", ()) if name.startswith("bearer.")]
        # In constant time, so that answers do not depend on the first wrong character.
        if any(hmac.compare_digest(one.encode("utf-8", "surrogateescape"), self._token) for one in sent):
            return None
        return RefusedError(
            401, 4401, message("token", "another" if sent else "none", "the token of this server", "send it")
        )

    def named(self, name: str | None) -> Served:
        """Return a model by its name; None for the only one."""
        if name is None and len(self.served) == 1:
            return next(iter(self.served.values()))
        if name is None or name not in self.served:
            got, rule = "none" if name is None else quote(name), f"one of {quote_all(self.served)}"
            raise RefusedError(404, 4404, message("model", got, rule, "choose one of them"))
        return self.served[name]

    # Whole sequences.

    async def predict(self, body: PredictRequest) -> Response:
        """Predict whole sequences; requests that arrive together run in one batch."""
        served = self.named(body.model)
        options: dict[str, Any] = {"probabilities": body.probabilities}
        options |= {name: own for name in ("top", "horizon") if (own := getattr(body, name)) != 1}
        if (body.table is None) == (body.sequences is None):
            raise ArgumentError(message("sequences", "none or both", "given, or a table", "pass one of them"))
        if body.table is not None:
            columns = await served.table(body.table, options)
        else:
            columns = await served.predict(body.sequences or [], options)
        return _json({"model": served.name, "predictions": columns})

    # Live streams.

    async def stream(self, socket: WebSocket) -> None:
        """Talk with a client over a WebSocket."""
        await socket.accept(_PROTOCOL if _PROTOCOL in socket.scope["subprotocols"] else None)
        code, reason = 1011, ""
        try:
            code, reason = await self._talk(socket)
        except WebSocketDisconnect:
            return
        except Exception as error:
            if not isinstance(error, RaglaneError):
                log.exception("a stream failed")
            code, reason = codes_of(error)[1], error_text(error)
            with suppress(WebSocketDisconnect, RuntimeError):
                await socket.send_text(to_json({"error": reason}))
        with suppress(WebSocketDisconnect, RuntimeError):
            await socket.close(
                code, shorten(reason, _LONGEST_REASON).encode()[:_LONGEST_REASON].decode(errors="ignore")
            )

    async def _talk(self, socket: WebSocket) -> tuple[int, str]:
        if (refusal := self.refusal(socket.scope, socket.headers)) is not None:
            raise refusal
        options = _stream_options(socket.query_params)
        served = live(self.named(options.pop("model")))
        is_binary = options.pop("answers") == "binary"
        served.check(options)
        client = _client(socket.scope)
        self.clients.enter(client)
        try:
            conversation = Conversation(socket, served, options, is_binary, self.max_message)
            self.clients.conversations.add(conversation)
            try:
                return await conversation.run()
            finally:
                self.clients.conversations.discard(conversation)
        finally:
            self.clients.leave(client)

    async def infer(self, request: Request, name: Annotated[str, Path()], body: InferRequest) -> Response:
        """Run frames of a sequence, or of a whole one without ``sequence_id`` (Open Inference Protocol)."""
        served = live(self.named(name))
        frames = served.tensor(body.inputs[0].shape, body.inputs[0].datatype, body.inputs[0].data)
        number = body.parameters.get("sequence_id")
        if number is not None and type(number) not in (int, str):
            rule = "a whole number or a text"
            raise ArgumentError(message("sequence_id", quote(number), rule, "send one that no other client sends"))
        client = _client(request.scope)
        rows, state = await self._sequences.infer(served, client, frames, body.parameters)
        outputs = served.tensors(rows)
        if body.outputs is not None:
            wanted = {one.get("name") for one in body.outputs}
            outputs = [one for one in outputs if one["name"] in wanted]
        own = {"sequence_id": number, "state": state}
        found: dict[str, Any] = {"model_name": served.name, "model_version": "1", "outputs": outputs}
        found["parameters"] = {key: value for key, value in own.items() if value is not None}
        return _json({**found, **({} if body.id is None else {"id": body.id})})

    # Descriptions.

    async def page(self) -> Response:
        """Return the page with a form and a live plot."""
        models = [one.description() for one in self.served.values()]
        return HTMLResponse(render("serve/page.html", models=models, needs_token=self._token is not None))

    async def health(self) -> Response:
        """Return the state of the server and of its models; 503 if an engine failed or the server closes."""
        models = {}
        for name, one in self.served.items():
            own = one.description()["parameters"]
            models[name] = {"live": own["live"], **({"reason": one.reason} if one.reason else {})}
            if one.engine is not None:
                models[name] |= {"works": one.engine._error is None, "streams": one.engine.stats()["streams"]}
        status = "closing" if self.clients.is_closing else "ok" if self._works() else "failed"
        return _json({"status": status, "models": models}, 200 if status == "ok" else 503)

    def _works(self) -> bool:
        return all(one.engine is None or one.engine._error is None for one in self.served.values())

    async def metrics(self) -> Response:
        """Return statistics for Prometheus."""
        return Response(
            prometheus_client.generate_latest(self._registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )

    async def about(self) -> Response:
        """Return the metadata of the server (Open Inference Protocol)."""
        return _json({"name": "raglane", "version": _version(), "extensions": ["sequence"]})

    async def is_live(self) -> Response:
        """Return that the server runs (Open Inference Protocol)."""
        return _json({"live": True})

    async def is_ready(self) -> Response:
        """Return whether the server accepts work (Open Inference Protocol)."""
        is_ready = self._works() and not self.clients.is_closing
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def model(self, name: str) -> Response:
        """Return the metadata of a model (Open Inference Protocol)."""
        return _json(self.named(name).description())

    async def model_is_ready(self, name: str) -> Response:
        """Return whether a model accepts frames of streams (Open Inference Protocol)."""
        one = self.named(name)
        is_ready = one.engine is not None and one.engine._error is None
        return _json({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    # Around the routes.

    async def _invalid(self, _: Request, error: Exception) -> Response:
        """Answer a body that is not of the schema with one line."""
        assert isinstance(error, RequestValidationError), "the handler of this error"  # noqa: S101
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        return _error(
            RefusedError(400, 1008, message(place, first["msg"], "as /openapi.json defines it", "correct it"))
        )

    async def _failed(self, _: Request, error: Exception) -> Response:
        """Answer with the message of an error."""
        if isinstance(error, HTTPException):
            return _json({"error": str(error.detail)}, error.status_code)
        return _error(error)

    def observe(self, scope: Mapping[str, Any], status: int, seconds: float) -> None:
        """Count a request for the metrics."""
        route = getattr(scope.get("route"), "path", "other")
        self._requests.labels(route, status).inc()
        self._times.labels(route).observe(seconds)


class _Guard:
    """Checks the origin, the token and the size of each request before its route reads it, and counts requests."""

    def __init__(self, app: Any, server: Server) -> None:
        self._app, self._server = app, server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        server, start, status = self._server, time.perf_counter(), 500

        async def noted(sent: Any) -> None:
            nonlocal status
            status = sent.get("status", status)
            await send(sent)

        server.clients.requests += 1
        try:
            body = await self._checked(scope, receive)
            unread = [{"type": "http.request", "body": body}]

            async def read() -> Any:
                return unread.pop() if unread else await receive()

            if body is not None:
                await self._app(scope, read, noted)
        except RefusedError as refusal:
            await _error(refusal)(scope, receive, noted)
        finally:
            server.clients.requests -= 1
            server.observe(scope, status, time.perf_counter() - start)

    async def _checked(self, scope: Any, receive: Any) -> bytes | None:
        """Return the body; None if the client is gone."""
        server, headers = (
            self._server,
            {name.decode("latin-1"): own.decode("latin-1") for name, own in scope["headers"]},
        )
        if scope["path"] not in _HEALTH:
            server.clients.check_open()
        if (refusal := server.refusal(scope, headers)) is not None:
            raise refusal
        length = headers.get("content-length", "")
        size, parts, more = 0, [], True
        is_long = length.isdecimal() and int(length[:20]) > server.max_message
        while more and not is_long:
            part = await receive()
            if part["type"] == "http.disconnect":
                return None
            parts.append(part.get("body", b""))
            size, more = size + len(parts[-1]), part.get("more_body", False)
            is_long = size > server.max_message
        if is_long:
            got, rule = f"more than {server.max_message:,} bytes", "within the limit of the server"
            raise RefusedError(413, 1009, message("body", got, rule, "send less, or set --max-message"))
        return b"".join(parts)


class _EngineStatistics:
    """The statistics of the engines as metrics of Prometheus."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics; a model is a label."""
        found = {name: one.engine.stats() for name, one in self._server.served.items() if one.engine is not None}
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"raglane_{name}", text, labels=["model"])
            for model, own in found.items():
                gauge.add_metric([model], own[name])
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"raglane_{name}", text, labels=["model"])
            for model, own in found.items():
                counter.add_metric([model], own[name])
            yield counter
        for name, text in _TIMES.items():
            gauge = GaugeMetricFamily(f"raglane_{name}_seconds", text, labels=["model", "quantile"])
            for model, own in found.items():
                for quantile, key in (("0.5", "p50"), ("0.99", "p99"), ("1", "most")):
                    gauge.add_metric([model, quantile], own[f"{name}_ms"][key] / 1e3)
            yield gauge


_GAUGES = {
    "streams": "Open streams",
    "slots": "The most open streams",
    "ready": "Streams with frames",
    "queued": "Frames that wait",
    "results": "Results that were not sent",
}
_COUNTERS = {
    "steps": "Steps of the engine",
    "frames": "Frames of all steps",
    "opened": "Streams that were opened",
    "late": "Pushes while earlier frames of the stream waited",
    "refused": "Pushes and streams that were refused",
    "evicted": "Streams that were closed because they were idle",
}
_TIMES = {"step": "Times of recent steps", "queue": "Times from push to step of recent frames"}


def _json(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _error(error: Exception) -> Response:
    """Return an error as JSON, with the headers of its status."""
    status = codes_of(error)[0]
    response = _json({"error": error_text(error)}, status)
    response.headers.update({401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status, {}))
    return response


def _client(scope: Mapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _version() -> str:
    try:
        return version("raglane")
    except PackageNotFoundError:
        return "0"


def _stream_options(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a stream in the query of its address."""
    found: dict[str, Any] = {"model": None, "answers": "json"}
    for name, text in query.items():
        rule = _STREAM_OPTIONS.get(name)
        if rule is None:
            rule = f"one of {', '.join(_STREAM_OPTIONS)}"
            raise RefusedError(400, 1008, message("option", quote(name), rule, "correct the address"))
        if name == "top" and text.isdecimal() and len(text) < 10:
            found[name] = int(text)
        elif name == "model" or (name != "top" and text in rule.split(" or ")):
            found[name] = text == "true" if text in ("true", "false") and name != "model" else text
        else:
            raise RefusedError(400, 1008, message(name, quote(text), rule, "correct the address"))
    return found


_STREAM_OPTIONS = {
    "model": "the name of a model",
    "answers": "json or binary",
    "probabilities": "true or false",
    "outputs": "true or false",
    "top": "a whole number",
}
