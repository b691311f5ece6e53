"""These types say what is requested, drafted, scored, accepted and completed.

Shape letters: B rows, K drafted nodes per row, N = K + 1 scored nodes (node 0 is the root: the last
committed token), S committed tokens, V vocabulary, H hidden size, D depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum, StrEnum
from typing import NoReturn

from forerun.params import LogitsProcessor as LogitsProcessor
from forerun.params import SamplingParams as SamplingParams
from forerun.params import StructuredOutputs as StructuredOutputs
from forerun.params import StructuredOutputsParams as StructuredOutputsParams

Boundary = int  # A layer boundary: the residual stream after that many layers, 0 = embeddings; or `LAST_HIDDEN`
LAST_HIDDEN: Boundary = -1  # The hidden state after the final norm: what the output head reads


class Drawn(IntEnum):
    """The way in which a drafted node was chosen, which decides the rules that may verify it."""

    DETERMINISTIC = 0  # A function of the tokens before it (top-k, copied text)
    IID = 1  # Drawn from the recorded distribution of its parent, independently of its siblings
    WITHOUT_REPLACEMENT = 2  # The same with the elder sampled siblings removed and renormalised


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftKind:
    """The kind of drafts that a drafter may make for a request; the verification rule follows from it.

    It is known before anything is drawn: a rule that was chosen by looking at the drawn tree would depend
    on sampled values, and that biases the output.
    """

    sampled: bool = False  # Nodes may be sampled; False is safe for any drafter, only less is accepted of sampled nodes
    chain: bool = False  # No node ever has two children
    multipath: bool = False  # Deterministic siblings and at most one sampled child of a node: greedy multipath verifies


class CommittedTokens(list[int]):
    """The read-only list of a row's tokens, which only its `Row` changes.

    Drafters are handed it as it is, so that nothing is copied in a step; one that writes to it gets a
    TypeError instead of another completion.
    """

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("committed tokens are to be read; copy them, list(tokens), to change them")

    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[list[int]], tuple[list[int]]]:
        return list, (list(self),)


class Source(StrEnum):
    """The origin of a committed token."""

    DRAFT = "draft"
    RECOVERED = "recovered"
    BONUS = "bonus"
    TARGET = "target"  # Plain decoding: nothing was drafted for this step


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The verdict of a rule: what it accepted of one row's tree."""

    path: tuple[int, ...]  # Accepted node ids from the root's child downwards; empty if nothing was accepted
    next_token: int
    kind: Source  # RECOVERED after a rejection, BONUS when the path ended at a leaf, TARGET when nothing was drafted


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The amount that a drafter may propose for each row of the context."""

    nodes: Sequence[int]  # Most nodes, root not counted
    depth: Sequence[
        int
    ]  # Most tokens on one path; already limited by the room left in the completion and in the context


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, natural logarithm, with its rank (1 = likeliest)."""

    logprob: float
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedNode:
    """One drafted node in a `StepTrace`."""

    token: int
    parent: int  # Node id; 0 is the root
    draft_prob: float | None  # A sampled node's under its draft distribution, a deterministic one's confidence
    target_prob: float | None  # Under the target's processed distribution; None where no rule needed that
    accepted: bool
    probe: bool = False  # Scored for the drafter's own use, never accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTrace:
    """Records one row's part in one step.

    It feeds ``--show-draft``, the playground, the benchmark, the metrics and the tests.
    """

    step: int
    position: int  # Committed tokens before the step, prompt included
    drafter: str | None
    rule: str
    nodes: tuple[TracedNode, ...]
    path: tuple[int, ...]
    next_token: int
    kind: Source
    draft_ms: float  # Wall time of the whole batch's proposal; shared by its rows
    verify_ms: float  # Wall time of the batch's forward pass and verification
    commit_ms: float

    @property
    def emitted(self) -> int:
        return len(self.path) + 1


@dataclass(kw_only=True, slots=True)
class SpeculationStats:
    """Counts over the steps of one request, or of many (`add`). Field names are vLLM's."""

    num_tokens: int = 0  # Tokens of the completions, each one's first included, which the pass over its prompt gave
    num_prompt_passes: int = 0  # Passes that gave a first token: one per completion, in however many pieces it was read
    num_spec_steps: int = 0  # Target passes in which something was drafted
    num_plain_steps: int = 0  # Target passes without a draft, the prompt's not counted
    drafter_errors: int = 0  # Times that a drafter raised, or proposed what it may not; decoding went on without it
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)  # Steps whose tree reached depth d + 1
    accepted_per_depth: list[int] = field(default_factory=list)  # Steps that accepted a node at depth d + 1
    steps_per_rule: Counter[str] = field(default_factory=Counter)  # Speculative steps by the rule that verified them

    def __repr__(self) -> str:
        return (
            f"SpeculationStats(tokens_per_pass={self.tokens_per_pass:.2f}, num_tokens={self.num_tokens}, "
            f"num_passes={self.num_passes}, num_draft_tokens={self.num_draft_tokens}, "
            f"num_accepted_draft_tokens={self.num_accepted_draft_tokens})"
        )

    @property
    def num_passes(self) -> int:
        """Return the target's passes that gave tokens, with a draft or without, the prompt's
        included.
        """
        return self.num_prompt_passes + self.num_plain_steps + self.num_spec_steps

    @property
    def tokens_per_pass(self) -> float:
        """Return all tokens over all passes: what speculation brought; 1.0 is plain decoding."""
        return tokens_per_pass(self.num_tokens, self.num_passes)

    @property
    def mean_acceptance_length(self) -> float:
        """Return 1 + accepted drafted tokens over passes with a draft, as vLLM has it; 1.0 where
        nothing was drafted.
        """
        return mean_acceptance_length(self.num_accepted_draft_tokens, self.num_spec_steps)

    @property
    def draft_acceptance_rate(self) -> float:
        """Return accepted over drafted nodes. For trees read `acceptance_per_depth` instead."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Return for each depth the share of the steps that drafted there and accepted a node."""
        return [kept / tried for kept, tried in zip(self.accepted_per_depth, self.drafted_per_depth, strict=True)]

    def add(self, other: SpeculationStats) -> None:
        """Add another request's counts to these."""
        for name in (each.name for each in fields(self)):
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                _add_counts(mine, theirs)
            else:
                setattr(self, name, mine + theirs)

    @classmethod
    def sum(cls, each: Iterable[SpeculationStats]) -> SpeculationStats:
        """Return the sum of the counts of several requests."""
        total = cls()
        for stats in each:
            total.add(stats)
        return total

    def begin(self, tokens: int) -> None:
        """Count the pass over a prompt, which gave a completion's first token."""
        self.num_prompt_passes += 1
        self.num_tokens += tokens

    def record(self, *, tokens: int, drafted: int, depth: int, accepted: int, rule: str | None = None) -> None:
        """Count one step that gave `tokens` and drafted `drafted` nodes down to `depth`, of which `rule`, if known,
        kept a path of `accepted`."""
        self.num_tokens += tokens
        if drafted == 0:
            self.num_plain_steps += 1
            return
        self.num_spec_steps += 1
        if rule is not None:
            self.steps_per_rule[rule] += 1
        self.num_draft_tokens += drafted
        self.num_accepted_draft_tokens += accepted
        _add_counts(self.drafted_per_depth, [1] * depth)
        _add_counts(self.accepted_per_depth, [1] * accepted + [0] * (depth - accepted))


def _add_counts(total: list[int], more: Sequence[int]) -> None:
    total.extend([0] * (len(more) - len(total)))
    for index, count in enumerate(more):
        total[index] += count


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputToken:
    """One token of a completion."""

    id: int
    text: str  # Text that this token added; empty while a character is incomplete
    source: Source
    step: int  # Index of the engine step that committed it, counted per request
    logprob: TokenLogprob | None = None
    top_logprobs: Mapping[int, TokenLogprob] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One completion of one prompt."""

    index: int  # 0 .. n - 1
    text: str
    token_ids: list[int]
    tokens: list[OutputToken]
    finish_reason: str | None  # ``"stop"``, ``"length"``, ``"abort"`` (also where its time was up); None while running
    stop_reason: int | str | None  # Stop token id or string that ended it; None for the model's own end of text
    speculation: SpeculationStats
    trace: list[StepTrace] = field(default_factory=list)  # Filled where the request wanted it

    @property
    def logprobs(self) -> list[dict[int, TokenLogprob]] | None:
        """Return the log-probabilities of each token, by token id: its own and those of the likeliest, as vLLM has
        them; None where the request wanted none.
        """
        found = [(token.id, token.logprob, token.top_logprobs or {}) for token in self.tokens if token.logprob]
        return [{each: own, **best} for each, own, best in found] if 0 < len(found) == len(self.tokens) else None

    @property
    def cumulative_logprob(self) -> float | None:
        """Return the sum of the tokens' log-probabilities; None where the request wanted none."""
        found = self.logprobs
        if found is None:
            return None
        return sum(of_token[token].logprob for of_token, token in zip(found, self.token_ids, strict=True))

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={self.text!r}, finish_reason={self.finish_reason!r}, "
            f"num_tokens={len(self.token_ids)}, tokens_per_pass={self.speculation.tokens_per_pass:.2f})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """All completions of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | None = None
    time_to_first_token_s: float | None = None  # From the moment the request was queued to its first token
    decode_s: float | None = None  # From the first to the last token
    num_cached_tokens: int | None = 0  # Prompt tokens that were in the cache and were not read again; None: untold
    queue_s: float | None = None  # From the moment the request was queued to the first row of the cache that it got

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={self.prompt!r}, outputs={self.outputs!r}, "
            f"finished={self.finished})"
        )

    @property
    def seconds(self) -> float:
        """Return the seconds from the question to the last token, reading the prompt included."""
        return (self.time_to_first_token_s or 0.0) + (self.decode_s or 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamChunk:
    """The addition of one engine step to one completion."""

    request_id: str
    index: int  # Which of the `n` completions
    text: str  # New text; held back while it may be the beginning of a stop string
    tokens: list[OutputToken]
    trace: StepTrace | None  # Filled where the request wanted it; None for the first token
    finish_reason: str | None
    stop_reason: int | str | None = None  # See `CompletionOutput`; on the last chunk of a completion
    prompt_token_ids: list[int] | None = None  # On the first chunk of a completion, like the next, where wanted
    prompt_logprobs: list[Mapping[int, TokenLogprob] | None] | None = None
    since_last_s: float | None = None  # Since the completion's tokens before these; None for the first
    output: RequestOutput | None = None  # The whole result, on the last chunk of a request
    error: Exception | None = None  # The error that ended the request; other requests are not concerned


def tokens_per_pass(tokens: int, passes: int) -> float:
    """Return all tokens over all passes of the target, those without a draft and the prompt's included.

    Plain decoding has 1.0, and so has a completion of no pass.
    """
    return tokens / passes if passes else 1.0


def mean_acceptance_length(accepted: int, drafts: int) -> float:
    """Return vLLM's figure, 1 + accepted drafted tokens over passes that verified a draft; 1.0 where there was none.

    It leaves the passes without a draft out, so it tells how good drafts were and not what they brought.
    """
    return 1 + accepted / drafts if drafts else 1.0
