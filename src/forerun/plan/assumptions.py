"""These are the assumptions where nothing was measured: acceptance by kind of text, and the
roofline's costs of passes.

Every figure has its source. Acceptance: published figures of trained heads on large chat models.
They are a beginning, not a promise: ``forerun plan MODEL --drafter X --prompts FILE`` replaces all
of them by a measurement.

Temperature 1 leaves 0.92 of the tokens per pass at 0: the mean of 4.50/4.78, 3.17/3.46, 2.46/2.76
(LK losses, K = 7). Between 0 and 1 the share is interpolated linearly; above 1 it stays.

The roofline: T(n) = max(2 * P * n / FLOPS, (weights + KV of all rows) / bandwidth), n tokens in the
pass. Left out, because no figure holds for all: launches, the traffic between tensor-parallel
devices, the output head.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from forerun.errors import ArgumentError, choices, nearest
from forerun.plan.theory import alpha_of


class TextFigures(NamedTuple):
    """The published figures for one kind of text."""

    tokens: float  # Per pass, bonus included, of a trained head drafting a chain of `k` at temperature 0
    k: int
    source: str
    trained: tuple[str, float] | None = None  # Drafter, its speed-up on Spec-Bench, Vicuna-7B, A100, batch 1, T = 0
    untrained: tuple[str, float] | None = None  # The fastest without training of the same table


_BENCH = "EAGLE-3's tokens per pass on MT-Bench, scaled by its Spec-Bench speed-ups (Vicuna-13B)"
_CHAT = "Llama-3.1-8B, EAGLE-3, MT-Bench, T = 0, vLLM's test of acceptance lengths"
_USER = "code, scaled by one user's MTP speed-ups (0.91 over 1.35, llama.cpp)"
TEXTS: dict[str, TextFigures] = {
    "chat": TextFigures(2.60, 3, _CHAT, trained=("eagle", 2.84), untrained=("recycling", 2.37)),
    "code": TextFigures(3.10, 4, "Ling-Flash-2.0, EAGLE-3, HumanEval"),
    "math": TextFigures(
        3.41, 4, "Ling-Flash-2.0, EAGLE-3, GSM8K", trained=("eagle", 2.79), untrained=("recycling", 2.53)
    ),
    "creative": TextFigures(3.10 * 0.91 / 1.35, 4, _USER),
    "translation": TextFigures(2.60 * 2.36 / 3.48, 3, _BENCH, trained=("eagle", 1.88), untrained=("recycling", 2.02)),
    "summary": TextFigures(2.60 * 3.14 / 3.48, 3, _BENCH, trained=("eagle", 2.34), untrained=("ngram", 2.66)),
    "qa": TextFigures(2.60 * 2.94 / 3.48, 3, _BENCH, trained=("eagle", 2.15), untrained=("recycling", 2.08)),
    "rag": TextFigures(2.60 * 2.78 / 3.48, 3, _BENCH, trained=("eagle", 2.13), untrained=("recycling", 2.02)),
}

HOT = (4.50 / 4.78 + 3.17 / 3.46 + 2.46 / 2.76) / 3  # Tokens per pass at temperature 1 over those at 0


def find_text(name: str) -> TextFigures:
    """Return the figures of a kind of text; an ArgumentError names the nearest where there are none
    for it.
    """
    key = name.lower()
    if key not in TEXTS:
        raise ArgumentError(f"no figures for text {name!r}.{choices(key, TEXTS)}")
    return TEXTS[key]


def assume_alpha(text: str, temperature: float) -> tuple[float, list[str]]:
    """Return the acceptance of a trained head on a kind of text, and what was assumed, one sentence
    each.
    """
    if temperature < 0:
        raise ArgumentError(f"temperature must be 0 (greedy) or more, got {temperature}")
    kind = find_text(text)
    share = 1 - (1 - HOT) * min(temperature, 1.0)
    tokens = max(1.0, kind.tokens * share)
    alpha = alpha_of(tokens, kind.k)
    notes = [
        f"acceptance {alpha:.2f}: a trained head reaches {kind.tokens:.2f} tokens per pass with K = {kind.k} on "
        f"{text} ({kind.source})"
    ]
    if temperature > 0:
        notes.append(
            f"times {share:.2f} at temperature {temperature:g} (LK losses, three models, K = 7: T = 1 over T = 0)"
        )
    return alpha, notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator's figures, as its data sheet says."""

    name: str
    tflops: float  # Peak dense bf16 (fp16) arithmetic with float32 accumulation, 1e12 operations a second
    bandwidth: float  # Peak memory bandwidth, 1e12 bytes a second
    memory: float | None  # 1e9 bytes; None where it is the machine's own
    note: str = ""


_ASSUMED = "assumed: 60 GB/s, and the balance of 24 tokens in the middle of what two AMX cores were measured at"
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
    "cpu": Device(name="CPU with bf16 matrix instructions", tflops=1.44, bandwidth=0.06, memory=None, note=_ASSUMED),
}
"""These are dense figures, as the data sheets say."""

BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""A weight takes this many bytes. Narrow weights are multiplied in bf16, as engines do at small
batches; scales are not counted.
"""
_AROUND = re.compile(r"^(nvidia|amd|geforce|rtx|instinct)+|(80gb?|sxm[45]?)+$")  # A device's name without being another
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "auto": "bfloat16", "fp4": "int4"}


def find_device(name: str) -> Device:
    """Return a device by its name, with or without maker and form factor; ArgumentError if it is
    not in the table.
    """
    key = _AROUND.sub("", re.sub(r"[-_ ]", "", name.lower()))
    if key not in DEVICES:
        raise ArgumentError(
            f"unknown device {name!r}.{choices(key, DEVICES)} For another one give --tflops and --bandwidth"
        )
    return DEVICES[key]


def parse_dtype(name: str) -> str:
    """Return a key of `BYTES` from one of its usual names, else raise an ArgumentError."""
    key = _ALIASES.get(name.lower(), name.lower())
    if key not in BYTES:
        raise ArgumentError(
            f"unknown dtype {name!r}.{nearest(key, [*_ALIASES, *BYTES])} There are bf16, fp16, fp32, fp8, int8, int4."
        )
    return key


FREE_PASS = 1.05  # A pass counts as free up to this many plain ones
_MOST = 8192  # Nodes that are looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The number of weights of a model, and of those that a token uses."""

    params: float  # All weights
    active_params: float | None = None  # Those that one token runs through, for a mixture of experts; None: dense
    experts: int | None = None  # Routed experts of a layer
    experts_per_token: int | None = None  # How many of them a token is sent to

    def __post_init__(self) -> None:
        if not self.params > 0:
            raise ArgumentError(f"the number of parameters must be positive, got {self.params:g}")
        named = [value is not None for value in (self.active_params, self.experts, self.experts_per_token)]
        if any(named) != all(named):
            raise ArgumentError("a mixture of experts needs all of --active-params, --experts and --experts-per-token")
        if self.active_params is None or self.experts is None or self.experts_per_token is None:
            return
        if not 0 < self.active_params <= self.params or not 1 <= self.experts_per_token < self.experts:
            raise ArgumentError(
                f"active parameters must be in 0..{self.params:g} and experts per token in 1..{self.experts - 1}, "
                f"got {self.active_params:g} and {self.experts_per_token}"
            )
        if self.shared < 0:
            share = self.params * self.experts_per_token / self.experts
            raise ArgumentError(
                f"{self.active_params:g} active parameters are too few: {self.experts_per_token} of {self.experts} "
                f"experts alone hold up to {share:g}"
            )

    @property
    def active(self) -> float:
        return self.params if self.active_params is None else self.active_params

    @property
    def expert(self) -> float:
        """Return the weights of one expert in all layers together."""
        assert self.experts is not None and self.experts_per_token is not None
        return (self.params - self.active) / (self.experts - self.experts_per_token)

    @property
    def shared(self) -> float:
        """Return the weights that every token runs through."""
        assert self.experts_per_token is not None
        return self.active - self.experts_per_token * self.expert

    def touched(self, tokens: float) -> float:
        """Return the weights that a pass over `tokens` tokens reads, if each token chooses its
        experts at random.

        Of E experts, E * (1 - (1 - k/E)^n) are expected to be chosen (MoESD, arXiv 2505.19645).
        """
        if self.experts is None or self.experts_per_token is None:
            return self.params
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        chosen = self.experts * (1 - missed)
        return self.shared + chosen * self.expert


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyValues:
    """The size of one token in the KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    heads: int | None = None  # Query heads; given, the arithmetic of attention counts, too
    bytes_each: float = 2.0

    def __post_init__(self) -> None:
        if min(self.layers, self.kv_heads, self.head_dim, self.heads or 1) < 1:
            raise ArgumentError("--layers, --kv-heads, --head-dim and --heads must be at least 1")

    @property
    def bytes_per_token(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_each

    def operations(self, context: float) -> float:
        """Return the arithmetic of one query's attention over `context` tokens; 0 where `heads` is
        unknown.
        """
        return 4 * self.layers * (self.heads or 0) * self.head_dim * context


@dataclass(frozen=True, kw_only=True, slots=True)
class PassTerms:
    """The arithmetic and the memory time of one pass."""

    compute_ms: float
    memory_ms: float
    operations: float
    traffic: float  # Bytes

    @property
    def ms(self) -> float:
        return max(self.compute_ms, self.memory_ms)

    @property
    def intensity(self) -> float:
        return self.operations / self.traffic


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Estimates what passes of one model cost on one kind of device. Has the interface of a measured cost model."""

    device: Device
    size: Size
    dtype: str = "bfloat16"  # Dtype of the weights; a key of `BYTES`
    tp: int = 1  # Devices that share each layer; traffic between them is not counted
    kv: KeyValues | None = None  # None: the cache's traffic is not counted
    compute_efficiency: float = 0.4  # Share of the peak arithmetic that is reached; with the next: half the free width
    bandwidth_efficiency: float = 0.8  # Share of the peak bandwidth that is reached

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ArgumentError(f"tensor parallelism needs at least one device, got --tp {self.tp}")

    def terms(self, nodes: float, rows: int = 1, context: int = 0) -> PassTerms:
        """Return arithmetic and traffic of a pass over `nodes` nodes in each of `rows` rows behind
        `context` tokens.
        """
        tokens = nodes * rows
        operations = 2 * self.size.active * tokens
        traffic = BYTES[self.dtype] * self.size.touched(tokens)
        if self.kv is not None:
            operations += tokens * self.kv.operations(context)
            traffic += rows * (context + nodes) * self.kv.bytes_per_token
        return PassTerms(
            compute_ms=operations / (self.tp * self.device.tflops * self.compute_efficiency * 1e9),
            memory_ms=traffic / (self.tp * self.device.bandwidth * self.bandwidth_efficiency * 1e9),
            operations=operations,
            traffic=traffic,
        )

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return the wall time of one pass, ms."""
        return self.terms(nodes, rows, context).ms

    @property
    def balance(self) -> float:
        """Return the tokens in a pass at which peak arithmetic takes as long as reading all weights
        at peak bandwidth.
        """
        per_byte = self.device.tflops / (2 * self.device.bandwidth)
        return per_byte * BYTES[self.dtype] * self.size.params / self.size.active

    def free_nodes(self, rows: int = 1, context: int = 0) -> int:
        """Return the most nodes per row that cost at most `FREE_PASS` plain passes."""
        limit = FREE_PASS * self.pass_ms(1, rows, context)
        return bisect_right(range(_MOST), limit, key=lambda nodes: self.pass_ms(nodes, rows, context)) - 1

    def weights_gb(self) -> float:
        """Return the size of all weights, 1e9 bytes."""
        return BYTES[self.dtype] * self.size.params / 1e9

    def fits(self, rows: int, context: int) -> bool | None:
        """Return whether weights and cache fit the devices' memory; None where that is unknown."""
        if self.device.memory is None:
            return None
        cache = 0.0 if self.kv is None else rows * context * self.kv.bytes_per_token / 1e9
        return self.weights_gb() + cache <= self.device.memory * self.tp


class FreeVerification:
    """Every pass costs the same, which is Leviathan's own assumption. Times are in plain passes."""

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return 1, whatever the pass."""
        return 1.0
