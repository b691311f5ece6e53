"""forerun's drafters in front of a 4-bit GGUF file, beside llama-cpp-python's own prompt lookup and plain decoding.

``PYTHONPATH=. .venv-llama/bin/python benchmarks/serving/llama_drafts.py`` after ``make test-llama`` has made the
environment. The demo target, enlarged to 0.4 B parameters and quantised to Q4_0, answers greedily; arms take turns on
each text. *edit*: the longest shipped edits, really answered; *complete*: it goes on with files. Nothing is asked
twice: drafters remember answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from transformers import AutoTokenizer

from forerun.demo import edits, prompts
from forerun.demo.scale import ScaledModel
from forerun.deploy.llama_cpp import ForerunDraft
from forerun.deploy.trials.try_llama_cpp import convert_to_gguf
from forerun.shipped import resolve
from forerun.writing import cache_root

CONTEXT = 2048
PLAIN = "plain"
LOOKUPS = {f"prompt lookup, {tokens}": tokens for tokens in (10, 2)}
"""llama-cpp-python's default, and what it advises on a CPU."""
METHODS = ("suffix", "ngram", "auto")


def quantised(billions: float, sources: Path) -> Path:
    """The demo target enlarged, converted by llama.cpp and in 4 bits; kept in the cache."""
    scaled = ScaledModel(resolve("demo"), billions=billions).path
    file = cache_root() / "gguf" / f"{scaled.name}-q4_0.gguf"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = convert_to_gguf(sources, Path(sys.executable), scaled, file.with_suffix(".f32.gguf"), dtype="float32")
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
        partial = file.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(whole).encode(), str(partial).encode(), options):
            raise RuntimeError(f"llama.cpp could not quantise {whole}")
        partial.rename(file)
        for rest in (whole, whole.with_suffix(".log")):
            rest.unlink()
    return file


class Arm:
    """One way to decode; a model of its own, since a draft model is part of it."""

    def __init__(self, file: Path, draft: LlamaDraftModel | None, threads: int) -> None:
        self.draft, self.sizes = draft, list[int]()
        self.model = llama_cpp.Llama(
            str(file),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=None if draft is None else self._counted,
            logits_all=draft is not None,  # which llama-cpp-python otherwise has too little room for
            verbose=False,
        )

        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model.model)

    def _counted(self, ids: Any, /, **options: Any) -> Any:
        assert self.draft is not None
        found = self.draft(ids, **options)
        self.sizes.append(len(found))
        return found

    def seconds(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        """Of the answer of at most `tokens`, from its first token on, and the answer."""
        self.model.reset()
        answer = self.model.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
        found = [next(answer)]
        began = time.perf_counter()
        for token in islice(answer, tokens - 1):
            found.append(token)
            if llama_cpp.llama_vocab_is_eog(self.vocabulary, token):
                break
        return time.perf_counter() - began, found


def main() -> None:
    """Measure, and print a table, or one JSON line with ``--json``."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--billions", type=float, default=0.4)
    options.add_argument("--llama-cpp", type=Path, default=Path("build/llama-cpp-python/vendor/llama.cpp"))
    options.add_argument("--texts", type=int, default=12, help="of each workload")
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    file = quantised(asked.billions, asked.llama_cpp)
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    drafts: dict[str, LlamaDraftModel | None] = {PLAIN: None}
    drafts |= {name: LlamaPromptLookupDecoding(num_pred_tokens=tokens) for name, tokens in LOOKUPS.items()}
    drafts |= {f"forerun {method}": ForerunDraft({"method": method}) for method in METHODS}
    arms = {name: Arm(file, draft, asked.threads) for name, draft in drafts.items()}
    found = {
        "edit": measured(arms, _edits(tokenizer, asked.texts)),
        "complete": measured(arms, _files(tokenizer, asked.texts, asked.tokens)),
    }
    if asked.json:
        print(json.dumps({"model": file.name, "threads": asked.threads, **found}))  # noqa: T201
        return
    for workload, figures in found.items():
        for name, figure in figures.items():
            print(f"{workload:10}{name:22}" + "".join(f"  {key} {value}" for key, value in figure.items()))  # noqa: T201


def _edits(tokenizer: Any, count: int) -> list[tuple[list[int], int]]:
    """The prompts of the shipped edits with the longest answers, and room for an answer half as long again."""
    found = []
    for edit in edits():
        prompt = tokenizer.apply_chat_template(edit.messages, add_generation_prompt=True, return_dict=False)
        found.append((list(prompt), len(tokenizer.encode(edit.answer, add_special_tokens=False)) * 3 // 2))
    return sorted(found, key=lambda one: -one[1])[:count]


def _files(tokenizer: Any, count: int, tokens: int) -> list[tuple[list[int], int]]:
    return [(tokenizer.encode(one.text, verbose=False)[:400], tokens) for one in prompts()[:count]]


def measured(arms: dict[str, Arm], work: list[tuple[list[int], int]]) -> dict[str, dict[str, Any]]:
    """By arm: tokens per second, the ratio to plain decoding (both medians over the texts), tokens per pass."""
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    steps, made, same = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0), dict.fromkeys(arms, 0)
    for prompt, tokens in work:
        plain, expected = 0.0, list[int]()
        for name, arm in arms.items():
            arm.sizes.clear()
            seconds, answer = arm.seconds(prompt, tokens)
            plain, expected = (seconds / len(answer), answer) if name == PLAIN else (plain, expected)
            ratios[name].append(plain * len(answer) / seconds)
            speeds[name].append(len(answer) / seconds)
            steps[name] += len(arm.sizes) or len(answer)
            made[name] += len(answer)
            same[name] += answer == expected
    return {
        name: {
            "tokens/s": round(median(speeds[name]), 1),
            "/ plain": round(median(ratios[name]), 3),
            "tokens/step": round(made[name] / steps[name], 2),
            "same text": f"{same[name]}/{len(work)}",
        }
        for name in arms
    }


if __name__ == "__main__":
    main()
