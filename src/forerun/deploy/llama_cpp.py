"""forerun's lookup drafters draft in front of any GGUF file, as a draft model for
`llama-cpp-python`.

``Llama(model_path, draft_model=ForerunDraft())``. llama.cpp accepts those drafted tokens that it
samples itself, so the text is what it would be without. The interface is that of
``llama_cpp/llama_speculative.py`` and `Llama.generate` of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.deploy.sequences import Sequences, parse_config
from forerun.errors import ArgumentError

try:
    from llama_cpp.llama_speculative import LlamaDraftModel
except ImportError as error:
    raise ArgumentError(
        f"forerun.deploy.llama_cpp is a draft model for llama-cpp-python, which cannot be imported ({error}); "
        "pip install llama-cpp-python"
    ) from error

MOST = 16
"""At most this many tokens are drafted where the configuration does not say.

On a CPU each further token costs a tenth to a third of a pass.
"""
_UNKNOWN = 2**31 - 1
"""This stands for a vocabulary or context of any size: llama-cpp-python cuts drafts at the end of
its context itself.
"""


class ForerunDraft(LlamaDraftModel):  # type: ignore[misc]
    """Drafts what was seen before, and decides how much by this model's step times on this machine."""

    def __init__(
        self, speculative_config: Mapping[str, Any] | str | None = None, *, vocab_size: int = _UNKNOWN
    ) -> None:
        """Build the drafter.

        Args:
            speculative_config: as `forerun.LLM` takes it, of ``ngram``, ``suffix`` (the default), ``rest``,
                ``prediction``, ``first_of``, ``merge`` or ``auto``. ``"adaptive": False`` drafts the same at every
                step.
            vocab_size: of the model, which a corpus (``rest``) and a ``prediction`` are checked against; by default
                they are not.

        Raises:
            ArgumentError: an unknown option, or a drafter that needs more than the text.
        """
        given = parse_config(speculative_config or {"method": "suffix"})
        self.most = given.num_speculative_tokens or MOST
        given = replace(given, num_speculative_tokens=self.most)
        self.sequences = Sequences(given, vocab_size=vocab_size, rows=1, slots=_UNKNOWN, nodes=self.most)

    def __call__(self, input_ids: NDArray[np.intc], /, **_: Any) -> NDArray[np.intc]:
        """Return (K,) drafted tokens, K of 0 or more, for a text of (N,) token ids."""
        table = input_ids.reshape(1, -1)
        lengths = np.array([len(input_ids)], np.int32)
        (draft,) = self.sequences.chains(table, lengths, np.array([self.most]))
        return np.array(draft, dtype=np.intc)
