"""The other names of nvidia-modelopt 0.47 around `convert`: configurations, saving and
restoring, export, the draft vocabulary, stored states, and how much of a draft is accepted.

A program for ModelOpt runs with ``modelopt.torch.speculative``, ``modelopt.torch.opt`` and
``modelopt.torch.export`` replaced by ``forerun.modelopt``.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from forerun.engine.llm import LLM
from forerun.errors import ArgumentError, CheckpointError, DataError, nearest
from forerun.heads.engines import Exported
from forerun.training.convert.model import MARKER, ConvertedModel, plain_names, restore_head
from forerun.training.convert.modes import MODES
from forerun.training.convert.settings import Key, check_config
from forerun.training.recipe import EvaluationSettings
from forerun.training.trained import head_shapes
from forerun.types import SamplingParams


class ModeConfig(dict[str, Any]):
    """The keys of one mode, each with its default; they are attributes, too.

    ArgumentError for an unknown key, a value of the wrong type, or one that is not supported.
    """

    KEYS: ClassVar[Mapping[str, Key]] = {}

    def __init__(self, **given: Any) -> None:
        super().__init__(check_config(given, self.KEYS, ""))

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{type(self).__name__} has no key {name!r}.{nearest(name, self)}")
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self |= check_config({**self, name: value}, self.KEYS, "")

    def model_dump(self) -> dict[str, Any]:
        """Return the keys and values as a plain dict."""
        return dict(self)


def config_class(mode: str, name: str) -> type[ModeConfig]:
    """Return the class of the configurations of a mode, under ModelOpt's name."""
    words = f"`{name}` holds the keys of the mode ``{mode}`` of `forerun.modelopt.convert`, each with its default."
    return type(name, (ModeConfig,), {"KEYS": MODES[mode].KEYS, "__doc__": words, "__module__": __name__})


EagleConfig = config_class("eagle", "EagleConfig")
MedusaConfig = config_class("medusa", "MedusaConfig")
DFlashConfig = config_class("dflash", "DFlashConfig")
DFLASH_DEFAULT_CFG: dict[str, Any] = {"algorithm": "dflash", "config": {"dflash_architecture_config": {}}}
"""This preset is a DFlash head of the model's own sizes."""


def check_converted(model: Any, caller: str) -> None:
    """Raise ArgumentError for a model without a head."""
    if not isinstance(model, ConvertedModel):
        raise ArgumentError(
            f"{caller}: this {type(model).__name__} has no head: convert it first, or restore it with its head. A "
            "plain model is saved by its own save_pretrained"
        )


def save(model: Any, f: str | Path) -> None:
    """Save a converted model, base and head, in a new directory `f`; `restore` reads it."""
    check_converted(model, "save")
    if Path(f).is_file():
        raise ArgumentError(f"save: {f} is a file; a converted model is saved in a directory")
    model.save_pretrained(f)


def restore(model: Any, f: str | Path) -> Any:
    """Give a plain model the weights and the head that `save` or ``save_pretrained`` wrote, and return it.

    CheckpointError if `f` is no such directory; ArgumentError for a model that has a head already.
    """
    folder = Path(f)
    if isinstance(model, ConvertedModel):
        raise ArgumentError("restore: this model has a head already: take the plain one, or model.load_head(directory)")
    if not (folder / MARKER).is_file():
        raise CheckpointError(
            f"restore: {folder} is no directory of a converted model; forerun.modelopt.save writes one"
        )
    names = model.state_dict().keys()
    stored = plain_names(type(model).from_pretrained(folder, dtype=model.dtype).state_dict())
    model.load_state_dict({name: tensor for name, tensor in stored.items() if name in names})
    return restore_head(model, folder)


def export_speculative_decoding(
    model: Any,
    dtype: torch.dtype | None = None,
    export_dir: str | Path | None = None,
    *,
    target: str | None = None,
) -> Exported:
    """Write the head of a converted model alone, as ModelOpt lays it out, or as its kind is published.

    The arguments are ModelOpt's; `target`, and another layout, are those of ``model.export_head``.
    """
    check_converted(model, "export_speculative_decoding")
    if export_dir is None:
        raise ArgumentError("export_speculative_decoding: name the directory to write, export_dir=DIRECTORY")
    to = "modelopt" if model._convert_head.config.kind == "eagle3" else "hf"
    return model.export_head(export_dir, to, dtype=dtype, target=target)


def export_hf_checkpoint(
    model: Any, dtype: torch.dtype | None = None, export_dir: str | Path | None = None
) -> Exported:
    """Write the head of a converted model alone: `export_speculative_decoding`."""
    return export_speculative_decoding(model, dtype, export_dir)


def calibrate_frequent_vocab(
    tokenizer: Any, text: Any, target_vocab_size: int, output_file: str | Path | None = None
) -> Tensor:
    """Return which tokens a draft vocabulary of the most frequent ones holds, as offsets (Vd,) int64.

    Token i of the draft vocabulary is token i + offset of the model's, as in a head's ``d2t``.

    Args:
        text: conversations (lists of messages), which go through the chat template, or plain texts; or one of them.
        output_file: a file to which the offsets are written, by ``torch.save``.

    ArgumentError if the text has fewer different tokens.
    """
    counter = Counter[int]()
    for one in [text] if isinstance(text, str) or (text and isinstance(text[0], Mapping)) else text:
        words = one if isinstance(one, str) else tokenizer.apply_chat_template(one, tokenize=False)
        counter.update(tokenizer(words, add_special_tokens=isinstance(one, str))["input_ids"])
    if len(counter) < target_vocab_size:
        raise ArgumentError(
            f"the text has {len(counter)} different tokens, fewer than the {target_vocab_size} of the draft "
            "vocabulary: take more text or fewer tokens"
        )
    ids = torch.tensor(sorted(token for token, _ in counter.most_common(target_vocab_size)))
    offsets = ids - torch.arange(target_vocab_size)
    if output_file is not None:
        torch.save(offsets, output_file)
    return offsets


def read_draft_vocabulary(path: str | Path) -> Tensor:
    """Return the token ids (Vd,) of a ``d2t.pt``, which holds offsets, for ``model.set_draft_vocabulary``.

    CheckpointError for another file.
    """
    offsets = _load(Path(path))
    if not isinstance(offsets, Tensor) or offsets.dim() != 1 or offsets.dtype != torch.int64:
        raise CheckpointError(f"{path} holds no offsets of a draft vocabulary, (Vd,) int64")
    return offsets + torch.arange(len(offsets))


def _load(path: Path) -> Any:
    """Read tensors that ``torch.save`` wrote, and nothing that could run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as tensors: {error}") from error


class OfflineStates(Dataset[dict[str, Any]]):
    """The rows of a directory of ``*.pt`` files in which ModelOpt's scripts stored a model's
    states, for a model that was converted with ``eagle_offline``.

    A Trainer takes them with ``data_collator=OfflineStates.collate``.
    """

    def __init__(self, directory: str | Path) -> None:
        self.files = sorted(Path(directory).rglob("*.pt"))
        if not self.files:
            raise DataError(
                f"{directory} holds no *.pt files with input_ids, hidden_states and aux_hidden_states. What `forerun "
                "features` wrote is read by `forerun train KIND mode=offline features=DIRECTORY`"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        stored = _load(self.files[index])
        names = {"hidden_states": "base_model_hidden_states", "aux_hidden_states": "aux_hidden_states"}
        ids = stored["input_ids"].flatten()
        mask = stored.get("loss_mask", torch.ones_like(ids)).flatten()
        states = {new: stored[old].reshape(len(ids), -1) for old, new in names.items() if old in stored}
        return {"input_ids": ids, "loss_mask": mask, "attention_mask": torch.ones_like(ids), **states}

    @staticmethod
    def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return one batch of rows, padded at the end."""
        padded = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
        states = {name: padded.pop(name) for name in list(padded) if name.endswith("hidden_states")}
        return {**padded, "base_model_outputs": states}


class HFARValidation:
    """Measures how many tokens a pass of a converted model brings with its head.

    Here that is real speculative decoding, greedy, with the head's chain: `forerun bench` and `forerun train`'s
    evaluation measure the same.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        check_converted(model, "HFARValidation")
        self.model, self.tokenizer = model.eval(), tokenizer
        self._llm = LLM(model, tokenizer=False, max_num_seqs=1, self_check=model._convert_mode.lora)

    def validate(
        self, osl: int, prompt: Any = None, input_ids: Tensor | None = None, *, steps: int = 1
    ) -> tuple[Tensor, float]:
        """Answer one prompt, and return its tokens with the answer's, (1, S), and the tokens of a pass.

        Args:
            osl: most tokens of the answer.
            prompt: messages for the chat template, or plain text; or give `input_ids` (1, S).
            steps: drafted tokens of a pass.
        """
        if input_ids is None:
            words = prompt
            if not isinstance(prompt, str):
                words = self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            input_ids = torch.tensor([self.tokenizer(words, add_special_tokens=isinstance(prompt, str))["input_ids"]])
        settings = EvaluationSettings(num_speculative_tokens=steps)
        chain = {**head_shapes(self.model._convert_head, self.model, settings)["chain"], "adaptive": False}
        plain: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "detokenize": False}
        params = SamplingParams(temperature=0, max_tokens=osl, **plain)
        ids = input_ids.flatten().tolist()
        (output,) = self._llm.generate([{"prompt_token_ids": ids}], params, speculative=chain)
        answer = output.outputs[0]
        return torch.tensor([[*ids, *answer.token_ids]]), answer.speculation.tokens_per_pass
