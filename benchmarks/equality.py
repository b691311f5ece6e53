"""Is what speculation writes the target's own text, token for token? Counted on questions, for every drafter.

    python benchmarks/equality.py --model MODEL --questions FILE --prompts 100 --tokens 256

The file is Spec-Bench's: a JSON object a line with ``turns``, of which the first is asked, through the chat template
where the model has one; the categories take turns. Each question is answered plainly, alone, then with each drafter,
and for the first token that differs its place and both tokens are told. Greedy by default; with `--temperature` every
question has a seed, and drafters draft deterministically. With `--concurrency 32` so many are answered at once. What
was answered is kept in the file `--keep`, and a run that was stopped goes on from there. Exit code 1: an answer
differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.console import Console

from forerun import LLM, SamplingParams

PLAIN = "plain"
SKIPPED = [f"{layer}.{part}" for layer in (10, 14, 18, 22) for part in ("attn", "mlp")]
ARMS: dict[str, Mapping[str, Any] | bool] = {  # Whatever drafts with nothing but the target
    PLAIN: False,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "suffix tree": {"method": "suffix", "nodes": 24, "adaptive": False},
    "recycling": {"method": "recycling"},
    "recycling tree": {"method": "recycling", "nodes": 24, "adaptive": False},
    "recycling wide": {"method": "recycling", "nodes": 64, "adaptive": False},
    "lookahead": {"method": "lookahead", "adaptive": False},
    "jacobi": {"method": "jacobi", "adaptive": False},
    "merge": {"method": "merge", "drafters": [{"method": "suffix"}, {"method": "recycling"}], "adaptive": False},
    "early_exit": {"method": "early_exit", "exit_layer": 12, "num_speculative_tokens": 3, "adaptive": False},
    "early_exit tree": {"method": "early_exit", "exit_layer": 12, "shape": [3, 2, 1], "adaptive": False},
    "skip_layers": {"method": "skip_layers", "skip": SKIPPED, "num_speculative_tokens": 3, "adaptive": False},
    "skip_layers tree": {"method": "skip_layers", "skip": SKIPPED, "shape": [2, 2, 1], "adaptive": False},
    "quantized_self": {"method": "quantized_self", "num_speculative_tokens": 3, "adaptive": False},
    "auto": {"method": "auto"},
}
CHEAP = [name for name in ARMS if name.partition(" ")[0] not in {PLAIN, "early_exit", "skip_layers", "quantized_self"}]


def questions(path: Path, count: int) -> list[str]:
    """The first turns of a file, category by category in turns."""
    by_category = defaultdict[str, list[str]](list)
    for line in path.read_text(encoding="utf-8").splitlines():
        asked = json.loads(line)
        by_category[asked["category"]].append(asked["turns"][0])
    mixed = [question for some in zip_longest(*by_category.values()) for question in some if question is not None]
    return mixed[:count]


class Answers:
    """What was answered so far, by arm and question, and the file in which it is kept."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self._path, self._setting = path, dict(setting)
        self._known: dict[str, dict[str, list[int]]] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept["setting"] != self._setting:
                raise SystemExit(
                    f"{path} holds answers of {kept['setting']}, not of {self._setting}; name another file"
                )
            self._known = kept["answers"]

    def lacking(self, arm: str, count: int) -> list[int]:
        """Questions without an answer."""
        return [index for index in range(count) if str(index) not in self._known.get(arm, {})]

    def of(self, arm: str, index: int) -> list[int]:
        """Token ids."""
        return self._known[arm][str(index)]

    def add(self, arm: str, found: Mapping[int, Sequence[int]]) -> None:
        """Note answers, and keep them."""
        self._known.setdefault(arm, {}).update({str(index): list(tokens) for index, tokens in found.items()})
        if self._path is not None:
            whole = json.dumps({"setting": self._setting, "answers": self._known})
            self._path.write_text(whole + "\n", encoding="utf-8")


def answer(llm: LLM, arm: str, prompts: Sequence[Any], answers: Answers, options: argparse.Namespace) -> None:
    """Let one arm answer what it has not answered yet, so many at once; plainly one by one."""
    size = 1 if arm == PLAIN else options.concurrency
    lacking = answers.lacking(arm, len(prompts))
    for start in range(0, len(lacking), size):
        some = lacking[start : start + size]
        params = [
            SamplingParams(temperature=options.temperature, top_k=0, top_p=1.0, max_tokens=options.tokens, seed=index)
            for index in some
        ]
        outputs = llm.generate([prompts[index] for index in some], params, speculative=ARMS[arm])
        answers.add(arm, {index: one.outputs[0].token_ids for index, one in zip(some, outputs, strict=True)})


def compared(arm: str, count: int, answers: Answers) -> dict[str, Any]:
    """How many answers of an arm equal the plain ones, and where the others part from them."""
    parted = []
    for index in range(count):
        plain, other = answers.of(PLAIN, index), answers.of(arm, index)
        if plain != other:
            place = next((at for at, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1]), None)
            place = min(len(plain), len(other)) if place is None else place
            mine, theirs = (one[place] if place < len(one) else None for one in (plain, other))
            parted.append({"question": index, "place": place, "plain": mine, "drafted": theirs})
    tokens = sum(len(answers.of(arm, index)) for index in range(count))
    return {"questions": count, "equal": count - len(parted), "tokens": tokens, "parted": parted}


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--questions", type=Path, required=True, help="lines of JSON with category and turns")
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=1, help="answers at once; plain ones come one by one")
    parser.add_argument("--drafters", nargs="+", choices=[name for name in ARMS if name != PLAIN], default=CHEAP)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--no-self-check", action="store_true")
    parser.add_argument("--keep", type=Path, help="file in which answers are kept, and looked for")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    return parser.parse_args()


def main() -> int:
    """Ask, compare, tell."""
    options = arguments()
    setting = {
        key: str(getattr(options, key))
        for key in ("model", "questions", "tokens", "dtype", "temperature", "reproducible")
    }
    answers = Answers(options.keep, {**setting, "concurrency": str(options.concurrency)})
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_num_seqs=options.concurrency,
        max_model_len=2048,
        reproducible=options.reproducible,
        self_check=not options.no_self_check,
    )
    asked = questions(options.questions, options.prompts)
    template = llm.tokenizer is not None and llm.tokenizer.chat_template
    prompts = [llm.chat_prompt([{"role": "user", "content": one}]) if template else one for one in asked]
    console, found = Console(stderr=options.json), {}
    for arm in (PLAIN, *options.drafters):
        answer(llm, arm, prompts, answers, options)
        if arm == PLAIN:
            continue
        found[arm] = one = compared(arm, len(prompts), answers)
        console.print(f"{arm}: {one['equal']} of {one['questions']} equal, {one['tokens']} tokens")
        for part in one["parted"]:
            texts = [
                repr(llm.tokenizer.decode([token])) if llm.tokenizer is not None and token is not None else str(token)
                for token in (part["plain"], part["drafted"])
            ]
            console.print(
                f"  question {part['question']}, token {part['place']}: {texts[0]} plainly, {texts[1]} drafted"
            )
    if options.json:
        line = json.dumps({**setting, "concurrency": options.concurrency, "arms": found})
        sys.stdout.write(line + "\n")
    return int(any(one["parted"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
