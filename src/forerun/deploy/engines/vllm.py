"""vLLM starts with ``--speculative-config`` and, over several machines, its own launcher.

Flags are from ``config/speculative.py``, ``config/vllm.py``, ``engine/arg_utils.py`` and
``v1/spec_decode/dynamic/utils.py`` of the wheels 0.31.0, 0.32.0 and 0.33.0. It drafts chains.

NVIDIA Dynamo runs vLLM workers behind its frontend, on this machine or as a
``DynamoGraphDeployment`` on Kubernetes.

Flags are from the wheel of 1.6.1 (``frontend_args.py``, ``configuration/groups/runtime_args.py``),
its custom resource definition (``nvidia.com/v1beta1``), and
``recipes/gpt-oss-120b/vllm/agg-b200-agentic/deploy.yaml``, which hands the speculation over in the
same way. Its documents show speculation with vLLM and EAGLE-3 only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from forerun.deploy import reads_text_alone
from forerun.deploy.launch import Command, Counterpart, Deployment, DeployRequest, EngineWriter, Stretch, map_options
from forerun.drafters import AUTO
from forerun.errors import ArgumentError
from forerun.heads.engines import refuse_misread

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


class Vllm(EngineWriter):
    """Starts ``vllm serve``."""

    title: ClassVar[str] = "vLLM"
    versions: ClassVar[tuple[str, ...]] = ("0.31.0", "0.32.0", "0.33.0")
    reads: ClassVar[str] = "vllm"
    vocabulary_margin: ClassVar[int | None] = 0
    variable: ClassVar[str] = VARIABLE
    predictions: ClassVar[bool] = True
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

    def deployment(self) -> Deployment:
        request = self.request
        words = ["vllm", "serve", request.model, "--port", str(request.port), *parallel(request)]
        environment: dict[str, str] = {}
        speculation: dict[str, Any] | None
        if self.plugs_in:
            speculation, schedule, environment = self._plug_in()
            words.append("--no-async-scheduling")
        else:
            speculation, schedule = self.speculation()
        if speculation is not None:
            words += ["--speculative-config", json.dumps(speculation)]
        if request.nodes == 1:
            return Deployment(commands=(Command(words=tuple(words), environment=environment),), schedule=schedule)
        commands = []
        for rank in range(request.nodes):
            machine = ["--nnodes", str(request.nodes), "--node-rank", str(rank), "--master-addr", request.first_machine]
            headless = ["--headless"] if rank else []
            commands.append(Command.on_machine(rank, (*words, *machine, *headless), environment))
        return Deployment(commands=tuple(commands), schedule=schedule)

    def _plug_in(self) -> tuple[dict[str, Any], tuple[Stretch, ...], dict[str, str]]:
        """Return vLLM's ``speculative_config`` for forerun's own drafter in it, the schedule, and
        the environment.
        """
        config = self.config
        k = config.num_speculative_tokens
        k = k or max(draft.k for draft in self.list_drafts() if reads_text_alone(draft.method))
        routed = config.method == AUTO or self.request.adaptive  # A policy decides how much
        schedule = self.schedule(k) if self.request.forecast is not None or not routed else ()
        options = {**config.named, "adaptive": True} if self.request.adaptive else config.named
        if routed:
            which = "which drafter, and how much, follows" if config.method == AUTO else "how much is drafted follows"
            self.notes.append(f"{which} from what the steps take and what is accepted")
        if schedule:
            options[SCHEDULE] = [list(stretch) for stretch in schedule]
        self.notes.append(
            "forerun itself drafts inside vLLM (a plug-in): `pip install forerun` beside it. vLLM asks a plug-in with "
            "its older model runner V1 and without asynchronous scheduling only; others measured that to cost 10 % of "
            "the speed of a 4 B model, 6 % at 9 B, 2 % at 27 B"
        )
        self.notes.append(_REFUSES)
        self.note_outside()
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0", VARIABLE: json.dumps(options)}
        return {"method": "custom_class", "model": PLUG_IN, "num_speculative_tokens": k}, schedule, environment

    def speculation(self) -> tuple[dict[str, Any] | None, tuple[Stretch, ...]]:
        """Return vLLM's ``speculative_config``, None for plain decoding, and the schedule in it."""
        request = self.request
        if request.config is None:
            return None, ()
        draft, way, _ = self.choose()
        self.notes.append(_REFUSES)
        if request.config.rule == "block" and draft.method in _RUNNER_V1:
            raise ArgumentError(
                f"vLLM has the rule block in its model runner V2 only, and {draft.method} needs V1, which would pass "
                "over it: leave --rule out, or give --rule token_rejection"
            )
        read = {"draft_model": draft.model, "medusa": draft.model, "mtp": request.model}.get(way.name) or ""
        refuse_misread(read, f"rename {read}")
        _, k = self.read_drafter(draft)
        self.note_chain(draft, k)
        schedule = self.schedule(k, able=draft.method not in _ONE_LENGTH)
        speculation: dict[str, Any] = {"method": way.name}
        if draft.model is not None:
            speculation["model"] = draft.model
        speculation["num_speculative_tokens"] = k
        speculation |= {**way.keys, **map_options(draft, way)}
        if request.config.rule is not None:
            speculation["rejection_sample_method"] = self.rules[request.config.rule]
            greedy = way.name == "medusa" or "use_heterogeneous_vocab" in way.keys
            if draft.model is not None and not greedy:
                speculation["draft_sample_method"] = "probabilistic"
        if schedule:
            speculation["num_speculative_tokens_per_batch_size"] = [list(stretch) for stretch in schedule]
        if request.pp > 1:
            self.notes.append("vLLM drafts with pipeline parallelism for some targets only; it says so when it starts")
        return speculation, schedule


def parallel(request: DeployRequest) -> list[str]:
    """Return the flags that share the model out to devices."""
    return request.sharing("--tensor-parallel-size", "--pipeline-parallel-size")


# Dynamo, which runs vLLM
_FILE, _KEY, _SECRET = "dynamo.yaml", "speculative-config", "hf-token-secret"
_SCRIPT = "kubernetes.sh"
_VLLM = {"1.6.1": "0.31.0"}  # The vLLM in each version's runtime image
_LOCAL = ("--discovery-backend", "file")  # Neither etcd nor NATS is needed on one machine


class Dynamo(Vllm):
    """Starts ``python -m dynamo.frontend`` and ``python -m dynamo.vllm``."""

    title: ClassVar[str] = "Dynamo"
    versions: ClassVar[tuple[str, ...]] = tuple(_VLLM)
    variable: ClassVar[str] = ""  # Its image has no forerun

    @property
    def version(self) -> str:
        """Return the version of the vLLM inside."""
        return _VLLM[self.request.version]

    def deployment(self) -> Deployment:
        request = self.request
        speculation, schedule = self.speculation()
        if speculation is not None and speculation["method"] != "eagle3":
            self.notes.append(
                f"Dynamo {request.version} documents speculation with EAGLE-3 alone; vLLM gets this as it stands"
            )
        local_paths = [
            path for path in (request.model, (speculation or {}).get("model")) if path and Path(path).is_dir()
        ]
        if local_paths:
            self.notes.append(f"on Kubernetes {', '.join(local_paths)} must be mounted into the worker, or be a hub id")
        token = Command(
            words=("kubectl", "create", "secret", "generic", _SECRET, "--from-literal=HF_TOKEN=YOUR_TOKEN"),
            where="for a gated model, once, on Kubernetes",
            role="by hand",
            script=_SCRIPT,
        )
        apply = Command(
            words=("kubectl", "apply", "-f", request.path(_FILE)),
            where="on Kubernetes",
            role="elsewhere",
            script=_SCRIPT,
        )
        files = {_FILE: yaml.dump_all(_manifests(request, speculation), Dumper=_Plain, sort_keys=False, width=1000)}
        local = _on_this_machine(request, speculation) if request.nodes == 1 else ()
        return Deployment(commands=(*local, token, apply), files=files, schedule=schedule)


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """Writes repeated values in full, not as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _worker(request: DeployRequest) -> list[str]:
    return ["--model", request.model, *parallel(request)]


def _on_this_machine(request: DeployRequest, speculation: dict[str, Any] | None) -> tuple[Command, ...]:
    front = ("python", "-m", "dynamo.frontend", "--http-port", str(request.port), *_LOCAL)
    words = ["python", "-m", "dynamo.vllm", *_worker(request), *_LOCAL]
    words += ["--speculative-config", json.dumps(speculation)] if speculation is not None else []
    return (Command(words=front, where="on one machine"), Command(words=tuple(words), where="beside it"))


def _manifests(request: DeployRequest, speculation: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the ConfigMap with the speculation, and the deployment that reads it."""
    name = re.sub(r"[^a-z0-9]+", "-", request.model.rpartition("/")[2].lower())[:40].strip("-") or "model"
    image = f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{request.version}"
    secret = {"envFrom": [{"secretRef": {"name": _SECRET, "optional": True}}]}
    front = {"name": "main", "image": image, "command": ["python3", "-m", "dynamo.frontend"], **secret}
    devices = {"nvidia.com/gpu": str(request.devices)}
    worker: dict[str, Any] = {
        "name": "main",
        "image": image,
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": _worker(request),
        **secret,
        "resources": {"requests": devices, "limits": devices},
    }
    maps = list[dict[str, Any]]()
    if speculation is not None:
        settings = f"{name}-speculation"
        source = {"configMapKeyRef": {"name": settings, "key": _KEY}}
        worker["env"] = [{"name": "SPECULATIVE_CONFIG", "valueFrom": source}]
        worker["args"].append("--speculative-config=$(SPECULATIVE_CONFIG)")
        maps.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": settings},
                "data": {_KEY: json.dumps(speculation)},
            }
        )
    components = [_component("Frontend", "frontend", front), _component("Worker", "worker", worker)]
    if request.nodes > 1:
        components[1]["multinode"] = {"nodeCount": request.nodes}
    spec = {"backendFramework": "vllm", "components": components}
    graph = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"}
    return [*maps, {**graph, "metadata": {"name": name}, "spec": spec}]


def _component(name: str, kind: str, container: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "type": kind, "replicas": 1, "podTemplate": {"spec": {"containers": [container]}}}
