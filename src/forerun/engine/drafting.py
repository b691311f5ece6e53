"""The drafters of an engine: built on the first request that names them, run in groups of rows, and monitored for
acceptance at chance level.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.control.config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig, arms_of, greedy_with_seed
from forerun.control.measuring import keep_steps
from forerun.control.policy import Policy, policy_for
from forerun.core.rules import check_fits, rule_named
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.step import Emitted, Group, context_for
from forerun.drafters import AUTO, entry_named
from forerun.drafters.guarded import Guarded
from forerun.errors import UnsupportedModelError
from forerun.types import Boundary, SamplingParams, SpeculationStats

log = logging.getLogger(__name__)

_SAMPLED = Sampler(SamplingParams(temperature=1.0), ())  # Stands for a sampled request
_CHANCE_STEPS = 200
_CHANCE_RATE = 0.02


class DrafterPool:
    """All drafters in use, by the key of their configuration."""

    def __init__(self, setup: DrafterSetup, *, nodes: int = 64) -> None:
        """Create an empty pool. `nodes` is the most drafted nodes of a row in one step."""
        self._setup, self._nodes = setup, nodes
        self._active: dict[str, _Active] = {}
        self._numbers = itertools.count(1)  # Numbers replaced drafters
        self.replaced = set[str]()  # Keys of replaced drafters that running requests still use
        self._planned: list[Policy] = []
        self._free = False  # Whether drafts cost nothing, see `free_of_charge`

    def ensure(self, config: SpeculativeConfig | None) -> str | None:
        """Return the key of the drafter with this configuration, which is built if there is none yet; None for None.
        Raises ArgumentError for an unknown rule, drafter or option.
        """
        if config is None:
            return None
        if config.rule is not None:
            rule_named(config.rule)  # before anything is loaded
        key = self._wider(config) or _key(config)
        active = self._active.get(key)
        if active is None:
            active = self._built(config)
            if self._free:
                active.set_free()
        for name, drafter in active.drafters:
            if config.rule is not None:
                check_fits(config.rule, drafter.kind(_SAMPLED), name)
            straightened = active.policy is not None and entry_named(name).is_lookup
            if self._setup.target.chains_only and not (straightened or drafter.kind(_SAMPLED).chain):
                raise UnsupportedModelError(
                    f"{name} drafts trees, and {self._setup.target.name_or_path} runs chains only, for llama.cpp keeps "
                    "one recurrent state a row: draft a chain, or open the file with backend='transformers'"
                )
        self._active[key] = active
        return key

    def swap(self, key: str, model: str) -> str:
        """Replace the drafter of a key by one with the model of another directory, and return a new key for the old
        drafter, which works until it is discarded. Raises the ForerunError that keeps the new one from being built;
        nothing changes then."""
        former = self._active[key]
        former_key = f"{key}, replaced {next(self._numbers)}"
        fresh = self._built(former.config.with_model(model))
        # Requests name the drafter by its configuration, whichever model it was replaced with.
        self._active |= {former_key: former, key: replace(fresh, config=former.config)}
        self.replaced.add(former_key)
        return former_key

    def discard(self, key: str) -> None:
        """Free a replaced drafter."""
        self.replaced.remove(key)
        self._planned = []
        del self._active[key]

    def _wider(self, config: SpeculativeConfig) -> str | None:
        """Return the key of a drafter with this configuration but a larger draft length, if there is one: a request's
        own limit shortens its drafts.
        """
        if config.num_speculative_tokens is None:
            return None
        unlimited = _key(replace(config, num_speculative_tokens=None))
        for key, active in self._active.items():
            most = active.config.num_speculative_tokens
            if (
                key not in self.replaced
                and _key(replace(active.config, num_speculative_tokens=None)) == unlimited
                and (most is None or most >= config.num_speculative_tokens)
            ):
                return key
        return None

    def _built(self, config: SpeculativeConfig) -> _Active:
        depth = config.num_speculative_tokens or MAX_SPECULATIVE_TOKENS
        if config.adaptive:
            policy = policy_for(
                arms_of(config),
                self._setup,
                nodes=self._nodes,
                greedy_with_seed=greedy_with_seed(config),
                chains=self._setup.target.chains_only,
            )
            drafters = [(arm.name, arm.drafter) for arm in policy.arms]
            return _Active(config=config, drafters=drafters, policy=policy, depth=depth)
        drafter = Guarded.build(config.method, config.drafter_options, self._setup)
        depth = drafter.depth or depth
        return _Active(config=config, drafters=[(config.method, drafter)], policy=None, depth=depth)

    def grow(self, rows: int, slots: int) -> None:
        """Let all drafters make room for `rows` cache rows of `slots` slots, while they know no row."""
        self._setup = replace(self._setup, rows=rows, slots=slots)
        for active in self._active.values():
            for _, drafter in active.drafters:
                drafter.grow(rows, slots)

    def reread(self) -> None:
        """Let all drafters rebuild what they derive from the target's weights, while they know no row."""
        for active in self._active.values():
            for _, drafter in active.drafters:
                drafter.reread()

    def requires(self, key: str | None) -> frozenset[Boundary]:
        """Return the layer boundaries whose hidden states the drafters read."""
        drafters = self._active[key].drafters if key is not None else []
        return frozenset[Boundary]().union(*(drafter.requires for _, drafter in drafters))

    def groups(
        self,
        rows: Sequence[Row],
        keys: Sequence[str | None],
        depths: Sequence[int | None],
        *,
        others_wait: bool = False,
    ) -> list[Group]:
        """Return the groups of a step of `rows`, one per drafter.

        Args:
            keys: of each row's drafter.
            depths: of each row, most tokens on a path; None: the drafter's own limit.
            others_wait: other requests wait for their first token.
        """
        groups = list[Group]()
        self._planned = []
        for key in dict.fromkeys(key for key in keys if key is not None):
            active = self._active[key]
            members = [index for index, other in enumerate(keys) if other == key]
            limits = [self.depth(key, depths[index]) for index in members]
            if active.policy is not None:
                groups += active.policy.plan(rows, members, limits, others_wait=others_wait)
                self._planned.append(active.policy)
                continue
            name, drafter = active.config.method, active.drafter
            groups.append(Group(name=name, drafter=drafter, members=members, depths=limits, nodes=self._nodes))
        return groups

    def admit(self, trees: list[TokenTree]) -> list[TokenTree]:
        """Return the drafted trees without the nodes that policies prune."""
        for policy in self._planned:
            trees = policy.admit(trees)
        return trees

    def learn(self, emitted: Sequence[Emitted]) -> None:
        """Let policies learn from what the step committed, by row."""
        for policy in self._planned:
            policy.learn(emitted)

    def keep_costs(self) -> None:
        """Write the measured times of all policies' steps to disk for the next process; see `keep_steps`."""
        for active in self._active.values():
            if active.policy is not None and active.policy.measure:
                keep_steps(self._setup.target, active.policy.costs.passes)

    def depth(self, key: str | None, asked: int | None) -> int:
        """Return the most tokens on one path that the drafter of a key may draft for a request whose own limit is
        `asked`.
        """
        if key is None:
            return 0
        active = self._active[key]
        if asked is None or asked == active.config.num_speculative_tokens:
            return active.depth
        return min(asked, active.depth)

    def read(self, key: str, sequences: Sequence[NewSequence]) -> None:
        """Let drafters read the texts (prompts and first tokens) of rows that are new to them, as far as these are
        prefilled.
        """
        rows, fresh = [new.row for new in sequences], [new.length - new.known for new in sequences]
        texts = [
            new.row.tokens if new.length == len(new.row.tokens) else new.row.tokens[: new.length] for new in sequences
        ]
        hidden_states = {
            boundary: pad_sequence([new.states[boundary] for new in sequences], batch_first=True)
            for boundary in self.requires(key)
        }
        for _, drafter in self._active[key].drafters:
            states_read = {boundary: hidden_states[boundary] for boundary in drafter.requires}
            drafter.extend(replace(context_for(rows, range(len(rows)), fresh, states_read), tokens=texts))

    def count_failures(self, rows: Iterable[Row]) -> None:
        """Add to each row's count the drafter failures since the last call."""
        for row in rows:
            row.drafter_errors += self._setup.failures.pop(row.cache_row, 0)

    def remembers(self, key: str | None) -> bool:
        """Return whether the drafters' state of a row is worth keeping when its request has ended."""
        if key is None or key in self.replaced:
            return False
        return any(drafter.remembers for _, drafter in self._active[key].drafters)

    def finish(self, key: str, row: Row) -> None:
        """Let the drafters of a key that learn from texts read the rest of a finished text."""
        policy = self._active[key].policy
        if policy is not None:
            policy.finish(row)

    def forget(self, key: str, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate the rows of the drafters of a key to these lengths; 0 frees a row."""
        active = self._active[key]
        if active.policy is not None:
            active.policy.forget(rows, lengths)
        else:
            active.drafter.truncate(rows, lengths)
        active.stats.drafter_errors += sum(self._setup.failures.pop(row, 0) for row in rows)  # Of finished rows

    def wrap(self, key: str, around: Callable[[Drafter], Drafter]) -> None:
        """Wrap the drafters of a configuration: the wrapper sees what they propose and read."""
        for _, guarded in self._active[key].drafters:
            guarded.wrap(around)

    @contextmanager
    def free_of_charge(self) -> Iterator[None]:
        """Replace the policies, within the context, by ones for which drafting is free: they draft wherever a token may
        be accepted. Checks of losslessness need drafts also where they do not pay. No request may be running.
        """
        self._free = True
        for active in self._active.values():
            active.set_free()
        try:
            yield
        finally:
            self._free = False
            for active in self._active.values():
                active.charge()

    def watch(self, key: str, stats: SpeculationStats) -> None:
        """Add a finished completion's counts; warn once if acceptance is at chance level."""
        active = self._active[key]
        active.stats.add(stats)
        steps = active.stats.num_spec_steps
        if active.config.method == AUTO or active.warned or steps < _CHANCE_STEPS:
            return
        rate = active.stats.acceptance_per_depth[0]
        if rate < _CHANCE_RATE:
            active.warned = True
            log.warning(
                f"drafter {active.config.method!r} is at chance level: {100 * rate:.1f} % of its first drafted "
                f"tokens were accepted in {steps} steps. Was it trained for this target and tokenizer? The output is "
                "right, but nothing is gained."
            )


@dataclass(kw_only=True, slots=True)
class _Active:
    config: SpeculativeConfig
    drafters: Sequence[tuple[str, Guarded]]  # Name and drafter; several where a policy chooses among them
    policy: Policy | None
    depth: int  # Most tokens on one path
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    warned: bool = False
    charging: Policy | None = None  # While drafts are free: the policy that takes over again

    def set_free(self) -> None:
        """Let a policy decide for which drafts are free."""
        if self.policy is not None:
            self.charging, self.policy = self.policy, self.policy.with_free_drafts()

    def charge(self) -> None:
        """Undo `set_free`."""
        if self.charging is not None:
            self.policy, self.charging = self.charging, None

    @property
    def drafter(self) -> Drafter:
        """The one drafter, or the first."""
        return self.drafters[0][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewSequence:
    """A row whose text its drafter has not read yet."""

    row: Row
    known: int  # Number of first tokens that the drafter has read already
    length: int  # Number of tokens that are prefilled
    states: Mapping[Boundary, Tensor]
    """Hidden states (M, H) of the tokens before each of those that are new; M is one less if no
    token is known.
    """


def _key(config: SpeculativeConfig) -> str:
    return f"{config.key}:adaptive" if config.adaptive else config.key
