"""The registry of draft head kinds: training, checkpoints and the command line know a kind only by its entry here.

A new kind is one file in `forerun.heads` and one entry here. The file has the module, its drafter, its objective, its
checkpoint format and how serving engines load it. The entry refers to these by name, so this imports no torch.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Literal

from forerun.errors import ArgumentError, refuse_unknown

Way = Literal["sequential", "recurrent", "parallel", "block", "adapter", "sharing"]
Role = Literal["head", "draft_model", "target", "target_and_head"]
PLUGINS = "FORERUN_PLUGINS"
"""Environment variable that names modules with further kinds of heads and rules, see `load_plugins`."""
READ_HEAD = "forerun.heads.files:read_head"
"""Path of the function that reads a head from a directory or hub id. It is not imported here: heads import this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadKind:
    """The registry's entry for one kind."""

    name: str  # Name for ``forerun train``; for a head also the drafter's name
    title: str  # Name in papers
    summary: str
    module: str  # ``module:Class`` of the head, a `heads.base.Head`; its `Config` has the head's sizes
    drafter: str  # ``module:Class`` of the drafter; for a head a `heads.drafting.HeadDrafter`
    objective: str | None = None
    """``module:Class`` of the training objective, a `losses.objective.Objective`; None: that of `same_head_as`, or such
    heads are not trained here.
    """
    format: str | None = None
    """``module:Class`` of the kind's own checkpoint format, a `heads.files.Format`; None: the kind shares a format that
    `heads.files` lists."""
    engines: str | None = None  # ``module:NAME`` of how serving engines load such heads, a `heads.engines.Engines`
    drafts: Way
    """How the head drafts. ``sequential``: depth by depth through layers. ``recurrent``: depth by depth with weights
    for each depth. ``parallel``: all depths from one hidden state. ``block``: all depths in one pass over a block.
    ``adapter``: depth by depth through the target's first layers. ``sharing``: depth by depth over keys and values that
    the target keeps.
    """
    trains: Role = "head"
    """The model that training changes: a head on a frozen target, a draft model, the target itself,
    or the target and a head.
    """
    in_target: str | None = None
    """``module:function`` that reads such a head from the target's own checkpoint or beside it, if there is one."""
    same_head_as: str | None = None
    """The kind with the same module and checkpoint, if two kinds differ only in how they draft."""

    @property
    def stored_as(self) -> str:
        """The kind that checkpoints of such heads name."""
        return self.same_head_as or self.name

    @property
    def head(self) -> Any:
        """Return the class of the head, a `heads.base.Head`."""
        return import_named(self.module)


_EAGLE = "forerun.heads.eagle"
KINDS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        HeadKind(
            name="eagle3",
            title="EAGLE-3",
            summary="a small head on fused hidden states of the target (EAGLE-3, 3.1); chain, fixed or dynamic tree",
            module=f"{_EAGLE}:EagleHead",
            drafter=f"{_EAGLE}:Eagle3Drafter",
            objective="forerun.heads.eagle:Eagle3Objective",
            engines="forerun.heads.eagle_engines:ENGINE_FACTS",
            drafts="sequential",
        ),
        HeadKind(
            name="eagle",
            title="EAGLE-1",
            summary="a head that continues the target's last hidden state (EAGLE-1); chain, fixed or dynamic tree",
            module=f"{_EAGLE}:EagleHead",
            drafter=f"{_EAGLE}:EagleDrafter",
            objective="forerun.heads.eagle:EagleObjective",
            engines="forerun.heads.eagle_engines:ENGINE_FACTS",
            drafts="sequential",
        ),
        HeadKind(
            name="eagle2",
            title="EAGLE-2",
            summary="an EAGLE-1 head that drafts a tree which grows where the head is sure (EAGLE-2)",
            module=f"{_EAGLE}:EagleHead",
            drafter=f"{_EAGLE}:Eagle2Drafter",
            drafts="sequential",
            same_head_as="eagle",
        ),
        HeadKind(
            name="peagle",
            title="P-EAGLE",
            summary="an EAGLE-3 head that drafts all depths in one pass, from masks; the tree of the likeliest paths",
            module="forerun.heads.peagle:PEagleHead",
            drafter="forerun.heads.peagle:PEagleDrafter",
            objective="forerun.heads.peagle:PEagleObjective",
            format="forerun.heads.peagle:PEagleFormat",
            engines="forerun.heads.peagle:ENGINE_FACTS",
            drafts="block",
        ),
        HeadKind(
            name="medusa",
            title="Medusa-1",
            summary="an output head for each token further ahead, all from one hidden state (Medusa)",
            module="forerun.heads.medusa:MedusaHead",
            drafter="forerun.heads.medusa:MedusaDrafter",
            objective="forerun.heads.medusa:MedusaObjective",
            format="forerun.heads.medusa:MedusaFormat",
            engines="forerun.heads.medusa:ENGINE_FACTS",
            drafts="parallel",
        ),
        HeadKind(
            name="medusa2",
            title="Medusa-2",
            summary="Medusa's output heads and the target itself, which learn together (Medusa-2)",
            module="forerun.heads.medusa:MedusaHead",
            drafter="forerun.heads.medusa:MedusaDrafter",
            objective="forerun.training.medusa2:Medusa2Objective",
            drafts="parallel",
            trains="target_and_head",
            same_head_as="medusa",
        ),
        HeadKind(
            name="hydra",
            title="Hydra",
            summary="Medusa's heads in a row: each reads the tokens drafted above it (Hydra, Hydra++)",
            module="forerun.heads.hydra:HydraHead",
            drafter="forerun.heads.hydra:HydraDrafter",
            objective="forerun.heads.hydra:RecurrentObjective",
            format="forerun.heads.hydra:HydraFormat",
            engines="forerun.heads.hydra:ENGINE_FACTS",
            drafts="recurrent",
        ),
        HeadKind(
            name="mlp_speculator",
            title="MLP speculator",
            summary="a small recurrent network over the target's last state and the drafted tokens (IBM)",
            module="forerun.heads.mlp_speculator:MlpSpeculatorHead",
            drafter="forerun.heads.mlp_speculator:MlpSpeculatorDrafter",
            objective="forerun.heads.hydra:RecurrentObjective",
            format="forerun.heads.mlp_speculator:MlpSpeculatorFormat",
            engines="forerun.heads.mlp_speculator:ENGINE_FACTS",
            drafts="recurrent",
        ),
        HeadKind(
            name="dflash",
            title="DFlash",
            summary="a block of tokens in one pass, from masks (DFlash); the tree of the likeliest paths",
            module="forerun.heads.dflash:DFlashHead",
            drafter="forerun.heads.dflash:DFlashDrafter",
            objective="forerun.heads.dflash:DFlashObjective",
            engines="forerun.heads.block_files:ENGINE_FACTS",
            drafts="block",
        ),
        HeadKind(
            name="dspark",
            title="DSpark",
            summary="a block in one pass whose tokens depend on the one before, and which says where to stop (DSpark)",
            module="forerun.heads.dspark:DSparkHead",
            drafter="forerun.heads.dspark:DSparkDrafter",
            objective="forerun.heads.dspark:DSparkObjective",
            engines="forerun.heads.block_files:ENGINE_FACTS",
            drafts="block",
        ),
        HeadKind(
            name="dflash2",
            title="DFlash 2",
            summary="a block in one pass with convolutions in it, whose likeliest tokens a selector scores (DFlash 2)",
            module="forerun.heads.dflash2:DFlash2Head",
            drafter="forerun.heads.dflash2:DFlash2Drafter",
            objective="forerun.heads.dflash2:DFlash2Objective",
            engines="forerun.heads.block_files:ENGINE_FACTS",
            drafts="block",
        ),
        HeadKind(
            name="domino",
            title="Domino",
            summary="a block in one pass whose depths a recurrent network over the tokens above corrects (Domino)",
            module="forerun.heads.domino:DominoHead",
            drafter="forerun.heads.domino:DominoDrafter",
            objective="forerun.heads.domino:DominoObjective",
            engines="forerun.heads.block_files:ENGINE_FACTS",
            drafts="block",
        ),
        HeadKind(
            name="mtp",
            title="MTP",
            summary="the multi-token prediction layers of the target's own checkpoint; needs no further head",
            module="forerun.heads.mtp:MtpHead",
            drafter="forerun.heads.mtp:MtpDrafter",
            objective="forerun.heads.mtp:MtpObjective",
            format="forerun.heads.mtp_files:MtpFormat",
            engines="forerun.heads.mtp_files:ENGINE_FACTS",
            drafts="sequential",
            in_target="forerun.heads.mtp_files:read_target",
        ),
        HeadKind(
            name="gemma4_assistant",
            title="Gemma 4's assistant",
            summary="Google's assistants for Gemma 4, which read the target's own keys and values; chain or tree",
            module="forerun.heads.gemma4_assistant:Gemma4AssistantHead",
            drafter="forerun.heads.gemma4_assistant:Gemma4AssistantDrafter",
            format="forerun.heads.gemma4_assistant:Gemma4AssistantFormat",
            drafts="sharing",
            in_target="forerun.heads.gemma4_assistant:read_assistant",
        ),
        HeadKind(
            name="kangaroo",
            title="Kangaroo",
            summary="the target's first layers and a trained layer of attention draft, its others verify (Kangaroo)",
            module="forerun.heads.kangaroo:KangarooHead",
            drafter="forerun.heads.kangaroo:KangarooDrafter",
            objective="forerun.heads.kangaroo:KangarooObjective",
            format="forerun.heads.kangaroo:KangarooFormat",
            engines="forerun.heads.kangaroo:ENGINE_FACTS",
            drafts="adapter",
        ),
        HeadKind(
            name="distill",
            title="DistillSpec",
            summary="a smaller causal LM that learns the target's distributions (DistillSpec, AdaSPEC)",
            module="transformers:AutoModelForCausalLM",
            drafter="forerun.drafters.draft_models.draft_model:DraftModelDrafter",
            objective="forerun.training.distill:DistillObjective",
            drafts="sequential",
            trains="draft_model",
        ),
        HeadKind(
            name="pard",
            title="PARD",
            summary="a smaller causal LM that learns to draft all depths in one pass, from masks (PARD, PARD-2)",
            module="transformers:AutoModelForCausalLM",
            drafter="forerun.drafters.draft_models.pard:PardDrafter",
            objective="forerun.training.pard:PardObjective",
            drafts="block",
            trains="draft_model",
        ),
        HeadKind(
            name="layerskip",
            title="LayerSkip",
            summary="the target itself, whose first layers learn to draft for the others (LayerSkip)",
            module="transformers:AutoModelForCausalLM",
            drafter="forerun.drafters.self_drafting.early_exit:EarlyExitDrafter",
            objective="forerun.training.layerskip:LayerSkipObjective",
            drafts="sequential",
            trains="target",
        ),
    )
}


def kind_named(name: str) -> HeadKind:
    """Return the kind of that name. Raises ArgumentError, naming the nearest, if there is none."""
    refuse_unknown("unknown kind of head", name, KINDS)
    return KINDS[name]


def import_named(path: str) -> Any:
    """Import and return the attribute that ``module:attribute`` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def objective_for(kind: HeadKind) -> Any:
    """Return the class of a kind's objective, ``(head, target, settings)``. Its ``Settings`` are the recipe's section
    ``objective``. Raises ArgumentError for kinds that cannot be trained.
    """
    path = kind.objective or KINDS.get(kind.stored_as, kind).objective
    if path is None:
        raise ArgumentError(
            f"heads of the kind {kind.name} cannot be trained here; "
            f"{', '.join(one.name for one in KINDS.values() if one.objective)} can"
        )
    return import_named(path)


def load_plugins(names: str) -> None:
    """Import the modules that `names` lists, separated by commas. Such a module adds entries to `KINDS`, or rules to
    `core.rules.RULES`; it may import nothing else of forerun. Raises ArgumentError if one cannot be imported.
    """
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ArgumentError(f"{PLUGINS} names {name!r}, which cannot be imported ({error!r})") from error


load_plugins(os.environ.get(PLUGINS, ""))  # Before the registries of drafters and formats are made of `KINDS`
