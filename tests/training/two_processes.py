"""One process of the test that trains a real head on two: the command line, run after run."""

import json
import os
import sys

from forerun.cli import leave, main

if __name__ == "__main__":
    for port, words in json.loads(sys.argv[1]):
        # A port for each: on the same one a process may meet the group that the other is about to leave.
        os.environ["MASTER_PORT"] = str(port)
        code = main(words)
        if code:
            leave(code)
    leave(0)
