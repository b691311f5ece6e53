"""What drafting costs the host inside vLLM: forerun's plug-in beside vLLM's own `ngram` and `suffix`, called as vLLM's
model runner calls them, without a model.

``python benchmarks/serving/plugged.py`` after ``make test-vllm`` has made vLLM's environment, in which it goes on. The
texts are known: the shipped edits with their right answers, and the shipped files. A row goes on by what was drafted
rightly and one token, and when its text has ended the next one takes the row, as new requests do. Reading prompts is in
the time. vLLM's `suffix` takes part where arctic-inference is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import scene
from numpy.typing import NDArray
from transformers import AutoTokenizer

from benchmarks.suite.suite import this_machine
from forerun.demo import edits, prompts
from forerun.deploy.engines.vllm import VARIABLE
from forerun.deploy.vllm import ForerunProposer
from forerun.shipped import resolve

OWN = "vLLM ngram"
Text = tuple[list[int], list[int]]  # Prompt and answer, token ids
Ints = NDArray[np.int32]
Propose = Callable[[list[str], list[list[int]], Ints, Ints, Ints], list[list[int]]]
"""(request ids, sampled, tokens of each row, tokens of each prompt, all tokens) -> drafts."""


class Found(NamedTuple):
    """Of one run through a workload."""

    seconds: float  # Of proposing alone
    steps: int
    rows: int  # Drafts asked for
    tokens: int  # That the rows gained


def main() -> int:
    """Measure, and print a table, or one JSON line with ``--json``."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, nargs="+", default=[5, 16], help="of a draft")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    options.add_argument("--contexts", type=int, nargs="+", default=[300, 3000], help="tokens of the files' prompts")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--json", action="store_true")
    options.add_argument("--vllm", type=Path, default=scene.ROOT / ".venv-vllm/bin/python")
    asked = options.parse_args()
    if importlib.util.find_spec("vllm") is None:
        os.environ["PYTHONPATH"] = str(scene.ROOT / "src")
        os.execv(asked.vllm, [str(asked.vllm), *sys.argv])
    results, workloads = [], list(_workloads(asked.contexts))
    for make in ARMS.values():
        _run(make, workloads[0][1][:2], 1, asked.tokens[0])  # Has everything compiled
    for name, texts in workloads:
        for batch in (one for one in asked.batches if 2 * one <= len(texts)):
            for drafted in asked.tokens:
                found: dict[str, list[Found]] = {}
                for _ in range(asked.repeats):
                    for arm, make in ARMS.items():
                        found.setdefault(arm, []).append(_run(make, texts, batch, drafted))
                for arm, runs in found.items():
                    step = median(run.seconds / run.steps for run in runs)
                    own = median(run.seconds / own.seconds * own.steps / run.steps
                                 for run, own in zip(runs, found[OWN], strict=True))  # fmt: skip
                    results.append({
                        "workload": name, "batch": batch, "drafted": drafted, "arm": arm,
                        "us_per_step": 1e6 * step, "us_per_row": 1e6 * step * runs[0].steps / runs[0].rows,
                        "over_ngram": own, "tokens_per_pass": runs[0].tokens / runs[0].rows,
                    })  # fmt: skip
                    if not asked.json:
                        print(_line(results[-1]))  # noqa: T201
    if asked.json:
        print(json.dumps({"machine": str(this_machine()), "results": results}))  # noqa: T201
    return 0


def _line(result: dict[str, Any]) -> str:
    shown = "{workload:12} batch {batch:2}  K = {drafted:2}  {arm:16} {us_per_step:7.0f} us a step, {us_per_row:5.1f} "
    return (shown + "a row, {over_ngram:5.2f} x vLLM's ngram; {tokens_per_pass:5.2f} tokens per pass").format(**result)


def _workloads(contexts: Sequence[int]) -> Iterator[tuple[str, list[Text]]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    asked = []
    for edit in edits():
        ids = tokenizer.apply_chat_template(edit.messages, add_generation_prompt=True, return_dict=False)
        asked.append((list(ids), list(tokenizer.encode(edit.answer, add_special_tokens=False))))
    yield "edits", asked
    texts = [tokenizer.encode(one.text, add_special_tokens=False, verbose=False) for one in prompts()]
    whole = [token for text in texts for token in text]
    for context in contexts:
        size = context + 150
        starts = range(0, len(whole) - size, max(1, (len(whole) - size) // 130))
        yield f"files, {context}", [(whole[at : at + context], whole[at + context : at + size]) for at in starts]


def _run(make: Callable[[Any], Propose], texts: Sequence[Text], batch: int, drafted: int) -> Found:
    """Answer the texts, so many at once, until there are fewer left."""
    most = max(len(prompt) + len(answer) for prompt, answer in texts) + drafted + 1
    propose = make(_config(drafted, batch, most))
    table = np.zeros((batch, most), np.int32)
    lengths, starts, ends = (np.zeros(batch, np.int32) for _ in range(3))
    waiting, ids, gained = list(enumerate(texts)), [""] * batch, [[0]] * batch
    seconds, steps, tokens = 0.0, 0, 0
    while True:
        for row in range(batch):
            if lengths[row] >= ends[row]:
                if not waiting:
                    return Found(seconds, steps, steps * batch, tokens)
                number, (prompt, answer) = waiting.pop(0)
                starts[row], ends[row] = len(prompt), len(prompt) + len(answer)
                table[row, : ends[row]] = [*prompt, *answer]
                ids[row], lengths[row], gained[row] = str(number), len(prompt) + 1, [answer[0]]
        began = time.perf_counter()
        drafts = propose(ids, gained, lengths, starts, table)
        seconds, steps = seconds + time.perf_counter() - began, steps + 1
        for row, draft in enumerate(drafts):
            known, end = int(lengths[row]), int(ends[row])
            right = 0
            while right < len(draft) and known + right < end and draft[right] == table[row, known + right]:
                right += 1
            lengths[row] = min(end, known + right + 1)
            gained[row] = table[row, known : lengths[row]].tolist()
            tokens += len(gained[row])


def _config(drafted: int, rows: int, most: int) -> Any:
    """What the proposers read of vLLM's configuration; all else are its defaults."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=drafted, prompt_lookup_min=2, prompt_lookup_max=4,
            suffix_decoding_max_tree_depth=24, suffix_decoding_max_cached_requests=10_000,
            suffix_decoding_max_spec_factor=1.0, suffix_decoding_min_token_prob=0.1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        model_config=SimpleNamespace(max_model_len=most, get_vocab_size=lambda: 8192, skip_tokenizer_init=True),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )  # fmt: skip


def _own_ngram(config: Any) -> Propose:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    made, drafted = NgramProposer(config), config.speculative_config.num_speculative_tokens
    return lambda ids, gained, lengths, starts, table: made.propose(drafted, gained, lengths, table)


def _own_suffix(config: Any) -> Propose:
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    made, drafted = SuffixDecodingProposer(config), config.speculative_config.num_speculative_tokens

    def propose(ids: list[str], gained: list[list[int]], lengths: Ints, starts: Ints, table: Ints) -> list[list[int]]:
        batch = SimpleNamespace(
            req_ids=ids,
            num_tokens_no_spec=lengths,
            req_id_to_index={one: row for row, one in enumerate(ids)},
            num_prompt_tokens=starts,
            token_ids_cpu=table,
        )
        found: list[list[int]] = made.propose(drafted, batch, gained)
        return found

    return propose


def _forerun(method: str) -> Callable[[Any], Propose]:
    def make(config: Any) -> Propose:
        os.environ[VARIABLE] = json.dumps({"method": method})
        made = ForerunProposer(config)
        return lambda ids, gained, lengths, starts, table: made.propose(gained, lengths, table)

    return make


ARMS: dict[str, Callable[[Any], Propose]] = {OWN: _own_ngram}
if importlib.util.find_spec("arctic_inference"):
    ARMS["vLLM suffix"] = _own_suffix
ARMS |= {f"forerun {method}": _forerun(method) for method in ("suffix", "ngram")}


if __name__ == "__main__":
    sys.exit(main())
