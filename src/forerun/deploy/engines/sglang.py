"""SGLang starts with ``--speculative-...`` options, of which ``num-draft-tokens`` counts the root.

Flags are from ``arg_groups/fields/spec.py``, ``parallel.py``, ``arg_groups/speculative_hook.py``
and ``speculative/adaptive_spec_params.py`` of the wheel 0.5.23. It drafts EAGLE's dynamic trees,
not trees of fixed shape.
"""

from __future__ import annotations

import json
from typing import ClassVar

from forerun.deploy.launch import (
    Command,
    Counterpart,
    Deployment,
    DraftSpec,
    EngineWriter,
    ExaminedFiles,
    Stretch,
    guesses_length,
)
from forerun.errors import ArgumentError
from forerun.heads.eagle import EagleConfig
from forerun.heads.eagle_engines import sglang_window

_LEVELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
"""These algorithms draft level by level, so that they have steps and trees; the others draft a
block, or what they find.
"""
_SAMPLES = ("EAGLE", "EAGLE3", "NEXTN")
_ADAPTS = ("EAGLE", "EAGLE3")
ALGORITHM, VARIABLE = "FORERUN", "FORERUN_SGLANG_CONFIG"
"""This algorithm runs forerun's own drafters there, and this variable holds their options."""
PLUGGED_NODES = 16
"""By default the plug-in has this many tokens scored for each request at every step, the root
included.
"""
_VERIFIES = (
    "SGLang ignores min_p while it speculates, and holds penalties as they were before a step for all its drafted "
    "tokens; on CPU, XPU and ROCm it answers with the likeliest tokens whatever the temperature (on ROCm not with "
    "--rule token_rejection or block)"
)
"""This note is about `eagle_sample` (``speculative/eagle_utils.py``), with which these algorithms
verify.
"""
_TRIE = "SGLang copies from one trie of all requests' n-grams, whose depth is --speculative-ngram-max-trie-depth"


class SGLang(EngineWriter):
    """Starts ``python -m sglang.launch_server``."""

    title: ClassVar[str] = "SGLang"
    versions: ClassVar[tuple[str, ...]] = ("0.5.23",)
    reads: ClassVar[str] = "sglang"
    handled: ClassVar[tuple[str, ...]] = ("its command line must have",)
    vocabulary_margin: ClassVar[int | None] = 0
    variable: ClassVar[str] = VARIABLE
    rules: ClassVar[dict[str, str]] = {
        "token_rejection": "--speculative-use-rejection-sampling",
        "block": "--speculative-use-block-verification",
    }
    ways: ClassVar[dict[str, Counterpart]] = {
        "ngram": Counterpart(name="NGRAM", model=False, note=_TRIE),
        "draft_model": Counterpart(name="STANDALONE"),
        "eagle": Counterpart(name="EAGLE"),
        "eagle2": Counterpart(name="EAGLE"),
        "eagle3": Counterpart(name="EAGLE3"),
        "dflash": Counterpart(name="DFLASH"),
        "dflash2": Counterpart(name="DFLASH"),
        "domino": Counterpart(name="DFLASH"),
        "dspark": Counterpart(name="DSPARK"),
        "mtp": Counterpart(name="NEXTN", model=False),
    }

    def deployment(self) -> Deployment:
        request = self.request
        words = ["python", "-m", "sglang.launch_server", "--model-path", request.model, "--port", str(request.port)]
        words += request.sharing("--tp-size", "--pp-size")
        speculation, schedule, environment = list[str](), tuple[Stretch, ...](), dict[str, str]()
        if self.plugs_in:
            speculation, environment = self._plug_in()
        elif request.config is not None:
            speculation, schedule = self._speculation()
        words += speculation
        # Each size is a lower bound; of the lengths that it may take there, there is one.
        table = {str(first): {"candidate_steps": [k]} for first, _, k in schedule}
        files = {_TABLE: json.dumps(table, indent=2) + "\n"} if schedule else {}
        if request.nodes == 1:
            command = Command(words=tuple(words), environment=environment)
            return Deployment(commands=(command,), files=files, schedule=schedule)
        words += ["--dist-init-addr", f"{request.first_machine}:{_PORT}", "--nnodes", str(request.nodes), "--node-rank"]
        commands = [Command.on_machine(rank, (*words, str(rank)), environment) for rank in range(request.nodes)]
        return Deployment(commands=tuple(commands), files=files, schedule=schedule)

    def _plug_in(self) -> tuple[list[str], dict[str, str]]:
        """Return options and environment for forerun's own drafter inside SGLang; ArgumentError if
        it should be adaptive.
        """
        config = self.config
        drafts = self.list_drafts()
        if self.request.adaptive:
            raise ArgumentError("SGLang scores as many tokens for each request at every step: leave --adaptive out")
        tree = config.method == "merge" or any(draft.method == "rest" or draft.nodes for draft in drafts)
        k = config.num_speculative_tokens or min(PLUGGED_NODES - 1, max(draft.k for draft in drafts))
        count = 1 + int(config.options.get("nodes", PLUGGED_NODES - 1) if tree else k)
        self.schedule(k, able=False)
        self.notes.append(
            "forerun itself drafts inside SGLang (a plug-in), which verifies whole trees: `pip install forerun` beside "
            "it. It scores as many tokens for each request at every step, and verifies trees on pages of one token or "
            "with flashinfer; --speculative-eagle-topk 1 drafts chains"
        )
        self.notes.append(_VERIFIES)
        self.note_outside()
        words = ["--speculative-algorithm", ALGORITHM, "--speculative-num-draft-tokens", str(count)]
        words += [] if tree else ["--speculative-eagle-topk", "1"]
        return words, {VARIABLE: json.dumps({"method": config.method, **config.drafter_options})}

    def _speculation(self) -> tuple[list[str], tuple[Stretch, ...]]:
        draft, way, _ = self.choose()
        if way.name in ("DFLASH", "DSPARK") and self.request.pp > 1:
            raise ArgumentError(f"SGLang runs {way.name} without pipeline parallelism only: leave --pp out, raise --tp")
        examined, k = self.read_drafter(draft)
        self.notes += [_VERIFIES] if way.name in (*_LEVELS, "NGRAM") else []
        words = ["--speculative-algorithm", way.name]
        if draft.model is not None:
            words += ["--speculative-draft-model-path", draft.model]
        branches = self._branches(draft, way, k)
        schedule = self.schedule(k, able=way.name in _ADAPTS and branches == 1)
        k = schedule[0].k if schedule else k
        if way.name in _LEVELS:
            words += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", str(branches)]
        if way.name == "NGRAM":
            words += ["--speculative-ngram-max-bfs-breadth", str(branches)]
        words += self._count(draft, way, k, branches, examined)
        words += [*_window(examined), *self._rule(way, branches)]
        words += (
            ["--speculative-adaptive", "--speculative-adaptive-config", self.request.path(_TABLE)] if schedule else []
        )
        return words, schedule

    def _count(self, draft: DraftSpec, way: Counterpart, k: int, branches: int, examined: ExaminedFiles) -> list[str]:
        """Return how many tokens are scored, the root among them.

        For a block that nobody has looked at, SGLang reads the number from the head.
        """
        if way.name in ("DFLASH", "DSPARK") and guesses_length(draft, examined):
            return []
        count = 1 + k
        if branches > 1:
            grown = branches + (k - 1) * branches**2  # of which the tree is chosen; a trie's has no such limit
            count = 1 + (min(draft.nodes, grown) if way.name in _LEVELS else draft.nodes)
        if draft.method == "domino" and examined.launch is not None:
            count = examined.launch.head.config.block_size  # whose first place drafts, too
        block = ["--speculative-dspark-block-size", str(k)] if way.name == "DSPARK" else []
        return [*block, "--speculative-num-draft-tokens", str(count)]

    def _branches(self, draft: DraftSpec, way: Counterpart, k: int) -> int:
        """Return the number of continuations of a node; 1 for a chain."""
        options = draft.options
        grows = draft.method == "eagle2"
        if way.name in _LEVELS and (grows or options.get("top_k")):
            return int(options.get("top_k") or 10)
        if way.name == "NGRAM" and draft.nodes:
            return int(options.get("max_branches") or 10)
        self.note_chain(draft, k)
        return 1

    def _rule(self, way: Counterpart, branches: int) -> list[str]:
        rule = self.config.rule
        if rule is None:
            return []
        if way.name not in _SAMPLES or branches > 1:
            raise ArgumentError(
                f"SGLang has the rule {rule} for chains of {', '.join(_SAMPLES)} only: leave --rule out"
            )
        return [self.rules[rule]]


_TABLE = "sglang-adaptive.json"
_PORT = 20000  # At which the first machine waits for the others


def _window(examined: ExaminedFiles) -> list[str]:
    config = examined.launch.head.config if examined.launch is not None else None
    return sglang_window(config).split() if isinstance(config, EagleConfig) else []
