"""The demo target's heads, made with the commands that anybody would use: the target writes, the heads learn.

Knows which commands follow each other; what they do is in `forerun.cli`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import corpus
import edits
from tokenizer import plain_words
from transformers import PreTrainedTokenizerFast

from forerun.cli import main
from forerun.writing import replace_file

PIECES = 6_000
"""Prompts that the target continues."""
PIECE_CHARACTERS = 1_600
EDITS = 4_000
"""Edits that it is asked for."""
LIBRARY_SHARE = 12
"""One training file in so many is read as it is, beside what the target wrote."""
PROMPT_TOKENS = 96
ANSWER_TOKENS = 160
EDIT_TOKENS = 600
TEMPERATURE = 0.8
TABLES = "training.learning_rate=4.0e-3"
"""Of heads with tables of the vocabulary, which AdamW moves beside Muon."""
LEADER_BOARD = {
    "eagle3": ("draft.options={fc_norm: true, norm_output: true}", "objective={steps: 5, decay: 0.8}"),
    "eagle": (),
    "peagle": (),
    "medusa": ("training.optimizer=adamw",),
    "hydra": ("training.optimizer=adamw", "draft.options={num_heads: 5}"),
    "mlp_speculator": ("training.optimizer=adamw", "draft.options={n_predict: 5}"),
    "dflash": ("draft.options={block_size: 8, num_hidden_layers: 3}", "objective={anchors: 64}"),
    "dspark": ("draft.options={block_size: 7, num_hidden_layers: 3}", TABLES),
    "domino": ("draft.options={block_size: 8, num_hidden_layers: 3}", TABLES),
    "dflash2": ("draft.options={block_size: 8, num_hidden_layers: 3}", TABLES),
    "kangaroo": (),
    "pard": ("training.optimizer=adamw", "training.learning_rate=5.0e-4", "draft.options={layers: 2}"),
}
"""Kind of `forerun train` -> what its recipe says besides ``heads.yaml``; each drafts at least five tokens. PARD's
draft model is two of the target's layers. What is trained together with a target (Medusa-2) is not comparable."""


SHIPPED = ("training.epochs=1.15", "windows.rows=8")
"""What the recipe of the head that ships says besides that of its kind."""
EVALUATION = ("evaluation.count=16", "evaluation.prompt_tokens=200", "evaluation.settings.max_tokens=64")


def make_head(work: Path) -> None:
    """Write ``work/head-training``, the EAGLE-3 head that ships; RuntimeError: a command failed, it has said why."""
    prompts = f"evaluation.prompts={write_data(work) / 'prompts'}"
    _train("eagle3", work, work / "head-training", *SHIPPED, *EVALUATION, prompts)


def make_leader_board(work: Path, seconds: float) -> None:
    """Write ``work/heads``: a head of every kind, each trained for so many seconds of wall time; errors as `make_head`.
    Run again, it trains what is missing, and goes on with what was stopped. `forerun demo --all --heads` compares
    them."""
    for kind in LEADER_BOARD:
        _train(kind, work, work / "heads" / kind, f"training.seconds={seconds}")


def _train(kind: str, work: Path, output: Path, *words: str) -> None:
    _run(
        *("train", kind, str(Path(__file__).with_name("heads.yaml")), *LEADER_BOARD[kind], *words),
        *("--target", str(work / "target"), "--data", str(write_data(work) / "train"), "--output", str(output)),
    )


def write_data(work: Path) -> Path:
    """The data of all heads, made once: the target in ``work/target`` continues pieces of the training files and
    answers edits; with them are some of the files themselves. The folder of ``train`` and ``prompts``."""
    folder = work / "head-data"
    if (folder / "prompts").is_dir() and (folder / "train").is_dir():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = corpus.split(corpus.read_standard_library())
    target = str(work / "target")
    _write(folder / "pieces.jsonl", lambda: _pieces(train, PIECES))
    _write(folder / "edits.jsonl", lambda: _edits(train, target, EDITS))
    _write(folder / "library.jsonl", lambda: [file.text for file in train[::LIBRARY_SHARE]])
    _write(folder / "held-out.jsonl", lambda: [file.text for file in held_out if corpus.is_prompt(file)])
    for asked, longest in (("pieces", ANSWER_TOKENS), ("edits", EDIT_TOKENS)):
        _run(
            *("data", "regenerate", str(folder / f"{asked}.jsonl"), "--target", target),
            *("--output", str(folder / f"{asked}-answered.jsonl"), "--prompt-tokens", str(PROMPT_TOKENS)),
            *(
                "--max-tokens",
                str(longest),
                "--temperature",
                str(TEMPERATURE),
                "--concurrency",
                "32",
                "--drafter",
                "suffix",
            ),
        )
    answered = [folder / f"{asked}-answered.jsonl" for asked in ("pieces", "edits")]
    _prepare(target, folder / "train", *answered, folder / "library.jsonl")
    _prepare(target, folder / "prompts", folder / "held-out.jsonl")
    return folder


def _pieces(files: list[corpus.SourceFile], count: int) -> list[str]:
    """Pieces of the files that begin at the start of a line, long files giving more."""
    chance = random.Random(0)
    chosen = chance.choices(files, weights=[len(file.text) for file in files], k=count)
    found = []
    for file in chosen:
        start = file.text.rfind("\n", 0, chance.randrange(len(file.text))) + 1
        found.append(file.text[start : start + PIECE_CHARACTERS])
    return found


def _edits(files: list[corpus.SourceFile], target: str, count: int) -> list[list[dict[str, str]]]:
    """Some of all edits that can be made of the files, as they are asked for."""
    words = plain_words(PreTrainedTokenizerFast.from_pretrained(target))
    return [edit.prompt for edit in random.Random(0).sample(list(edits.edits(files, words, seed=1)), count)]


def _write(path: Path, made: Callable[[], Sequence[str | list[dict[str, str]]]]) -> None:
    """Texts, or conversations, if they are not there yet."""
    if path.exists():
        return
    lines = [
        json.dumps({"id": str(number), ("text" if isinstance(one, str) else "messages"): one})
        for number, one in enumerate(made())
        if not isinstance(one, str) or one.strip()
    ]
    with replace_file(path) as file:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _prepare(target: str, output: Path, *files: Path) -> None:
    if not output.exists():
        _run(
            *("data", "prepare", *map(str, files), "--target", target, "--output", str(output)),
            *("--max-length", "512", "--split-long"),
        )


def _run(*words: str) -> None:
    code = main(words)
    if code != 0:
        raise RuntimeError(f"forerun {' '.join(words[:2])} ended with exit code {code}")
