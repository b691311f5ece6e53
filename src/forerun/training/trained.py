"""The trained part of a run, by the role of its kind: how it starts, drafts in evaluation, and is written.

It is a head on a frozen target; a draft model, either an existing one or the target with fewer layers and less width;
the target itself, whose first layers then draft better; or target and head together.

A draft model that is made from the target keeps its strongest part: neurons, key-value heads with their queries, and
dimensions of the residual stream are removed in the order of the smallest output weights. Parts whose output weights
are zero are removed without any change.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.drafters.draft_models.pard import PardDrafter, mark
from forerun.drafters.kinds import HeadKind, Role, import_named, kind_named
from forerun.drafters.vocabulary import check_tokenizers
from forerun.errors import (
    ArgumentError,
    UnsupportedModelError,
    VocabularyMismatchError,
    choices,
    refuse,
    refuse_unknown,
)
from forerun.heads.base import Head, check_fits
from forerun.heads.files import HeadCheckpoint, TargetFacts, format_for, read_head, refuse_foreign, write_head
from forerun.heads.start import fit
from forerun.losses.objective import FeatureBatch
from forerun.model.identity import fingerprint
from forerun.model.layers import is_quantised
from forerun.model.load import LoadOptions, save_model
from forerun.model.names import resolve, tokenizer_beside
from forerun.model.prepare import open_named
from forerun.model.support import text_config
from forerun.training.data.store import PreparedData, draft_vocabulary, token_counts
from forerun.training.features.store import find_loaded, target_hash
from forerun.training.medusa2 import TargetAndHead
from forerun.training.recipe import EvaluationSettings, TrainRecipe
from forerun.types import Boundary
from forerun.writing import replace_folder

STYLES = ("llama", "mistral", "qwen2", "qwen3")
"""The ``model_type`` values of decoders with layers of ``self_attn`` and a gated ``mlp`` after RMS norms."""
WIDTHS = ("hidden_size", "intermediate_size", "num_key_value_heads")
"""The configuration keys that may be reduced, besides layers."""


@torch.no_grad()
def shrink(model: Any, options: Mapping[str, Any]) -> Any:
    """Return a causal LM in float32 on the CPU with a part of `model`'s weights.

    `options`: ``layers``, how many (evenly spaced, first and last included) or which, from 0; and
    keys of `WIDTHS`. ArgumentError for other options or sizes, UnsupportedModelError for other
    architectures than `STYLES`, and quantised ones.
    """
    former = model.config
    layers, config = check_shrinkable(options, former), copy.deepcopy(former)
    if is_quantised(model):
        raise UnsupportedModelError("a quantised target cannot be shrunk; name its unquantised checkpoint as target")
    state = {name: value.detach().float().cpu() for name, value in model.state_dict().items()}
    state = _of_layers(state, layers)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [former.layer_types[layer] for layer in layers]
    head = config.head_dim = getattr(former, "head_dim", None) or former.hidden_size // former.num_attention_heads
    for layer in range(len(layers)):
        if "intermediate_size" in options:
            _keep_neurons(state, f"model.layers.{layer}.mlp.", options["intermediate_size"])
        if "num_key_value_heads" in options:
            queries = former.num_attention_heads // former.num_key_value_heads
            _keep_heads(state, f"model.layers.{layer}.self_attn.", options["num_key_value_heads"], queries, head)
            config.num_attention_heads = queries * options["num_key_value_heads"]
    if "hidden_size" in options:
        _keep_dimensions(state, options["hidden_size"])
    for name in WIDTHS:
        setattr(config, name, options.get(name, getattr(config, name)))
    with torch.random.fork_rng(devices=[]):
        shrunk = type(model)(config).float()
    shrunk.load_state_dict(state)
    shrunk.generation_config = copy.deepcopy(model.generation_config)
    return shrunk.eval()


def space_evenly(count: int, layers: int) -> list[int]:
    """Return `count` evenly spaced layers of `layers`, from 0 on, including the last one if there are at least two."""
    return [round(index * (layers - 1) / max(1, count - 1)) for index in range(count)]


def check_shrinkable(options: Mapping[str, Any], config: Any) -> list[int]:
    """Return the layers; errors as in `shrink`, with what is allowed."""
    if config.model_type not in STYLES:
        raise UnsupportedModelError(
            f"{config.model_type} cannot be shrunk; {', '.join(STYLES)} can. Name a draft model instead: --draft"
        )
    names = ("layers", *WIDTHS)
    for name in options:
        refuse_unknown("a target cannot be shrunk by", name, names, "draft.options has")
    most = {"layers": config.num_hidden_layers} | {name: getattr(config, name) for name in WIDTHS}
    chosen = options.get("layers", config.num_hidden_layers)
    listed = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    for name, value in options.items():
        if listed and name == "layers":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most[name]:
            raise ArgumentError(f"draft.options.{name} must be 1 to {most[name]}, as the target has, got {value!r}")
    if not listed:
        return space_evenly(chosen, config.num_hidden_layers)
    if not chosen or list(chosen) != sorted(set(chosen) & set(range(config.num_hidden_layers))):
        raise ArgumentError(
            f"draft.options.layers must be layers of the target, 0 to {config.num_hidden_layers - 1}, rising; got "
            f"{chosen}"
        )
    return list(chosen)


State = dict[str, Tensor]


def _of_layers(state: State, layers: Sequence[int]) -> State:
    """Return the weights of some layers, numbered anew, and all that belong to none."""
    prefix, selected = "model.layers.", State()
    for name, value in state.items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            selected[name] = value
        elif int(number) in layers:
            selected[f"{prefix}{layers.index(int(number))}.{rest}"] = value
    return selected


def _strongest(scores: Tensor, count: int) -> Tensor:
    """Return the indices (count,) of the largest scores (n,), rising; of equals the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _keep_neurons(state: State, mlp: str, count: int) -> None:
    """Keep the neurons of one MLP whose input and output weights are longest, multiplied."""
    gate, up, down = (state[f"{mlp}{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj"))
    kept = _strongest(gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0), count)
    for name in ("gate_proj", "up_proj"):
        _select(state, f"{mlp}{name}", kept, 0)
    _select(state, f"{mlp}down_proj", kept, 1, bias=False)


def _keep_heads(state: State, attention: str, count: int, queries: int, size: int) -> None:
    """Keep the key-value heads of one attention, with their queries, whose values and outputs are
    longest, multiplied.
    """
    value, output = (state[f"{attention}{name}.weight"] for name in ("v_proj", "o_proj"))
    written = output.view(len(output), -1, queries * size).norm(dim=(0, 2))
    kept = _strongest(value.view(-1, size, value.shape[1]).norm(dim=(1, 2)) * written, count)
    places = (kept.unsqueeze(1) * size + torch.arange(size)).flatten()
    wide = (kept.unsqueeze(1) * queries * size + torch.arange(queries * size)).flatten()
    _select(state, f"{attention}q_proj", wide, 0)
    _select(state, f"{attention}k_proj", places, 0)
    _select(state, f"{attention}v_proj", places, 0)
    _select(state, f"{attention}o_proj", wide, 1, bias=False)


WRITERS, READERS = ("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""These matrices write into the residual stream, and read from it."""


def _keep_dimensions(state: State, count: int) -> None:
    """Keep the dimensions of the residual stream into which embedding and layers write most.

    A norm divides by the mean square of what is left, for which its weights make up.
    """
    parts = {name: name.split(".")[-2] for name in state}
    embedding = state["model.embed_tokens.weight"]
    scores = embedding.square().mean(0)
    for name, part in parts.items():
        if part in WRITERS and name.endswith(".weight"):
            scores = scores + state[name].square().sum(1)
    kept = _strongest(scores, count)
    scale = (scores[kept].sum() / scores.sum() * len(scores) / count).sqrt()
    for name, part in parts.items():
        if part in (*READERS, "embed_tokens", "lm_head") and name.endswith(".weight"):
            state[name] = state[name][:, kept]
        elif part in WRITERS:
            state[name] = state[name][kept]
        elif part in ("norm", "input_layernorm", "post_attention_layernorm"):
            state[name] = state[name][kept] * scale


def _select(state: State, matrix: str, kept: Tensor, axis: int, *, bias: bool = True) -> None:
    """Keep rows (axis 0) or columns of a matrix; a bias goes with the rows."""
    state[f"{matrix}.weight"] = state[f"{matrix}.weight"].index_select(axis, kept)
    if bias and f"{matrix}.bias" in state:
        state[f"{matrix}.bias"] = state[f"{matrix}.bias"][kept]


class Trained(ABC):
    """The trained part of a run, which drafts for a target before and after training."""

    folder: ClassVar[str]  # Folder of the finished checkpoint, in the recipe's output
    beside: ClassVar[tuple[str, ...]] = ()  # Further folders that are written there
    writes: ClassVar[bool] = False  # True if it can generate text alone
    drafts_by: ClassVar[tuple[str, ...]] = ("chain", "tree")  # The keys of `shapes`
    module: nn.Module
    boundaries: tuple[Boundary, ...]  # Layers at which the target is read, besides its last state

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        """Check the recipe; ArgumentError for what cannot be; nothing is loaded yet."""
        self.recipe, writer = recipe, recipe.objective.writer
        refuse(
            (
                writer != "data" and recipe.mode == "offline",
                f"mode=offline has features of the data's own text: objective.writer={writer} is online",
            ),
            (
                writer == "draft" and not self.writes,
                f"what forerun train {recipe.kind} trains does not write alone: objective.writer=target lets the "
                "target write while it is drafted for",
            ),
            (
                writer == "target" and recipe.target_parallel != "none",
                "objective.writer=target needs the whole target on each process: target_parallel=none",
            ),
        )
        metrics = metric_names(self.drafts_by, recipe.evaluation.settings.num_speculative_tokens)
        if (metric := recipe.training.best_metric) is not None and metric not in metrics:
            raise ArgumentError(
                f"training.best_metric={metric!r} is not among the values of evaluation.{choices(metric, metrics)}"
            )

    @classmethod
    def check_output(cls, output: Path) -> None:
        """Raise ArgumentError if a new run would replace a folder in `output` that no run has written."""
        for folder in (output / cls.folder, *(output / name for name in cls.beside)):
            if folder.name == TrainedHead.folder:
                refuse_foreign(folder)
            elif folder.exists():
                raise ArgumentError(
                    f"{folder} exists, and would be replaced by what is trained, but there is no checkpoint of a run "
                    "beside it: name another output"
                )

    def check_shape(self, target: Any) -> None:
        """Raise ArgumentError for a shape that does not fit a target with this configuration: before it is loaded."""
        return

    @abstractmethod
    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        """Make the `module` for a target and its tokenizer, on the CPU or on the target's device."""

    def check_target(self, model: Any) -> None:
        """Raise UnsupportedModelError if what is trained could not draft for the target, which is whole."""
        return

    def fit(self, objective: Any, batches: Sequence[FeatureBatch], *, halves: bool) -> None:
        """Fit what starts afresh to the target's states on the first batches of the run, see `heads.start.fit`; a model
        that is made of another is not fresh.
        """
        return

    @abstractmethod
    def blank(self) -> nn.Module:
        """Return a module of the same shape, for other weights; ours may be distributed over
        several processes.
        """

    def target(self, model: Any) -> Any:
        """Return the model that is drafted for in evaluation: the target `model`, unless it is what
        is trained.
        """
        return model

    @abstractmethod
    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        """Map each of `drafts_by` to a speculative configuration: how a copy of the module drafts
        for the target `model`.
        """

    @abstractmethod
    def write(self, module: nn.Module, folder: Path, facts: TargetFacts) -> None:
        """Write a trained module as a checkpoint that drafts."""

    def contents(self) -> dict[str, str]:
        """Map keys of the recipe to the hash of what their directory holds."""
        return {}


class TrainedHead(Trained):
    """A head on a frozen target."""

    folder: ClassVar[str] = "head"
    module: Head

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        self.kind = kind_named(recipe.kind)
        format_for(self.kind.stored_as)  # what could not be written need not be trained

    def check_shape(self, target: Any) -> None:
        draft, kind = self.recipe.draft, self.kind
        if draft.start is None and kind.in_target is None:
            kind.head.Config.for_target(kind.name, SimpleNamespace(config=target), draft.vocab_size, draft.options)
        elif draft.options or draft.vocab_size is not None:
            what = "draft.start" if draft.start is not None else "the target"
            raise ArgumentError(f"{what} brings its own shape; leave draft.options and draft.vocab_size away")

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.module = self._head(model, data)
        self.boundaries = self.module.config.boundaries

    def check_target(self, model: Any) -> None:
        self.module.config.check_target(model)

    def fit(self, objective: Any, batches: Sequence[FeatureBatch], *, halves: bool) -> None:
        if self.recipe.draft.start is None and self.kind.in_target is None:
            fit(objective, batches, halves=halves)

    def blank(self) -> nn.Module:
        return type(self.module)(self.module.config)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        return head_shapes(self.module, model, settings)

    def write(self, module: nn.Module, folder: Path, facts: TargetFacts) -> None:
        assert isinstance(module, Head), "from `blank`"
        made = replace(HeadCheckpoint.of(module), target=fingerprint(resolve(facts.name_or_path)))
        write_head(made, folder, format_for(module.config.kind), facts)

    def _head(self, model: Any, data: PreparedData) -> Head:
        draft, kind = self.recipe.draft, self.kind
        if draft.start is not None or kind.in_target is not None:
            if draft.start is None:
                checkpoint = import_named(kind.in_target or "")(self.recipe.target)
            else:
                checkpoint = read_head(draft.start, num_layers=model.config.get_text_config().num_hidden_layers)
            own_kind = checkpoint.config.kind
            if own_kind != kind.stored_as:
                raise ArgumentError(
                    f"draft.start holds a head of the kind {own_kind}; go on with it by: forerun train {own_kind}"
                )
            if draft.start is not None:
                check_fits(checkpoint.config, TargetFacts.of(model.config, self.recipe.target), "draft.start")
            return checkpoint.build(torch.float32)
        config = kind.head.Config.for_target(kind.name, model, draft.vocab_size, draft.options)
        counts = token_counts(data, config.vocab_size) if config.reduced_vocabulary else None
        ids = None if counts is None else draft_vocabulary(counts, config.draft_vocab_size)
        return kind.head.initial(model, config, ids, seed=self.recipe.training.seed)


def head_shapes(head: Head, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
    """Return how a copy of a head drafts for the target `model` in evaluation, as `Trained.shapes`
    does.
    """
    depth = min(settings.num_speculative_tokens, head.config.max_depth or settings.num_speculative_tokens)
    base = {"method": head.config.kind, "model": copy_for_drafting(head, model), "num_speculative_tokens": depth}
    if kind_named(head.config.kind).drafts == "adapter":
        base["exit_below"] = 0.0  # measured as far as the chain goes
    return {
        "chain": {**base, "shape": (1,) * depth},
        "tree": {**base, "top_k": settings.top_k, "nodes": settings.nodes},
    }


def rate_name(shape: str, temperature: int, depth: int) -> str:
    """Return evaluation's name for the share of steps in which a shape got beyond a depth, from 0."""
    of = "" if (shape, temperature) == ("chain", 0) else f"{shape}_t{temperature}_"
    return f"acceptance_{of}{depth}"


def metric_names(shapes: Sequence[str], depths: int) -> list[str]:
    """Return the names of an evaluation's values: mean acceptance lengths, and the shares of so
    many depths.
    """
    pairs = [(shape, temperature) for temperature in (0, 1) for shape in shapes]
    lengths = [f"{shape}_t{temperature}" for shape, temperature in pairs]
    return [*lengths, *(rate_name(*pair, depth) for pair in pairs for depth in range(depths))]


def branches(settings: EvaluationSettings) -> int:
    """Return the chains below the root of a tree of fixed shape that has no more nodes than
    evaluation allows.
    """
    return max(1, min(settings.top_k, settings.nodes // settings.num_speculative_tokens))


def copy_for_drafting(module: nn.Module, model: Any) -> nn.Module:
    """Return a copy that drafts beside the target `model`."""
    return copy.deepcopy(module).to(model.device, model.dtype).eval()


def hash_checkpoints(names: Mapping[str, str | None]) -> dict[str, str]:
    """Map keys to the hash of the checkpoint that they name, where they name one."""
    return {key: target_hash(find_loaded(name)) for key, name in names.items() if name is not None}


class TrainedWhole(Trained):
    """A causal LM of its own, which transformers writes."""

    module: Any
    tokenizer: Any
    boundaries: tuple[Boundary, ...] = ()

    def blank(self) -> nn.Module:
        return blank_model(self.module)

    def write(self, module: Any, folder: Path, facts: TargetFacts) -> None:
        """Write the model as transformers does: its folder is what a drafter is given."""
        write_model(module, self.module.generation_config, self.tokenizer, folder)


class TrainedModel(TrainedWhole):
    """A draft model with the target's tokenizer: a causal LM of any
    architecture that forerun serves.
    """

    folder: ClassVar[str] = "draft"
    writes: ClassVar[bool] = True

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        self.method: str = import_named(kind_named(recipe.kind).drafter).name  # Name of the drafter that uses it
        draft = recipe.draft
        refuse(
            (draft.vocab_size is not None, "a draft model has its tokenizer's vocabulary; leave draft.vocab_size away"),
            (draft.start is not None and draft.options, "draft.start brings its own shape; leave draft.options away"),
            (
                draft.start is None and not draft.options,
                "there is no draft model: name one with --draft DIRECTORY, or say what the target shall be shrunk to, "
                "for example draft.options={layers: 4}",
            ),
            (
                draft.start is None and recipe.target_parallel != "none",
                "the target is shrunk from its whole weights: target_parallel=none, or name a --draft",
            ),
        )

    def check_shape(self, target: Any) -> None:
        if self.recipe.draft.start is None:
            check_shrinkable(self.recipe.draft.options, target.get_text_config())

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        start = self.recipe.draft.start
        self.tokenizer = tokenizer
        if start is None:
            self.module = shrink(model, self.recipe.draft.options).requires_grad_(True)
        else:
            self.module = load_trainable(start)
            path = resolve(start)
            theirs = tokenizer_beside(str(path))
            sizes = [text_config(one).vocab_size for one in (self.module, model)]
            if theirs is not None:
                check_tokenizers(tokenizer, theirs)
            elif sizes[0] != sizes[1]:
                raise VocabularyMismatchError(
                    f"{start} has {sizes[0]} token ids and no tokenizer, the target has {sizes[1]}: nobody can tell "
                    "whether they mean the same. Put the tokenizer's files beside the draft model."
                )
        data.check_ids(text_config(self.module).vocab_size, f"the draft model ({start or 'the shrunk target'})")
        if self.method == PardDrafter.name:
            mark(self.module, tokenizer, self.recipe.objective.mask_token)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        depth = settings.num_speculative_tokens
        base = {"method": self.method, "model": copy_for_drafting(self.module, model)}
        tree: dict[str, Any] = {"shape": (branches(settings), *(1,) * (depth - 1))}
        if self.method == PardDrafter.name:
            tree = {"num_speculative_tokens": depth, "nodes": settings.nodes}
        return {"chain": {**base, "shape": (1,) * depth}, "tree": {**base, **tree}}

    def contents(self) -> dict[str, str]:
        reference = getattr(self.recipe.objective, "reference", None)
        return hash_checkpoints({"draft.start": self.recipe.draft.start, "objective.reference": reference})


def load_trainable(name: str) -> Any:
    """Load the causal LM of a directory or hub id in float32 on the CPU, every weight trainable."""
    return open_named(name, LoadOptions(dtype="float32", device="cpu")).requires_grad_(True)


def blank_model(model: Any) -> nn.Module:
    """Return a model of the same shape, for other weights."""
    with torch.random.fork_rng(devices=[]):
        made: nn.Module = type(model)(copy.deepcopy(model.config))
    return made


def write_model(model: Any, generation_config: Any, tokenizer: Any, folder: Path) -> None:
    """Write a causal LM and its tokenizer as transformers does."""
    model.generation_config = generation_config
    with replace_folder(folder) as fresh:
        save_model(model, tokenizer, fresh)


class TrainedTarget(TrainedWhole):
    """A copy of the target, which learns; the target as it was stands beside
    it.
    """

    folder: ClassVar[str] = "model"
    drafts_by: ClassVar[tuple[str, ...]] = ("chain", "chain_half", "chain_three_quarters", "tree")

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        draft = recipe.draft
        if draft.vocab_size is not None or draft.options or draft.start is not None:
            raise ArgumentError(
                "the target itself is trained; leave draft.vocab_size, draft.options and draft.start away"
            )
        check_whole(recipe)

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.tokenizer = tokenizer
        self.module = load_trainable(self.recipe.target)

    def target(self, model: Any) -> Any:
        return copy_for_drafting(self.module, model)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        """Return chains of exits after a quarter, half and three quarters of the layers, and a
        ``tree`` of the first.
        """
        layers = self.module.config.get_text_config().num_hidden_layers
        chain = (1,) * settings.num_speculative_tokens
        names = {"chain": 1, "chain_half": 2, "chain_three_quarters": 3}
        exits = {name: max(1, min(layers - 1, layers * quarters // 4)) for name, quarters in names.items()}
        shapes = {name: {"method": "early_exit", "exit_layer": one, "shape": chain} for name, one in exits.items()}
        return shapes | {"tree": {**shapes["chain"], "shape": (branches(settings), *chain[1:])}}


class TrainedTargetAndHead(Trained):
    """A copy of the target and a head for it, which learn together."""

    folder: ClassVar[str] = "model"
    beside: ClassVar[tuple[str, ...]] = ("head",)
    module: TargetAndHead
    boundaries: tuple[Boundary, ...] = ()

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        check_whole(recipe)
        self.head = TrainedHead(recipe)

    def check_shape(self, target: Any) -> None:
        self.head.check_shape(target)

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.tokenizer = tokenizer
        self.head.start(model, tokenizer, data)
        self.module = TargetAndHead(load_trainable(self.recipe.target), self.head.module)

    def blank(self) -> nn.Module:
        return TargetAndHead(blank_model(self.module.model), self.head.blank())

    def fit(self, objective: Any, batches: Sequence[FeatureBatch], *, halves: bool) -> None:
        self.head.fit(objective.heads, batches, halves=halves)

    def target(self, model: Any) -> Any:
        return copy_for_drafting(self.module.model, model)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        return self.head.shapes(model, settings)

    def write(self, module: Any, folder: Path, facts: TargetFacts) -> None:
        """Write the target as transformers does, and beside it the head, which drafts for that one."""
        write_model(module.model, self.module.model.generation_config, self.tokenizer, folder)
        self.head.write(module.head, folder.parent / self.beside[0], replace(facts, name_or_path=str(folder)))


def check_whole(recipe: TrainRecipe[Any]) -> None:
    """Raise ArgumentError where the target, which is trained, would be distributed over processes."""
    if recipe.target_parallel != "none":
        raise ArgumentError("the target is trained from its whole weights: target_parallel=none")


TRAINED: dict[Role, type[Trained]] = {
    "head": TrainedHead,
    "draft_model": TrainedModel,
    "target": TrainedTarget,
    "target_and_head": TrainedTargetAndHead,
}


def trained_class(kind: HeadKind) -> type[Trained]:
    """Return the class of a kind's role."""
    return TRAINED[kind.trains]
