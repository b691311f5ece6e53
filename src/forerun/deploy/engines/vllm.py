"""vLLM starts with ``--speculative-config`` and, over several machines, its own launcher.

Flags are from ``config/speculative.py``, ``config/vllm.py``, ``engine/arg_utils.py`` and
``v1/spec_decode/dynamic/utils.py`` of the wheels 0.31.0, 0.32.0 and 0.33.0. It drafts chains.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from forerun.deploy import reads_text_alone
from forerun.deploy.launch import Command, Counterpart, Deployment, DeployRequest, EngineInfo, Stretch
from forerun.drafters import AUTO
from forerun.errors import ArgumentError
from forerun.heads.engines import NAMES_METHOD

_NGRAM = {"prompt_lookup_max": "prompt_lookup_max", "prompt_lookup_min": "prompt_lookup_min"}
_SUFFIX = {
    option: f"suffix_decoding_{option}"
    for option in ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
}
PLUG_IN = "forerun.deploy.vllm.ForerunProposer"
"""This class drafts where vLLM has no counterpart of a drafter that only copies."""
VARIABLE, SCHEDULE = "FORERUN_VLLM_CONFIG", "schedule"
"""The plug-in reads its options from this variable; the option is vLLM's table by batch size, which
vLLM drops for plug-ins.
"""
_MASKS = {"parallel_drafting": True}
_REFUSES = "vLLM answers requests with min_p or logit_bias by an error while it speculates"
_RUNNER_V1 = frozenset({"suffix", "pard", "tli", "peagle", "medusa"})
"""These need the older model runner, whose sampler knows no block verification and would do
standard rejection instead.
"""
_ONE_LENGTH = _RUNNER_V1 - {"tli"}
"""These draft all their tokens at once, and as many at every step.

medusa asserts it, pard and peagle reshape by it.
"""


class Vllm(EngineInfo):
    """`Vllm` starts ``vllm serve``."""

    title: ClassVar[str] = "vLLM"
    versions: ClassVar[tuple[str, ...]] = ("0.31.0", "0.32.0", "0.33.0")
    reads: ClassVar[str] = "vllm"
    apart: ClassVar[int | None] = 0
    variable: ClassVar[str] = VARIABLE
    routes: ClassVar[bool] = True
    rules: ClassVar[dict[str, str]] = {"token_rejection": "standard", "block": "block"}
    ways: ClassVar[dict[str, Counterpart]] = {
        "ngram": Counterpart(name="ngram", options=_NGRAM, model=False),
        "suffix": Counterpart(
            name="suffix",
            options=_SUFFIX,
            model=False,
            note="suffix needs `pip install arctic-inference==0.1.1` beside vLLM, and its older model runner V1",
        ),
        "draft_model": Counterpart(name="draft_model"),
        "pard": Counterpart(name="draft_model", keys=_MASKS),
        "tli": Counterpart(
            name="draft_model",
            keys={"use_heterogeneous_vocab": True},
            note="vLLM drafts greedily over two vocabularies, with its older model runner V1",
        ),
        "eagle": Counterpart(name="eagle"),
        "eagle2": Counterpart(name="eagle"),
        "eagle3": Counterpart(name="eagle3"),
        "peagle": Counterpart(name="eagle3", keys=_MASKS, note="P-EAGLE needs vLLM's older model runner V1"),
        "dflash": Counterpart(name="dflash"),
        "dflash2": Counterpart(name="dflash"),
        "domino": Counterpart(name="dflash", note="vLLM passes Domino's correction over; SGLang applies it"),
        "dspark": Counterpart(name="dspark"),
        "mtp": Counterpart(name="mtp", model=False),
        "medusa": Counterpart(name="medusa", versions=("0.31.0", "0.32.0")),
    }

    def deployment(self, asked: DeployRequest, notes: list[str]) -> Deployment:
        words = ["vllm", "serve", asked.model, "--port", str(asked.port), *parallel(asked)]
        environment: dict[str, str] = {}
        speculation: dict[str, Any] | None
        if asked.config is not None and self.plugs_in(asked.config):
            speculation, schedule, environment = self._plugged(asked, notes)
            words.append("--no-async-scheduling")
        else:
            speculation, schedule = self.speculation(asked, notes)
        if speculation is not None:
            words += ["--speculative-config", json.dumps(speculation)]
        if asked.nodes == 1:
            return Deployment(commands=(Command(words=tuple(words), environment=environment),), schedule=schedule)
        commands = []
        for rank in range(asked.nodes):
            own = ["--nnodes", str(asked.nodes), "--node-rank", str(rank), "--master-addr", asked.first_machine]
            headless = ["--headless"] if rank else []
            commands.append(Command.on_machine(rank, (*words, *own, *headless), environment))
        return Deployment(commands=tuple(commands), schedule=schedule)

    def _plugged(
        self, asked: DeployRequest, notes: list[str]
    ) -> tuple[dict[str, Any], tuple[Stretch, ...], dict[str, str]]:
        """Return vLLM's ``speculative_config`` for forerun's own drafter in it, the schedule, and
        the environment.
        """
        config = asked.config
        assert config is not None
        k = config.num_speculative_tokens or max(one.k for one in self.drafts(config) if reads_text_alone(one.method))
        routed = config.method == AUTO or asked.adaptive  # A policy decides how much
        schedule = self.schedule(asked, k, notes) if asked.forecast is not None or not routed else ()
        options = {**config.named, "adaptive": True} if asked.adaptive else config.named
        if routed:
            which = "which drafter, and how much, follows" if config.method == AUTO else "how much is drafted follows"
            notes.append(f"{which} from what the steps take and what is accepted")
        if schedule:
            options[SCHEDULE] = [list(stretch) for stretch in schedule]
        notes.append(
            "forerun itself drafts inside vLLM (a plug-in): `pip install forerun` beside it. vLLM asks a plug-in with "
            "its older model runner V1 and without asynchronous scheduling only; others measured that to cost 10 % of "
            "the speed of a 4 B model, 6 % at 9 B, 2 % at 27 B"
        )
        notes += [_REFUSES, *self.needs(config)]
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", VARIABLE: json.dumps(options)}
        return {"method": "custom_class", "model": PLUG_IN, "num_speculative_tokens": k}, schedule, environment

    def speculation(self, asked: DeployRequest, notes: list[str]) -> tuple[dict[str, Any] | None, tuple[Stretch, ...]]:
        """Return vLLM's ``speculative_config``, None for plain decoding, and the schedule in it."""
        if asked.config is None:
            return None, ()
        draft, way, _ = self.chosen(asked, notes)
        notes.append(_REFUSES)
        if asked.config.rule == "block" and draft.method in _RUNNER_V1:
            raise ArgumentError(
                f"vLLM has the rule block in its model runner V2 only, and {draft.method} needs V1, which would pass "
                "over it: leave --rule out, or give --rule token_rejection"
            )
        read = {"draft_model": draft.model, "medusa": draft.model, "mtp": asked.model}.get(way.name) or ""
        misread = [word for word in NAMES_METHOD if word in read.lower()]
        if misread:
            raise ArgumentError(
                f"vLLM takes a path with {misread[0]!r} in it for a head of that kind, whatever it is told; rename "
                f"{read}"
            )
        _, k = self.read_drafter(asked, draft, notes)
        self.chain_only(asked, draft, k, notes)
        schedule = self.schedule(asked, k, notes, able=draft.method not in _ONE_LENGTH)
        found: dict[str, Any] = {"method": way.name}
        if draft.model is not None:
            found["model"] = draft.model
        found["num_speculative_tokens"] = k
        found |= {**way.keys, **self.mapped(draft, way)}
        if asked.config.rule is not None:
            found["rejection_sample_method"] = self.rules[asked.config.rule]
            greedy = way.name == "medusa" or "use_heterogeneous_vocab" in way.keys
            if draft.model is not None and not greedy:
                found["draft_sample_method"] = "probabilistic"
        if schedule:
            found["num_speculative_tokens_per_batch_size"] = [list(stretch) for stretch in schedule]
        if asked.pp > 1:
            notes.append("vLLM drafts with pipeline parallelism for some targets only; it says so when it starts")
        return found, schedule


def parallel(asked: DeployRequest) -> list[str]:
    """Return the flags that share the model out to devices."""
    return asked.sharing("--tensor-parallel-size", "--pipeline-parallel-size")
