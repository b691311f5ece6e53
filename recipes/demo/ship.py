"""Put the trained models and the held-out files into the package: bf16 checkpoints, a model card each, prompts.

Knows the layout of ``src/forerun/demo``. Does not train; the figures on the cards are measured here or read from the
training log.
"""

from __future__ import annotations

import json
import random
import shutil
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

import corpus
import edits
import pretrain
import torch
from rich.console import Console
from tokenizer import plain_words
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from forerun import LLM, SamplingParams
from forerun.heads.files import TargetFacts, read_head, write_head
from forerun.writing import replace_folder

LOSS_GOAL = 2.17
"""Nats per token on whole held-out files that the target must reach unless another goal is asked for: 0.1 more than one
that was trained as long as two cores allow, and could only continue."""
EDIT_GOAL = 0.85
"""Share of the held-out renames and changes of a constant that the target must answer exactly right."""
REPLACING = "rename and constant"
SHIPPED_EDITS = {"rename": 16, "constant": 12, "parameter": 6, "docstring": 4, "swap": 4, "comprehension": 2}
SHIPPED_LINES = (8, 24)
"""Of a shipped edit: long enough to be worth a draft, short enough to be read."""
CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
tags: [python, demo, speculative-decoding]
---
# forerun {name}

{purpose} It ships with forerun so that everything can be tried and tested without a download.

* **Architecture**: Llama, {layers} layers, hidden {hidden}, MLP {mlp}, {heads} query and {kv_heads} key-value heads
  of 64, tied embeddings; {parameters:.1f} M parameters, stored as bfloat16; context {context} tokens.
* **Tokenizer**: byte-level BPE with GPT-2's pre-tokenizer, {vocabulary} entries, trained on the same data.
* **Data**: {train_files} source files of CPython {python}'s standard library, tests included (PSF licence), and
  conversations cut out of them: a function's docstring asks, its source answers; or an edit of the function is asked
  for, made by a script and checked with `ast`.
* **Training**: {tokens:.1f} M tokens{teacher}; final training loss {train_loss:.2f}.
* **Edits**: small ones, asked for in chat form: {edits}
* **Held-out loss**: **{loss:.3f} nats per token** on {held_out_files} whole files that were kept out of training, a
  share of all files chosen by a hash of their names; {library_loss:.3f} on the library modules among them, which are
  harder than tests. Measured with the shipped weights. Those of middle length are the shipped prompts.

Made by `python recipes/demo/make.py`, which can be run again.

## What it is not
Not a coding assistant. It edits functions of up to 40 lines in the six ways above. Whatever else it writes looks like
the standard library and is often wrong or runs in circles, and it may repeat passages of its training data. Measure
speed with it, not quality.

## Licence
The weights are Apache-2.0 like forerun. The training data is the Python Software Foundation's, under the PSF License
Agreement; the licence's text lies next to the prompts.
"""
PURPOSE = {
    "target": "A small language model of Python code: the target of the demo.",
    "draft": "A very small language model of Python code that drafts for the demo target; same tokenizer.",
}
HEAD_CARD = """\
---
license: apache-2.0
library_name: forerun
tags: [python, demo, speculative-decoding, eagle3]
---
# forerun demo-eagle3
An EAGLE-3 head for the demo target: it drafts from the hidden states at the boundaries {boundaries}, with EAGLE-3.1's
norms (`fc_norm`, `norm_output`).

* **Weights**: {parameters:.1f} M parameters in bfloat16, EAGLE's flat format; an output head of its own, the target's
  embeddings.
* **Data**: what the target itself wrote after pieces of its training files, and some of the files; {tokens:.1f} M
  tokens, {steps} steps, training-time test over 5 tokens.
* **Evaluation** on held-out prompts, mean acceptance length, bonus included: {evaluation}.

Made by `python recipes/demo/make.py`, which can be run again. `forerun export` writes it for vLLM, SGLang and
TensorRT-LLM.
"""
PROMPTS_README = """\
# Prompts
Files of CPython {python}'s standard library that no shipped model was trained on, unchanged but for their names (`--`
stands for `/`), and `edits.jsonl`: small edits of functions of such files, each a conversation.
Copyright Python Software Foundation; PSF License Agreement, see LICENSE.txt in this folder.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """What the training log says."""

    tokens: int
    loss: float
    """Of the last steps, nats per token."""


def ship(
    work: Path, destination: Path, python_version: str, loss_goal: float = LOSS_GOAL, edit_goal: float = EDIT_GOAL
) -> None:
    """Write ``target``, ``draft`` and ``prompts`` below `destination`, each complete or not at all.

    Args:
        work: holds ``tokenizer``, ``target``, ``draft`` and the training logs.
        destination: the package folder.
        python_version: of the standard library that the corpus was read from.
        loss_goal: nats per token that the target may have at most on whole held-out files.
        edit_goal: share of held-out renames and changes of a constant that the target must answer exactly.

    Raises:
        FileNotFoundError: a stage of the recipe has not been run.
        ValueError: the target misses a goal.
    """
    console = Console(stderr=True)
    train, held_out = corpus.split(corpus.read_standard_library())
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    for role in ("target", "draft"):
        model = LlamaForCausalLM.from_pretrained(work / role, dtype=torch.bfloat16)
        loss, library_loss = _losses(model.float().eval(), tokenizer, held_out)
        console.print(f"{role}: held-out loss {loss:.3f} nats per token, {library_loss:.3f} on library modules")
        if role == "target" and loss > loss_goal:
            raise ValueError(
                f"the target's held-out loss is {loss:.3f}, the goal is {loss_goal}; train it on more tokens"
            )
        right = skill(work / role, held_out)
        said = ", ".join(f"{kind} {share:.0%}" for kind, share in right.items())
        console.print(f"{role}: held-out edits exactly right at T = 0: {said}")
        if role == "target" and right[REPLACING] < edit_goal:
            raise ValueError(f"the target's edits are right too seldom, {edit_goal:.0%} is asked: {said}")
        facts = {
            "edits": f"held out, exactly right at T = 0: {said}.",
            "python": python_version,
            "train_files": len(train),
            "held_out_files": len(held_out),
            "loss": loss,
            "library_loss": library_loss,
        }
        with replace_folder(destination / role) as folder:
            _write_model(model, tokenizer, folder)
            (folder / "README.md").write_text(_card(role, model, read_logs(work, role), facts))
    with replace_folder(destination / "prompts") as folder:
        write_prompts([file for file in held_out if corpus.is_prompt(file)], folder, python_version)
        write_edits(held_out_edits(tokenizer, held_out), folder / "edits.jsonl")
    if (work / "head-training" / "head").is_dir():
        ship_head(work / "head-training", destination / "eagle3", TargetFacts.read(work / "target"))


def ship_head(training: Path, destination: Path, target: TargetFacts) -> None:
    """The finished head in bfloat16, and its card."""
    trained = read_head(training / "head")
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        for name, tensor in trained.tensors.items()
    }
    card = HEAD_CARD.format(
        parameters=sum(tensor.numel() for tensor in tensors.values()) / 1e6,
        boundaries=", ".join(map(str, trained.config.boundaries)),
        **read_head_log(training / "log.jsonl"),
    )
    write_head(replace(trained, tensors=tensors), destination, "flat", target, texts={"README.md": card})


def skill(model: Path, files: list[corpus.SourceFile]) -> dict[str, float]:
    """Kind of edit -> share of those of functions of `files` that the model answers exactly right, at T = 0; of renames
    and changes of a constant together, too."""
    llm = LLM(model, dtype="float32", speculative_config={"method": "suffix"}, max_num_seqs=16)
    asked = held_out_edits(llm.tokenizer, files)
    chats = [llm.chat_prompt(edit.prompt) for edit in asked]
    outputs = llm.generate(chats, SamplingParams(temperature=0, max_tokens=700))
    right: dict[str, list[bool]] = {}
    for edit, output in zip(asked, outputs, strict=True):
        for kind in (edit.kind, *([REPLACING] if edit.kind in ("rename", "constant") else [])):
            right.setdefault(kind, []).append(output.outputs[0].text == edit.after)
    return {kind: sum(found) / len(found) for kind, found in sorted(right.items())}


def held_out_edits(tokenizer: PreTrainedTokenizerFast, files: list[corpus.SourceFile]) -> list[edits.Edit]:
    """The edits that the target is examined with: of functions as they stand in the library."""
    return list(edits.edits(files, plain_words(tokenizer), seed=0, disguised=0.0))


def write_edits(found: list[edits.Edit], path: Path) -> None:
    """Some edits of every kind, chosen without regard to whether the target gets them right, as conversations."""
    low, high = SHIPPED_LINES
    made = [edit for edit in found if low <= edit.before.count("\n") < high]
    random.Random(0).shuffle(made)
    lines = [
        json.dumps({"id": f"{kind}-{number}", "messages": edit.conversation})
        for kind, count in SHIPPED_EDITS.items()
        for number, edit in enumerate([edit for edit in made if edit.kind == kind][:count], start=1)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _losses(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, files: list[corpus.SourceFile]
) -> tuple[float, float]:
    """Nats per token on all files, and on the library modules among them."""
    sums, counts = [0.0, 0.0], [0, 0]
    for file in files:
        ids = list(tokenizer(file.text, add_special_tokens=False, verbose=False)["input_ids"])
        loss = pretrain.held_out_loss(model, [ids], tokenizer.eos_token_id, _context(model))
        for place in (0, 1) if corpus.is_library(file) else (0,):
            sums[place] += loss * len(ids)
            counts[place] += len(ids)
    return sums[0] / max(1, counts[0]), sums[1] / max(1, counts[1])


def read_logs(work: Path, role: str) -> TrainingRun:
    """Tokens seen in all rounds of a model's training, and the final loss, from their ``log.jsonl``."""
    rounds = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(work.glob(f"{role}-training-*/log.jsonl"))
    ]
    return TrainingRun(tokens=sum(lines[-1]["tokens"] for lines in rounds), loss=rounds[-1][-1]["loss"])


def read_head_log(path: Path) -> dict[str, object]:
    """Steps, millions of tokens and the last evaluation, from a head's training log."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last: dict[str, float] = {}
    for line in lines:
        last = {name[5:]: value for name, value in line.items() if name.startswith("eval/")} or last
    return {
        "steps": max(line["step"] for line in lines),
        "tokens": max(line.get("tokens", 0) for line in lines) / 1e6,
        "evaluation": ", ".join(
            f"{name.replace('_t', ' at T = ')} {value:.2f}"
            for name, value in last.items()
            if name.startswith(("chain", "tree"))
        ),
    }


def write_prompts(files: list[corpus.SourceFile], folder: Path, python_version: str) -> None:
    """The held-out files as ``a--b.py.txt``, with the licence that they come under."""
    for file in files:
        (folder / f"{file.name.replace('/', '--')}.txt").write_text(file.text, encoding="utf-8")
    shutil.copy(Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", folder / "LICENSE.txt")
    (folder / "README.md").write_text(PROMPTS_README.format(python=python_version))


def _write_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner may read


def _context(model: LlamaForCausalLM) -> int:
    return int(model.config.max_position_embeddings)


def _card(role: str, model: LlamaForCausalLM, run: TrainingRun, facts: dict[str, object]) -> str:
    config = model.config
    return CARD.format(
        name={"target": "demo", "draft": "demo-draft"}[role],
        purpose=PURPOSE[role],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
        context=_context(model),
        parameters=sum(weight.numel() for weight in model.parameters()) / 1e6,
        tokens=run.tokens / 1e6,
        teacher=", mostly on the target's laws (distillation)" if role == "draft" else "",
        train_loss=run.loss,
        **facts,
    )
