"""What every serving benchmark asks for: enlarged demo models, speculative configurations, prompts and bodies."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from forerun.demo import contexts
from forerun.demo.scale import ScaledModel, scaled_head_folder
from forerun.shipped import resolve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the package `benchmarks`, for those who import it after this module
CONTEXT, TOKENS, MAX_MODEL_LEN, ROWS, FEWEST = 300, 128, 1536, 16, 4
NAME = "target"
DRAFTERS = ("ngram", "draft_model", "eagle3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Configs:
    """Speculative configurations of one kind of drafter."""

    ours: dict[str, Any]
    theirs: dict[str, Any]

    @property
    def same(self) -> int | None:
        """vLLM's number of drafted tokens where forerun's own is another: both are then measured."""
        key = "num_speculative_tokens"
        return int(self.theirs[key]) if self.theirs[key] != self.ours[key] else None


def models() -> dict[str, Path]:
    """The enlarged target, draft model and head on disk."""
    target = ScaledModel(resolve("demo"), billions=0.4)
    draft = ScaledModel(resolve("demo-draft"), billions=0.031)
    return {"target": target.path, "draft": draft.path, "head": scaled_head_folder("demo-eagle3", target)}


def configs(paths: Mapping[str, Path]) -> dict[str, Configs]:
    """What each engine is told: vLLM the setup of its documentation, forerun the same drafter, which adapts."""
    theirs = {
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"method": "draft_model", "model": str(paths["draft"]), "num_speculative_tokens": 5},
        "eagle3": {"method": "eagle3", "model": str(paths["head"]), "num_speculative_tokens": 5},
    }
    found = {name: Configs(ours=dict(config), theirs=config) for name, config in theirs.items()}
    found["ngram"].ours["num_speculative_tokens"] = 16
    return found


def texts(target: Path) -> list[str]:
    """Pieces of the held-out files, `CONTEXT` tokens each."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer.decode(ids) for ids in contexts(tokenizer, count=ROWS, length=CONTEXT)]


def fresh(pieces: Sequence[str], count: int, mark: str) -> list[str]:
    """Prompts that nobody has seen: each begins with a comment of its own."""
    return [f"# {mark} {index}\n{pieces[index % len(pieces)]}" for index in range(count)]


def body(prompt: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A greedy request of `TOKENS` tokens to ``/v1/completions``."""
    asked = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**asked, **extra}
