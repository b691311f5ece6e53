"""Make the demo models that ship with forerun: `python recipes/demo/make.py [STAGE...]`; without a stage, all of them
but `heads`, which trains one of every kind for `forerun demo --all --heads build/demo/heads`, and `reader`, a draft
model without a teacher, which benchmarks/training/gains.py distils.

Every stage reads what the one before wrote below ``--work`` and resumes where it was stopped. The target took eight
minutes of an H200 and 14 of two CPU cores, the others an hour of these. Writes
``src/forerun/demo/{target,draft,eagle3,prompts}``.
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parent))
import corpus
import documents
import head
import pretrain
import ship
import tokenizer as demo_tokenizer

CONTEXT = 2048
STAGES = ("tokenizer", "target", "draft", "head", "ship")
LEADER_BOARD, READER = "heads", "reader"
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


@dataclass(frozen=True, slots=True)
class Round:
    """A part of a training; it starts from the weights of the one before."""

    schedule: pretrain.Schedule
    reading: dict[str, Any]
    """What is read: arguments of `documents.Reading`."""
    teacher: str = ""
    """Whose law is followed: a folder below ``--work``."""
    mixed: dict[str, float] = field(default_factory=dict)
    """Shares of other weights, folders below ``--work``, in those that the round leaves: a mean knows more than what
    it is of (Wortsman et al. 2022, model soups). ``role-N`` is what round N left, ``role-N-alone`` before mixing."""


SHAPES[READER] = SHAPES["draft"]
FINISH = pretrain.Schedule(
    tokens=3_000_000,
    batch_tokens=16_384,
    muon_rate=2.0e-3,
    adam_rate=1.0e-3,
    warmup_steps=12,
    decay_share=1.0,
    question_weight=0.1,
)
DISTILLED = pretrain.Schedule(tokens=3_000_000, batch_tokens=4_096, distill_weight=0.9)
ROUNDS = {
    "target": (
        Round(pretrain.Schedule(tokens=136_000_000, decay_share=0.0), {"context": 1024}),
        Round(pretrain.Schedule(tokens=225_000_000, decay_share=1.0), {"context": 2048}, mixed={"target-1": 0.5}),
        Round(FINISH, {"context": 1024, "texts": 0.15}, mixed={"target-2-alone": 0.6}),
    ),
    "draft": (Round(DISTILLED, {"context": 1024}, "target"),) * 2,
    READER: (Round(pretrain.Schedule(tokens=6_000_000, batch_tokens=4_096), {"context": 1024}),),
}
"""The second round learns the library by heart: alone its held-out loss is 0.4 nats above that of the mean."""


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


def make_tokenizer(work: Path) -> None:
    files, _ = corpus.split(corpus.read_standard_library())
    demo_tokenizer.train_tokenizer((file.text for file in files), CONTEXT).save_pretrained(work / "tokenizer")


def make_model(role: str, work: Path) -> None:
    """Train the rounds of a role that follow the last one of which ``work/role-N`` holds a checkpoint, on the GPU where
    there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = build_model(role, tokenizer)
    marks = pretrain.Marks(
        **dict(zip(("question", "answer", "text"), tokenizer.convert_tokens_to_ids(demo_tokenizer.MARKS), strict=True))
    )
    rounds = range(1, len(ROUNDS[role]) + 1)
    done = max((number for number in rounds if (work / f"{role}-{number}/config.json").is_file()), default=0)
    if done:
        model = LlamaForCausalLM.from_pretrained(work / f"{role}-{done}", dtype=torch.float32)
    model.to(device)
    for number, part in enumerate(ROUNDS[role][done:], start=done + 1):
        teacher = None
        if part.teacher:
            teacher = LlamaForCausalLM.from_pretrained(work / part.teacher, dtype=torch.float32).eval().to(device)
        reading = documents.Reading(tokenizer=work / "tokenizer", seed=number, **part.reading)
        stream = documents.TokenStream(reading)
        pretrain.train(model, stream, marks, part.schedule, work / f"{role}-training-{number}", teacher=teacher)
        model.save_pretrained(work / f"{role}-{number}-alone")
        mix(model, {work / name: share for name, share in part.mixed.items()})
        model.save_pretrained(work / f"{role}-{number}")
    model.save_pretrained(work / role)
    tokenizer.save_pretrained(work / role)


@torch.no_grad()
def mix(model: LlamaForCausalLM, others: dict[Path, float]) -> None:
    """Replace the weights by a mean of them and those of other checkpoints, which have these shares."""
    own = 1 - sum(others.values())
    for weight in model.parameters():
        weight.mul_(own)
    for folder, share in others.items():
        other = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(model.device)
        for weight, added in zip(model.parameters(), other.parameters(), strict=True):
            weight.add_(added, alpha=share)


def _stage(name: str) -> str:
    known = (*STAGES, LEADER_BOARD, READER)
    if name not in known:  # as `choices` they would have to hold the default, too
        raise argparse.ArgumentTypeError(f"no stage {name!r}; there are {', '.join(known)}")
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
