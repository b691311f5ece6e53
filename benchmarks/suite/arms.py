"""The contestants: transformers' own decoding and forerun's, on the same checkpoints, timed by the same rule.

Decoding speed is counted from the first moment at which an arm has given out tokens: what came until then belongs to
the time to first token. Knows no goals and no report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from benchmarks.suite.workloads import Setting
from forerun import LLM, SamplingParams

if TYPE_CHECKING:  # an older commit, which benchmarks/against.py runs, may have them elsewhere
    from forerun.heads.eagle import EagleHead
    from forerun.types import StepTrace


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One answer of one arm."""

    arm: str
    prompt: int
    seed: int
    tokens: list[int]
    """What was generated."""
    first_s: float
    """Until the first token or, in transformers' speculative modes, the first group of tokens."""
    decode_s: float
    """From then to the end."""
    decode_tokens: int
    """Tokens that came in that time."""
    trace: Sequence[StepTrace] = ()
    """The steps after the prompt's; only forerun's arms have them."""


class Arm(Protocol):
    """One way of decoding."""

    name: str

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        ...


class ForerunArm:
    """forerun with one drafter, or none (``speculative=False``)."""

    def __init__(
        self,
        name: str,
        llm: LLM,
        speculative: Mapping[str, Any] | bool,
        *,
        predictions: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`predictions`: what a client would predict of each prompt's answer, token ids."""
        self.name, self.llm, self.speculative = name, llm, speculative
        self._predictions = predictions

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        params = SamplingParams(
            temperature=setting.temperature,
            top_p=setting.top_p,
            top_k=0,
            max_tokens=setting.new_tokens,
            ignore_eos=True,
            seed=seed,
            detokenize=False,
        )
        request: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if self._predictions is not None:
            request["prediction"] = list(self._predictions[index])
        output = self.llm.generate([request], params, speculative=self.speculative, trace=True)[0]
        answer = output.outputs[0]
        return Run(
            arm=self.name,
            prompt=index,
            seed=seed,
            tokens=list(answer.token_ids),
            first_s=output.time_to_first_token_s or 0.0,
            decode_s=output.decode_s or 0.0,
            decode_tokens=len(answer.token_ids) - 1,
            trace=answer.trace,
        )


class TransformersArm:
    """``model.generate`` with the options of one of its decoding modes."""

    def __init__(self, name: str, model: Any, options: Mapping[str, Any]) -> None:
        self.name, self.model, self.options = name, model, options

    def run(self, index: int, prompt: Sequence[int], setting: Setting, seed: int) -> Run:
        """Answer prompt number `index`."""
        clock = _Clock(len(prompt))
        sampling: dict[str, Any] = {"do_sample": False}
        if setting.temperature > 0:
            sampling = {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": 0}
        ids = torch.tensor([list(prompt)])
        torch.manual_seed(seed)
        clock.start()
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=setting.new_tokens,
            stopping_criteria=[clock],
            **sampling,
            **self.options,
        )
        tokens = result[0, len(prompt) :].tolist()
        return Run(
            arm=self.name,
            prompt=index,
            seed=seed,
            tokens=tokens,
            first_s=clock.marks[0][0],
            decode_s=clock.marks[-1][0] - clock.marks[0][0],
            decode_tokens=len(tokens) - clock.marks[0][1],
        )


class _Clock:
    """A stopping criterion that never stops and notes when how many tokens were there."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.marks: list[tuple[float, int]] = []
        self._begin = 0.0

    def start(self) -> None:
        self._begin = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:
        self.marks.append((time.perf_counter() - self._begin, input_ids.shape[1] - self.prompt))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def load_transformers(path: Any) -> Any:
    """A stock model as users load it, without end-of-text so that every arm generates the same number of tokens."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def transformers_arms(target: Any, draft: Any | None, *, chain: int, lookup: int) -> list[Arm]:
    """transformers' plain decoding, prompt lookup of `lookup` tokens and, with a draft model, a chain of `chain`."""
    model = load_transformers(target)
    arms: list[Arm] = [
        TransformersArm("transformers plain", model, {}),
        TransformersArm("transformers prompt lookup", model, {"prompt_lookup_num_tokens": lookup}),
    ]
    if draft is not None:
        assistant = load_transformers(draft)
        assistant.generation_config.num_assistant_tokens = chain
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        arms.append(TransformersArm("transformers assisted", model, {"assistant_model": assistant}))
    return arms


TREE_NODES = 15
"""Of the head's dynamic tree: with the root 16 rows, what a pass carries at about the price of one."""
TREE_TOP_K = 4
"""Nodes that it expands per level: a head's pass over few rows costs what one over one row costs."""


def forerun_arms(llm: LLM, draft: Any | None, *, chain: int, lookup: int, head: EagleHead | None = None) -> list[Arm]:
    """forerun plain and `ngram`; with a draft model a chain of `chain` tokens and a tree of the same depth.

    With a head, in the target's dtype, the same of `eagle3`, whose tree is dynamic. All draft the same at every step.
    """
    arms: list[Arm] = [
        ForerunArm("forerun plain", llm, False),
        ForerunArm("forerun ngram", llm, {"method": "ngram", "num_speculative_tokens": lookup, "adaptive": False}),
    ]
    if draft is not None:
        common = {"method": "draft_model", "model": str(draft), "adaptive": False}
        arms += [
            ForerunArm("forerun draft_model", llm, common | {"num_speculative_tokens": chain}),
            ForerunArm("forerun draft_model tree", llm, common | {"shape": (2, 2, *[1] * (chain - 2))}),
        ]
    if head is not None:
        trained: dict[str, Any] = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": chain,
            "adaptive": False,
        }
        arms += [
            ForerunArm("forerun eagle3", llm, trained),
            ForerunArm("forerun eagle3 tree", llm, trained | {"top_k": TREE_TOP_K, "nodes": TREE_NODES}),
        ]
    return arms
