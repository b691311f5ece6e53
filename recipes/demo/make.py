"""Make the demo models that ship with forerun: `python recipes/demo/make.py [STAGE...]`; without a stage, all of them
but `heads`, which trains one of every kind for `forerun demo --all --heads build/demo/heads`.

Every stage reads what the one before wrote below ``--work`` and resumes where it was stopped. Takes about three hours
on two CPU cores. Writes ``src/forerun/demo/{target,draft,eagle3,prompts}``.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import corpus
import head
import pretrain
import ship
import tokenizer as demo_tokenizer
from drills import line_drills, name_drills, piece_drills, token_drills
from edits import dialogue
from edits import edits as all_edits
from guide import Document, copied

CONTEXT = 2048
STAGES = ("tokenizer", "target", "draft", "head", "ship")
LEADER_BOARD = "heads"
SHAPES = {
    "target": {
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
    "draft": {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    },
}
AGAIN = pretrain.Schedule(tokens=10_000_000, muon_rate=4.0e-3, adam_rate=2.0e-3, decay_share=1.0)
COPYING = replace(
    AGAIN, tokens=3_840_000, decay_share=0.25, phases=((1.0, 512),), question_weight=0.0, guide_weight=0.5
)
EDITING = replace(
    COPYING,
    tokens=5_500_000,
    muon_rate=3.0e-3,
    adam_rate=1.5e-3,
    decay_share=1.0,
    phases=((0.7, 512), (0.3, 1024)),
    question_weight=0.3,
    echo=True,
    distill_weight=1.0,
    teach_answers=False,
)
MARKING = replace(
    EDITING,
    tokens=4_000_000,
    muon_rate=2.0e-3,
    adam_rate=1.0e-3,
    phases=((0.75, 512), (0.25, 1024)),
    guide_weight=1.0,
)
DECIDING = replace(MARKING, tokens=1_900_000, muon_rate=1.2e-3, adam_rate=5.0e-4, phases=((1.0, 512),))
MARKED = {"texts": 0.25, "edits": 0.2, "lines": 600, "names": 2_000, "tokens": 400, "dialogues": False}
DECIDED = {
    "texts": 0.04,
    "edits": 0.06,
    "lines": 150,
    "names": 3_500,
    "tokens": 1_000,
    "pieces": 2_000,
    "dialogues": False,
}
DISTILLED = pretrain.Schedule(tokens=3_000_000, distill_weight=0.9, phases=pretrain.LONG_PHASES)


@dataclass(frozen=True, slots=True)
class Round:
    """A part of a training; it starts from the weights of the one before."""

    schedule: pretrain.Schedule
    shares: dict[str, Any] = field(default_factory=dict)
    """What the documents are: arguments of `training_documents`."""
    teacher: str = ""
    """Whose law is followed: a folder below ``--work``."""
    kept: float = 0.0
    """Share of the weights before in those after: a mean knows more than either (Wortsman et al. 2022, WiSE-FT)."""


ROUNDS = {
    "target": (
        Round(pretrain.Schedule(tokens=15_020_000)),
        Round(AGAIN),
        Round(COPYING, {"texts": 0.3, "edits": 0.6, "lines": 4_000, "tokens": 4_000}),
        Round(EDITING, {"texts": 0.36, "edits": 0.16, "lines": 1_500, "names": 5_000, "tokens": 5_000}, "target-2"),
        Round(
            EDITING, {"texts": 0.24, "edits": 0.18, "lines": 350, "names": 2_700, "tokens": 1_700}, "target-2", kept=0.4
        ),
        *[Round(MARKING, MARKED, "target-2", kept=0.5)] * 2,
        *[Round(DECIDING, DECIDED, "target-2", kept=0.5)] * 3,
    ),
    "draft": (Round(DISTILLED, {"edits": 1.0}, "target"),),
}
"""While it learns to edit, the target follows in texts the law that it had before."""


def build_model(role: str, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh Llama of the role's shape, float32."""
    torch.manual_seed(0)
    end, turn = tokenizer.convert_tokens_to_ids([demo_tokenizer.END_OF_TEXT, demo_tokenizer.END_OF_TURN])
    config = LlamaConfig(
        vocab_size=demo_tokenizer.VOCABULARY_SIZE,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        bos_token_id=end,
        eos_token_id=[end, turn],
        pad_token_id=tokenizer.pad_token_id,
        **SHAPES[role],
    )
    return LlamaForCausalLM(config)


def training_documents(
    tokenizer: PreTrainedTokenizerFast,
    files: list[corpus.SourceFile],
    *,
    texts: float = 1.0,
    edits: float = 0.0,
    lines: int = 0,
    names: int = 0,
    tokens: int = 0,
    pieces: int = 0,
    dialogues: bool = True,
    seed: int = 0,
) -> list[Document]:
    """Shares of the training modules, with the conversations cut out of each, and of the edits, and numbers of drills
    of lines, names, tokens and pieces; `dialogues`: whether an edit may be followed by others of the answer."""
    chance = random.Random(seed)
    words = demo_tokenizer.plain_words(tokenizer)
    read = [file for file in files if chance.random() < texts]
    chats = [chat for file in read for chat in corpus.conversations(file)]
    written = [file.text for file in read]
    written += [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
    plain = [Document(ids) for ids in tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"]]
    made = list(all_edits(files, words, seed=seed)) if edits else []
    made = chance.sample(made, k=int(edits * len(made)))
    asked = [dialogue(edit, words, chance) if dialogues else [edit] for edit in made]
    asked += [[drill] for drill in line_drills(files, words, count=lines, seed=seed)]
    asked += [[drill] for drill in name_drills(words, count=names, seed=seed)]
    return [
        *plain,
        *copied(tokenizer, asked, seed=seed),
        *token_drills(tokenizer, count=tokens, seed=seed),
        *piece_drills(tokenizer, count=pieces, seed=seed),
    ]


def make_tokenizer(work: Path) -> None:
    files, _ = corpus.split(corpus.read_standard_library())
    demo_tokenizer.train_tokenizer((file.text for file in files), CONTEXT).save_pretrained(work / "tokenizer")


def make_model(role: str, work: Path) -> None:
    """Train the rounds of a role that follow the last one of which ``work/role-N`` holds a checkpoint. Where nothing is
    left of a run, the shipped target can be put there as ``target-2``, whose rounds it had."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    files, _ = corpus.split(corpus.read_standard_library())
    model = build_model(role, tokenizer)
    marks = pretrain.Marks(
        **dict(zip(("question", "answer", "text"), tokenizer.convert_tokens_to_ids(demo_tokenizer.MARKS), strict=True))
    )
    rounds = range(1, len(ROUNDS[role]) + 1)
    done = max((number for number in rounds if (work / f"{role}-{number}/config.json").is_file()), default=0)
    if done:
        model = LlamaForCausalLM.from_pretrained(work / f"{role}-{done}", dtype=torch.float32)
    for number, part in enumerate(ROUNDS[role][done:], start=done + 1):
        teacher = None
        if part.teacher:
            teacher = LlamaForCausalLM.from_pretrained(work / part.teacher, dtype=torch.float32).eval()
        documents = training_documents(tokenizer, files, **part.shares, seed=number)
        stream = pretrain.TokenStream(documents, marks, seed=10 * number - 9)
        before = [weight.detach().clone() for weight in model.parameters()]
        pretrain.train(model, stream, part.schedule, work / f"{role}-training-{number}", teacher)
        for weight, old in zip(model.parameters(), before, strict=True):
            weight.detach().lerp_(old, part.kept)
        model.save_pretrained(work / f"{role}-{number}")
    model.save_pretrained(work / role)
    tokenizer.save_pretrained(work / role)


def _stage(name: str) -> str:
    if name not in (*STAGES, LEADER_BOARD):  # as `choices` they would have to hold the default, too
        raise argparse.ArgumentTypeError(f"no stage {name!r}; there are {', '.join((*STAGES, LEADER_BOARD))}")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "stages", nargs="*", default=STAGES, type=_stage, help=f"of {', '.join(STAGES)}; all by default"
    )
    parser.add_argument("--work", type=Path, default=Path("build/demo"))
    parser.add_argument("--seconds", type=int, default=300, help="of training, for each head of the leader board")
    parser.add_argument("--loss-goal", type=float, default=ship.LOSS_GOAL, help="held-out nats per token, at most")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    for stage in arguments.stages:
        if stage == "tokenizer":
            make_tokenizer(arguments.work)
        elif stage == "head":
            head.make_head(arguments.work)
        elif stage == LEADER_BOARD:
            head.make_leader_board(arguments.work, arguments.seconds)
        elif stage == "ship":
            package = Path(__file__).parents[2] / "src/forerun/demo"
            ship.ship(arguments.work, package, platform.python_version(), arguments.loss_goal)
        else:
            make_model(stage, arguments.work)


if __name__ == "__main__":
    main()
