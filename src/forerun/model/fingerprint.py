"""A fingerprint tells whether a checkpoint's weights are those that a head was trained for.

It is made of a few values of every tensor, rounded to bfloat16, so that a conversion from float32 or other shards keep
it, and a fine-tune of the same shape does not. Reading it takes milliseconds, whatever the size of the checkpoint.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

from forerun.errors import ForerunError
from forerun.model.load import read_header, weight_files

VALUES = 8  # Values of each tensor that are read, from its middle on
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SHARED = "lm_head."  # Some checkpoints write the output head that is the embedding, some do not


def fingerprint(name: str | Path) -> str | None:
    """Return the fingerprint of the checkpoint in a directory or under a hub id that was loaded before, as hex digits.

    None where no weights of 16 or 32 bits can be found there.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        found = try_to_load_from_cache(str(name), "config.json") if str(name).count("/") == 1 else None
        if not isinstance(found, str):
            return None
        folder = Path(found).parent
    try:
        sampled = {tensor: value for path in weight_files(folder) for tensor, value in _samples(path).items()}
    except (ForerunError, OSError):
        return None
    digest = hashlib.sha256()
    for tensor, value in sorted(sampled.items()):
        digest.update(tensor.encode() + value)
    return digest.hexdigest()[:16] if sampled else None


def _samples(path: Path) -> dict[str, bytes]:
    """Return some values of each tensor of a safetensors file, as bfloat16."""
    found = dict[str, bytes]()
    header = read_header(path)
    with path.open("rb") as file:
        first = 8 + int.from_bytes(file.read(8), "little")
        for name, entry in header.items():
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None or name.startswith(SHARED):
                continue
            start, end = entry["data_offsets"]
            count = (end - start) // dtype.itemsize
            file.seek(first + start + max(0, count // 2 - VALUES) * dtype.itemsize)
            held = file.read(min(VALUES, count) * dtype.itemsize)
            if held:
                values = torch.frombuffer(bytearray(held), dtype=dtype).to(torch.bfloat16)
                found[name] = values.view(torch.uint8).numpy().tobytes()
    return found
