"""Live streams on a Ray cluster: replicas of the server, and a router that sends each stream to the
same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raglane._utils.messages import require
from raglane.errors import ArgumentTypeError, ClosedError
from raglane.streams.engine import Engine

_ROUTER = "ray.serve.experimental.consistent_hash_router"
_MOST = (
    2**20
)  # requests of a replica at a time; a live stream over WebSocket is one, and the server has own limits


def deployment(
    models: Any,
    *,
    token: str | None = None,
    allow_hosts: Sequence[str] | None = (),
    **options: Any,
) -> Any:
    """Return a deployment for Ray Serve whose replicas are servers as that of ``raglane serve``.

    Each replica has its own engines. Ray's consistent hashing sends all requests with the same
    header ``x-session-id`` to one replica, and a WebSocket stays at its replica. If replicas are
    lost or added, some ids move to another replica, where a client continues from the last state
    that it has kept.

    Args:
        models: a run, or another model of :class:`Engine`; several ones by name. Ray pickles them.
        token: clients must send it as ``Authorization: Bearer TOKEN``. None disables authentication.
        allow_hosts: the names and addresses under which clients reach Ray's proxies, next to those
            of this machine, e.g. ``["example.org"]``; None for any, which requires a token.
        **options: those of the server: ``max_streams``, ``idle`` etc., as the options of ``raglane
            serve``.

    Returns:
        A ``ray.serve.Deployment``; its method ``options`` sets the number of replicas and their
        resources.

    Raises:
        MissingExtraError: Ray Serve is not installed.
        ArgumentTypeError: a model is an engine, which cannot be sent to other processes.
        ArgumentError: ``allow_hosts`` is invalid.

    Example:
        >>> from ray import serve  # doctest: +SKIP
        >>> two = rl.serve.deployment(rl.load("runs/vowels")).options(num_replicas=2)  # doctest: +SKIP
        >>> serve.run(two.bind())  # doctest: +SKIP
    """
    for module in ("fastapi", "prometheus_client", "jinja2", _ROUTER):
        require(module, "ray")
    from ray import serve

    named = dict(models) if isinstance(models, Mapping) else {"model": models}
    if any(isinstance(model, Engine) for model in named.values()):
        raise ArgumentTypeError(
            "models", "an engine", "runs or modules", "pass the model of the engine"
        )

    from raglane.serve.hosts import Hosts

    Hosts(allow_hosts, token)  # raises here, and not in the replicas

    def build() -> Any:
        from raglane.serve.app import create_app

        return create_app(named, token=token, allow_hosts=allow_hosts, **options)

    router = {
        "request_router_class": f"{_ROUTER}.ConsistentHashRouter",
        # Another replica does not have the state of the stream.
        "request_router_kwargs": {"num_fallback_replicas": 0},
    }
    replica = serve.ingress(build)(_Replica)
    return serve.deployment(
        replica, name="raglane", max_ongoing_requests=_MOST, request_router_config=router
    )


class _Replica:
    """A server in a process of Ray, which replaces it if an engine has failed."""

    app: Any

    async def check_health(self) -> None:
        """Raise if an engine has failed."""
        if self.app.state.server.status() == "failed":
            raise ClosedError(
                "engine", "an engine whose step failed", "a working engine", "restart it"
            )
