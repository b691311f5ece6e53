"""This module finds the modules and names that had another place before version 0.2, and says once where each is now.

`forerun` puts `Moved` before Python's own finders: a package of before is today's package under another name, and these
would load what lies in it a second time.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NOW = {
    "bench.report": "bench.load",
    "bench.run": "bench.load",
    "bench.summary": "bench.load",
    "caching": "writing",
    "checkpoints": "heads",
    "checkpoints.base": "heads.files",
    "checkpoints.block_engines": "heads.block_files",
    "checkpoints.dflash": "heads.block_files",
    "checkpoints.eagle": "heads.decoders",
    "checkpoints.flat": "heads.eagle_files",
    "checkpoints.gguf": "heads.engines",
    "checkpoints.medusa_engines": "heads.medusa",
    "checkpoints.modelopt": "heads.eagle_files",
    "checkpoints.mtp": "heads.mtp_files",
    "checkpoints.mtp_engines": "heads.mtp_files",
    "checkpoints.pard": "heads.pard_files",
    "checkpoints.peagle_engines": "heads.peagle",
    "checkpoints.recurrent_engines": "heads.engines",
    "checkpoints.speculators": "heads.speculators_files",
    "control.step_plan": "control.choice",
    "core.ladder": "decode.residuals",
    "core.row": "decode.row",
    "core.rules.argmax_walk": "core.rules",
    "core.rules.base": "core.rules",
    "core.rules.block": "core.rules",
    "core.rules.greedy_k": "core.rules",
    "core.rules.recursive_rejection": "core.rules",
    "core.rules.sample_walk": "core.rules",
    "core.rules.token_rejection": "core.rules",
    "core.rules.traversal": "core.rules",
    "core.rules.typical": "core.rules",
    "core.scores": "decode.scores",
    "core.step": "decode.step",
    "demo.download": "shipped",
    "demo.questions": "demo",
    "deploy.gguf_converter": "deploy.trials.gguf_converter",
    "deploy.in_llama_cpp": "deploy.trials.try_llama_cpp",
    "deploy.in_vllm": "deploy.trials.try_vllm",
    "deploy.known_rows": "deploy.sequences",
    "deploy.schedule": "deploy.launch",
    "deploy.trial": "deploy.trials.trial",
    "deploy.vllm_answers": "deploy.trials.vllm_answers",
    "drafters.base": "decode.drafter",
    "drafters.combined.first_of": "drafters.combined.composed",
    "drafters.combined.members": "drafters.combined.composed",
    "drafters.combined.merge": "drafters.combined.composed",
    "drafters.heads": "heads",
    "drafters.heads.experts": "heads.mtp",
    "drafters.heads.kinds": "drafters.kinds",
    "drafters.heads.latent": "heads.layers",
    "drafters.lookup.automaton": "drafters.lookup.suffix",
    "drafters.lookup.compiled": "drafters.lookup",
    "drafters.lookup.compiled.grams": "drafters.lookup.ngram",
    "drafters.lookup.compiled.suffix_rows": "drafters.lookup.suffix",
    "drafters.lookup.datastore": "drafters.lookup.rest",
    "drafters.lookup.follower": "drafters.lookup.prediction",
    "drafters.self_drafting.base": "drafters.self_drafting.early_exit",
    "drafters.self_drafting.jacobi": "drafters.self_drafting.lookahead",
    "drafters.self_drafting.skipping": "drafters.self_drafting.skip_layers",
    "engine.config": "control.config",
    "engine.costs": "control.costs",
    "engine.measuring": "control.measuring",
    "engine.policy": "control",
    "figures": "types",
    "head_keys": "heads.keys",
    "heads.formats": "heads.files",
    "heads.recurrent": "heads.hydra",
    "losses.batch": "losses.objective",
    "manifests": "writing",
    "model.fingerprint": "model.identity",
    "model.padding": "model.inputs",
    "model.proof": "model.prepare",
    "model.twin": "model.prepare",
    "model.unrolled": "drafters.draft_models.draft_model",
    "model.verdicts": "model.identity",
    "plan.plot": "plan.planner",
    "plan.trial": "plan.measured",
    "serve.chat_format": "serve.handling",
    "serve.tools.calls": "serve.tools.base",
    "serve.tools.deepseek_v3": "serve.tools.formats",
    "serve.tools.fields": "serve.tools.base",
    "serve.tools.glm45": "serve.tools.formats",
    "serve.tools.hermes": "serve.tools.formats",
    "serve.tools.llama3_json": "serve.tools.formats",
    "serve.tools.mistral": "serve.tools.formats",
    "serve.tools.qwen3_coder": "serve.tools.formats",
    "speedup.answering": "speedup.prompts",
    "speedup.choice": "speedup.training",
    "training.batch": "losses.objective",
    "training.chunked_loss": "losses.chunked_loss",
    "training.draft_models": "training.trained",
    "training.flex_attention": "losses.unrolled_attention",
    "training.loop.settings": "training.recipe",
    "training.objectives": "heads",
    "training.objectives.base": "losses.objective",
    "training.objectives.conditional_drop": "losses.objective",
    "training.objectives.distill": "training.distill",
    "training.objectives.eagle3": "heads.eagle",
    "training.objectives.layerskip": "training.layerskip",
    "training.objectives.medusa2": "training.medusa2",
    "training.objectives.pard": "training.pard",
    "training.shrink": "training.trained",
    "training.targets": "training.trained",
}
"""Modules and packages of before map to where they are, ``forerun.`` left out.

What lay in a package lies in the new one under its own name, unless it has a line of its own.
"""

NOW_IN_MODELOPT = frozenset(
    {
        "DFLASH_DEFAULT_CFG",
        "DFlashConfig",
        "EAGLE1_DEFAULT_CFG",
        "EAGLE3_DEFAULT_CFG",
        "EAGLE_MTP_DEFAULT_CFG",
        "EagleConfig",
        "HFARValidation",
        "MedusaConfig",
        "OfflineStates",
        "calibrate_frequent_vocab",
        "convert",
        "enable_huggingface_checkpointing",
        "export_hf_checkpoint",
        "export_speculative_decoding",
        "read_draft_vocabulary",
        "restore",
        "save",
    }
)
"""These names of `forerun.modelopt` were names of `forerun` itself."""


def from_modelopt(name: str) -> Any:
    """Return a name of `forerun.modelopt` to a program that takes it from `forerun`; a FutureWarning says so."""
    said = f"forerun.{name} is forerun.modelopt.{name} since forerun 0.2; import it from there"
    warnings.warn(said, FutureWarning, stacklevel=3)
    return getattr(importlib.import_module("forerun.modelopt"), name)


def place_now(name: str) -> str | None:
    """Return where a module of before is, None if it never was one."""
    head, _, old = name.partition(".")
    rest = ""
    while head == "forerun" and old:
        if old in NOW:
            return f"forerun.{NOW[old]}{rest}"
        old, _, last = old.rpartition(".")
        rest = f".{last}{rest}"
    return None


class Moved(MetaPathFinder, Loader):
    """The finder hands out the module of today under the name of before."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that has moved, where it can be imported from its new place."""
        found = place_now(fullname)
        return None if found is None else ModuleSpec(fullname, self, origin=found)

    def exec_module(self, module: ModuleType) -> None:
        """Import the module from its new place; a FutureWarning names it."""
        name = module.__name__
        now = str(module.__spec__.origin if module.__spec__ else "")
        try:
            sys.modules[name] = importlib.import_module(now)
        except ModuleNotFoundError as error:
            if error.name != now:
                raise
            raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None
        warnings.warn(f"{name} is {now} since forerun 0.2; import it from there", FutureWarning, stacklevel=2)
