"""`TransformersTarget`: a causal LM of transformers seen as "score this token tree", on a row-and-slot cache."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from forerun.core.tree import TokenTree
from forerun.devices import attention_kernels, device_name, send, send_ints
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import compression, layers, masks, positions, updating
from forerun.model.cache import SlotCache
from forerun.model.inputs import (
    Buckets,
    Flat,
    Nodes,
    Pass,
    Resumed,
    Scored,
    TreePaths,
    pad_right,
    running,
    scatter_rows,
    take_last,
)
from forerun.model.kernels import attention, compiling, native
from forerun.model.kernels.packing import PackedLinear, name_blocks, packed_bytes
from forerun.model.layers import LayerRange, capture_states, check_boundaries
from forerun.model.load import LoadOptions
from forerun.model.memory import Sizes, default_slots, plan_slots_beside
from forerun.model.prepare import prepare
from forerun.model.recordings import MET_BEFORE, Recordings, Work, bucket, recordable, round_tokens, wide
from forerun.model.states import install, keep_outside, uses_cache
from forerun.model.states.rows import RowStates
from forerun.model.support import context_length, known_states, text_config
from forerun.model.target import PREFILL_CHUNK, Target
from forerun.types import LAST_HIDDEN, Boundary

ALIGNED = 16  # On an accelerator a mask's width is a multiple of this many slots, or attention copies the mask
VERIFYING = 16  # Recordings of what rules ask that are kept
SHORT = 16  # Most tokens of a row that are appended by a recorded pass: what a draft model lacks of a step, say

_VOLATILE = ("_name_or_path", "name_or_path", "transformers_version", "torch_dtype")


class TransformersTarget(Target):
    """A causal LM of transformers with a cache of `rows` x `slots` tokens."""

    def __init__(self, model: Any, *, rows: int = 1, slots: int | None = None, buckets: Buckets | None = None) -> None:
        """Wrap a loaded model unchecked; most callers want `load`. Raises UnsupportedModelError if
        it cannot score trees.
        """
        states, config = known_states(model), text_config(model)
        length = context_length(config)
        super().__init__(rows=rows, slots=default_slots(length) if slots is None else slots)
        self.model = model
        self.config = config
        self.generation_config = getattr(model, "generation_config", None)
        self.name_or_path = str(model.name_or_path)
        self.vocab_size = self.config.vocab_size
        self.hidden_size = self.config.hidden_size
        self.max_length = length
        self.buckets = Buckets() if buckets is None else buckets
        self.head = layers.OutputHead(model)
        self.dtype = model.dtype
        self._base = layers.base_of(model)
        self.pass_lock = layers.pass_lock(self._base)
        self._prompt = object()  # See `Pass.prompt`; renewed with every prompt
        name, self._layers = layers.layers_of(self._base, self.config.num_hidden_layers)
        self.num_layers = len(self._layers)
        self._ranges = layers.LayerRanges(self._base, name, self._layers)
        self._embedding: nn.Module = model.get_input_embeddings()
        self.device = layers.device_of(self._embedding)
        install(states)
        # Whether it would count positions itself, from the cache
        self._counts = any([positions.install(model), compression.install(model)])
        # Told to use no cache, what keeps states in one of its own makes none.
        self._caching: dict[str, Any] = {"use_cache": not keep_outside(states)}
        self._style = masks.MaskStyle.of(self.config)
        self.states = RowStates(rows) if states else None  # Of layers that keep more than keys and values
        self._make_cache()
        self.verifying = Recordings.on(self.device)  # Each holds copies of logits
        self.verifying.most = VERIFYING

    def _make_cache(self) -> None:
        """Make an empty cache of `rows` x `slots` tokens, and forget the recordings that read another."""
        aligned = self.slots if self.device.type == "cpu" else -(-self.slots // ALIGNED) * ALIGNED
        self.cache = SlotCache(self.rows, aligned)
        if uses_cache(self.model):
            self._caching[layers.cache_argument(self._base)] = self.cache
        records = recordable(self.config) and self.states is None and not self._counts
        self.recordings = Recordings.on(self.device) if records else Recordings(None)  # For scoring

    @classmethod
    def load(
        cls,
        model: Any,
        *,
        rows: int = 1,
        slots: int | None = None,
        reserve_bytes: int = 0,
        reserve_bytes_per_slot: int = 0,
        **loading: Any,
    ) -> Self:
        """Open a directory or hub id, or wrap a transformers model that is already loaded.

        Args:
            model: a loaded model is left alone: nothing is moved or repacked unless `repack` is True.
            rows: sequences that the cache holds.
            slots: tokens of a row, drafted ones included; default: see `default_slots`.
            reserve_bytes: memory to leave for a drafter in the plan that is checked before loading.
            reserve_bytes_per_slot: the same for its own cache, for each slot of each row.
            loading: fields of `LoadOptions`.

        Raises:
            CheckpointError: missing, corrupt, gated, or not what its configuration announces.
            UnsupportedModelError: recurrent state, an encoder, or a failed self-check.
            OutOfMemoryError: weights and cache do not fit; says how much was needed and what to lower.
            ArgumentError: an argument is out of range or makes no sense for a loaded model.
        """
        return prepare(
            cls,
            model,
            LoadOptions(**loading),
            rows=rows,
            slots=slots,
            reserve=reserve_bytes,
            reserve_per_slot=reserve_bytes_per_slot,
        )

    @torch.inference_mode()
    def prefill(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        boundaries: Set[Boundary] = frozenset(),
        all_logits: bool = False,
    ) -> Scored:
        counts = [len(chunk) for chunk in tokens]
        self.check_room(rows, counts, counts)
        if min(counts) < 1:
            raise ArgumentError("every row of a prefill needs at least one token")
        check_boundaries(boundaries, self.num_layers)
        if self.records and max(counts) <= SHORT:
            return self._prefill_recorded(rows, Nodes.of_prompt(tokens), counts, boundaries, all_logits=all_logits)
        captured = boundaries | {LAST_HIDDEN} if all_logits else boundaries
        gathered: dict[Boundary, Tensor] = {}
        last: Tensor | None = None  # (B, 1, H) of each row's last token so far, after the final norm
        for start in range(0, max(counts), PREFILL_CHUNK):
            active = [index for index, count in enumerate(counts) if count > start]
            pieces = [list(tokens[index][start : start + PREFILL_CHUNK]) for index in active]
            some = [rows[index] for index in active]
            nodes = Nodes.of_prompt(pieces)
            with self.pass_lock, attention_kernels(self.device):
                flat = self._flat(nodes, padded=False)
                states, caught = self._forward(some, nodes, captured, flat, padded=False)
            self._note_appended(some, [len(piece) for piece in pieces])
            for boundary, value in caught.items():
                if boundary not in gathered:
                    gathered[boundary] = value.new_zeros(len(rows), max(counts), value.shape[-1])
                gathered[boundary][send_ints(active, value.device), start : start + value.shape[1]] = value
            index = send_ints(active, states.device)
            ending = take_last(states, [len(piece) for piece in pieces])
            last = ending if last is None else last.index_copy_(0, index, ending)
        assert last is not None, "every row has a token"
        return Scored(
            logits=self.head(gathered[LAST_HIDDEN] if all_logits else last),
            hidden_states={boundary: gathered[boundary] for boundary in boundaries},
        )

    @torch.inference_mode()
    def score(
        self,
        rows: Sequence[int],
        trees: Sequence[TokenTree] | Nodes,
        *,
        boundaries: Set[Boundary] = frozenset(),
        padded: bool = True,
    ) -> Scored:
        """Run `Target.score`. Node k stands in slot lengths + k."""
        check_boundaries(boundaries, self.num_layers)
        nodes = self._nodes(rows, trees)
        resumed = nodes.resumed([self.writes[row] for row in rows], boundaries)
        if resumed is not None:
            scored = self._resume(rows, nodes, resumed, boundaries)
        elif self.records:
            scored = self._score_recorded(rows, nodes, boundaries)
        else:
            flat = self._flat(nodes, padded=True)
            with self.pass_lock, attention_kernels(self.device):
                states, caught = self._forward(rows, nodes, boundaries, flat, padded=True)
            hidden_states = {boundary: value[:, : nodes.fresh] for boundary, value in caught.items()}
            if flat is None or padded:
                scored = Scored(logits=self._logits(states, flat)[:, : nodes.fresh], hidden_states=hidden_states)
            else:
                scored = Scored(logits=self.head(flat.flatten(states)), hidden_states=hidden_states, flat=flat)
        self._note_run(rows, nodes)
        return scored

    @torch.inference_mode()
    def run(
        self, rows: Sequence[int], trees: Sequence[TokenTree] | Nodes, plan: LayerRange, *, states: Tensor | None = None
    ) -> Tensor:
        """Run the nodes that `score` would run through the layers of `plan` only, in the same
        slots: from `states` (B, N - start, H) at boundary ``plan.start``, needed unless that is 0,
        to those at ``plan.stop``, before the final norm: `final_norm`, then `lm_head` give logits.
        Skipped attention writes no keys; run these layers in full before committing. Raises
        ArgumentError if the plan does not fit the model, or states are missing or misshapen.
        """
        plan.check(self.num_layers)
        nodes = self._nodes(rows, trees)
        if (states is None) != (plan.start == 0):
            raise ArgumentError("states are needed to start above boundary 0, and only there")
        expected = (len(rows), nodes.fresh, self.hidden_size)
        if states is not None and tuple(states.shape) != expected:
            raise ArgumentError(f"states have the shape {tuple(states.shape)}, expected {expected}")
        return self._run_layers(rows, nodes, plan, states)[0]

    @torch.inference_mode()
    def draft(
        self,
        rows: Sequence[int],
        nodes: Nodes,
        plan: LayerRange,
        head: Callable[[Tensor], Tensor] | None = None,
        *,
        tried: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run layers as `run` does, from the embeddings on, and also return the raw logits (B, N -
        start, V) that `head` computes from these states (None: the target's final norm and output
        head). A plan that is only `tried` is not recorded.
        """
        plan.check(self.num_layers)
        states, logits = self._run_layers(rows, nodes, plan, None, head or self._exit, tried=tried)
        return states, logits

    def _exit(self, states: Tensor) -> Tensor:
        return self.head(self.final_norm(states))

    @torch.inference_mode()
    def _keep(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        sources = [[self.lengths[row] + node for node in path] for row, path in zip(rows, paths, strict=True)]
        self.cache.move(rows, sources, [self.lengths[row] + 1 for row in rows])
        if self.states is not None:
            self.states.commit(rows, [self.lengths[row] for row in rows], paths)

    def _cut(self, row: int, length: int) -> None:
        if self.states is not None:
            self.states.copy_row(row, row, self.lengths[row], length)

    def reserve(self, other: TransformersTarget) -> None:
        """Allocate what another target of the same model had to allocate; see `SlotCache.reserve`."""
        self.cache.reserve(other.cache)
        if self.states is not None and other.states is not None:
            self.states.reserve(other.states)

    def check_growth(self) -> None:
        pass

    def grow(self, rows: int, slots: int) -> None:
        if any(self.lengths):
            raise ArgumentError(f"a cache grows while its rows are empty; they hold {self.lengths} tokens")
        self._make_cache()  # Which lets go of the memory of the former one
        plan_slots_beside(self.model, Sizes(rows, slots))
        self.rows, self.slots, self.lengths, self.writes = rows, slots, [0] * rows, [0] * rows
        if self.states is not None:
            self.states = RowStates(rows)
        self._make_cache()

    def open_weights(self, folder: Path, tokenizer: Any) -> Any:
        return updating.open_weights(self.model, folder, tokenizer)

    def write_weights(self, weights: Any, folder: Path) -> None:
        with self.pass_lock:
            updating.write_weights(self.model, weights)
        self.name_or_path = str(folder)

    def reusable(self, row: int, length: int) -> int:
        return length if self.states is None else self.states.reusable(row, self.lengths[row], length)

    def clear(self, row: int) -> int:
        """Zero the slots behind a row's committed tokens, and return how many were zeroed; see `SlotCache.clear`."""
        return self.cache.clear(row, self.lengths[row])

    def announce(self, rows: Sequence[int], length: int) -> None:
        """Let free rows hold `length` tokens: attention takes as long whatever stands in their slots."""
        for row in rows:
            self.lengths[row] = length

    def check_reproducible(self) -> None:
        if self.states is not None:
            raise ArgumentError(
                f"reproducible=True cannot hold for {self.name_or_path}: its recurrent states are rounded otherwise "
                "where several drafted tokens are kept at once; float32 gives equal answers without it"
            )

    @property
    def runs_as(self) -> str:
        in_blocks = name_blocks(self.model)
        return f"{in_blocks} on CPU" if in_blocks else super().runs_as

    def identity(self) -> dict[str, Any]:
        on_cpu = self.device.type == "cpu"
        config = {key: value for key, value in self.config.to_dict().items() if key not in _VOLATILE}
        return {
            "model": type(self.model).__name__,
            "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
            "attention": str(getattr(self.config, "_attn_implementation", None)),
            "weights_bytes": self.memory_bytes() - self.cache.nbytes(),
            "device": device_name(self.device),
            "dtype": str(self.dtype),
            "threads": torch.get_num_threads() if on_cpu else None,
            "kernel": compiling.version() if on_cpu and native.attention_kernel() is not None else None,
            "packed": sum(isinstance(module, PackedLinear) for module in self.model.modules()),
            "torch": torch.__version__,
            "buckets": asdict(self.buckets),
        }

    @torch.inference_mode()
    def _copy(self, source: int, target: int, length: int) -> None:
        if self.states is not None:
            self.states.copy_row(source, target, self.lengths[source], length)
        self.cache.copy_row(source, target, length)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embedding table's rows (.., H) of `tokens` (..)."""
        return self._embedding(tokens.to(self.device))

    @torch.inference_mode()
    def final_norm(self, states: Tensor) -> Tensor:
        """Apply the final norm: states at the last boundary (.., H) -> LAST_HIDDEN (.., H)."""
        flat = states.reshape(1, -1, states.shape[-1])
        size = flat.shape[1]
        ids = torch.zeros(1, size, dtype=torch.int64, device=self.device)
        mask = torch.zeros(1, 1, size, size, dtype=self.dtype, device=self.device)
        inputs = {
            "input_ids": ids,
            "position_ids": ids,
            "attention_mask": self._style.hand_over(dict.fromkeys(self._style.types, mask)),
            "use_cache": False,
        }
        this = Pass(positions=positions.Positions(ids, ids) if self._counts else None)
        with running(this):
            return self._ranges.finish(flat, inputs).view(states.shape)

    @torch.inference_mode()
    def lm_head(self, states: Tensor) -> Tensor:
        """Return raw logits (.., V) of states after the final norm (.., H), soft caps and scales included."""
        return self.head(states)

    def layer_that_keeps(self, kind: str) -> int:
        """Return the last layer of that kind, as transformers names kinds, which has keys and values of its own.
        Raises ArgumentError if there is none.
        """
        keeping = self.num_layers - (getattr(self.config, "num_kv_shared_layers", None) or 0)
        kinds = (getattr(self.config, "layer_types", None) or [masks.FULL] * self.num_layers)[:keeping]
        layers = [layer for layer, other in enumerate(kinds) if other == kind]
        if not layers:
            raise ArgumentError(f"{self.name_or_path} has no layer of the kind {kind} with keys of its own")
        return layers[-1]

    @property
    def keeps_states(self) -> bool:
        return self.states is not None

    @property
    def computes_padding(self) -> bool:
        return bool(self.buckets.nodes) or not self._folds

    @property
    def pads_prompts(self) -> bool:
        return not self._folds

    @property
    def _folds(self) -> bool:
        """True if attention itself finds rows and real tokens."""
        return self.device.type == "cpu" and attention.is_installed(self.model)

    def memory_bytes(self) -> int:
        """Return the bytes of weights and cache."""
        return int(self.model.get_memory_footprint()) + packed_bytes(self.model) + self.cache.nbytes()

    # A drafter that exits early has run some nodes through layers 0 .. b: their states are at hand and their keys in
    # the slots. What is missing are the same layers for the other nodes, then the layers behind b for all.

    def _resume(self, rows: Sequence[int], nodes: Nodes, resumed: Resumed, boundaries: Set[Boundary]) -> Scored:
        """Return what one whole pass over `nodes` would give."""
        size = nodes.ids.shape[1]
        shape = tuple(resumed.states.shape)
        if shape[1] > size or shape[2] != self.hidden_size or nodes.start:
            expected, span = f"(1..{size}, {self.hidden_size}), root first", f"nodes {nodes.start}..{size - 1}"
            raise ArgumentError(f"a pass over {span} cannot resume states {shape[1:]} in a row; expected {expected}")
        if not 1 <= resumed.boundary <= self.num_layers:
            raise ArgumentError(f"cannot resume at boundary {resumed.boundary}; there are 1..{self.num_layers}")
        captured = sorted(boundaries)
        flat = self._flat(nodes, padded=True)

        def work(inputs: dict[str, Any], states: Tensor) -> list[Tensor]:
            with capture_states(self._layers, boundaries) as caught:
                final = self._ranges.finish(states, inputs, start=resumed.boundary)
            caught |= {resumed.boundary: states, LAST_HIDDEN: final}
            return [self._logits(final, flat), *(caught[boundary] for boundary in captured)]

        key = "complete", resumed.boundary, tuple(captured)
        logits, *states = self._run_pass(key, work, rows, nodes, self._resumed_states(rows, nodes, resumed))
        return Scored(logits=logits, hidden_states=dict(zip(captured, states, strict=True)))

    def _resumed_states(self, rows: Sequence[int], nodes: Nodes, resumed: Resumed) -> Tensor:
        """Return the states (B, N, H) of all nodes at the boundary; those that lack the first
        layers run through them now.
        """
        size = nodes.ids.shape[1]
        states = nn.functional.pad(resumed.states, (0, 0, 0, size - resumed.states.shape[1]))
        lacking = nodes.real & (torch.arange(size) >= torch.tensor(resumed.counts).unsqueeze(1))
        if not lacking.any():
            return states
        start = int(lacking.any(0).int().argmax())
        # What nodes feed into recurrent states comes from one pass for all that stand behind `start`.
        run = lacking if self.states is None else nodes.real & (torch.arange(size) >= start)
        [early] = self._run_layers(rows, replace(nodes, real=run, start=start), LayerRange(stop=resumed.boundary), None)
        [fresh] = send([lacking[:, start:].unsqueeze(2)], states.device)
        return torch.cat([states[:, :start], torch.where(fresh, early, states[:, start:])], dim=1)

    def _run_layers(
        self,
        rows: Sequence[int],
        nodes: Nodes,
        plan: LayerRange,
        states: Tensor | None,
        head: Callable[[Tensor], Tensor] | None = None,
        *,
        tried: bool = False,
    ) -> list[Tensor]:
        """Return the nodes' states behind the layers of `plan`, from `states` on, and what `head`
        computes from them.
        """

        def work(inputs: dict[str, Any], *states_given: Tensor) -> list[Tensor]:
            results = self._ranges.run(plan, inputs, *states_given or [None])
            return [results] if head is None else [results, head(results)]

        results = self._run_pass(None if tried else ("part", plan, head), work, rows, nodes, states)
        if plan.stop == self.num_layers:
            self._note_run(rows, nodes)
        return results

    def _run_pass(
        self, what: Hashable | None, work: Work, rows: Sequence[int], nodes: Nodes, states: Tensor | None = None
    ) -> list[Tensor]:
        """Run `work` (named `what`) on a pass's arguments and on `states` (B, N - start, H) of its
        nodes, and return its results, (B, N - start, ..) each. It is recorded where passes are, if
        it has a name and has come more than once.
        """
        tensors = [] if states is None else [states]
        if self.records:
            return self._replay(what, work, rows, nodes, tensors, after=MET_BEFORE)
        inputs, this = self.build_inputs(rows, nodes, padded=True)
        missing = inputs["input_ids"].shape[1] - nodes.fresh
        with self.pass_lock, running(this), attention_kernels(self.device):
            results = work(inputs, *(nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in tensors))
        return [values[:, : nodes.fresh] for values in results]

    def _logits(self, states: Tensor, flat: Flat | None) -> Tensor:
        """Return the logits of states (B, N, H) after the final norm; with `flat` those of the real
        tokens alone are computed.
        """
        return self.head(states) if flat is None else flat.restore(self.head(flat.flatten(states)))

    @property
    def records(self) -> bool:
        """True if passes are recorded and replayed."""
        return self.recordings.active and not self.buckets.nodes

    def _prefill_recorded(
        self,
        rows: Sequence[int],
        nodes: Nodes,
        counts: Sequence[int],
        boundaries: Set[Boundary],
        *,
        all_logits: bool,
    ) -> Scored:
        """Run `prefill` of short chains as one recorded pass."""
        scored = self._score_recorded(rows, nodes, boundaries)
        self._note_appended(rows, counts)
        return scored if all_logits else replace(scored, logits=take_last(scored.logits, counts))

    def _score_recorded(self, rows: Sequence[int], nodes: Nodes, boundaries: Set[Boundary]) -> Scored:
        """Run `score` as a recorded pass."""
        captured = sorted(boundaries)

        def work(inputs: dict[str, Any]) -> list[Tensor]:
            with capture_states(self._layers, boundaries) as caught:
                states: Tensor = self._base(**inputs).last_hidden_state
            return [
                self.head(states),
                *(states if boundary == LAST_HIDDEN else caught[boundary] for boundary in captured),
            ]

        logits, *states = self._replay(("whole", tuple(captured)), work, rows, nodes, [])
        return Scored(logits=logits, hidden_states=dict(zip(captured, states, strict=True)))

    def _replay(
        self,
        what: Hashable | None,
        work: Work,
        rows: Sequence[int],
        nodes: Nodes,
        tensors_given: Sequence[Tensor],
        *,
        after: int = 0,
    ) -> list[Tensor]:
        """Run `work` as `_run_pass` does, by one recording for all passes of about this size, or as it
        comes where recording failed.
        """
        index = send_ints(rows, self.device)
        host, drafted, width = self._pack_inputs(rows, nodes, index)
        count = len(host) + len(drafted)
        batch, size = host[1].shape[:2]
        missing = size - nodes.fresh
        wider = [
            tensor.new_zeros(batch, size, tensor.shape[2]).index_copy_(
                0, index, nn.functional.pad(tensor, (0, 0, 0, missing))
            )
            for tensor in tensors_given
        ]

        def recorded(*tensors: Tensor) -> list[Tensor]:
            (*block, places, ids), more = tensors[:count], tensors[count:]
            inputs = self._inputs_of_first_rows(masks.Block(*block), places, ids, width)
            with running(Pass()), attention_kernels(self.device):
                results: list[Tensor] = work(inputs, *more)
            return results

        key = what, width, bool(drafted), *(tensor.shape for tensor in host)
        with self.pass_lock:
            results = self.recordings.run_sent(
                key if what is not None else None, recorded, host, self.device, *drafted, *wider, after=after
            )
        # Copies: what a recording returns lives until the next call.
        return [values[:, : nodes.fresh].index_select(0, index.to(values.device)) for values in results]

    def run_first_rows(self, block: masks.Block, places: Tensor, ids: Tensor, width: int) -> Tensor:
        """Run `ids` (B, N) in the first B rows of the cache, in the slots `places` (B, N), and return the states after
        the final norm (B, N, H). Nothing is asked of the host, so that the pass can be recorded.
        """
        with running(Pass()), attention_kernels(self.device):
            states: Tensor = self._base(**self._inputs_of_first_rows(block, places, ids, width)).last_hidden_state
        return states

    def _inputs_of_first_rows(self, block: masks.Block, places: Tensor, ids: Tensor, width: int) -> dict[str, Any]:
        """Return the arguments of a pass over `ids` (B, N) in the first B rows of the cache,
        written to the slots `places` (B, N).
        """
        self.cache.begin(range(len(ids)), places, width, index=torch.arange(len(ids), device=ids.device))
        return self._keywords(block, ids, width, None)

    def build_inputs(
        self, rows: Sequence[int], nodes: Nodes, *, padded: bool, flat: Flat | None = None, select: bool = True
    ) -> tuple[dict[str, Any], Pass]:
        """Return the keyword arguments for the base model's forward and the properties that its
        attention needs, and tell the cache where the tokens go. Padding nodes are written to the
        dump slot and look at slot 0 alone. The width counts them: it is the same for plain and
        speculative steps that are padded to the same N. With `flat` the model is handed the real
        tokens alone.
        """
        committed = self.note_passes(rows, nodes)
        size = self.buckets.pad_nodes(nodes.fresh) if padded else nodes.fresh
        missing, used = size - nodes.fresh, max(committed) + nodes.start + size
        width = self.buckets.pad_width(used, self.cache.slots, on_cpu=self.device.type == "cpu")
        host = [
            *nodes.structure(committed, missing=missing, unseen=0, dump=self.cache.dump, longest=self.max_length),
            torch.tensor(rows, dtype=torch.int64),
        ]
        host += self._paths(nodes, missing) if padded else []
        ids = pad_right(nodes.ids[:, nodes.start :], missing)
        if ids.device.type == "cpu":
            *sent, ids = send([*host, ids], self.device)
        else:
            sent = send(host, self.device)
        block, (places, index, *paths) = masks.Block(*sent[:4]), sent[4:]
        self.cache.begin(rows, places, width, index=index, real=flat, select=select)
        this = Pass(flat=flat, rows=self.cache.unselected, exact=bool(self.buckets.nodes))
        if self.states is not None:
            this.states = self.states.begin(rows, committed, nodes, missing=missing, appends=not padded)
        if paths:
            this.paths = TreePaths(block.lengths, *paths)
        this.positions = self._positions(block, width, flat, branches=nodes.paths is not None)
        return self._keywords(block, ids, width, flat), this

    def _pack_inputs(self, rows: Sequence[int], nodes: Nodes, index: Tensor) -> tuple[list[Tensor], list[Tensor], int]:
        """Return the structure of a pass on the host, with its ids or beside them on the device, and its width. Sizes
        are powers of two, and every row stands at its own place in the cache, so one recording serves all rows and
        texts of about these sizes, and nothing of the cache is copied. Other rows' places, and nodes that are not
        there, are padding as in `build_inputs`. `index` holds the rows, on the device.
        """
        committed = self.note_passes(rows, nodes)
        batch = min(self.cache.rows, bucket(max(rows) + 1))
        size = round_tokens(nodes.fresh, batch)
        width, missing = wide(max(committed) + nodes.start + size, self.cache.slots), size - nodes.fresh
        *others, slots = nodes.structure(
            committed, missing=missing, unseen=missing, dump=self.cache.dump, longest=self.max_length
        )
        host = [
            *(scatter_rows(part, rows, batch, 0) for part in others),
            scatter_rows(slots, rows, batch, self.cache.dump),
        ]
        ids = pad_right(nodes.ids[:, nodes.start :], missing)
        if ids.device.type == "cpu":
            return [*host, scatter_rows(ids, rows, batch, 0)], [], width
        return host, [ids.new_zeros(batch, size).index_copy_(0, index, ids)], width

    def _paths(self, nodes: Nodes, missing: int) -> list[Tensor]:
        """Return the paths (B, N, D) of a pass over `nodes` and `missing` ones of padding, or
        nothing where slots do as well: on a CPU where all rows are chains. Elsewhere bits depend on
        shapes, and chains take the way of trees or none does.
        """
        if self.device.type != "cpu" and not self.buckets.nodes:
            return []
        node_paths = nodes.paths
        if node_paths is None and self.device.type == "cpu":
            return []
        paths = (nodes.chains() if node_paths is None else node_paths)[:, nodes.start :]
        return [nn.functional.pad(paths, (0, 0, 0, missing), value=-1) if missing else paths]

    def _positions(
        self, block: masks.Block, width: int, flat: Flat | None, *, branches: bool
    ) -> positions.Positions | None:
        """Return the positions of a pass, for a model that would count them itself."""
        if not self._counts:
            return None
        queries = block.query_positions if flat is None else flat.flatten(block.query_positions)
        return positions.Positions(queries, block.key_positions(width), block if branches else None)

    def _keywords(self, block: masks.Block, ids: Tensor, width: int, flat: Flat | None) -> dict[str, Any]:
        positions = block.query_positions
        return {
            "input_ids": ids if flat is None else flat.flatten(ids),
            "position_ids": positions if flat is None else flat.flatten(positions),
            "attention_mask": masks.build(block, self._style, width, self.dtype),
            **self._caching,
        }

    def note_passes(self, rows: Sequence[int], nodes: Nodes) -> list[int]:
        """Count a pass over the rows, and return their committed tokens."""
        committed = [self.lengths[row] for row in rows]
        for row in rows:
            self.writes[row] += 1
        self.cache.touch(rows, [length + nodes.ids.shape[1] for length in committed])
        return committed

    def _forward(
        self, rows: Sequence[int], nodes: Nodes, boundaries: Set[Boundary], flat: Flat | None, *, padded: bool
    ) -> tuple[Tensor, dict[Boundary, Tensor]]:
        """Run one pass of the base model: states (B, N, H) after the final norm, and those asked for."""
        inputs, this = self.build_inputs(rows, nodes, padded=padded, flat=flat, select=not self._folds)
        if not padded:
            self._prompt, this.reads = object(), not this.exact
        this.prompt = self._prompt
        with capture_states(self._layers, boundaries) as caught, running(this):
            states: Tensor = self._base(**inputs).last_hidden_state
        if LAST_HIDDEN in boundaries:
            caught[LAST_HIDDEN] = states
        if flat is None:
            return states, caught
        return flat.restore(states), {boundary: flat.restore(value) for boundary, value in caught.items()}

    def _flat(self, nodes: Nodes, *, padded: bool) -> Flat | None:
        """Return which tokens of a pass run, or None for all, padding included."""
        whole = (padded and self.buckets.nodes) or not self._folds or self.states is not None
        if whole or min(nodes.counts) == nodes.ids.shape[1]:  # Known without a look at a tensor, as in most steps
            return None
        return Flat.of(nodes.real[:, nodes.start :])

    def _note_appended(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Record that so many more tokens of the rows are in the cache."""
        for row, count in zip(rows, counts, strict=True):
            self.hold(row, self.lengths[row] + count)


def require_layers(target: Target, who: str) -> TransformersTarget:
    """Return a target that hands out its layers and hidden states. Raises UnsupportedModelError, in the name of `who`,
    for one that does not.
    """
    if isinstance(target, TransformersTarget):
        return target
    raise UnsupportedModelError(
        f"{who} reads hidden states or runs layers of the target, and llama.cpp, which runs {target.name_or_path}, "
        "hands out neither: draft with auto, ngram, suffix or another drafter that reads text alone, with a draft "
        "model, or open the file with backend='transformers'"
    )
