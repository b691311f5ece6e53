"""The options of ``forerun plan``, typed and checked against each other. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from forerun.cli.options import LoadOptions, SpeculationOptions
from forerun.errors import ArgumentError
from forerun.plan.assumptions import text_named


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceOptions:
    """What is accepted, and what drafting costs."""

    alpha: float | None = None
    """Probability that a drafted token is accepted, in 0..1."""
    acceptance: str | None = None
    """The same by position, comma separated: 0.8,0.7,0.6; the last one goes on."""
    rank_acceptance: str | None = None
    """For a tree: by rank, and by depth behind semicolons: 0.6,0.2,0.1;0.5,0.2."""
    tree_nodes: int = 32
    """Most drafted nodes of a tree."""
    draft_cost: float | None = None
    """c: time of one drafted level in plain passes of the target; default 0."""
    draft_params: float | None = None
    """Parameters of a draft model, costed by the same roofline."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineOptions:
    """A target that is not here: its size and where it would run. --dtype and --device say in what and on what."""

    params: float | None = None
    """Parameters of the target, for example 70e9."""
    tp: int = 1
    """Devices that share every layer."""
    active_params: float | None = None
    """Mixture of experts: parameters that one token runs through."""
    experts: int | None = None
    """Mixture of experts: routed experts of a layer."""
    experts_per_token: int | None = None
    """Mixture of experts: how many of them a token is sent to."""
    layers: int | None = None
    """With --kv-heads and --head-dim: the cache's traffic counts."""
    kv_heads: int | None = None
    """Key-value heads of a layer."""
    head_dim: int | None = None
    """Width of a head."""
    heads: int | None = None
    """Query heads: the arithmetic of attention counts, too."""
    tflops: float | None = None
    """Peak bf16 arithmetic of a device that is not in the table, 1e12 operations a second."""
    bandwidth: float | None = None
    """Its peak memory bandwidth, 1e9 bytes a second."""


ACCEPTANCE = AcceptanceOptions()
ROOFLINE = RooflineOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The command line, typed."""

    batch: int
    context: int | None
    temperature: float | None
    text: str | None
    prompts: Path | None
    candidates: tuple[str, ...]
    max_tokens: int
    limit: int
    acceptance: AcceptanceOptions
    roofline: RooflineOptions
    speculation: SpeculationOptions
    loading: LoadOptions

    @property
    def k(self) -> int | None:
        return self.speculation.num_speculative_tokens

    @property
    def given(self) -> bool:
        """Whether acceptance was given as numbers."""
        options = self.acceptance
        return any(value is not None for value in (options.alpha, options.acceptance, options.rank_acceptance))

    @property
    def measuring(self) -> bool:
        """Whether acceptance is to be measured: prompts or candidates are there, or nothing else says it."""
        return self.prompts is not None or bool(self.candidates) or not (self.given or self.text is not None)

    def check(self, model: str | None) -> None:
        """Raise ArgumentError where options contradict each other, or something is missing."""
        if self.text is not None:
            text_named(self.text)
        if self.k is not None and self.k < 1:
            raise ArgumentError(f"at least one token must be drafted: -k must be 1 or more, got {self.k}")
        if self.temperature is not None and self.temperature < 0:
            raise ArgumentError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.acceptance.alpha is not None and self.acceptance.acceptance is not None:
            raise ArgumentError("give --alpha or --acceptance, not both")
        if model is not None and self.roofline.params is not None:
            raise ArgumentError("a MODEL is measured here and --params describes one that is not: give one of them")
        wants_model = self.prompts is not None or self.candidates or self.speculation.drafter is not None
        if model is None and wants_model:
            raise ArgumentError("--prompts, --drafter and --choose-draft measure, for which a MODEL is needed")
        if model is None and not self.given and self.text is None:
            raise ArgumentError(
                "what is accepted? Give --alpha 0.7, --acceptance 0.8,0.7,0.6, --text chat (published figures), or "
                "measure it: forerun plan MODEL --drafter NAME --prompts FILE"
            )
        if self.given and (self.prompts is not None or self.candidates):
            raise ArgumentError("acceptance is given (--alpha ...) or measured (--prompts ...), not both")
        if model is not None and self.measuring:
            self._check_measuring()

    def _check_measuring(self) -> None:
        if self.prompts is None:
            raise ArgumentError(
                "acceptance is measured on prompts of yours: give --prompts FILE (one a line), or --alpha without"
            )
        if not self.candidates and not self.speculation.config():
            raise ArgumentError("whose acceptance? Give --drafter NAME or --choose-draft MODEL ... (forerun drafters)")
