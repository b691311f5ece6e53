"""Peak figures of accelerators, and bytes per weight. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ArgumentError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator, as its data sheet says."""

    name: str
    tflops: float
    """Peak dense bf16 (fp16) arithmetic with float32 accumulation, 1e12 operations a second."""
    bandwidth: float
    """Peak memory bandwidth, 1e12 bytes a second."""
    memory: float | None
    """1e9 bytes; None where it is the machine's own."""
    note: str = ""


DEVICES: dict[str, Device] = {
    "3090": Device(name="RTX 3090", tflops=71.0, bandwidth=0.936, memory=24),
    "4090": Device(name="RTX 4090", tflops=165.2, bandwidth=1.008, memory=24),
    "l4": Device(name="L4", tflops=121.0, bandwidth=0.300, memory=24),
    "l40s": Device(name="L40S", tflops=362.0, bandwidth=0.864, memory=48),
    "a100": Device(name="A100-80G SXM", tflops=312.0, bandwidth=2.039, memory=80),
    "h100": Device(name="H100 SXM", tflops=989.4, bandwidth=3.35, memory=80),
    "h200": Device(name="H200", tflops=989.4, bandwidth=4.8, memory=141),
    "b200": Device(name="B200", tflops=2250.0, bandwidth=8.0, memory=180),
    "mi300x": Device(name="MI300X", tflops=1307.4, bandwidth=5.3, memory=192),
    "cpu": Device(
        name="CPU with bf16 matrix instructions",
        tflops=1.44,
        bandwidth=0.06,
        memory=None,
        note="assumed: 60 GB/s, and the balance of 24 tokens in the middle of what two AMX cores were measured at",
    ),
}
"""Data sheets, dense figures. Their balance points are those of the algorithms sheet, section 1.4."""

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of a weight. Narrow weights are multiplied in bf16, as engines do at small batches; scales are not counted."""
_SUFFIXES = ("80gb", "80g", "sxm5", "sxm4", "sxm")
"""What may stand behind a name in the table without being another product."""
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": "bfloat16", "fp4": "int4"}


def device_named(name: str) -> Device:
    """A device by its short name, in any case, with or without maker and form factor: ``NVIDIA H100-SXM``.

    Raises:
        ArgumentError: it is not in the table; the message names the nearest.
    """
    key = name.lower().replace("-", "").replace(" ", "").replace("_", "")
    for prefix in ("nvidia", "amd", "geforce", "rtx", "instinct"):
        key = key.removeprefix(prefix)
    for suffix in _SUFFIXES:
        key = key.removesuffix(suffix)
    found = DEVICES.get(key)
    if found is None:
        raise ArgumentError(
            f"unknown device {name!r}; there are {', '.join(DEVICES)}.{nearest(key, DEVICES)} For another one give "
            "--tflops and --bandwidth"
        )
    return found


def dtype_named(name: str) -> str:
    """One of `BYTES`, from its usual spellings.

    Raises:
        ArgumentError: it is none.
    """
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in BYTES:
        known = [*_ALIASES, *BYTES]
        raise ArgumentError(
            f"unknown dtype {name!r}; there are bf16, fp16, fp32, fp8, int8, int4.{nearest(key, known)}"
        )
    return key
