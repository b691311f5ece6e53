"""``forerun demo --all``: every drafter answers the same questions, and one table says what each brought."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from forerun import demo as shipped
from forerun.cli import console
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.types import RequestOutput

TEMPERATURES = (0.0, 1.0)
FILES, EDITS = 3, 3  # Questions of either kind
DEPTH, NODES = 5, 32  # Tokens of a chain; drafted nodes of a tree
COPYING: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
}
SHIPPED: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": DEPTH},
}


@dataclass(kw_only=True, slots=True)
class Entry:
    """One line: a drafter, and what it brought at each temperature."""

    name: str
    config: dict[str, Any]
    parameters: int = 0  # Trained ones
    trained_s: float | None = None  # Seconds of training, evaluation left out
    passes: dict[float, int] = field(default_factory=dict)  # Of the target, the prompts' not counted
    tokens: dict[float, int] = field(default_factory=dict)  # That came of them
    seconds: dict[float, float] = field(default_factory=dict)  # That they took
    unlike: int = 0  # Greedy answers that differ from plain decoding's by more than a numeric tie

    def add(self, temperature: float, output: RequestOutput) -> None:
        """Count an answer."""
        stats = output.outputs[0].speculation
        steps, tokens = stats.num_spec_steps + stats.num_plain_steps, len(output.outputs[0].token_ids) - 1
        self.passes[temperature] = self.passes.get(temperature, 0) + steps
        self.tokens[temperature] = self.tokens.get(temperature, 0) + tokens
        self.seconds[temperature] = self.seconds.get(temperature, 0.0) + (output.decode_s or 0.0)

    def per_pass(self, temperature: float) -> float:
        """Tokens per pass of the target: the mean acceptance length, bonus included."""
        return self.tokens[temperature] / max(1, self.passes[temperature])

    def speed(self, temperature: float) -> float:
        """Decoded tokens per second."""
        return self.tokens[temperature] / max(1e-9, self.seconds[temperature])


def entries(heads: Path | None) -> list[Entry]:
    """The drafters that need no training, the shipped ones, and every head in a folder below `heads`, as `forerun
    train` leaves it; heads draft a chain and a tree."""
    found = [Entry(name=name, config=config) for name, config in COPYING.items()]
    for name, config in SHIPPED.items():
        found.append(Entry(name=name, config=config, parameters=_weights(Path(shipped.resolve(config["model"])))))
    found += _of_head("eagle3, shipped", "demo-eagle3", None)
    if heads is None:
        return found
    folders = sorted(path for path in heads.iterdir() if (path / "head" / "config.json").is_file())
    if not folders:
        raise ArgumentError(f"{heads} holds no folder with a trained head, as `forerun train ... --output` leaves one")
    for folder in folders:
        found += _of_head(folder.name, str(folder / "head"), folder / "log.jsonl")
    return found


def _of_head(name: str, source: str, log: Path | None) -> list[Entry]:
    from forerun.checkpoints import read_head

    head = read_head(shipped.resolve(source))
    parameters = sum(tensor.numel() for tensor in head.tensors.values() if tensor.is_floating_point())
    depth = min(DEPTH, head.config.max_depth or DEPTH)
    chain = {"method": head.config.kind, "model": source, "num_speculative_tokens": depth, "shape": [1] * depth}
    tree = {"method": head.config.kind, "model": source, "nodes": NODES, "top_k": _width(head.config)}
    trained = None if log is None or not log.is_file() else _trained_s(log)
    return [
        Entry(name=f"{name}, {shape}", config=config, parameters=parameters, trained_s=trained)
        for shape, config in (("chain", chain), ("tree", tree))
    ]


def _width(config: Any) -> int:
    """Nodes that a tree expands per level: all, where a level costs the head nothing."""
    from forerun.drafters.heads.kinds import kind_named

    return NODES if kind_named(config.kind).drafts in ("parallel", "block") else 8


def _trained_s(log: Path) -> float:
    """Seconds of training, from the speeds that its log names."""
    seconds, before = 0.0, 0
    for line in map(json.loads, log.read_text().splitlines()):
        if "tokens_per_second" in line:
            seconds += (line["tokens"] - before) / line["tokens_per_second"]
            before = line["tokens"]
    return seconds


def _weights(folder: Path) -> int:
    from forerun.model.load import read_header

    return sum(
        math.prod(entry["shape"]) for path in folder.glob("*.safetensors") for entry in read_header(path).values()
    )


def questions(llm: LLM) -> list[Any]:
    """Held-out files to continue and held-out functions to edit, the longest of the shipped ones."""
    files = [{"prompt_token_ids": ids} for ids in shipped.contexts(llm.tokenizer, count=FILES, length=256)]
    edits = sorted(shipped.edits(), key=lambda edit: len(edit.answer))[-EDITS:]
    return [*files, *(llm.chat_prompt(edit.messages) for edit in edits)]


def run(llm: LLM, board: list[Entry], *, max_tokens: int) -> Entry:
    """Let plain decoding, which is returned, and every entry answer all questions, in turns question by question."""
    from forerun.certify.reference import difference
    from forerun.types import SamplingParams

    plain = Entry(name="plain", config={})
    asked = questions(llm)
    arms = [plain, *board]
    with console.progress_bar("answering", total=len(arms) * len(asked) * len(TEMPERATURES)) as advance:
        for temperature in TEMPERATURES:
            for number, prompt in enumerate([asked[0], *asked]):  # the first question once more, to warm up
                length = 8 if number == 0 else max_tokens
                params = SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=number <= FILES, seed=7)
                first: RequestOutput | None = None
                for arm in arms:
                    drafter: Any = {**arm.config, "adaptive": False} if arm.config else False
                    # A domain of its own for each answer, or drafters that remember would copy the one before.
                    salt = f"{arm.name} {temperature} {number}"
                    [output] = llm.generate([prompt], params, speculative=drafter, cache_salt=salt)
                    first = first or output
                    if number == 0:
                        continue
                    arm.add(temperature, output)
                    if temperature == 0 and arm is not plain:
                        pair = (first.outputs[0].token_ids, output.outputs[0].token_ids)
                        parted = difference(llm, output.prompt_token_ids, pair, 0)
                        arm.unlike += parted is not None and not parted.tie
                    advance(advance=1)
    return plain


def table(plain: Entry, board: list[Entry]) -> Table:
    """The fastest first."""
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = [Column("drafter", no_wrap=True), Column("parameters", **right), Column("trained", **right)]
    columns += [Column("greedy\ntext", **right)]
    for temperature in TEMPERATURES:
        columns += [Column(f"T = {temperature:g}\ntokens/pass", **right), Column("\nspeed-up", **right)]
    made = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for entry in sorted(board, key=lambda one: -sum(one.speed(t) / plain.speed(t) for t in TEMPERATURES)):
        cells = [entry.name, f"{entry.parameters / 1e6:.1f} M" if entry.parameters else "-"]
        cells += ["-" if entry.trained_s is None else f"{entry.trained_s:.0f} s"]
        cells += ["the same" if not entry.unlike else f"{entry.unlike} DIFFER"]
        for temperature in TEMPERATURES:
            gain = entry.speed(temperature) / plain.speed(temperature)
            cells += [f"{entry.per_pass(temperature):.2f}", f"{gain:.2f}"]
        made.add_row(*(Text(cell, "bold red" if "DIFFER" in cell else "") for cell in cells))
    return made


def records(plain: Entry, board: list[Entry]) -> list[dict[str, Any]]:
    """What ``demo --all --json`` prints."""
    return [
        {
            "drafter": entry.name,
            "speculative_config": entry.config,
            "parameters": entry.parameters,
            "trained_seconds": entry.trained_s,
            "greedy_answers_unlike_plain": entry.unlike,
            "mean_acceptance_length": {f"{t:g}": round(entry.per_pass(t), 4) for t in TEMPERATURES},
            "speedup": {f"{t:g}": round(entry.speed(t) / plain.speed(t), 4) for t in TEMPERATURES},
        }
        for entry in board
    ]
