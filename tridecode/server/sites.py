"""Checks of the headers Host and Origin, so that no web page of another site uses a server without a key."""

import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address

from .errors import ApiError, bad_request

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]+)(:\d+)?")


class Sites:
    """The hosts whose requests are accepted.

    A page of another site can send requests to this server in two ways. It names the server, then the browser sends
    the page's Origin. Or the page's own host name changes its address to the server's (DNS rebinding), then Host
    contains this name. An IP address in Host is safe, because it cannot change.

    Args:
        hosts: host names in addition to those of this machine; "*" accepts all.
        origins: origins of web pages that may send requests; "*" accepts all.
    """

    def __init__(self, hosts: Iterable[str], origins: Iterable[str]):
        own = socket.gethostname().lower()
        self._hosts = {"localhost", own, f"{own}.local", *(host.lower().rstrip(".") for host in hosts)}
        self._origins = set(origins)

    def check(self, scope, any_origin: bool = False) -> None:
        """Raise ApiError if a request comes from another site. With `any_origin`, only its host is checked."""
        hosts = [value.decode("latin-1").lower() for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not hosts and scope["http_version"] == "1.1":
            raise bad_request("send the header Host once")
        for host in hosts:
            if not (match := _HOST.fullmatch(host)):
                raise bad_request("the header Host is not a host name")
            if not self._is_own(match[1]):
                name = match[1][:100]
                raise ApiError(
                    403,
                    f"the host name {name} is not allowed: start the server with --allow-host {name}, or with a key",
                    code="host_not_allowed",
                )
        for name, value in scope["headers"]:
            origin = value.decode("latin-1")
            if name == b"origin" and not any_origin and not self._origins.intersection((origin, "*")):
                if origin.lower().partition("://")[2] not in hosts:
                    raise ApiError(
                        403,
                        f"web pages of {origin[:100]} may not use this server; start it with --cors {origin[:100]}",
                        code="origin_not_allowed",
                    )

    def _is_own(self, name: str) -> bool:
        with suppress(ValueError):
            return bool(ip_address(name.strip("[]")))
        name = name.rstrip(".")
        return name in self._hosts or "*" in self._hosts or name.endswith(".localhost")
