"""Run as a process: for each line read, a child saves checkpoint after checkpoint until it is killed."""

from __future__ import annotations

import copy
import itertools
import os
import sys
from pathlib import Path

import torch

from contract.harness import model, relative, word_tokenizer
from forerun.engine.adapting.adaptation import Snapshots
from forerun.model import Target


def say(text: object) -> None:
    os.write(1, f"{text}\n".encode())


def save_forever(snapshots: Snapshots) -> None:
    twin = copy.deepcopy(relative())
    kept = snapshots.resume()
    for version in itertools.count(1 if kept is None else kept.version + 1):
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(version)
        snapshots.save(twin, version, {"updates": version})
        say(version)


def main() -> None:
    snapshots = Snapshots(Path(sys.argv[1]), Target(model(), rows=1, slots=32), word_tokenizer(), relative())
    say("ready")
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                save_forever(snapshots)
            finally:
                os._exit(1)
        say(child)
        os.waitpid(child, 0)
        say("dead")


if __name__ == "__main__":
    main()
