"""Acceptance over a stream of similar prompts, with online adaptation and without, on the models that ship.

    python benchmarks/adaptation.py --share 0.3

The prompts are cut from held-out files of one kind: 96 tokens each, no place twice. Both runs answer them in the same
order with the same parameters; the second one's drafter learns meanwhile. At temperature 0 the answers must be equal.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from forerun import LLM, SamplingParams
from forerun.demo import prompts

say = Console(highlight=False, soft_wrap=True).print
MODELS = {"draft_model": "demo-draft", "eagle3": "demo-eagle3"}
PART = 16
"""Prompts between two lines."""


@dataclass(kw_only=True)
class Ran:
    """One run over the stream."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    """Kept and judged drafted tokens."""
    texts: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    stats: Any = None


def stream(llm: LLM, kind: str, count: int, context: int) -> list[list[int]]:
    """Token ids of the prompts."""
    texts = [llm.tokenizer.encode(prompt.text, verbose=False) for prompt in prompts() if kind in prompt.name]
    places = [(text, start) for text in texts for start in range(0, len(text) - context, 16)]
    random.Random(0).shuffle(places)
    if len(places) < count:
        raise SystemExit(f"only {len(places)} prompts of this kind; lower --prompts")
    return [text[start : start + context] for text, start in places[:count]]


def run(options: argparse.Namespace, adapt: dict[str, Any] | None) -> Ran:
    """Answer the whole stream."""
    drafter = {
        "method": options.drafter,
        "model": MODELS[options.drafter],
        "num_speculative_tokens": 4,
        "adaptive": False,
    }
    llm = LLM("demo", speculative_config=drafter, adapt=adapt, max_num_seqs=4, max_model_len=512, dtype=options.dtype)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=0, ignore_eos=True)
    ran, began = Ran(), time.perf_counter()
    wanted = stream(llm, options.kind, options.prompts, 96)
    for start in range(0, len(wanted), PART):
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in wanted[start : start + PART]], params)
        kept = judged = 0
        for output in outputs:
            speculation = output.outputs[0].speculation
            kept += speculation.num_accepted_draft_tokens
            drafted, accepted = speculation.drafted_per_depth, speculation.accepted_per_depth
            # The first token of a draft is always judged, each other one where the one before it was kept.
            judged += sum(min(tried, before) for tried, before in zip(drafted, [drafted[0], *accepted], strict=False))
            ran.texts.append(output.outputs[0].token_ids)
            ran.tokens += len(output.outputs[0].token_ids)
        ran.parts.append((kept, judged))
    ran.seconds = time.perf_counter() - began
    if llm.adaptation is not None:
        llm.adaptation.close()
        ran.stats = llm.adaptation.stats()
    return ran


def main() -> None:
    """Print both runs side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", choices=MODELS, default="draft_model")
    parser.add_argument("--kind", default="test/", help="part of the names of the files that prompts are cut from")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64, help="of one answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--learning-rate", type=float, default=None)
    options = parser.parse_args()
    adapt = {"share": options.share}
    if options.learning_rate is not None:
        adapt["learning_rate"] = options.learning_rate
    plain, adapted = run(options, None), run(options, adapt)
    say(f"{torch.get_num_threads()} threads, {options}")
    say("prompts     without   adapting   (share of judged drafted tokens that were kept)")
    for part, (fixed, learned) in enumerate(zip(plain.parts, adapted.parts, strict=True)):
        last = min((part + 1) * PART, options.prompts)
        say(f"{part * PART + 1:4d}-{last:<4d}   {fixed[0] / fixed[1]:8.3f}   {learned[0] / learned[1]:8.3f}")
    say(f"tokens/s    {plain.tokens / plain.seconds:8.1f}   {adapted.tokens / adapted.seconds:8.1f}")
    if options.temperature == 0:
        say("answers are", "equal" if plain.texts == adapted.texts else "NOT EQUAL")
    say(adapted.stats)


if __name__ == "__main__":
    main()
