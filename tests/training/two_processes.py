"""One process of the test that trains a real head on two: the command line, run after run."""

from __future__ import annotations

import json
import sys

from forerun.cli import main

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        code = main(words)
        if code:
            sys.exit(code)
