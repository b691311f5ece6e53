"""The head that vLLM is to load: the one named, else the one that ships, else a stand-in that no training made.

The stand-in is a fresh head whose ``fc`` is fitted in closed form, so that it guesses some tokens right: what the
target will think of the next token, linearly from what it thinks of this one. Its boundaries are not vLLM's default, so
layer ids that were read wrongly would show. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from forerun.checkpoints import HeadCheckpoint, TargetFacts, write_head
from forerun.checkpoints.engines import export_head
from forerun.demo import FOLDER
from forerun.drafters.heads.eagle import EagleConfig, EagleHead

SHIPPED = FOLDER / "eagle3"
BOUNDARIES = (1, 4, 7)
"""Of the stand-in; vLLM's default for 8 layers is 2, 4, 5."""
RIDGE = 1e-2
"""Of the fit, as a share of the mean squared feature."""


def exported_head(named: Path | None, target: Path, texts: Sequence[Sequence[int]], work: Path) -> tuple[Path, str]:
    """The directory that `forerun export --to vllm` wrote, and a sentence that says whose head it is.

    Args:
        named: a head's directory, or None.
        target: the target's directory.
        texts: token ids that the stand-in is fitted to, if one is needed.
        work: where to write.
    """
    facts = TargetFacts.read(target)
    source, what = named, f"the head in {named}"
    if source is None and (SHIPPED / "config.json").is_file():
        source, what = SHIPPED, "the shipped head"
    if source is None:
        source = write_head(HeadCheckpoint.of(stand_in(target, texts)), work / "stand-in", "flat", facts)
        what = f"NOT a trained head: {SHIPPED} does not exist. A fresh head with a fitted fc, boundaries {BOUNDARIES}"
    done = export_head(source, facts, "vllm", work / "eagle3")
    return done.directory, what


@torch.no_grad()
def stand_in(target: Path, texts: Sequence[Sequence[int]]) -> EagleHead:
    """An EAGLE-3.1 head in float32 that was fitted, not trained."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    options = {"boundaries": BOUNDARIES, "fc_norm": True, "norm_output": True}
    head = EagleHead.initial(model, EagleConfig.for_target("eagle3", model, None, options))
    size = head.fc.in_features
    squares, products = torch.zeros(size, size), torch.zeros(size, head.config.hidden_size)
    for text in texts:
        states = model.model(torch.tensor([text]), output_hidden_states=True)
        features = [norm(states.hidden_states[b][0]) for norm, b in zip(head.fc_norm, BOUNDARIES, strict=True)]
        # Entry i reads the features of token i and predicts token i + 2, as the target's state at token i + 1 does.
        read = torch.cat(features, dim=-1)[:-1]
        wanted = (states.last_hidden_state[0] / model.model.norm.weight)[1:]
        squares, products = squares + read.T @ read, products + read.T @ wanted
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(size)
    head.fc.weight.copy_(torch.linalg.solve(squares + ridge, products).T)
    return head
