"""Faster forwards for the norms, gated MLPs, attentions and whole decoder layers of a packed model:
the same modules in fewer operations.

Only `forward` of a module is replaced, on the object; where a pass is not what the kernels take (gradients, another
cache, a compiler that traces) the module's own runs. A module gets one if it answers the states of a plain pass as
before, see `acceptance`. The operations are those of its device, see `fused`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from forerun.devices import time_in_turns
from forerun.model.cache import SlotCache
from forerun.model.inputs import current
from forerun.model.kernels import acceptance, products, streamed
from forerun.model.kernels.acceptance import ModuleForward
from forerun.model.kernels.module_forwards import (
    AttentionForward,
    GatedForward,
    HeadForward,
    NormForward,
    RotaryForward,
    run_on_a_cache,
)
from forerun.model.kernels.native import Attention, LayerParts, LayerRoom, Layers
from forerun.model.kernels.packing import JoinedWeight, PackedLinear, PanelWeight
from forerun.model.layers import Capture, cache_argument, captures_on
from forerun.model.recordings import CudaGraphs

_log = logging.getLogger(__name__)

MODELS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Classes that only embed, run their layers and norm."""
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Classes that only norm, attend and add, then norm, mix and add."""


LAYERS_BY = "FORERUN_LAYERS"  # Environment variable: "whole" or "parts" on a GPU, where nobody is to time them
_FEW = 16  # Tokens on which whole models are compared on a GPU
_ROUNDING = 2**-5  # Share of the largest state by which rounding may move one, over all layers
_TRIED_AT, _TRIED_TOKENS = 1024, (1, 8)  # Slots that a token sees where layers are timed, and tokens of a pass
_TURNS, _REPLAYS = 4, 8  # How often, and in how many passes at a time


class _Rooms:
    """Scratch buffers that all layers of a model share, since they run one at a time."""

    KEPT = 64  # Tokens for which there is always room; that of larger passes is let go by the next smaller one

    def __init__(self) -> None:
        self.last: LayerRoom | None = None

    def of(self, parts: LayerParts, tokens: int, dtype: torch.dtype, kind: int) -> LayerRoom:
        """Return buffers for so many tokens in such layers."""
        room = self.last
        if room is None or (room.sizes, room.dtype) != (parts.sizes, dtype) or not self._fits(room.tokens, tokens):
            room = self.last = LayerRoom(parts.sizes, max(tokens, self.KEPT), dtype, kind)
        return room

    def _fits(self, held: int, tokens: int) -> bool:
        return tokens <= held <= max(tokens, self.KEPT)

    def __deepcopy__(self, memo: dict[int, object]) -> _Rooms:
        memo[id(self)] = found = _Rooms()
        return found


class _Run:
    """Consecutive whole layers that run together."""

    def __init__(self, layers: Sequence[LayerForward]) -> None:
        self.layers, self.first = layers, layers[0]
        self.prompt: object | None = None  # The `Pass.prompt` at which nothing inside had changed
        self.parts: list[Any] = [layer.parts() for layer in layers]
        self.numbers = tuple(layer.attention.module.layer_idx for layer in layers)

    def fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
        """Return whether the kernels can run this pass."""
        prompt = current().prompt
        if prompt is None or prompt is not self.prompt:
            if not all(layer.inside.intact() for layer in self.layers):
                return False
            self.read_weights()
            self.prompt = prompt
        return self.first.attention.fits(states, angles, mask, cache)

    def read_weights(self) -> None:
        """Take up weights that stand elsewhere now."""

    def slots(self, states: Tensor, cache: SlotCache) -> tuple[Sequence[tuple[Tensor, Tensor]], Tensor]:
        """Return each layer's stores of keys and values, and the slots there of a pass over these states."""
        heads = self.first.attention.heads
        stores = cache.stores_for(self.numbers, (heads.keys, heads.depth), like=states)
        return stores, cache.places(states.device)


class _LayerRun(_Run):
    """Consecutive whole layers that run in one call."""

    def __init__(self, layers: Sequence[LayerForward]) -> None:
        super().__init__(layers)
        self.rooms, self.kind = self.first.rooms, products.kind_of(self.first.dtype)
        self.calls = Layers(self.parts, self.kind, products.address())

    def read_weights(self) -> None:
        self.calls.read_weights()

    def __call__(
        self,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: SlotCache,
        wanted: Sequence[int],
    ) -> list[Tensor]:
        """Run the layers on states (B, N, width) that fit, and return the outputs of those that are
        `wanted`, by number in this run.
        """
        stores, places = self.slots(states, cache)
        tokens = states.shape[:-1].numel()
        room = self.rooms.of(self.parts[0], tokens, states.dtype, self.kind)
        self.calls.begin(room, tokens, angles, places, stores, reads=current().reads)
        asked = self._asked(states, cache, mask)
        if asked is not None:
            return self.calls.run(states, asked, wanted)
        outputs = list[Tensor]()
        for number, layer in enumerate(self.layers):
            query = self.calls.enter(number, states)
            attended = layer.attention.attend(query, cache, mask)
            states = self.calls.leave(number, attended.contiguous(), states)
            outputs.append(states)
        return [outputs[number] for number in wanted]

    def _asked(self, states: Tensor, cache: SlotCache, mask: Tensor) -> Attention | None:
        """Return the attention problem that all layers give to the C kernel, or None if attention
        runs elsewhere or on other tokens.
        """
        this, module = current(), self.first.attention.module
        if cache.copies_rows or mask.shape[1] != 1:
            return None
        seen, query = cache.seen(module.layer_idx), self.calls.query(states.shape[:-1]).transpose(1, 2)
        if not self.first.ops.takes_attention(query, *seen, mask):
            return None
        return Attention(query, *seen, mask, module.scaling, this.rows, paths=this.paths, flat=this.flat)


class _StreamedRun(_Run):
    """Consecutive whole layers on a GPU for a pass of few tokens, five kernels each (`triton_layer`)."""

    def __init__(self, layers: Sequence[LayerForward]) -> None:
        super().__init__(layers)
        self.tools = streamed(self.first.device)
        heads = self.first.attention.heads
        self.arrived = torch.zeros(self.tools.ROWS * heads.keys, dtype=torch.int32, device=self.first.device)

    def fits(self, states: Tensor, angles: tuple[Tensor, Tensor] | None, mask: Any, cache: Any) -> bool:
        """Return whether the kernels can run this pass."""
        this = current()
        return (
            states.shape[:-1].numel() <= self.tools.ROWS
            and this.flat is None
            and this.paths is None
            and super().fits(states, angles, mask, cache)
            and mask.dim() == 4
            and mask.shape[1] == 1
            and mask.dtype == states.dtype
            and mask.stride(-1) == 1
        )

    def __call__(
        self,
        states: Tensor,
        angles: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: SlotCache,
        wanted: Sequence[int],
    ) -> list[Tensor]:
        """Run the layers as `_LayerRun` does."""
        stores, places = self.slots(states, cache)
        squares = self.tools.square(states)
        outputs = dict[int, Tensor]()
        for number, (part, store) in enumerate(zip(self.parts, stores, strict=True)):
            query = self._project(part, states, squares, angles, store, places)
            scale = self.layers[number].attention.module.scaling
            attended = self.tools.attend(query, store, mask, places=places, scale=scale, arrived=self.arrived)
            states, squares = self.tools.multiply(attended, part.mix.weight, part.mix.bias, residual=states)
            second = self.tools.Normed(states, squares, part.second.weight, part.second.epsilon)
            inner = self.tools.gate(second, part.gates.packed, part.gates.bias)
            states, squares = self.tools.multiply(inner, part.down.weight, part.down.bias, residual=states)
            if number in wanted:
                outputs[number] = states
        return [outputs[number] for number in wanted]

    def _project(
        self,
        part: LayerParts,
        states: Tensor,
        squares: Tensor,
        angles: tuple[Tensor, Tensor],
        store: tuple[Tensor, Tensor],
        places: Tensor,
    ) -> Tensor:
        """Return the queries of a layer, and write its keys and values. Where heads have norms of their own, these,
        the rotation and the cache are a kernel more.
        """
        heads, joint = part.heads, part.joint
        first = self.tools.Normed(states, squares, part.first.weight, part.first.epsilon)
        if heads.query_norm is None and heads.key_norm is None:
            return self.tools.project(first, joint.packed, joint.bias, angles, heads, stores=store, places=places)
        both, _ = self.tools.multiply(first, joint.packed, joint.bias)
        return self.first.ops.rope_and_write(both, angles, heads, store, places)


class _LayerRuns(dict[tuple[int, int], "_LayerRun | _StreamedRun"]):
    """The runs that were needed so far, by first layer and end. A copied model makes its own."""

    def __deepcopy__(self, memo: dict[int, object]) -> _LayerRuns:
        return _LayerRuns()


class LayerForward(ModuleForward):
    """A decoder layer on a CPU in one call, or in two with its attention between them. Its parts
    must have their own faster forwards already; the bits are those of the parts.
    """

    PARTS: ClassVar = {
        "input_layernorm": NormForward,
        "self_attn": AttentionForward,
        "post_attention_layernorm": NormForward,
        "mlp": GatedForward,
    }
    RUN: ClassVar[type[_LayerRun | _StreamedRun]] = _LayerRun

    def __init__(self, module: Any, rooms: _Rooms) -> None:
        super().__init__(module, module.input_layernorm.weight)
        self.cache_argument = cache_argument(module.self_attn)
        self.rooms = rooms
        self.before, self.attention, self.behind, self.mlp = (
            module._modules[name].__dict__["forward"] for name in self.PARTS
        )
        last = [getattr(owner, name) for owner, name in _projections(module)]
        self.last = [getattr(each, "packed_weight", each) for each in last]
        self.runs = _LayerRuns()  # Runs of this layer alone
        self.key = (self.device, self.parts().sizes, module.self_attn.scaling)  # Layers with one key can be one run

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Return whether a module can be replaced; asked once its parts have their forwards."""
        if type(module).__name__ not in LAYERS or not type(module).__module__.startswith("transformers.models."):
            return False
        parts = [(module._modules.get(name), kind) for name, kind in cls.PARTS.items()]
        if any(part is None or type(part.__dict__.get("forward")) is not kind for part, kind in parts):
            return False
        layer: Any = module
        attention, mlp = layer.self_attn.forward, layer.mlp.forward
        last = [owner._modules.get(name) for owner, name in _projections(module)]
        width, inner = attention.joint.in_features, mlp.joint.sizes[0]
        sizes = [(attention.joint.sizes[0], width), (inner, width)]
        return (
            mlp.joint.in_features == width
            and [(getattr(projection, "in_features", 0), getattr(projection, "out_features", 0)) for projection in last]
            == sizes
            and cls.takes([attention.joint, mlp.joint], last)
        )

    @classmethod
    def takes(cls, joints: Sequence[Any], last: Sequence[Any]) -> bool:
        """Return whether the kernels take a layer's joint weights and its last projections."""
        weights = [*joints, *(one.packed_weight for one in last if _alone(one))]
        return len(weights) == 4 and all(
            isinstance(one, PanelWeight) and one.in_features % products.STEP == 0 for one in weights
        )

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        cache: Any = kwargs.get(self.cache_argument)
        if not self.runs:
            self.runs[0, 1] = self.RUN([self])
        if not self.runs[0, 1].fits(hidden_states, position_embeddings, attention_mask, cache):
            return self.plain(
                hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
            )
        assert position_embeddings is not None and attention_mask is not None
        [states] = self.runs[0, 1](hidden_states, position_embeddings, attention_mask, cache, [0])
        return states

    def parts(self) -> LayerParts:
        """Return the weights and sizes of the layer."""
        mix, down = self.last
        return LayerParts(
            first=self.before,
            second=self.behind,
            joint=self.attention.joint,
            mix=mix,
            gates=self.mlp.joint,
            down=down,
            heads=self.attention.heads,
        )

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return the layer's output for causal rows on a cache of its own, and what it writes
        there.
        """
        return run_on_a_cache(self.attention, forward, states, kwargs, lambda found: found)


class StreamedLayerForward(LayerForward):
    """A decoder layer on a GPU in five kernels, for passes of few tokens; others go through its parts. Its values are
    those of the parts but for the order of their sums.
    """

    RUN = _StreamedRun

    @classmethod
    def takes(cls, joints: Sequence[Any], last: Sequence[Any]) -> bool:
        tools = streamed(joints[0].device)
        if tools is None or not all(type(one) is JoinedWeight for one in joints):
            return False
        weights = [*(one.packed for one in joints), *(one.weight for one in last if type(one) is nn.Linear)]
        return len(weights) == 4 and all(tools.takes_weight(weight) for weight in weights)

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        few = slice(0, self.tools.ROWS)
        angles = tuple(part[:, few] for part in kwargs["position_embeddings"])
        return super().answers(forward, states[:, few], {**kwargs, "position_embeddings": angles})


class ModelForward(ModuleForward):
    """A base model whose whole layers run in one call where none of them is hooked, but to capture
    the states at boundaries. Embedding, rotary angles, last norm and other layers are called as its
    own forward calls them. What is exchanged or hooked inside a layer counts from the next prompt on.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.layers[0].forward.attention.joint)
        self.cache_argument = cache_argument(module)
        self.layers = list(module.layers)
        self.runs = _LayerRuns()

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Return whether a module can be replaced; asked once its layers have their forwards."""
        if type(module).__name__ not in MODELS or not type(module).__module__.startswith("transformers.models."):
            return False
        layers: Any = module._modules.get("layers")
        return bool(len(layers)) and isinstance(layers[0].__dict__.get("forward"), LayerForward)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        module: Any = self.module
        if not self._fits(input_ids, attention_mask, position_ids, kwargs):
            return self.plain(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        cache = kwargs[self.cache_argument]
        states = module.embed_tokens(input_ids)
        angles = module.rotary_emb(states, position_ids=position_ids)
        at = 0
        while at < len(self.layers):
            end, captures = self._whole_until(at)
            if end > at and (run := self._run(at, end)).fits(states, angles, attention_mask, cache):
                boundaries = sorted({capture.boundary for capture in captures} - {at} | {end})
                outputs = run(states, angles, attention_mask, cache, [boundary - at - 1 for boundary in boundaries])
                by_boundary = {at: states, **dict(zip(boundaries, outputs, strict=True))}
                for capture in captures:
                    capture.keep(by_boundary[capture.boundary])
                states, at = by_boundary[end], end
                continue
            arguments = {"attention_mask": attention_mask, "position_embeddings": angles, "position_ids": position_ids}
            states, at = self.layers[at](states, **arguments, **kwargs), at + 1
        states = module.norm(states)
        return BaseModelOutputWithPast(last_hidden_state=states, **{self.cache_argument: cache})

    def _fits(self, ids: Tensor | None, mask: Any, positions: Tensor | None, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a plain pass of ids over a `SlotCache`."""
        module: Any = self.module
        return (
            ids is not None
            and positions is not None
            and isinstance(mask, Tensor)
            and mask.dim() == 4
            and kwargs.keys() == {self.cache_argument, "use_cache"}
            and type(kwargs[self.cache_argument]) is SlotCache
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and list(module.layers._modules.values()) == self.layers
        )

    def _whole_until(self, start: int) -> tuple[int, list[Capture]]:
        """Return the end of the run of whole layers of one kind that begins at `start`, and the hooks
        on them, which capture their states and do nothing else.
        """
        end, key, captures = start, None, list[Capture]()
        for layer in self.layers[start:]:
            forward = layer.__dict__.get("forward")
            if not isinstance(forward, LayerForward) or (key is not None and forward.key != key):
                break
            if layer._forward_hooks or layer._forward_pre_hooks:
                hooks = captures_on(layer)
                if hooks is None:
                    break
                captures += hooks
            end, key = end + 1, forward.key
        return end, captures

    def _run(self, start: int, end: int) -> _LayerRun | _StreamedRun:
        if (start, end) not in self.runs:
            forwards = [layer.forward for layer in self.layers[start:end]]
            self.runs[start, end] = forwards[0].RUN(forwards)
        return self.runs[start, end]

    @torch.inference_mode()
    def agrees(self, ids: Tensor) -> bool:
        """Return whether it computes from ids (B, N), on a cache of its own, what the module's own forward computes:
        exactly that on a CPU; on a GPU another order of a sum may move states by their rounding.
        """
        exact = self.layers[0].forward.RUN is _LayerRun
        ids = ids if exact else ids[:, :_FEW]
        batch, count = ids.shape
        positions = torch.arange(count, device=self.device).expand(batch, -1)
        cache = SlotCache(batch, count)
        cache.begin(range(batch), positions, count)
        lowest = torch.finfo(self.dtype).min
        mask = torch.full((count, count), lowest, dtype=self.dtype, device=self.device).triu(1)
        arguments = {"input_ids": ids, "attention_mask": mask.expand(batch, 1, -1, -1), "position_ids": positions}
        others: dict[str, Any] = {self.cache_argument: cache, "use_cache": True}
        expected, ours = (forward(**arguments, **others).last_hidden_state for forward in (self.plain, self))
        if exact:
            return torch.equal(expected, ours)
        return float((expected - ours).abs().max()) <= _ROUNDING * float(expected.abs().max())


def _projections(layer: Any) -> list[tuple[Any, str]]:
    """Return owners and names of the projections that are not part of a joint product."""
    return [(layer._modules["self_attn"], "o_proj"), (layer._modules["mlp"], "down_proj")]


def _alone(part: Any) -> bool:
    return type(part) is PackedLinear and part.group is None


def install(model: nn.Module, ids: Tensor | None, accepted: Collection[str] | None = None) -> int:
    """Give every module of `model` that suits and answers as before a faster forward, and return
    how many got one.

    Args:
        ids: (B, N) tokens, text of the model's own kind, over which the modules are compared. None: `model` takes no
            tokens (a head); norms and MLPs are compared on random states, and no attention gets one.
        accepted: names of modules that were compared before: they alone get one, and nothing is compared.
    """
    modules = dict(model.named_modules())
    install_kinds = partial(_install_tried, model, ids, accepted)
    installed = install_kinds(modules, (NormForward, GatedForward, AttentionForward))
    if ids is None and accepted is None:
        return len(installed)
    # Whole layers, of modules that have faster forwards by now
    layers = install_kinds(modules, (LayerForward, StreamedLayerForward), rooms=_Rooms())
    if not are_faster(layers, timed=accepted is None):
        for layer in layers:
            del layer.module.forward
        return len(installed)
    installed += layers
    if any(type(layer) is StreamedLayerForward for layer in layers):
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        ends = {name: module for name, module in modules.items() if module is head or type(module) is not nn.Linear}
        installed += install_kinds(ends, (HeadForward, RotaryForward))
    for name, module in modules.items():
        if ModelForward.suits(module):
            whole = ModelForward(module)
            if (ids is not None and whole.agrees(ids)) if accepted is None else name in accepted:
                module.forward = whole
                installed.append(whole)
    return len(installed)


def are_faster(layers: Sequence[LayerForward], *, timed: bool = True) -> bool:
    """Return whether a plain step and a small tree go through these layers faster than through their parts. That is
    measured on a GPU, where they are to be `timed`; elsewhere whole layers are known to be faster.
    """
    if not layers or layers[0].device.type != "cuda":
        return True
    if (chosen := os.environ.get(LAYERS_BY)) in ("whole", "parts"):
        return chosen == "whole"
    if not timed:
        return True
    try:
        times = [time_layers(layers, tokens) for tokens in _TRIED_TOKENS]
    except Exception as error:  # whatever keeps a device from recording
        _log.debug("whole layers are left out: they could not be timed: %r", error)
        return False
    for tokens, (parts, whole) in zip(_TRIED_TOKENS, times, strict=True):
        _log.info("tokens %d: %.2f ms through the layers' parts, %.2f through whole layers", tokens, parts, whole)
    parts, whole = (sum(column) for column in zip(*times, strict=True))
    return whole < parts


@torch.inference_mode()
def time_layers(layers: Sequence[LayerForward], tokens: int) -> tuple[float, float]:
    """Return what a pass of so many tokens through layers takes on a GPU, in ms, by their parts and as whole layers:
    each recorded as a graph and replayed in turns, the fastest turn of each.
    """
    first, slots = layers[0], _TRIED_AT
    alike = [layer for layer in layers if layer.key == first.key]
    cache, device = SlotCache(1, slots), first.device
    cache.begin([0], torch.arange(slots - tokens, slots, device=device).unsqueeze(0), slots)
    states = torch.ones(1, tokens, first.attention.joint.in_features, device=device, dtype=first.dtype)
    mask, depth = states.new_zeros(1, 1, tokens, slots), first.attention.heads.depth
    angles = states.new_ones(1, tokens, depth), states.new_ones(1, tokens, depth)
    others = {"attention_mask": mask, "position_embeddings": angles, first.cache_argument: cache}

    def by_parts(found: Tensor) -> Tensor:
        for layer in alike:
            found = layer.plain(found, **others)
        return found

    whole = partial(first.RUN(alike), angles=angles, mask=mask, cache=cache, wanted=[len(alike) - 1])
    record = CudaGraphs(device)
    replays = [record(work, (states,)) for work in (by_parts, whole)]

    def run(replay: Callable[[Tensor], Any]) -> None:
        for _ in range(_REPLAYS):
            replay(states)
        torch.cuda.synchronize(device)

    times = time_in_turns([partial(run, replay) for replay in replays], _TURNS)
    parts, wholes = (1e3 * min(taken) / _REPLAYS for taken in times)
    return parts, wholes


def _install_tried(
    model: nn.Module,
    ids: Tensor | None,
    accepted: Collection[str] | None,
    modules: Mapping[str, nn.Module],
    kinds: Sequence[type[Any]],
    **options: Any,
) -> list[Any]:
    """Install faster forwards on the `modules`, by name, that answer as before, and return these forwards. A module
    gets the first of the `kinds` that suits it, made with the `options`.
    """
    made = dict[str, ModuleForward]()
    for name, module in modules.items():
        kind = next((kind for kind in kinds if kind.suits(module)), None)
        if kind is not None and "forward" not in module.__dict__:
            made[name] = kind(module, **options)
    if accepted is not None:
        installed = [forward for name, forward in made.items() if name in accepted]
    elif ids is not None:
        installed = acceptance.accept(model, list(made.values()), ids) if made else []
    else:
        installed = acceptance.accept_alone([forward for forward in made.values() if forward.width])
    for forward in installed:
        forward.module.forward = forward
    return installed


def list_installed(model: nn.Module) -> list[str]:
    """Return the names of the modules that have a faster forward."""
    return [name for name, module in model.named_modules() if isinstance(module.__dict__.get("forward"), ModuleForward)]


def remove(model: nn.Module) -> int:
    """Undo `install`, and return how many modules have their own forward again."""
    replaced = [module for module in model.modules() if isinstance(module.__dict__.get("forward"), ModuleForward)]
    for module in replaced:
        del module.forward
    return len(replaced)
