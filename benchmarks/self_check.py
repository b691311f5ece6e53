"""What the self-check sees: a model's own noise, the sound model's error and that of each planted fault, as a table.

    python -m benchmarks.self_check MODEL --dtype float32 bfloat16 float16

Each fault is planted between the plain forwards, which say what is right, and the target's own passes. In 16 bits sizes
are mean KL divergences in nats (limit: `FACTOR` times the model's own noise); in float32 the worst root-mean-square
error of a node's logits in units of their spread (limit: `STRUCTURE`). `tests/model/test_self_check.py` plants the
same in models of every kind.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.model import TransformersTarget, masks, self_check
from forerun.model.cache import SlotCache
from forerun.model.inputs import Nodes
from forerun.model.load import LoadOptions, open_model, read_config
from forerun.model.masks import MaskStyle
from forerun.model.names import tokenizer_beside
from forerun.model.sample import sample
from forerun.model.support import text_config

Plant = Callable[[pytest.MonkeyPatch, Any], None]  # (patch, model) -> nothing


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which speculation could go wrong."""

    name: str
    plant: Plant
    suits: Callable[[Any], bool] = lambda _model: True  # Whether a model has what is damaged
    in_model: bool = False  # It damages a module of the model itself, as a wrong kernel would


@contextmanager
def planted(fault: Fault, model: Any) -> Iterator[None]:
    """While open, the fault is there."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch, model)
        yield


def _no_mask(patch: pytest.MonkeyPatch, _model: Any) -> None:
    build = masks.build

    def nothing(*args: Any) -> Any:
        made = build(*args)
        parts = made if isinstance(made, dict) else {"": made}
        clear = {name: torch.zeros_like(mask) for name, mask in parts.items()}
        return clear if isinstance(made, dict) else clear[""]

    patch.setattr(masks, "build", nothing)


def _structure(change: Callable[[Nodes], Nodes]) -> Plant:
    """Whatever changes the nodes of a tree that branches."""

    def plant(patch: pytest.MonkeyPatch, _model: Any) -> None:
        of_trees = Nodes.of_trees.__func__  # type: ignore[attr-defined]

        def changed(cls: type[Nodes], trees: Any, **keywords: Any) -> Nodes:
            nodes: Nodes = of_trees(cls, trees, **keywords)
            return change(nodes) if any(tree.size > 4 for tree in trees) else nodes

        patch.setattr(Nodes, "of_trees", classmethod(changed))

    return plant


def _seeing(query: int, key: int, value: bool) -> Callable[[Nodes], Nodes]:
    def change(nodes: Nodes) -> Nodes:
        sees = nodes.sees.clone()
        sees[:, query, key] = value
        return replace(nodes, sees=sees)

    return change


def _one_later(nodes: Nodes) -> Nodes:
    depths = nodes.depths.clone()
    depths[:, 1:] += 1
    return replace(nodes, depths=depths)


def _slots_for_depths(nodes: Nodes) -> Nodes:
    return replace(nodes, depths=torch.arange(nodes.ids.shape[1]).expand_as(nodes.depths).clone())


def _wrong_node(patch: pytest.MonkeyPatch, _model: Any) -> None:
    move = SlotCache.move

    def neighbour(self: SlotCache, rows: Any, sources: Any, starts: Any) -> None:
        move(self, rows, [[slot - 1 + 2 * (slot % 2) for slot in slots] for slots in sources], starts)

    patch.setattr(SlotCache, "move", neighbour)


def _stale_row(patch: pytest.MonkeyPatch, _model: Any) -> None:
    """Of the first layer's keys the last token of each pass keeps what stood in its slot."""
    write = SlotCache.write

    def stale(self: SlotCache, keys: Tensor, values: Tensor, layer: int) -> None:
        if layer == 0 and 0 in self._stores:
            keys = keys.clone()
            store = self._stores[0][0].flatten(0, 1)
            keys[-1, :, -1] = store[self._on(keys.device).flat[-1]]
        write(self, keys, values, layer)

    patch.setattr(SlotCache, "write", stale)


def _heads_swapped(patch: pytest.MonkeyPatch, _model: Any) -> None:
    """In one layer two heads of the keys are swapped on the way into the cache."""
    write = SlotCache.write

    def swapped(self: SlotCache, keys: Tensor, values: Tensor, layer: int) -> None:
        order = [1, 0, *range(2, keys.shape[1])]
        write(self, keys[:, order] if layer == 0 else keys, values, layer)

    patch.setattr(SlotCache, "write", swapped)


def _window(patch: pytest.MonkeyPatch, _model: Any) -> None:
    of = MaskStyle.of

    def wider(config: Any) -> MaskStyle:
        style = of(config)
        return replace(style, window=style.window and style.window + 1, chunk=style.chunk and style.chunk + 1)

    patch.setattr(MaskStyle, "of", wider)


def _norms(change: Callable[[Any], Any]) -> Plant:
    """Whatever another forward does to the norms of the layers."""

    def plant(patch: pytest.MonkeyPatch, model: Any) -> None:
        for norm in norms_of(model):
            patch.setattr(norm, "forward", change(norm), raising=False)

    return plant


def norms_of(model: Any) -> list[Any]:
    """The root-mean-square norms of a model's hidden states."""
    size = text_config(model).hidden_size
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None
        if module.weight.shape == (size,)
    ]


def _epsilon(norm: Any) -> tuple[str, float]:
    name = next(name for name in ("variance_epsilon", "eps") if getattr(norm, name, None))
    return name, float(getattr(norm, name))


def _without_one(norm: Any) -> Callable[[Tensor], Tensor]:
    """Multiply by the weight alone where the model adds one; by one less where it does not."""
    source = inspect.getsource(type(norm))
    adds_one = "1.0 + " in source or "1 + " in source

    def forward(states: Tensor) -> Tensor:
        wide = states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _epsilon(norm)[1])
        return (normed * (norm.weight.float() - (0 if adds_one else 1))).to(states.dtype)

    return forward


def _epsilon_times_100(patch: pytest.MonkeyPatch, model: Any) -> None:
    for norm in norms_of(model):
        name, value = _epsilon(norm)
        patch.setattr(norm, name, 100 * value)


def _rope(factor: float) -> Plant:
    """Another base of all rotary embeddings."""

    def plant(patch: pytest.MonkeyPatch, model: Any) -> None:
        for module in model.modules():
            for name, frequencies in list(module.named_buffers(recurse=False)):
                if name.endswith("inv_freq"):
                    steps = torch.linspace(0, 1, len(frequencies) + 1, device=frequencies.device)[:-1]
                    patch.setitem(module._buffers, name, frequencies * factor**steps)

    return plant


def has_rope(model: Any) -> bool:
    """Whether a model has rotary embeddings whose base can be changed."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def _scale(patch: pytest.MonkeyPatch, model: Any) -> None:
    """Attention forgets half of its scale."""
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float) and hasattr(module, "layer_idx"):
            patch.setattr(module, "scaling", module.scaling * 1.5)


def has_scale(model: Any) -> bool:
    """Whether a model's attentions hold a scale."""
    return any(isinstance(getattr(module, "scaling", None), float) for module in model.modules())


def _cap(patch: pytest.MonkeyPatch, model: Any) -> None:
    for module in model.modules():
        if getattr(module, "attn_logit_softcapping", None):
            patch.setattr(module, "attn_logit_softcapping", None)
    patch.setattr(text_config(model), "final_logit_softcapping", None)


def has_cap(model: Any) -> bool:
    """Whether a model caps its logits."""
    return bool(getattr(text_config(model), "final_logit_softcapping", None))


def _key_heads(model: Any) -> int:
    config = text_config(model)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


FAULTS = (
    Fault("no mask", _no_mask),
    Fault("a sibling seen", _structure(_seeing(2, 1, True))),
    Fault("a parent unseen", _structure(_seeing(3, 1, False))),
    Fault("a position off by one", _structure(_one_later), has_rope),
    Fault("slots in place of depths", _structure(_slots_for_depths), has_rope),
    Fault("the wrong node gathered", _wrong_node),
    Fault("a stale row of the cache", _stale_row),
    Fault("a KV head swapped", _heads_swapped, lambda model: _key_heads(model) > 1),
    Fault("a window off by one", _window, lambda model: bool(MaskStyle.of(text_config(model)).window)),
    Fault("a forgotten 1 + in a norm", _norms(_without_one), lambda model: bool(norms_of(model)), in_model=True),
    Fault("RMSNorm's epsilon x 100", _epsilon_times_100, lambda model: bool(norms_of(model)), in_model=True),
    Fault("rope base / 10", _rope(10.0), has_rope, in_model=True),
    Fault("rope base / 1.1", _rope(1.1), has_rope, in_model=True),
    Fault("attention's scale x 1.5", _scale, has_scale, in_model=True),
    Fault("no soft cap", _cap, has_cap, in_model=True),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the check sees of a model in one dtype."""

    limit: float
    sound: float  # The worst phase of the sound model
    faults: dict[str, float]  # The worst phase of each fault that suits


def measured(model: Any, ids: list[int]) -> Measured:
    """Measure a model with the faults that suit it, one at a time, without kernels of forerun's own."""
    with self_check.short_windows(text_config(model)):
        expected = self_check.expect(model, ids, sizes=False)
        near, slots = expected.near, expected.slots

        def worst() -> float:
            return max(self_check.errors(TransformersTarget(model, rows=2, slots=slots), near).values())

        faults = {}
        for fault in (fault for fault in FAULTS if fault.suits(model)):
            with planted(fault, model):
                faults[fault.name] = worst()
        return Measured(limit=near.limit, sound=worst(), faults=faults)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint directory or hub id")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    found = {}
    for dtype in given.dtype:
        options = LoadOptions(dtype=dtype, device=given.device)
        model = open_model(given.model, options, read_config(given.model, options), quiet=True)
        found[dtype] = measured(model, sample(model, partial(tokenizer_beside, given.model)))
    lines = [("limit", [f"{one.limit:.2g}" for one in found.values()])]
    noise = {dtype: "-" if "32" in dtype else f"{one.limit / self_check.FACTOR:.2g}" for dtype, one in found.items()}
    lines += [("noise of its own", list(noise.values()))]
    lines += [("the sound model", [f"{one.sound:.2g}" for one in found.values()])]
    names = [fault.name for fault in FAULTS if any(fault.name in one.faults for one in found.values())]
    lines += [(name, [f"{one.faults[name]:.2g}" for one in found.values()]) for name in names]
    table = [f"| | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
    table += [f"| {name} | {' | '.join(values)} |" for name, values in lines]
    sys.stdout.write("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
