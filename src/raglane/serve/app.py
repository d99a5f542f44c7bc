"""The HTTP application of ``raglane serve``: whole sequences, live streams over WebSocket, and the
Open Inference Protocol. The extra ``serve`` installs its dependencies.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import logging
import re
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
import prometheus_client
import torch
from fastapi import APIRouter, Depends, FastAPI, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from raglane._utils.checks import check_count, check_real
from raglane._utils.messages import message, quote, quote_all
from raglane.errors import ArgumentError, RaglaneError
from raglane.report.page import render
from raglane.serve.conversations import Conversation, Link, One
from raglane.serve.gateways import Many
from raglane.serve.hosts import Hosts, check_names, is_same_site
from raglane.serve.live import (
    Clients,
    ProtocolSequences,
    RefusedError,
    error_text,
    live,
    status_of,
)
from raglane.serve.relay import relay
from raglane.serve.served import Served, to_json
from raglane.serve.wire import PING_EVERY, Socket

log = logging.getLogger("raglane.serve")

_OPEN = ("/", "/health", "/v2/health/live", "/v2/health/ready")  # need no token
_HEALTH = _OPEN[1:]  # answered while the server closes
_LONGEST_TOKEN = 4096  # characters
CHUNK = 32  # frames of a stream in a step, which must not occupy the event loop for long
_SWITCH = 0.0005  # seconds between switches of threads
_CARE = 0.25  # seconds between searches for idle streams
_FACTS = ("works", "streams", "slots", "lag_seconds", "longest")  # of an engine, in /health
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}  # of errors


class PredictRequest(BaseModel):
    """Whole sequences, or a table, and options of ``Run.predict``."""

    model_config = ConfigDict(extra="forbid")  # a misspelt option would have no effect
    sequences: list[Any] | None = Field(
        None, description="lists of frames, lists of tokens, or texts"
    )
    table: dict[str, list[Any]] | None = Field(
        None, description="columns by name, in place of sequences"
    )
    model: str | None = Field(None, description="the name of a model; default: the only one")
    probabilities: bool = False
    top: int = 1
    horizon: int = Field(1, le=10_000)  # one request must not occupy the model for minutes
    beam_size: int | None = None
    n_best: int = 1


class InferTensor(BaseModel):
    """A tensor of the Open Inference Protocol."""

    name: str = "frames"
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    datatype: str
    data: list[Any]


class InferParameters(BaseModel):
    """Parameters of the extension for sequences, and the state of a stream in base64."""

    sequence_id: StrictInt | StrictStr | None = None
    at: StrictInt | None = None  # the number of earlier frames
    sequence_start: bool = False
    sequence_end: bool = False
    return_state: bool = False
    state: Any = None


class InferRequest(BaseModel):
    """A request of the Open Inference Protocol."""

    id: str | None = None
    inputs: Annotated[list[InferTensor], Field(min_length=1, max_length=1)]
    parameters: InferParameters = InferParameters()
    outputs: list[dict[str, Any]] | None = None


def create_app(
    models: Mapping[str, Any],
    *,
    token: str | None = None,
    client_streams: int = 256,
    max_message: int = 4 * 2**20,
    origins: Sequence[str] = (),
    allow_hosts: Sequence[str] | None = (),
    period: float | None = None,
    **options: Any,
) -> FastAPI:
    """Return an application that serves models; ``raglane serve`` runs it with uvicorn.

    Args:
        models: runs, modules, or engines, by name.
        token: clients must send it as ``Authorization: Bearer TOKEN``: visible ASCII characters.
            None disables authentication.
        client_streams: the most live streams of a client address.
        max_message: the most bytes of a request or of a message.
        origins: the addresses of other sites whose pages may use the server, e.g.
            ``"https://example.org"``.
        allow_hosts: the names and addresses under which clients reach the server, next to those of
            this machine (``localhost``, 127.0.0.1), e.g. ``"example.org"``: without scheme and
            port. Requests with another header ``Host`` are refused, because a page can resolve its
            own name to the address of the server. None for any, which requires a token.
        period: the seconds between two frames of a live stream. While results take longer, the
            server is overloaded: it accepts no other streams. None to accept all that have a slot.
        **options: of the engines of runs and modules, see :class:`raglane.serve.Engine`; by default
            1,000 ``max_streams``, and ``idle`` after 300 seconds.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.

    Example:
        >>> from raglane.serve.app import create_app
        >>> app = create_app({"lstm": rl.serve.Engine(rl.nn.LSTM(3, 4).eval(), max_streams=100)})
    """
    if not models:
        raise ArgumentError("models", "none", "at least one model", "pass e.g. {'vowels': run}")
    if token is not None:
        check_token("token", token)
    clients = Clients(check_count("client_streams", client_streams))
    check_count("max_message", max_message)
    if period is not None:
        rule = "a number of seconds above 0, or None"
        check_real("period", period, rule, lambda number: number > 0, "pass e.g. 0.032")
    hosts = Hosts(allow_hosts, token)
    sites = check_names("origins", origins, "https://example.org")
    defaults = {"max_streams": 1000, "idle": 300, "chunk": CHUNK}
    served = {
        name: Served(name, model, period=period, **{**defaults, **options})
        for name, model in models.items()
    }
    text = (
        "Predictions of recurrent networks: whole sequences, and live streams with the same bits."
    )
    app = FastAPI(
        title="Raglane",
        version=version("raglane"),
        description=text,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
    )
    server = app.state.server = Server(served, clients, token, max_message, sites, hosts)
    app.include_router(_routes)
    for kind in (RequestValidationError, HTTPException, RaglaneError, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_middleware(_Guard, server=server)
    return app


def settings(app: FastAPI) -> dict[str, Any]:
    """Return the settings of uvicorn with which live streams need the least time of a processor.

    Args:
        app: an application of :func:`create_app`.

    Example:
        >>> import uvicorn
        >>> from raglane.serve.app import create_app, settings
        >>> app = create_app({"lstm": rl.nn.LSTM(3, 4).eval()}, max_streams=10)
        >>> uvicorn.run(app, port=8000, **settings(app))  # doctest: +SKIP
    """
    return {"ws": partial(Socket, app.state.server), "loop": "auto", "lifespan": "on"}


def check_token(name: str, token: Any) -> str:
    """Return a token that a header can contain."""
    rule = "a token of visible ASCII characters"
    size = len(token) if isinstance(token, str) else -1
    if not (
        0 < size <= _LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token
    ):
        # The message does not contain the token.
        got = f"{size} characters" if size else "nothing"
        if size < 0:
            got = f"a {type(token).__name__}"
        raise ArgumentError(name, got, rule, "write e.g. 32 random ones")
    return token


class Server:
    """The models of an application, and what its routes share."""

    def __init__(
        self,
        served: Mapping[str, Served],
        clients: Clients,
        token: str | None,
        max_message: int,
        origins: Sequence[str],
        hosts: Hosts,
    ) -> None:
        self.served = served
        self.clients = clients
        self.max_message = max_message
        self.token = None if token is None else token.encode()
        self._origins = origins
        self._hosts = hosts
        self.sequences = ProtocolSequences(clients)
        self.conversations = {"/stream": One, "/streams": Many}
        self.pages: dict[str, bytes] = {}  # by their paths, from the start on
        self.sockets: set[Any] = set()  # of the server of ``raglane serve``
        registry = self.registry = prometheus_client.CollectorRegistry()
        registry.register(_EngineStatistics(self))
        name = "raglane_requests"
        labels = ("route", "status")
        self.requests = prometheus_client.Counter(
            name, "Requests over HTTP", labels, registry=registry
        )
        name = "raglane_request_seconds"
        text = "Times of requests over HTTP"
        self.times = prometheus_client.Histogram(name, text, ("route",), registry=registry)

    def admit(self, connection: HTTPConnection) -> None:
        """Raise for other hosts, for pages of other sites, and for clients without the token."""
        scope = connection.scope
        headers = connection.headers
        # First: under a name of its own, a page of another site has the origin of the server.
        host = self._hosts.check(headers.getlist("host"))
        origin = headers.get("origin")
        if origin is not None and not is_same_site(origin, host) and origin not in self._origins:
            raise RefusedError(
                403, "Origin", quote(origin), "this server", "set --allow-origin to allow the site"
            )
        if self.token is None or (scope["type"] == "http" and scope["path"] in _OPEN):
            return
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        sent = [credentials.strip()] if kind.lower() == "bearer" else []
        sent += [
            name.removeprefix("bearer.")
            for name in scope.get("subprotocols", ())
            if name.startswith("bearer.")
        ]
        # In constant time, so that answers do not depend on the first wrong character.
        if not any(
            hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), self.token)
            for candidate in sent
        ):
            raise RefusedError(
                401, "token", "another" if sent else "none", "the token of this server", "send it"
            )

    def named(self, name: str | None) -> Served:
        """Return a model by its name; None for the only one."""
        if name is None and len(self.served) == 1:
            return next(iter(self.served.values()))
        if name is None or name not in self.served:
            got = "none" if name is None else quote(name)
            rule = f"one of {quote_all(self.served)}"
            raise RefusedError(404, "model", got, rule, "choose one of them")
        return self.served[name]

    def engines(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of the engines, by the names of their models."""
        return {
            name: served.rounds.statistics()
            for name, served in self.served.items()
            if served.engine is not None
        }

    def converse(self, path: str, connection: HTTPConnection, link: Link) -> Conversation:
        """Begin a conversation; raise if it is refused."""
        self.admit(connection)
        options = _stream_options(connection.query_params)
        served = live(self.named(options.pop("model")))
        is_many = path == "/streams"
        default = "binary" if is_many else "json"
        samples = options.pop("samples")
        if samples is not None:
            check_samples(served)
        form = served.form((options.pop("answers") or default) == "binary", options)
        talk = self.conversations[path]
        return talk(link, served, form, samples, self.clients, client_of(connection))

    async def care(self) -> None:
        """Close idle streams, and send pings, until it is cancelled."""
        pinged = time.monotonic()
        while True:
            await asyncio.sleep(_CARE)
            for served in self.served.values():
                try:
                    served.expire()
                except Exception:
                    log.exception("an idle stream could not be closed")
            for talk in [*self.clients.conversations]:
                if talk.idle is not None:
                    talk.expire(talk.idle)
            now = time.monotonic()
            if now - pinged > PING_EVERY:
                pinged = now
                for socket in [*self.sockets]:
                    socket.beat(now)

    def status(self) -> str:
        """Return closing, failed, overloaded or ok."""
        if self.clients.is_closing:
            return "closing"
        if not all(statistics["works"] for statistics in self.engines().values()):
            return "failed"
        live = [served for served in self.served.values() if served.engine is not None]
        return "overloaded" if any(served.rounds.is_overloaded for served in live) else "ok"


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server = app.state.server
    served = server.served.values()
    # The event loop must not wait 5 ms for a thread that predicts whole sequences.
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    for model in served:
        model.start()
    # The pages are made once: the first one takes 20 ms, in which no stream would be answered.
    server.pages = _pages(app)
    # What exists now stays: a full collection would visit it, and stop all streams meanwhile.
    gc.collect()
    gc.freeze()
    care = asyncio.create_task(server.care())
    try:
        yield
    finally:
        care.cancel()
        gc.unfreeze()
        for model in served:
            model.stop()
        sys.setswitchinterval(before)


def _pages(app: FastAPI) -> dict[str, bytes]:
    """Return the pages by their paths."""
    server = app.state.server
    models = [served.for_page() for served in server.served.values()]
    schema = app.openapi()
    schemas = schema["components"]["schemas"]
    return {
        "/": render("serve/page.html", models=models, needs_token=server.token is not None),
        "/docs": render("serve/routes.html", paths=schema["paths"], schemas=schemas),
    }


async def _server(connection: HTTPConnection) -> Server:
    # Not a plain function, which would be called in another thread.
    return connection.app.state.server


_Server = Annotated[Server, Depends(_server)]
_routes = APIRouter(default_response_class=JSONResponse)


@_routes.post("/predict")
async def predict(body: PredictRequest, server: _Server) -> Response:
    """Predict whole sequences; requests that arrive together run in one batch."""
    served = server.named(body.model)
    options = body.model_dump(
        include={"probabilities", "top", "horizon", "beam_size", "n_best"}, exclude_defaults=True
    )
    if (body.table is None) == (body.sequences is None):
        raise ArgumentError("sequences", "none or both", "given, or a table", "pass one of them")
    if body.table is not None:
        columns = await served.table(body.table, options)
    else:
        columns = await served.predict(body.sequences or [], options)
    return _json({"model": served.name, "predictions": columns})


@_routes.websocket("/stream")
async def stream(socket: WebSocket, server: _Server) -> None:
    """Run a live stream over a WebSocket of another server than that of ``raglane serve``."""
    await relay(server, socket)


@_routes.websocket("/streams")
async def streams(socket: WebSocket, server: _Server) -> None:
    """Run many live streams over a WebSocket of another server than that of ``raglane serve``."""
    await relay(server, socket)


@_routes.post("/v2/models/{name}/infer")
async def infer(
    connection: HTTPConnection, name: str, body: InferRequest, server: _Server
) -> Response:
    """Run frames of a sequence, or of a whole one without ``sequence_id`` (Open Inference
    Protocol).
    """
    served = live(server.named(name))
    tensor = body.inputs[0]
    parameters = body.parameters
    frames = served.tensor(tensor.shape, tensor.datatype, tensor.data)
    rows, state = await server.sequences.infer(
        served, client_of(connection), frames, parameters.model_dump()
    )
    outputs = served.tensors(rows)
    if body.outputs is not None:
        names = {str(output.get("name")) for output in body.outputs}
        outputs = [output for output in outputs if output["name"] in names]
    optional = {"sequence_id": parameters.sequence_id, "state": state}
    answer: dict[str, Any] = {"model_name": served.name, "model_version": "1", "outputs": outputs}
    answer["parameters"] = {key: value for key, value in optional.items() if value is not None}
    return _json({**answer, **({} if body.id is None else {"id": body.id})})


@_routes.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page(server: _Server) -> Response:
    """Return the page with a form and a live plot."""
    return HTMLResponse(server.pages["/"])


@_routes.get("/docs", response_class=HTMLResponse, include_in_schema=False)
async def routes(server: _Server) -> Response:
    """Return the page of the routes."""
    return HTMLResponse(server.pages["/docs"])


@_routes.get("/health")
async def health(server: _Server) -> Response:
    """Return the state of the server and of its models; 503 if an engine failed, or the server
    closes or is overloaded.
    """
    models: dict[str, dict[str, Any]] = {}
    engines = server.engines()
    for name, served in server.served.items():
        models[name] = {
            "live": name in engines,
            **({"reason": served.reason} if served.reason else {}),
        }
        models[name] |= {key: engines[name][key] for key in _FACTS if name in engines}
    status = server.status()
    return _json({"status": status, "models": models}, 200 if status == "ok" else 503)


@_routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(server: _Server) -> Response:
    """Return statistics for Prometheus."""
    text = prometheus_client.generate_latest(server.registry)
    return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)


@_routes.get("/v2")
async def about() -> Response:
    """Return the metadata of the server (Open Inference Protocol)."""
    return _json({"name": "raglane", "version": version("raglane"), "extensions": ["sequence"]})


@_routes.get("/v2/health/live")
async def is_live() -> Response:
    """Report that the server runs (Open Inference Protocol)."""
    return _json({"live": True})


@_routes.get("/v2/health/ready")
async def is_ready(server: _Server) -> Response:
    """Report whether the server accepts work (Open Inference Protocol)."""
    ready = server.status() == "ok"
    return _json({"ready": ready}, 200 if ready else 503)


@_routes.get("/v2/models/{name}")
async def model(name: str, server: _Server) -> Response:
    """Return the metadata of a model (Open Inference Protocol)."""
    return _json(server.named(name).description())


@_routes.get("/v2/models/{name}/ready")
async def model_is_ready(name: str, server: _Server) -> Response:
    """Report whether a model accepts frames of streams (Open Inference Protocol)."""
    ready = bool(server.engines().get(server.named(name).name, {}).get("works"))
    return _json({"name": name, "ready": ready}, 200 if ready else 503)


async def _failed(_: Any, error: Exception) -> Response:
    """Answer with the message of an error."""
    if isinstance(error, RequestValidationError):
        error = _refused(error.errors()[0])
    elif isinstance(error, HTTPException):
        error = RefusedError(error.status_code, str(error.detail))
    status = status_of(error)
    return _json({"error": error_text(error)}, status, _HEADERS.get(status))


def _refused(first: Any) -> RefusedError:
    """Return the refusal of a body that has another form."""
    path = [str(name) for name in first["loc"] if name != "body"]
    rule = str(first["msg"]).removeprefix("Input should be ").removesuffix(" required")
    fix = "correct it; /openapi.json has the form of requests"
    if first["type"] == "json_invalid":
        return RefusedError(400, "body", str(first.get("ctx", {}).get("error")), "JSON", fix)
    if first["type"] == "extra_forbidden":
        names = quote_all(PredictRequest.model_fields)
        return RefusedError(400, "option", quote(path[-1]), f"one of {names}", fix)
    got = "nothing" if first["type"] == "missing" else quote(first.get("input"))
    rule = "given" if first["type"] == "missing" else rule
    return RefusedError(400, ".".join(path) or "body", got, rule, fix)


class _Guard:
    """Checks the host, the origin, the token and the size of each request, and counts them."""

    def __init__(self, app: Any, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        server = self._server
        start = time.perf_counter()
        status = 500
        size = 0

        async def noted(sent: Any) -> None:
            nonlocal status
            status = sent.get("status", status)
            await send(sent)

        async def limited() -> Any:
            nonlocal size
            event = await receive()
            size += len(event.get("body", b""))
            if size > server.max_message:
                got = f"more than {server.max_message:,} bytes"
                rule = "within the limit of the server"
                raise HTTPException(
                    413, message("body", got, rule, "send less, or set --max-message")
                )
            return event

        server.clients.requests += 1
        try:
            if scope["path"] not in _HEALTH:
                server.clients.check_open()
            server.admit(HTTPConnection(scope))
            await self._app(scope, limited, noted)
        except RefusedError as refusal:
            response = await _failed(None, refusal)
            await response(scope, receive, noted)
        finally:
            server.clients.requests -= 1
            route = getattr(scope.get("route"), "path", "other")
            server.requests.labels(route, status).inc()
            server.times.labels(route).observe(time.perf_counter() - start)


class _EngineStatistics:
    """The statistics of the engines as metrics of Prometheus."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield the metrics; a model is a label."""
        engines = self._server.engines()
        for kind, texts in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, text in texts.items():
                metric = kind(f"raglane_{name}", text, labels=["model"])
                for model, statistics in engines.items():
                    metric.add_metric([model], statistics[name])
                yield metric
        for name, text in _TIMES.items():
            metric = GaugeMetricFamily(
                f"raglane_{name}_seconds", text, labels=["model", "quantile"]
            )
            for model, statistics in engines.items():
                for quantile, key in (("0.5", "p50"), ("0.99", "p99"), ("1", "most")):
                    metric.add_metric([model, quantile], statistics[f"{name}_ms"][key] / 1e3)
            yield metric


_GAUGES = {
    "streams": "Open streams",
    "slots": "The most open streams",
    "ready": "Streams with frames",
    "queued": "Frames that wait",
    "lag_seconds": "Mean time from the first frame of a step to its last result",
    "longest": "Frames that wait of the stream with the most",
    "results": "Results that were not sent",
}
_COUNTERS = {
    "busy_seconds": "Seconds of a processor in which the model ran",
    "steps": "Steps of the engine",
    "frames": "Frames of all steps",
    "opened": "Streams that were opened",
    "late": "Pushes while earlier frames of the stream waited",
    "refused": "Pushes and streams that were refused",
    "evicted": "Streams that were closed because they were idle",
}
_TIMES = {"step": "Times of recent steps", "queue": "Times from push to step of recent frames"}


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, headers, media_type="application/json")


def check_samples(served: Served) -> None:
    """Raise for a model whose frames are not made of samples."""
    prepared = served.streams.accepts.prepared
    if len(prepared.features) != 1 or prepared.dtype is not torch.float32:
        rule = "left out for a model whose frames are no vectors of float32"
        raise RefusedError(400, "samples", "given", rule, "send whole frames")


def client_of(connection: HTTPConnection) -> str:
    """Return the address of a client, by which its streams are counted."""
    return connection.client.host if connection.client else ""


def _stream_options(query: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a stream in the query of its address."""
    options: dict[str, Any] = {"model": None, "answers": None, "samples": None}
    for name, text in query.items():
        if name not in _STREAM_OPTIONS:
            fix = "correct the address"
            raise RefusedError(
                400, "option", quote(name), f"one of {', '.join(_STREAM_OPTIONS)}", fix
            )
        pattern, rule, convert = _STREAM_OPTIONS[name]
        if not re.fullmatch(pattern, text, re.ASCII | re.DOTALL):
            raise RefusedError(400, name, quote(text), rule, "correct the address")
        options[name] = convert(text)
    return options


_FLAG = ("true|false", "true or false", "true".__eq__)
_STREAM_OPTIONS: dict[str, tuple[str, str, Any]] = {
    "model": (".*", "the name of a model", str),
    "answers": ("json|binary", "json or binary", str),
    "samples": ("int16|float32", "int16 or float32", lambda text: np.dtype(text).newbyteorder("<")),
    "probabilities": _FLAG,
    "outputs": _FLAG,
    "top": (r"\d{1,9}", "a whole number", int),
}
