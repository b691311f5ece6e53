"""Ports that nobody listens on."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """As many different ports of this machine, free a moment ago."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]
