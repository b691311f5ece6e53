"""Speeds up the passes of a loaded target: packed linear layers, folded attention, fused C kernels,
compilation.

The replaced modules belong to the model object, so a model that a user handed in is only accelerated if asked. In a
compiled forward packed linears, and attention together with the cache, are single opaque operations of the graph; what
lies between them (norms, rotary embeddings, activations) is fused. So no weight is packed twice, and shapes stay
symbolic: there is one graph for one token and one for more. Passes with hooks run as before.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from forerun.errors import find_problem
from forerun.model.kernels import attention, forwards, packing
from forerun.model.kernels.attention import COMPILED, NAME
from forerun.model.kernels.packing import Packing
from forerun.model.layers import base_of, cache_argument, device_of
from forerun.model.padding import current, running
from forerun.model.sample import draw_tokens
from forerun.model.states import state_layers
from forerun.writing import cache_root

log = logging.getLogger(__name__)

COMPARED = 48  # Tokens on which replaced modules are compared with their own forwards


class _PassThrough:
    """A placeholder for the cache in the compiled graph; the attention operation reaches the real
    one.
    """

    def update(
        self, keys: Tensor, values: Tensor, _layer: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return keys, values


class CompiledForward:
    """A compiled forward with the signature of a base model's forward, to which it falls back for
    passes that cannot be compiled.
    """

    def __init__(self, base: nn.Module, layers: int) -> None:
        self.plain = base.forward
        self.base = base
        self.cache_argument = cache_argument(base)
        self.layers = layers
        self.watched = list(base.modules())
        self.compiled = torch.compile(self._trace, dynamic=True, fullgraph=True)
        self.failed = False
        self._seen: set[tuple[bool, ...]] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the base model, compiled if it is a cached pass of token ids without hooks."""
        if self.failed or args or not self._fits(kwargs):
            return self.plain(*args, **kwargs)
        this = replace(current(), cache=kwargs[self.cache_argument], attended=0)
        inputs = (kwargs["input_ids"], kwargs["position_ids"], kwargs["attention_mask"])
        try:
            with running(this):
                result = self._run(inputs)
        except Exception as error:
            log.debug("compilation failed", exc_info=error)
            return self._give_up((str(error) or type(error).__name__).splitlines()[0], kwargs)
        if this.attended != self.layers:
            return self._give_up("the model keeps the cache from its attention function", kwargs)
        return result

    def _give_up(self, why: str, kwargs: dict[str, Any]) -> Any:
        log.warning("compilation failed, going on without: %s", why)
        self.failed = True
        return self.plain(**kwargs)

    def _fits(self, kwargs: dict[str, Any]) -> bool:
        needed = {"input_ids", "position_ids", "attention_mask", self.cache_argument}
        return (
            kwargs.keys() - {"use_cache"} == needed
            and hasattr(kwargs[self.cache_argument], "begin")
            and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in self.watched)
        )

    def _run(self, inputs: tuple[Any, ...]) -> Any:
        """Run the compiled forward; the first pass of a kind compiles, behind a progress bar on
        stderr.
        """
        kind = tuple(size == 1 for size in inputs[0].shape)
        if kind in self._seen:
            return self.compiled(*inputs)
        self._seen.add(kind)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task("compiling the model's forward pass (kept on disk)", total=None)
            return self.compiled(*inputs)

    def _trace(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any) -> Any:
        return self.plain(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{self.cache_argument: _PassThrough(), COMPILED: True},
        )


def compile_forward(model: Any) -> bool:
    """Replace the base forward of a packed and folded `model`. Returns False, with nothing done,
    where that is impossible.
    """
    reason = _obstacle(model)
    if reason:
        log.warning("not compiled: %s", reason)
        return False
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_root() / "inductor")  # /tmp is often emptied
    base: Any = base_of(model)
    base.forward = CompiledForward(base, model.config.get_text_config().num_hidden_layers)
    return True


def _obstacle(model: Any) -> str | None:
    return find_problem(
        (model.device.type != "cpu", "passes on an accelerator are recorded instead"),
        (model.config._attn_implementation != NAME, "attention could not be folded on this device, dtype or model"),
        (
            getattr(model.config.get_text_config(), "kv_lora_rank", None),
            "its cache holds compressed latents, which are expanded outside the attention function",
        ),
        (state_layers(model), "recurrent states are kept outside the compiled graph"),
        (not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), "there is no C++ compiler"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceleration:
    """A record of what `accelerate` did to a model."""

    packing: Packing
    folded_attention: bool
    forwards: int  # Norms, MLPs and attentions that run in fewer operations
    compiled: bool

    def __str__(self) -> str:
        done = {
            f"{self.packing.layers} linear layers packed, {self.packing.fused} groups fused": self.packing.layers,
            "folded attention": self.folded_attention,
            f"{self.forwards} modules in our own kernels": self.forwards,
            "compiled": self.compiled,
        }
        found = ", ".join(what for what, some in done.items() if some)
        return found or "nothing to accelerate on this device and dtype"


@torch.inference_mode()
def accelerate(
    model: Any,
    *,
    compile: bool = False,
    ids: Sequence[int] = (),
    accepted: Collection[str] | None = None,
) -> Acceleration:
    """Make the passes of a causal LM in evaluation mode cheaper, in place. With `compile` the first
    pass with one token and the first with more take up to a minute each, in later processes
    seconds; compiled passes round differently.

    Args:
        ids: text on which what is replaced is compared with what was there; empty: what the model draws.
        accepted: the result of `list_replaced` when it was compared before: nothing is compared now.
    """
    packed = packing.pack(model)
    folds = (packed.layers > 0 or packing.list_in_blocks(model) or model.device.type != "cpu") and attention.suits(
        model
    )
    text: Tensor | None = None
    if folds and accepted is None:
        chosen = list(ids) or draw_tokens(model, COMPARED)
        text = torch.tensor([chosen[:COMPARED]], device=device_of(model.get_input_embeddings()))
        if wrong := attention.refusal(model, text):
            log.debug("attention is not folded: %s", wrong)
            folds = False
    elif accepted is not None:
        folds = folds and attention.NAME in accepted
    if folds:
        attention.install(model)
    compiled = compile and compile_forward(model)
    count = forwards.install(model, text, accepted) if folds and not compiled else 0
    return Acceleration(packing=packed, folded_attention=folds, forwards=count, compiled=compiled)


def list_replaced(model: Any) -> list[str]:
    """Return the names of what was compared and replaced in a model."""
    folded = [attention.NAME] if attention.is_installed(model) else []
    return [*folded, *forwards.list_installed(model)]


def undo(model: Any) -> Iterator[str]:
    """Undo `accelerate` piece by piece, the last first, and yield the name of each piece once it is
    removed. A compiled forward goes first, packed weights last.
    """
    base: Any = base_of(model)
    if isinstance(base.__dict__.get("forward"), CompiledForward):
        del base.forward
        yield "the compiled forward"
    if forwards.remove(model):
        yield "our kernels for norms, MLPs and attention"
    if attention.is_installed(model):
        model.set_attn_implementation("sdpa")
        yield "folded attention"
    if packing.unpack(model):
        yield "packed linear layers"


def folds(model: Any, base: Any) -> bool:
    """Return whether passes of `model`, through its `base`, run `fold_attention` uncompiled, where
    it sees the running `Pass`.
    """
    return attention.is_installed(model) and not isinstance(base.forward, CompiledForward)
