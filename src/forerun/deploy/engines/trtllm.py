"""TensorRT-LLM starts as ``trtllm-serve MODEL --config FILE``, where speculation stands in the
file.

Keys are from ``llmapi/llm_args.py`` and ``commands/serve.py`` of 1.4.0rc1. Batch sizes of
``draft_len_schedule`` are upper bounds there, above the last of which nothing is drafted; up to 1.2
they were lower bounds, so that such a file means something else to older versions.
"""

from __future__ import annotations

from typing import Any, ClassVar

import yaml

from forerun.deploy.launch import Command, Counterpart, Deployment, DraftSpec, EngineWriter, ExaminedFiles, map_options
from forerun.errors import ArgumentError, refuse
from forerun.heads.engines import engines_for
from forerun.heads.files import TRTLLM

_ENHANCED = ("Eagle3", "MTP", "PARD")  # Take a suffix automaton before the model
_SAMPLES = ("Draft_Target", "PARD", "Eagle3", "DFlash", "DSpark", "MTP")  # Have rejection sampling
_TREES = ("Eagle3", "MTP")
_MOST_SIBLINGS = 32  # The latter with rejection sampling
_HOST = ("NGram", "Draft_Target")  # Draft on the host, for which the scheduler must not run ahead


class TensorRtLlm(EngineWriter):
    """Starts ``trtllm-serve``."""

    title: ClassVar[str] = "TensorRT-LLM"
    versions: ClassVar[tuple[str, ...]] = ("1.4.0rc1",)
    reads: ClassVar[str] = "trtllm"
    handled: ClassVar[tuple[str, ...]] = ("in its YAML", f"reads them from {TRTLLM}")
    rules: ClassVar[dict[str, bool]] = {"token_rejection": True}
    combines: ClassVar[tuple[str, ...]] = ("suffix", "ngram")
    ways: ClassVar[dict[str, Counterpart]] = {
        "ngram": Counterpart(name="NGram", options={"prompt_lookup_max": "max_matching_ngram_size"}, model=False),
        "suffix": Counterpart(name="SA", model=False),
        "draft_model": Counterpart(name="Draft_Target"),
        "pard": Counterpart(name="PARD"),
        "eagle3": Counterpart(name="Eagle3"),
        "dflash": Counterpart(name="DFlash"),
        "dspark": Counterpart(name="DSpark"),
        "mtp": Counterpart(name="MTP", model=False),
    }

    def deployment(self) -> Deployment:
        request = self.request
        words = ["trtllm-serve", request.model, "--port", str(request.port)]
        words += request.sharing("--tp_size", "--pp_size")
        files = dict[str, str]()
        if request.config is not None:
            words += ["--config", request.path(TRTLLM)]
            files[TRTLLM] = yaml.safe_dump(self._speculation(), sort_keys=False)
        if request.nodes > 1:
            ranks = ["--ntasks-per-node", str(request.devices), "--mpi=pmix", "trtllm-llmapi-launch"]
            words = ["srun", "-N", str(request.nodes), *ranks, *words, "--gpus_per_node", str(request.devices)]
        return Deployment(commands=(Command(words=tuple(words)),), files=files)

    def _speculation(self) -> dict[str, Any]:
        rule = self.config.rule
        if self.request.pp > 1:
            raise ArgumentError("TensorRT-LLM drafts without pipeline parallelism only: leave --pp out, raise --tp")
        draft, way, first = self.choose()
        self._check_rule(draft, way, first)
        if rule is None and way.name in _SAMPLES:
            self.notes.append(
                "TensorRT-LLM accepts a drafted token of a sampled request where it is the one that it samples itself; "
                "--rule token_rejection compares probabilities instead"
            )
        if way.name in _SAMPLES:
            self.notes.append(
                "TensorRT-LLM refuses requests with penalties while it speculates, unless `enable_penalty: true` "
                f"stands in {TRTLLM}"
            )
        examined, k = self.read_drafter(draft)
        if way.name == "DSpark":
            self._check_block(examined, k)
        schedule = self.schedule(k, able=way.name != "DSpark")
        k = schedule[0].k if schedule else k
        speculation: dict[str, Any] = {"decoding_type": way.name, **_of_head(examined), "max_draft_len": k}
        if draft.model is not None:
            speculation["speculative_model"] = draft.model
        speculation |= map_options(draft, way)
        speculation |= self._tree(draft, way, k)
        if first is not None and way.name in _ENHANCED:
            speculation["sa_config"] = {"threshold": 4}
            self.notes.append(
                f"its suffix automaton, not forerun's {first.method}, drafts before {way.name} where 4 tokens match"
            )
        elif first is not None:
            self.notes.append(f"TensorRT-LLM puts nothing before {way.name}: {first.method} is left out")
        if rule is not None:
            speculation["use_rejection_sampling"] = self.rules[rule]
        if schedule:
            speculation["draft_len_schedule"] = {stretch.last: stretch.k for stretch in schedule if stretch.k}
            self.notes.append(f"above a batch of {max(speculation['draft_len_schedule'])} it drafts nothing")
        whole: dict[str, Any] = {"speculative_config": speculation}
        return whole | ({"disable_overlap_scheduler": True} if way.name in _HOST else {})

    def _check_rule(self, draft: DraftSpec, way: Counterpart, first: DraftSpec | None) -> None:
        """Raise ArgumentError where TensorRT-LLM would not start with the rule."""
        rule = self.config.rule
        if rule is None:
            return
        top = draft.options.get("top_k") or 0
        refuse(
            (
                way.name not in _SAMPLES,
                f"TensorRT-LLM has the rule {rule} for {', '.join(_SAMPLES)} only, whose drafts have probabilities, "
                f"not for {way.name}: leave --rule out",
            ),
            (
                first is not None and way.name in _ENHANCED,
                f"TensorRT-LLM has no rule {rule} where its suffix automaton drafts before {way.name}: leave --rule "
                f"out, or draft with {draft.method} alone",
            ),
            (
                top > _MOST_SIBLINGS and way.name in _TREES,
                f"TensorRT-LLM has the rule {rule} for trees of top_k up to {_MOST_SIBLINGS}, got {top}: leave --rule "
                "out, or lower top_k",
            ),
        )

    def _tree(self, draft: DraftSpec, way: Counterpart, k: int) -> dict[str, Any]:
        top = draft.options.get("top_k")
        if not top or way.name not in _TREES:
            self.note_chain(draft, k)
            return {}
        nodes = min(max(draft.nodes, k), top * k)
        return {"use_dynamic_tree": True, "dynamic_tree_max_topK": top, "max_total_draft_tokens": nodes}

    def _check_block(self, examined: ExaminedFiles, k: int) -> None:
        """Raise ArgumentError for a DSpark head that is to draft less than its block; TensorRT-LLM does
        not start with that.
        """
        if examined.depth is None:
            self.notes.append("TensorRT-LLM starts only where `max_draft_len` is the DSpark head's own block_size")
        elif k != examined.depth:
            raise ArgumentError(
                f"TensorRT-LLM drafts a DSpark head's whole block, {examined.depth} tokens; {k} were requested: leave "
                "-k out"
            )


def _of_head(examined: ExaminedFiles) -> dict[str, Any]:
    """Return what an export of the head writes into the file, such as the layers whose states it
    reads.
    """
    if examined.launch is None:
        return {}
    destination = engines_for(examined.launch.head.config.kind).destinations["trtllm"]
    read = yaml.safe_load(destination.files(examined.launch)[TRTLLM])["speculative_config"]
    return {key: value for key, value in read.items() if key not in ("decoding_type", "max_draft_len")}
