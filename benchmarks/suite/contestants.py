"""Who takes part in the contest: the drafters that this target can have, with options for a pass of some 16 rows.

Knows names and options; does not run anything.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.suite.arms import TREE_NODES, TREE_TOP_K, Arm
from benchmarks.suite.contest import PLAIN, Contestant, TransformersContestant, Workload
from benchmarks.suite.speed import Progress
from forerun import LLM
from forerun.control.costs import DraftCost
from forerun.demo import prompts
from forerun.heads.eagle import EagleHead
from forerun.training.data import datastore
from forerun.writing import TokenizerIdentity

FEW_NODES = 15
"""With the root 16 rows: more are dear on this kind of machine."""
CHEAP_NODES = 7
"""With the root 8 rows, which cost hardly more than one: for drafters that always fill their tree."""
CORPUS_FILES = 400
"""Of the standard library, for the datastore; those that the shipped prompts were cut from are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """What there is to draft with."""

    draft: Path | None
    """A smaller model."""
    head: EagleHead | None
    """An EAGLE-3 head of the target, in its dtype."""
    store: Path | None
    """A datastore for `rest`."""
    chain: int
    lookup: int


def training_free(field: Field) -> dict[str, Mapping[str, Any]]:
    """Name -> configuration of every drafter that needs nothing but the target and text."""
    found: dict[str, Mapping[str, Any]] = {
        "ngram": {"method": "ngram", "num_speculative_tokens": field.lookup},
        "suffix": {"method": "suffix", "num_speculative_tokens": FEW_NODES},
        "recycling": {"method": "recycling", "nodes": CHEAP_NODES},
        "suffix + recycling": _suffix_and_recycling(),
        "lookahead": {"method": "lookahead", "window": 4, "level": 3, "guesses": 3},
    }
    if field.store is not None:
        found["rest"] = {"method": "rest", "datastore": str(field.store), "nodes": FEW_NODES}
    return found


def _suffix_and_recycling() -> Mapping[str, Any]:
    """Long copies where there are any, likely successors elsewhere, in one tree."""
    members = [
        {"method": "suffix", "num_speculative_tokens": CHEAP_NODES},
        {"method": "recycling", "nodes": CHEAP_NODES},
    ]
    return {"method": "merge", "drafters": members, "nodes": CHEAP_NODES}


def trained(field: Field) -> dict[str, Mapping[str, Any]]:
    """Name -> configuration of the draft model and the head, where there are any."""
    found: dict[str, Mapping[str, Any]] = {}
    if field.draft is not None:
        model = {"method": "draft_model", "model": str(field.draft)}
        found["draft_model"] = model | {"num_speculative_tokens": field.chain}
    if field.head is not None:
        head = {"method": "eagle3", "model": field.head, "num_speculative_tokens": field.chain}
        found["eagle3"] = head
        found["eagle3 tree"] = head | {"top_k": TREE_TOP_K, "nodes": TREE_NODES}
    return found


def contestants(llm: LLM, work: Workload, field: Field, costs: Mapping[str, DraftCost]) -> list[Contestant]:
    """Plain decoding, every drafter, which drafts the same at every step, and `auto`, which chooses among all of them.

    Args:
        costs: of drafters by name, for those whose speed-up is to be predicted.
    """
    costly = trained(field)
    configs = {**training_free(field), **costly}
    if work.predictions is not None:
        configs["prediction"] = {"method": "prediction", "num_speculative_tokens": FEW_NODES}
    candidates = [costly[name] for name in ("draft_model", "eagle3") if name in costly]
    configs["auto"] = {"method": "auto", "drafters": candidates}
    return [
        Contestant(PLAIN, llm, False, work),
        *(
            Contestant(f"forerun {name}", llm, {"adaptive": name == "auto", **config}, work, cost=costs.get(name))
            for name, config in configs.items()
        ),
    ]


def peers(model: Any, work: Workload, lookup: int) -> list[Arm]:
    """transformers' plain decoding and its prompt lookup."""
    return [
        TransformersContestant("transformers plain", model, {}, work),
        TransformersContestant("transformers prompt lookup", model, {"prompt_lookup_num_tokens": lookup}, work),
    ]


def library_store(tokenizer: Any, folder: Path, progress: Progress) -> Path:
    """A datastore of some files of this interpreter's standard library, none of them a prompt; made once."""
    folder = folder / TokenizerIdentity.of(tokenizer).vocabulary[:12]
    if not (folder / "manifest.json").is_file():
        root = Path(sysconfig.get_path("stdlib"))
        asked = {prompt.name for prompt in prompts()}
        files = [
            path
            for path in sorted(root.rglob("*.py"))
            if "site-packages" not in path.parts and str(path.relative_to(root)) not in asked and _is_text(path)
        ]
        step = max(1, len(files) // CORPUS_FILES)
        datastore.build(files[::step], tokenizer, folder, name="demo", tell=progress)
    return folder


def _is_text(path: Path) -> bool:
    """Whether it holds anything, in UTF-8."""
    try:
        return bool(path.read_text(encoding="utf-8").strip())
    except UnicodeDecodeError:
        return False
