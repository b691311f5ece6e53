"""``forerun demo --all`` lets every drafter complete the same prompts and prints one table of what
each brought.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table
from rich.text import Text

from forerun import demo, shipped
from forerun.cli import console
from forerun.errors import ArgumentError
from forerun.types import RequestOutput, SamplingParams, SpeculationStats

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.drafters.kinds import HeadKind

TEMPERATURES = (0.0, 1.0)
FILES, EDITS = 3, 3  # Questions of either kind
DEPTH, NODES = 5, 32  # Tokens of a chain; drafted nodes of a tree
ROOMY = 100  # Columns of a terminal that the whole table needs
COPYING: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedDrafter:
    """A drafter that ships, or what `forerun train` left in a folder."""

    name: str
    kind: HeadKind
    model: str  # Folder or shipped name
    parameters: int  # Parameters of its checkpoint
    seconds: float | None = None  # Time of training, evaluation left out; None: unknown
    max_depth: int | None = None  # Most tokens on one path; None: any

    @property
    def parallel(self) -> bool:
        """Return whether all depths come from one pass, so that one more level costs nothing."""
        return self.kind.drafts in ("parallel", "block")

    def chain(self, tokens: int) -> dict[str, Any]:
        """Return a configuration that drafts a chain of so many tokens, or of the most that the
        drafter has.
        """
        depth = min(tokens, self.max_depth or tokens)
        return {**self._base(), "num_speculative_tokens": depth, "shape": [1] * depth}

    def tree(self, nodes: int) -> dict[str, Any] | None:
        """Return a configuration that drafts the likeliest paths, so many nodes in all; None if the
        drafter has no such tree.
        """
        from forerun.drafters.kinds import import_named

        options = {option.name for option in fields(import_named(self.kind.drafter).Config)}
        if "nodes" not in options:
            return None
        width = {"top_k": nodes if self.parallel else min(nodes, 8)} if "top_k" in options else {}
        return {**self._base(), "nodes": nodes, **width}

    def _base(self) -> dict[str, Any]:
        from forerun.drafters.kinds import import_named

        return {"method": import_named(self.kind.drafter).name, "model": self.model}


@dataclass(kw_only=True, slots=True)
class BoardLine:
    """One line of the table: a drafter, and what it brought at each temperature."""

    name: str
    config: dict[str, Any]
    parameters: int = 0  # Trained ones
    trained_s: float | None = None  # Seconds of training, evaluation left out
    stats: dict[float, SpeculationStats] = field(default_factory=dict)
    tokens: dict[float, int] = field(default_factory=dict)  # That came of all passes but the prompts'
    seconds: dict[float, float] = field(default_factory=dict)  # That they took
    unlike: int = 0  # Greedy completions that differ from plain decoding's by more than a numeric tie

    def add(self, temperature: float, output: RequestOutput) -> None:
        """Count a completion."""
        self.stats.setdefault(temperature, SpeculationStats()).add(output.outputs[0].speculation)
        tokens = len(output.outputs[0].token_ids) - 1
        self.tokens[temperature] = self.tokens.get(temperature, 0) + tokens
        self.seconds[temperature] = self.seconds.get(temperature, 0.0) + (output.decode_s or 0.0)

    def per_pass(self, temperature: float) -> float:
        """Return the tokens per pass of the target."""
        return self.stats[temperature].tokens_per_pass

    def nodes(self, temperature: float) -> float:
        """Return the mean drafted nodes of the passes in which something was drafted."""
        stats = self.stats[temperature]
        return stats.num_draft_tokens / max(1, stats.num_spec_steps)

    def speed(self, temperature: float) -> float:
        """Return the decoded tokens per second."""
        return self.tokens[temperature] / max(1e-9, self.seconds[temperature])

    @property
    def rules(self) -> list[str]:
        """Return the verification rules that verified the drafts."""
        return sorted({rule for stats in self.stats.values() for rule in stats.steps_per_rule})

    @property
    def lossless(self) -> bool:
        """Return whether every one of the rules leaves the target's distribution as it is."""
        from forerun.core.rules import rule_named

        return all(rule_named(rule).lossless for rule in self.rules)


def list_lines(heads: Path | None) -> list[BoardLine]:
    """Return the drafters that need no training, the shipped ones, and those in the folders below
    `heads`.

    `forerun train` left the latter. Heads draft a chain and a tree.
    """
    lines = [BoardLine(name=name, config=config) for name, config in COPYING.items()]
    ours = [_draft("demo-draft", "demo-draft", "distill"), _head("demo-eagle3", "demo-eagle3")]
    for drafter in ours if heads is None else [*ours, *find_trained(heads)]:
        for shape, config in (("chain", drafter.chain(DEPTH)), ("tree", drafter.tree(NODES))):
            if config is not None:
                name = f"{drafter.name}, {shape}"
                size = drafter.parameters
                lines.append(BoardLine(name=name, config=config, parameters=size, trained_s=drafter.seconds))
    return lines


def find_trained(folder: Path) -> list[TrainedDrafter]:
    """Return the heads and draft models that `forerun train ... --output` left in folders below
    `folder`, by name.

    What was trained together with a target is left out. ArgumentError: there are none.
    """
    drafters = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (path / "model").is_dir():
            # Answers, lengths and the speed of plain decoding are that target's: in one table they compare nothing.
            console.warn(
                f"{path.name} is left out: its head drafts for the target that was trained with it, {path / 'model'}; "
                "compare it with that one's plain decoding: forerun demo MODEL --drafter ... --drafter-model HEAD"
            )
            continue
        head, draft = path / "head", path / "draft"
        if (head / "config.json").is_file():
            drafters.append(_head(path.name, str(head), trained_seconds(path)))
        elif (draft / "config.json").is_file():
            kind = json.loads((path / "run.json").read_text(encoding="utf-8"))["recipe"]["kind"]
            drafters.append(_draft(path.name, str(draft), kind, trained_seconds(path)))
    if not drafters:
        raise ArgumentError(
            f"{folder} holds no folder with a trained head or draft model, as `forerun train ... --output` leaves one"
        )
    return drafters


def _draft(name: str, source: str, kind: str, seconds: float | None = None) -> TrainedDrafter:
    from forerun.drafters.kinds import kind_named
    from forerun.speedup.run import count_weights

    size = count_weights(Path(shipped.resolve(source)))
    return TrainedDrafter(name=name, kind=kind_named(kind), model=source, parameters=size, seconds=seconds)


def _head(name: str, source: str, seconds: float | None = None) -> TrainedDrafter:
    from forerun.drafters.kinds import kind_named
    from forerun.heads.files import read_head

    head = read_head(shipped.resolve(source))
    return TrainedDrafter(
        name=name,
        kind=kind_named(head.config.kind),
        model=source,
        parameters=sum(tensor.numel() for tensor in head.tensors.values() if tensor.is_floating_point()),
        seconds=seconds,
        max_depth=head.config.max_depth,
    )


def trained_seconds(output: Path) -> float | None:
    """Return the seconds of the steps before the newest checkpoint in `output`, evaluation left
    out; None if unknown.
    """
    from forerun.training.loop import checkpoint

    newest = checkpoint.latest(output)
    return (checkpoint.Saved(newest).progress.seconds or None) if newest else None


def questions(llm: LLM) -> list[Any]:
    """Return held-out files to continue and held-out functions to edit, the longest of the shipped
    ones.
    """
    files = [{"prompt_token_ids": ids} for ids in demo.contexts(llm.tokenizer, count=FILES, length=256)]
    edits = sorted(demo.edits(), key=lambda edit: len(edit.answer))[-EDITS:]
    return [*files, *(llm.chat_prompt(edit.messages) for edit in edits)]


def run(llm: LLM, board: list[BoardLine], *, max_tokens: int) -> BoardLine:
    """Let plain decoding, which is returned, and every drafter complete all prompts, in turns
    question by question.
    """
    from forerun.speedup.compare import SpeedupArm, ask_arms, find_parting

    plain = BoardLine(name="plain", config={})
    drafting = [SpeedupArm(name=line.name, speculative={**line.config, "adaptive": False}) for line in board]
    arms = [SpeedupArm(name=plain.name), *drafting]
    prompts = questions(llm)
    with console.progress_bar("completing", total=len(arms) * len(prompts) * len(TEMPERATURES)) as advance:
        for temperature in TEMPERATURES:
            short = SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, seed=7)
            for prompt in (prompts[0], prompts[-1]):  # A file and an edit warm up
                ask_arms(llm, arms, prompt, short)
            for number, prompt in enumerate(prompts):
                params = replace(short, max_tokens=max_tokens, ignore_eos=number < FILES)
                outputs = ask_arms(llm, arms, prompt, params)
                for line in (plain, *board):
                    line.add(temperature, outputs[line.name])
                    if temperature == 0:
                        parted = find_parting(llm, outputs[plain.name], outputs[line.name])
                        line.unlike += parted is not None and not parted.tie
                advance(advance=len(arms))
    return plain


def table(plain: BoardLine, board: list[BoardLine], width: int) -> Table:
    """Return the table, the fastest first, within so many columns."""
    roomy = width >= ROOMY
    right: dict[str, Any] = {"justify": "right", "no_wrap": True}
    columns = [
        Column("drafter", overflow="fold"),
        Column("size", **right),
        Column("trained", **right),
        Column("lossless", **right),
    ]
    for temperature in TEMPERATURES:
        first = f"T = {temperature:g}"
        columns += [Column(f"{first}\n\nnodes", **right)] if roomy else []
        columns += [Column(f"{'' if roomy else first}\ntokens/\npass", **right), Column("\nspeed-\nup", **right)]
    board_table = Table(*columns, box=None, pad_edge=False, padding=(0, 2 if roomy else 1, 0, 0))
    for entry in sorted(board, key=lambda line: -sum(line.speed(t) / plain.speed(t) for t in TEMPERATURES)):
        cells = [
            entry.name,
            f"{entry.parameters / 1e6:.1f} M" if entry.parameters else "-",
            "-" if entry.trained_s is None else f"{entry.trained_s:.0f} s",
            f"{entry.unlike} DIFFER" if entry.unlike else "yes" if entry.lossless else "no",
        ]
        for temperature in TEMPERATURES:
            cells += [f"{entry.nodes(temperature):.0f}"] if roomy else []
            cells += [
                f"{entry.per_pass(temperature):.2f}",
                f"{entry.speed(temperature) / plain.speed(temperature):.2f}",
            ]
        board_table.add_row(*(Text(cell, "bold red" if "DIFFER" in cell or cell == "no" else "") for cell in cells))
    return board_table


def records(plain: BoardLine, board: list[BoardLine]) -> list[dict[str, Any]]:
    """Return the records that ``demo --all --json`` prints."""
    return [
        {
            "drafter": entry.name,
            "speculative_config": entry.config,
            "parameters": entry.parameters,
            "trained_seconds": None if entry.trained_s is None else round(entry.trained_s, 1),
            "lossless": entry.lossless,
            "rules": entry.rules,
            "greedy_answers_unlike_plain": entry.unlike,
            "drafted_nodes": {f"{t:g}": round(entry.nodes(t), 2) for t in TEMPERATURES},
            "tokens_per_pass": {f"{t:g}": round(entry.per_pass(t), 4) for t in TEMPERATURES},
            "speedup": {f"{t:g}": round(entry.speed(t) / plain.speed(t), 4) for t in TEMPERATURES},
        }
        for entry in board
    ]
