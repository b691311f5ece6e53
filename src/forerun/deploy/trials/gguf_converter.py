"""This script runs llama.cpp's own converter, also for tokenizers that it does not know.

Usage: ``python gguf_converter.py SOURCES ARGUMENTS``, where SOURCES is llama.cpp's directory and
the rest goes to its ``convert_hf_to_gguf.py``. Imports nothing of forerun.

The converter recognises how a tokenizer splits texts by a hash, and stops where the hash is not in
its list. A user who asks with token ids does not need the split; this script then takes GPT-2's and
prints `UNKNOWN`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

UNKNOWN = "llama.cpp's converter does not know this tokenizer: converted as GPT-2's"


def main() -> None:
    """Convert as the command line asks."""
    sources = Path(sys.argv[1]).absolute()
    sys.path[:1] = [str(sources), str(sources / "gguf-py")]  # in place of this file's directory
    sys.argv = [str(sources / "convert_hf_to_gguf.py"), *sys.argv[2:]]
    from conversion import base  # type: ignore[import-not-found]

    original = base.TextModel.get_vocab_base_pre

    def split(model: Any, tokenizer: Any) -> str:
        try:
            return str(original(model, tokenizer))
        except NotImplementedError:
            sys.stdout.write(f"{UNKNOWN}\n")
            return "gpt-2"

    base.TextModel.get_vocab_base_pre = split
    import convert_hf_to_gguf  # type: ignore[import-not-found]

    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
