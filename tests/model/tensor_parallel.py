"""One process of the tensor-parallel test; started by torchrun with the checkpoint as its argument."""

import os
import sys

from torch import distributed

from forerun.cli import leave
from forerun.model import LayerRange, TransformersTarget
from model.families import make
from model.test_placement import error, tree

if __name__ == "__main__":
    target = TransformersTarget.load(sys.argv[1], slots=64, tp_plan="auto")
    assert error(target, make("llama")) <= 2e-5
    assert target.cache.read(0, 0, 1)[0].shape == (1, 1, 16), "each process holds one head"
    early = target.run([0], [tree()], LayerRange(stop=2))
    target.run([0], [tree()], LayerRange(start=2, stop=4), states=early)
    sys.stdout.write(f"rank {os.environ['RANK']} matches\n")
    # A process that leaves while the other still talks to it takes the other down (gloo aborts).
    distributed.barrier()
    distributed.destroy_process_group()
    leave(0)
