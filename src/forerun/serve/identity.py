"""Who asks, by API key: whose stores serve a request, whose share of the rows it takes, and who may be learned from.

What the engine is told is hashed with a secret that is drawn when the server starts: nothing that is kept, counted or
written tells a key. Knows no engine and no answer.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Scope

from forerun.serve.settings import ServeSettings

_SECRET = secrets.token_bytes(32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """Whoever sent a request."""

    name: str
    """Rows are shared evenly among names: one for each API key or, where there are none, for each address."""
    domain: str | None
    """Isolation domain of the request; None is the one that unnamed clients share if the operator says so."""
    key: str = ""
    """The hash of its API key, where it has one."""
    adapt: bool
    """Whether online adaptation may learn from it."""

    def cache_salt(self, own: str | None) -> str | None:
        """The engine's salt for a request with a salt of its `own`: that narrows the domain and leads into no other."""
        if own is None:
            return self.domain
        return _hashed("salted", self.key, own)


class Clients:
    """Tells clients apart as the operator's settings say."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]

    def of(self, scope: Scope) -> Client | None:
        """The client of an HTTP request; None where a key is needed and it has none that is right."""
        settings = self._settings
        if not settings.api_keys:
            return self._unnamed(scope)
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's
        right = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if not any(right):
            return None
        key = settings.api_keys[right.index(True)]
        name = _hashed("key", key)
        return Client(name=name, domain=name, key=name, adapt=key in settings.learned_keys)

    def _unnamed(self, scope: Scope) -> Client:
        """An address names nobody, since all clients of a proxy have one: it decides about turns, not about text."""
        shared = self._settings.share_unnamed
        address = scope["client"][0] if scope.get("client") else ""
        domain = None if shared else _hashed("request", secrets.token_hex(16))
        return Client(name=_hashed("address", address), domain=domain, adapt=shared)


_client: ContextVar[Client] = ContextVar("client")


def begin(client: Client) -> None:
    """From here on this task answers that client."""
    _client.set(client)


def current() -> Client:
    """The client that this task answers; LookupError where nobody said, since a guess could leak text."""
    return _client.get()


def _hashed(*parts: str) -> str:
    whole = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=16).hexdigest()
