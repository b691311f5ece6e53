"""Finding the tokenizer that belongs to a model, and what a drafter will weigh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.demo import resolve
from forerun.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.engine.config import SpeculativeConfig


def load_tokenizer(model: Any, tokenizer: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer asked for, or the model's own; None where ``tokenizer`` is False or an object's model brings none.

    Raises:
        CheckpointError: none can be loaded from the directory or hub id.
    """
    if tokenizer is False:
        return None
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    source = tokenizer if tokenizer is not None else model
    if not isinstance(source, str | Path):
        source = getattr(source, "name_or_path", "") or None
        if source is None:
            return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise CheckpointError(
            f"no tokenizer could be loaded from {str(source)!r} ({type(error).__name__}: {str(error).splitlines()[0]});"
            " pass tokenizer=..., or tokenizer=False to work on token ids"
        ) from error


def drafter_bytes(config: SpeculativeConfig | None) -> int:
    """Bytes of the weights of the models that draft, where their directories say; 0 where there is none to ask."""
    if config is None:
        return 0
    others = [one for one in config.options.get("drafters", ()) if isinstance(one, Mapping)]
    return sum(_weights(options.get("model")) for options in (config.options, *others))


def _weights(model: Any) -> int:
    folder = Path(resolve(model)) if isinstance(model, str) else None
    if folder is None or not folder.is_dir():
        return 0
    from forerun.target.load import INDEX, SINGLE, weight_bytes

    if any((folder / name).is_file() for name in (INDEX, SINGLE)):
        return weight_bytes(folder, None)
    # A head's weights may have a name of their own. Where there are none, its loader says so.
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
