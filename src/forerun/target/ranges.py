"""Runs some of a model's layers, or some of their sublayers, on the same cache and without knowing the family.

A shallow copy of the base model gets a slice of the layers; *inject* in front of it puts stored states in the place
of what came before, *tap* behind it keeps the raw residual stream. Embedding multipliers and learned positions are
thereby neither lost nor applied twice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError
from forerun.target.nouns import Plan
from forerun.target.parts import replaced, turn_of

_PARTS = {
    "attn": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn"),
}


class _Inject(nn.Module):
    """A layer that returns `states`, whatever came in."""

    states: Tensor

    def __init__(self, attention_type: str | None) -> None:
        super().__init__()
        self.attention_type = attention_type

    def forward(self, *_args: object, **_kwargs: object) -> Tensor:
        return self.states


class _Tap(nn.Module):
    """A layer that remembers what came in, and passes it on."""

    states: Tensor

    def __init__(self, attention_type: str | None) -> None:
        super().__init__()
        self.attention_type = attention_type

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        self.states = hidden_states
        return hidden_states


class _Nothing(nn.Module):
    """A sublayer that adds nothing, in the shape in which the real one answers."""

    def __init__(self, extras: int | None) -> None:
        super().__init__()
        self.extras = extras
        """Further members of the answer where it is a tuple; None where it is a bare tensor."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return zeros if self.extras is None else (zeros, *[None] * self.extras)


class LayerRanges:
    """Slices of one base model; copies are made once for each (start, stop)."""

    def __init__(self, base: nn.Module, layers_name: str, layers: nn.ModuleList) -> None:
        self._base = base
        self._turn = turn_of(base)
        self._name = layers_name
        self._layers = layers
        self._copies: dict[tuple[int, int], tuple[nn.Module, _Inject, _Tap]] = {}
        self._extras: dict[tuple[int, str], int | None] = {}

    def run(self, plan: Plan, inputs: dict[str, Any], states: Tensor | None) -> Tensor:
        """States (B, N, H) at boundary ``plan.stop``; `states` are those at ``plan.start``, None for the embeddings."""
        model, inject, tap = self._slice(plan.start, plan.stop)
        if states is not None:
            inject.states = states
        with self._turn, self._without(plan, inputs["input_ids"].device):
            model(**inputs)
        result = tap.states
        del tap.states
        inject.__dict__.pop("states", None)
        return result

    def finish(self, states: Tensor, inputs: dict[str, Any], *, start: int | None = None) -> Tensor:
        """The layers from boundary `start` on (None: no layer), then the final norm: (B, N, H) -> LAST_HIDDEN."""
        end = len(self._layers)
        model, inject, tap = self._slice(end if start is None else start, end)
        inject.states = states
        with self._turn:
            normed: Tensor = model(**inputs).last_hidden_state
        del tap.states
        inject.__dict__.pop("states", None)
        return normed

    def _slice(self, start: int, stop: int) -> tuple[nn.Module, _Inject, _Tap]:
        if getattr(self._base.config, "hidden_size_per_layer_input", None):
            raise UnsupportedModelError(
                f"{type(self._base).__name__} feeds every layer an embedding by its place in the list: its "
                "layers cannot be run in part"
            )
        if (start, stop) not in self._copies:
            self._copies[start, stop] = self._copy(start, stop)
        return self._copies[start, stop]

    def _copy(self, start: int, stop: int) -> tuple[nn.Module, _Inject, _Tap]:
        owner = self._name.rpartition(".")[0]
        config: Any = copy.deepcopy(self._base.get_submodule(owner).config)
        types = getattr(config, "layer_types", None)
        first = types[min(start, len(types) - 1)] if types else None
        inject, tap = _Inject(first), _Tap(first)
        injected = [inject] if start > 0 else []
        layers = nn.ModuleList([*injected, *self._layers[start:stop], tap])
        twin = replaced(self._base, self._name, layers)
        config.num_hidden_layers = len(injected) + stop - start + 1
        if types:
            config.layer_types = [*[first for _ in injected], *types[start:stop], first]
        twin.get_submodule(owner).__dict__["config"] = config
        return twin, inject, tap

    @contextmanager
    def _without(self, plan: Plan, device: torch.device) -> Iterator[None]:
        """While open, the plan's skipped sublayers add nothing; the layers are put back whatever happens."""
        removed: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for layer, part in sorted(plan.skip):
                module = self._layers[layer]
                name = self._sublayer(layer, part)
                stub = _Nothing(self._answer(layer, part, device))
                removed.append((module, name, getattr(module, name)))
                module._modules[name] = stub
            yield
        finally:
            for module, name, original in removed:
                module._modules[name] = original

    def _sublayer(self, layer: int, part: str) -> str:
        module = self._layers[layer]
        for name in _PARTS[part]:
            if isinstance(getattr(module, name, None), nn.Module):
                return name
        raise UnsupportedModelError(
            f"{type(module).__name__} has no sublayer named {' or '.join(_PARTS[part])}: cannot skip {(layer, part)}"
        )

    def _answer(self, layer: int, part: str, device: torch.device) -> int | None:
        """How many further members the sublayer's answer has; found once by running one token through the model."""
        if (layer, part) not in self._extras:
            self._probe(part, device)
        return self._extras[layer, part]

    def _probe(self, part: str, device: torch.device) -> None:
        def note(layer: int) -> Any:
            def hook(_module: nn.Module, _args: Any, output: Any) -> None:
                self._extras[layer, part] = len(output) - 1 if isinstance(output, tuple) else None

            return hook

        handles = [
            getattr(module, self._sublayer(layer, part)).register_forward_hook(note(layer))
            for layer, module in enumerate(self._layers)
        ]
        try:
            self._base(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
