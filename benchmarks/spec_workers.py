"""The engines that `spec_bench` compares: each answers in a process, and an environment, of its own.

``python spec_workers.py ENGINE OPTIONS`` loads one engine, then a JSON line in is a batch to answer and a line out what
that took. Imports nothing but the standard library until an engine is loaded: environments differ. What engines print
goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Answer = tuple[list[list[int]], dict[str, Any]]
"""Tokens of each answer, without the prompt, and what else the engine tells."""
Ask = Callable[[Mapping[str, Any]], Answer]
"""What answers one order: ``arm``, ``prompts`` (token ids of each), ``tokens`` (most of each answer), ``temperature``,
``seed`` and ``memory`` (drafters know of what was asked under the same name)."""


def forerun(options: Mapping[str, Any]) -> Ask:
    """forerun, plain (arm ``False``) and with any drafter."""
    from forerun import LLM, SamplingParams

    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["context"],
        max_num_seqs=options["rows"],
        enable_prefix_caching=False,
        **options.get("loading", {}),
    )

    def ask(order: Mapping[str, Any]) -> Answer:
        params = [
            SamplingParams(
                temperature=order["temperature"],
                top_p=1.0,
                top_k=0,
                max_tokens=order["tokens"],
                seed=order["seed"] + index,
                detokenize=False,
            )
            for index in range(len(order["prompts"]))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        found = llm.generate(prompts, params, speculative=order["arm"], cache_salt=order["memory"])
        counts = [output.outputs[0].speculation for output in found]
        passes = sum(one.num_passes for one in counts)
        told = {"passes": passes, "drafted": sum(one.num_draft_tokens for one in counts)}
        return [list(output.outputs[0].token_ids) for output in found], told

    return ask


def vllm(options: Mapping[str, Any]) -> Ask:
    """vLLM in this process; its drafter is chosen when it is loaded."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # Its engine waits in a loop otherwise
    from vllm import LLM, SamplingParams

    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        max_model_len=options["context"],
        max_num_seqs=options["rows"],
        enable_prefix_caching=False,
        speculative_config=options["speculative"],
        seed=0,
    )

    def ask(order: Mapping[str, Any]) -> Answer:
        params = [
            SamplingParams(
                temperature=order["temperature"],
                top_p=1.0,
                top_k=-1,
                max_tokens=order["tokens"],
                seed=order["seed"] + index if order["temperature"] else None,
                detokenize=False,
            )
            for index in range(len(order["prompts"]))
        ]
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        found = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in found], {}

    return ask


def transformers(options: Mapping[str, Any]) -> Ask:
    """transformers' ``generate``; an arm is further keywords of it. Rows of a batch are padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=options["dtype"]).eval()
    ends = model.generation_config.eos_token_id
    stop = {ends} if isinstance(ends, int) else set(ends or ())
    padding = min(stop, default=0)

    def ask(order: Mapping[str, Any]) -> Answer:
        prompts, longest = order["prompts"], max(map(len, order["prompts"]))
        ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling: dict[str, Any] = {"do_sample": False}
        if order["temperature"]:
            sampling = {"do_sample": True, "temperature": order["temperature"], "top_p": 1.0, "top_k": 0}
        torch.manual_seed(order["seed"])
        written = model.generate(
            ids,
            attention_mask=seen,
            max_new_tokens=order["tokens"],
            pad_token_id=padding,
            **sampling,
            **order["arm"],
        )
        return [_until(answer, stop) for answer in written[:, longest:].tolist()], {}

    return ask


def _until(answer: Sequence[int], stop: set[int]) -> list[int]:
    """The answer up to its first stop token, that included; what follows is padding."""
    ends = [index for index, token in enumerate(answer) if token in stop]
    return list(answer[: ends[0] + 1] if ends else answer)


ENGINES: Mapping[str, Callable[[Mapping[str, Any]], Ask]] = {
    "forerun": forerun,
    "vllm": vllm,
    "transformers": transformers,
}


def main() -> None:
    """Load, and answer what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ask = ENGINES[sys.argv[1]](json.loads(sys.argv[2]))
    answers.write("{}\n")
    answers.flush()
    for line in sys.stdin:
        order = json.loads(line)
        began = time.perf_counter()
        tokens, told = ask(order)
        seconds = time.perf_counter() - began
        answers.write(json.dumps({"seconds": seconds, "tokens": sum(map(len, tokens)), **told}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
