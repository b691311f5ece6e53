"""Which tokenizer made these tokens: hashes of its vocabulary and of its chat template. Knows no model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """What tells one tokenizer from another."""

    name: str
    """Directory name or hub id it was loaded from; for messages, not for comparison."""
    vocab_size: int
    """Token ids are below this."""
    vocabulary: str
    """sha256 of the token strings and their ids."""
    template: str
    """sha256 of the chat template; empty where there is none."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> TokenizerIdentity:
        """The identity of a loaded tokenizer; `name` overrides the one it carries."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        template: Any = tokenizer.chat_template
        return cls(
            name=short_name(name or str(getattr(tokenizer, "name_or_path", "")) or "unnamed"),
            vocab_size=max(vocabulary.values()) + 1,
            vocabulary=_hash(sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))),
            template=_hash(template) if template else "",
        )

    def record(self) -> dict[str, Any]:
        """The same for JSON."""
        return asdict(self)


def short_name(source: str) -> str:
    """A hub id as it is, a directory by its last part: manifests travel, places on one machine do not."""
    path = Path(source)
    return path.name if path.is_absolute() or path.exists() else source


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
