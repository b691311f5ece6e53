"""From the signal on: all is answered or cut off, and the process is gone when its drain time is over."""

from __future__ import annotations

from pathlib import Path

import pytest

from selection import slow
from serve.drains import DRAINS, SLACK_S, ended

FAST = ("a stream that takes too long",)


@pytest.mark.parametrize("name", [*FAST, *slow(*DRAINS)])
def test_the_process_ends(name: str, checkpoint: Path, request: pytest.FixtureRequest) -> None:
    drain = DRAINS[name]
    code, seconds, written, heard = ended(drain, checkpoint)
    assert code == drain.code, written
    if request.node.get_closest_marker("slow"):
        assert seconds <= drain.drain_s + SLACK_S
    if code == 0:
        assert all(status == 200 or "the server is draining" in text for status, text in heard)
    cut = [text for status, text in heard if "the server was stopped" in text]
    assert bool(cut) == (code == 1 and bool(heard)) or "Timeout" in written
    if cut:
        assert "cut off at the end of the drain time" in written
