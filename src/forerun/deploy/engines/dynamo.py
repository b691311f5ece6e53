"""NVIDIA Dynamo runs vLLM workers behind its frontend, on this machine or as a
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

from forerun.deploy.engines.vllm import Vllm, parallel
from forerun.deploy.launch import Command, Deployment, DeployRequest

_FILE, _KEY, _SECRET = "dynamo.yaml", "speculative-config", "hf-token-secret"
_SCRIPT = "kubernetes.sh"
_VLLM = {"1.6.1": "0.31.0"}  # The vLLM in each version's runtime image
_LOCAL = ("--discovery-backend", "file")  # Neither etcd nor NATS is needed on one machine


class Dynamo(Vllm):
    """`Dynamo` starts ``python -m dynamo.frontend`` and ``python -m dynamo.vllm``."""

    title: ClassVar[str] = "Dynamo"
    versions: ClassVar[tuple[str, ...]] = tuple(_VLLM)
    variable: ClassVar[str] = ""  # Its image has no forerun

    def has(self, method: str, version: str) -> bool:
        """Return whether the vLLM inside drafts by that method."""
        return super().has(method, _VLLM[version])

    def deployment(self, asked: DeployRequest, notes: list[str]) -> Deployment:
        speculation, schedule = self.speculation(asked, notes)
        if speculation is not None and speculation["method"] != "eagle3":
            notes.append(
                f"Dynamo {asked.version} documents speculation with EAGLE-3 alone; vLLM gets this as it stands"
            )
        local_paths = [path for path in (asked.model, (speculation or {}).get("model")) if path and Path(path).is_dir()]
        if local_paths:
            notes.append(f"on Kubernetes {', '.join(local_paths)} must be mounted into the worker, or be a hub id")
        token = Command(
            words=("kubectl", "create", "secret", "generic", _SECRET, "--from-literal=HF_TOKEN=YOUR_TOKEN"),
            where="for a gated model, once, on Kubernetes",
            role="by hand",
            script=_SCRIPT,
        )
        apply = Command(
            words=("kubectl", "apply", "-f", asked.path(_FILE)),
            where="on Kubernetes",
            role="elsewhere",
            script=_SCRIPT,
        )
        files = {_FILE: yaml.dump_all(_manifests(asked, speculation), Dumper=_Plain, sort_keys=False, width=1000)}
        local = _on_this_machine(asked, speculation) if asked.nodes == 1 else ()
        return Deployment(commands=(*local, token, apply), files=files, schedule=schedule)


class _Plain(yaml.SafeDumper):  # type: ignore[misc]
    """`_Plain` writes repeated values in full, not as aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _worker(asked: DeployRequest) -> list[str]:
    return ["--model", asked.model, *parallel(asked)]


def _on_this_machine(asked: DeployRequest, speculation: dict[str, Any] | None) -> tuple[Command, ...]:
    front = ("python", "-m", "dynamo.frontend", "--http-port", str(asked.port), *_LOCAL)
    words = ["python", "-m", "dynamo.vllm", *_worker(asked), *_LOCAL]
    words += ["--speculative-config", json.dumps(speculation)] if speculation is not None else []
    return (Command(words=front, where="on one machine"), Command(words=tuple(words), where="beside it"))


def _manifests(asked: DeployRequest, speculation: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the ConfigMap with the speculation, and the deployment that reads it."""
    name = re.sub(r"[^a-z0-9]+", "-", asked.model.rpartition("/")[2].lower())[:40].strip("-") or "model"
    image = f"nvcr.io/nvidia/ai-dynamo/vllm-runtime:{asked.version}"
    secret = {"envFrom": [{"secretRef": {"name": _SECRET, "optional": True}}]}
    front = {"name": "main", "image": image, "command": ["python3", "-m", "dynamo.frontend"], **secret}
    devices = {"nvidia.com/gpu": str(asked.devices)}
    worker: dict[str, Any] = {"name": "main", "image": image, "command": ["python3", "-m", "dynamo.vllm"]}
    worker |= {"args": _worker(asked), **secret, "resources": {"requests": devices, "limits": devices}}
    maps = list[dict[str, Any]]()
    if speculation is not None:
        settings = f"{name}-speculation"
        source = {"configMapKeyRef": {"name": settings, "key": _KEY}}
        worker["env"] = [{"name": "SPECULATIVE_CONFIG", "valueFrom": source}]
        worker["args"].append("--speculative-config=$(SPECULATIVE_CONFIG)")
        data = {_KEY: json.dumps(speculation)}
        maps.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": settings}, "data": data})
    components = [_component("Frontend", "frontend", front), _component("Worker", "worker", worker)]
    if asked.nodes > 1:
        components[1]["multinode"] = {"nodeCount": asked.nodes}
    spec = {"backendFramework": "vllm", "components": components}
    graph = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"}
    return [*maps, {**graph, "metadata": {"name": name}, "spec": spec}]


def _component(name: str, kind: str, container: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "type": kind, "replicas": 1, "podTemplate": {"spec": {"containers": [container]}}}
