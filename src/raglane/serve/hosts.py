"""The names under which a server is reached. A browser sends them in the header ``Host``, also for
a page that resolves its own name to an address of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple

from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.serve.live import RefusedError

_NAME = r"[a-z0-9_](?:[a-z0-9_.-]{0,252}[a-z0-9_.])?"
_AUTHORITY = re.compile(rf"({_NAME}|\[[0-9a-f:.]+\])(?::(\d{{0,5}}))?", re.ASCII)
_PORTS = {"http": "80", "https": "443"}  # which browsers do not write


class Authority(NamedTuple):
    """A host in canonical form, and its port; empty for that of the scheme."""

    host: str
    port: str


def authority_of(text: str) -> Authority | None:
    """Return the parts of a header ``Host`` or of an origin; None if it is invalid."""
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None:
        return None
    host, port = match.groups(default="")
    if not host.startswith("["):
        return Authority(canonical(host), port)
    inside = host[1:-1]
    is_address = ":" in inside and _address_of(inside) is not None
    return Authority(canonical(inside), port) if is_address else None


def canonical(host: str) -> str:
    """Return the one form of a name or address, in which IPv6 has no brackets."""
    host = host.lower().removesuffix(".")
    address = _address_of(host)
    return host if address is None else str(address)


def is_loopback(host: str) -> bool:
    """Return True for a name or address that only this machine reaches."""
    address = _address_of(host)
    return host == "localhost" if address is None else address.is_loopback


def is_unspecified(host: str) -> bool:
    """Return True for an address that is all addresses of this machine."""
    address = _address_of(host)
    return address is not None and address.is_unspecified


def _address_of(host: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        address = ip_address(host)
        return getattr(address, "ipv4_mapped", None) or address
    return None


def check_names(name: str, names: Any, example: str) -> tuple[str, ...]:
    """Return a list of texts; a single text would be read as its characters."""
    if (
        isinstance(names, str | bytes)
        or not isinstance(names, Sequence)
        or not all(isinstance(text, str) for text in names)
    ):
        raise ArgumentTypeError(name, quote(names), "a list of texts", f"pass e.g. [{example!r}]")
    return tuple(names)


def check_hosts(name: str, names: Any) -> frozenset[str]:
    """Return names and addresses of a server in canonical form."""
    hosts = set()
    for host in check_names(name, names, "example.org"):
        is_bare = ":" in host and not host.startswith("[")  # an IPv6 address, or a mistake
        authority = authority_of(f"[{host}]" if is_bare else host)
        if authority is None or authority.port or host.endswith("]:"):
            rule = "names or addresses, without a scheme, a port or a path"
            raise ArgumentError(name, quote(host), rule, "pass e.g. example.org")
        hosts.add(authority.host)
    return frozenset(hosts)


class Hosts:
    """The hosts under which pages and clients may reach a server: those of this machine, and the
    named ones. None for any, which requires a token.
    """

    def __init__(self, names: Any, token: str | None) -> None:
        self._names = None if names is None else check_hosts("allow_hosts", names)
        if names is None and token is None:
            rule = "a list of names, or None for a server with a token"
            raise ArgumentError("allow_hosts", "None", rule, "set a token, or name the hosts")

    def check(self, headers: Sequence[str]) -> Authority:
        """Return the host of a request; raise for another one."""
        authority = authority_of(headers[0]) if len(headers) == 1 else None
        if authority is None:
            got = ", ".join(map(quote, headers)) or "none"
            rule = "one header with the name of the server"
            raise RefusedError(400, "Host", got, rule, "send it once")
        host = authority.host
        if self._names is not None and not is_loopback(host) and host not in self._names:
            fix = "set --allow-host to allow it"
            raise RefusedError(403, "Host", quote(host), "a name of this server", fix)
        return authority


def is_same_site(origin: str, server: Authority) -> bool:
    """Return True if a page with this origin is from the host and port of a request."""
    # Not urlsplit, which raises for some invalid addresses.
    scheme, _, rest = origin.lower().partition("://")
    page = authority_of(rest)
    port = _PORTS.get(scheme)
    if page is None or port is None:
        return False
    return (page.host, page.port or port) == (server.host, server.port or port)
