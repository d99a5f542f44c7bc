"""``raglane serve``: runs over HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raglane._utils.files import read_file
from raglane._utils.messages import quote, require
from raglane.cli import console, options
from raglane.cli.options import option
from raglane.errors import ArgumentError

if TYPE_CHECKING:
    from fastapi import FastAPI

_TOKEN = "RAGLANE_TOKEN"


@options.command
def serve(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=options.path,
            metavar="[RUN...]",
            help="Folders of runs or of saved models; the name of a folder is that of its model.",
            show_default=False,
        ),
    ] = None,
    *,
    model: Annotated[
        list[str] | None,
        option(
            "Layer or module to serve, as package.module:function, whose function returns it; "
            "NAME=package.module:function names it. May be repeated.",
            show_default="none",
        ),
    ] = None,
    feature_shape: Annotated[
        int | None,
        option("Numbers in a frame of each --model.", show_default="those of its first layer"),
    ] = None,
    port: Annotated[int, option("Port; 0 takes a free one.")] = 8000,
    host: Annotated[
        str, option("Address of this machine to which clients connect, e.g. 0.0.0.0 for all.")
    ] = "127.0.0.1",
    token_file: Annotated[
        Path | None,
        option(
            f"File with the token that clients must send. The environment variable {_TOKEN} may contain it instead.",
            parser=options.path,
            show_default="none",
        ),
    ] = None,
    max_streams: Annotated[
        int, option("Maximum number of live streams of a model.", options.RUN, "--max-streams")
    ] = 1000,
    threads: Annotated[int, option("Threads of each model.")] = 1,
    max_queue: Annotated[int, option("Maximum number of frames of a stream that wait.")] = 1024,
    client_streams: Annotated[
        int,
        option(
            "Maximum number of live streams of a client address.",
            options.RUN,
            "--max-streams-per-client",
        ),
    ] = 256,
    max_message: Annotated[
        int, option("Maximum size of a request or of a message of a stream, in bytes.")
    ] = 4 * 2**20,
    period: Annotated[
        float | None,
        option(
            "Seconds between frames of a stream; while results take longer, no stream is accepted.",
            show_default="none",
        ),
    ] = None,
    renew: Annotated[
        int | None,
        option(
            "For streams without an end: maximum number of frames that the state of a stream remembers.",
            show_default="all",
        ),
    ] = None,
    warm_up: Annotated[
        int | None,
        option(
            "Frames that a second state has seen when it takes over, with --renew.",
            show_default="none",
        ),
    ] = None,
    idle: Annotated[
        float,
        option("Seconds after which an idle stream is closed.", options.RUN, "--idle-timeout"),
    ] = 300,
    drain: Annotated[
        float,
        option(
            "Maximum number of seconds after SIGTERM in which queued frames are answered.",
            options.RUN,
            "--shutdown-timeout",
        ),
    ] = 30,
    origin: Annotated[
        list[str] | None,
        option(
            "Address of another site whose pages may use the server; several: repeat it, or a,b.",
            options.RUN,
            "--allow-origin",
            show_default="none",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        option(
            "Another name of the server, as e.g. example.org, that requests may use; several: repeat it, or a,b.",
            show_default="none",
        ),
    ] = None,
    int8: Annotated[
        bool, option("Use int8 weights for live streams.", options.RUN, "--int8")
    ] = False,
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Serve the best models of runs, and layers or modules, over HTTP: whole sequences, and live
    streams over WebSocket.

    A live stream gets the results of the whole sequence so far, bit for bit. A run that reads
    sequences from the end has no live streams. The page at the root of the address has a form and a
    live plot, and /docs lists the routes. After SIGTERM the server answers all queued frames, sends
    the state of each stream to its client, and exits with code 0.

    For example:

    raglane serve runs/vowels

    raglane serve runs/vowels runs/names --port 8080 --max-streams 5000

    raglane serve --model voice=detectors:make --feature-shape 512
    """
    for module in ("fastapi", "uvicorn", "websockets", "prometheus_client", "jinja2"):
        require(module, "serve")
    _check_numbers(port, drain)
    secret = _token(token_file)
    family, where = _address(host, port)
    allowed = _allowed(host, where[0], allow_host or [], secret)
    runs = runs or []
    names = _names(runs)
    specs = _specs(model or [], names)
    _check_models(names, specs, feature_shape)
    import torch

    from raglane.runs.run import load
    from raglane.serve.app import CHUNK, create_app
    from raglane.serve.hosts import is_loopback

    models: dict[str, Any] = {
        name: load(run, cell=cell) for name, run in zip(names, runs, strict=True)
    }
    tasks = {name: run.task for name, run in models.items()}
    dtype = torch.int8 if int8 else None
    engines: dict[str, Any] = {
        "max_streams": max_streams,
        "threads": threads,
        "max_queue": max_queue,
    }
    engines |= {"idle": idle, "renew": renew, "warm_up": warm_up}
    for name, spec in specs.items():
        models[name] = _engine(
            spec, feature_shape=feature_shape, dtype=dtype, chunk=CHUNK, **engines
        )
    app = create_app(
        models,
        token=secret,
        client_streams=client_streams,
        max_message=max_message,
        origins=origin or (),
        allow_hosts=allowed,
        period=period,
        dtype=dtype,
        **engines,
    )
    log = console.logger(quiet)
    with _listening(family, where, host) as listener:
        where = listener.getsockname()
        shown_host = f"[{where[0]}]" if ":" in where[0] else where[0]
        address = f"http://{shown_host}:{where[1]}"
        for line in _served(app, tasks):
            log(line)
        if secret is None and not is_loopback(where[0]):
            log(
                f"note: other machines can connect, and need no token; --token-file or {_TOKEN} sets one"
            )
        code = _run(app, listener, drain, lambda: log(f"serving: {address}"))
    if code:
        raise typer.Exit(code)


def _check_numbers(port: int, drain: float) -> None:
    if not 0 <= port < 2**16:
        raise ArgumentError("port", quote(port), "a number from 0 to 65535", "pass e.g. 8000")
    if not 0 <= drain < float("inf"):
        raise ArgumentError(
            "drain", quote(drain), "a finite number of seconds, at least 0", "pass e.g. 30"
        )


def _check_models(names: list[str], specs: dict[str, str], feature_shape: int | None) -> None:
    """Check that there is a model, and that ``--feature-shape`` belongs to one."""
    if not names and not specs:
        raise ArgumentError("RUN", "none", "a run, or --model", "pass e.g. runs/vowels")
    if feature_shape is not None and not specs:
        raise ArgumentError(
            "feature_shape", str(feature_shape), "passed with --model", "leave it out"
        )


def _served(app: FastAPI, tasks: dict[str, str]) -> list[str]:
    """Return a line for each model of a server."""
    lines = []
    for name, served in app.state.server.served.items():
        reason = f", whole sequences only: {served.reason}" if served.reason else ""
        lines.append(f"model: {name} ({tasks.get(name, 'module')}){reason}")
    return lines


def _specs(models: list[str], names: list[str]) -> dict[str, str]:
    """Return the functions of models by the names of their models."""
    specs: dict[str, str] = {}
    for text in models:
        name, _, spec = text.rpartition("=")
        module, _, function = spec.partition(":")
        if not all(word.isidentifier() for word in (*module.split("."), function)):
            rule = "package.module:function, or NAME=package.module:function"
            raise ArgumentError("model", quote(text), rule, "pass e.g. detectors:voice")
        name = name or function
        if name in specs or name in names:
            fix = "name one with NAME=package.module:function"
            raise ArgumentError("model", f"two named {quote(name)}", "different names", fix)
        specs[name] = spec
    return specs


def _engine(spec: str, **settings: Any) -> Any:
    """Return an engine of the layer or module that a function returns."""
    from torch import nn

    from raglane.streams.engine import Engine

    module_name, _, function_name = spec.partition(":")
    # As for python -m, modules in the current folder can be imported.
    sys.path.insert(0, os.getcwd())
    try:
        module = getattr(importlib.import_module(module_name), function_name)
        module = module if isinstance(module, nn.Module | list) else module()
    except Exception as error:
        got = f"{spec} ({type(error).__name__}: {error})"
        rule = "a function without arguments that returns a layer or module"
        raise ArgumentError("model", got, rule, "correct it") from error
    finally:
        sys.path.remove(os.getcwd())
    for layer in module if isinstance(module, list) else [module]:
        if isinstance(layer, nn.Module):
            layer.eval()
    return Engine(module, **settings)


def _names(runs: list[Path]) -> list[str]:
    """Return the names of models: of the folder of a run, which may be given by its best model."""
    names: list[str] = []
    for run in runs:
        folder = run.resolve()
        name = folder.parent.name if folder.name == "best" else folder.name
        if name in names:
            raise ArgumentError(
                "RUN", f"two named {quote(name)}", "folders of different names", "rename one"
            )
        names.append(name)
    return names


def _token(file: Path | None) -> str | None:
    """Return the token in a file or in the environment."""
    from raglane.serve.app import check_token

    name = _TOKEN
    text = os.environ.get(_TOKEN)
    if file is not None:
        name = str(file)
        try:
            text = read_file(file).decode().strip()
        except (OSError, ValueError) as error:
            got = f"{file}: {getattr(error, 'strerror', None) or 'no text'}"
            raise ArgumentError(
                "token_file", got, "a file with a token", "name another file"
            ) from error
    if text is None or (file is None and not text):
        return None
    return check_token(name, text)


def _allowed(host: str, address: str, allow_host: list[str], token: str | None) -> list[str] | None:
    """Return the hosts of the requests that the server accepts; None for any."""
    from raglane.serve.hosts import authority_of, check_hosts, is_unspecified

    check_hosts("allow_host", allow_host)
    if is_unspecified(address) and not allow_host:
        if token is None:
            rule = "an address of one network, or used with a token or with --allow-host"
            fix = "set --token-file, or name the server with --allow-host"
            raise ArgumentError("host", quote(host), rule, fix)
        return None
    # A browser sends no zone of an address of IPv6.
    names = [host] if authority_of(host) is not None else []
    return [*allow_host, *names, address.partition("%")[0]]


@contextmanager
def _address_errors(host: str, port: int) -> Iterator[None]:
    """Raise ArgumentError for an address that cannot be used."""
    try:
        yield
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        got = f"{host}:{port} ({reason})"
        rule = "a free port of an address of this machine"
        raise ArgumentError("port", got, rule, "pass another --port or --host") from error


def _address(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """Return an address to listen at, and its family."""
    with _address_errors(host, port):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return family, address


def _listening(family: socket.AddressFamily, address: tuple[Any, ...], host: str) -> socket.socket:
    """Return a socket that listens."""
    with _address_errors(host, address[1]):
        return socket.create_server(address[:2], family=family, backlog=2048)


def _run(app: FastAPI, listener: socket.socket, drain: float, started: Any) -> int:
    """Serve until a signal; return the exit code: 0 if all queued frames were answered."""
    import uvicorn

    from raglane.serve.app import settings

    class DrainingServer(uvicorn.Server):
        code = 0
        draining: asyncio.Task[None] | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
            # In a signal handler, which must not touch the event loop otherwise. It may run before
            # the startup.
            asyncio.get_running_loop().call_soon_threadsafe(self.stop, sig)

        def stop(self, sig: int) -> None:
            if self.draining is None:
                self.draining = asyncio.create_task(self.drain(sig))
            else:
                self.code = 128 + sig
                self.should_exit = True
                self.force_exit = True

        async def drain(self, sig: int) -> None:
            try:
                await asyncio.wait_for(app.state.server.clients.drain(), drain)
            except TimeoutError:
                self.code = 128 + sig
            self.should_exit = True

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        **settings(app),
    )
    server = DrainingServer(config)
    server.run([listener])
    return server.code
