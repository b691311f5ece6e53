"""Opens the socket that a server listens on. Imports nothing large, so that it comes first."""

from __future__ import annotations

import socket

from forerun.errors import ArgumentError


def listen(host: str, port: int) -> socket.socket:
    """Open a socket that listens, so that a wrong address is known before anything is loaded."""
    if not 0 <= port < 1 << 16:
        raise ArgumentError(f"--port is a number from 0 (any free one) to 65535, got {port}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, UnicodeError) as error:
        raise ArgumentError(
            f"cannot listen on {host!r}, port {port}: {getattr(error, 'strerror', None) or error}; choose another "
            "--host or --port"
        ) from error
