"""What a step will cost: the calibrated figures, corrected by what the steps themselves were seen to cost.

Knows no clock: times are handed in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, overload

from forerun.engine.controller.filling import Filling, Packed
from forerun.engine.cost import DraftCost, PassCost
from forerun.engine.cost.model import FREE

# What was seen over what was predicted: the machine's pace of late, times what each size has of its own.
#
# The pace is common to all sizes and quick, so a figure that was not seen for long follows when the machine becomes
# slower; what a size has of its own is slow. A size that is new tells what it has of its own and nothing of the pace:
# else one that is dearer than was predicted would seem to say that all have become so. Medians, so a garbage
# collection moves nothing. Knows no clock.


_PACE_WINDOW = 8
"""Latest ratios that make the pace."""
_OWN_WINDOW = 24
"""Ratios kept of each size; more than a change of pace takes to be noticed."""
_STALE = 1024
"""Additions after which a ratio no longer counts."""
_NEW = 3
"""Ratios of a size before it has a say in the pace."""
_COMMON_WEIGHT = 1.0
"""Observations that what its family has in common is worth to a size."""
_LEAST_MS = 1e-3


class Correction:
    """Factors for predictions, by size, leaning on what its family has in common while a size has been seen seldom.

    Args:
        family: of a size; by default they are all of one.
    """

    def __init__(self, family: Callable[[Any], Hashable] = lambda size: None) -> None:
        self._family = family
        self._latest: deque[tuple[Hashable, float]] = deque(maxlen=_PACE_WINDOW)
        self._seen: dict[Hashable, deque[tuple[int, float]]] = {}
        self._own: dict[Hashable, float] = {}
        """Median of the ratios kept of a size, the pace taken out."""
        self._common: dict[Hashable, float] = {}
        """Median of these by family."""
        self._count = 0
        self._pace = 1.0

    def add(self, size: Hashable, seen: float, predicted: float) -> None:
        """Take in one figure."""
        self._count += 1
        ratio = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS)
        own = self._seen.setdefault(size, deque(maxlen=_OWN_WINDOW))
        if len(own) >= _NEW or all(len(others) < _NEW for others in self._seen.values()):
            self._latest.append((size, ratio))
            self._pace = median(ratio / self._own.get(size, 1.0) for size, ratio in self._latest)
        own.append((self._count, ratio / self._pace))
        while own[0][0] < self._count - _STALE:
            own.popleft()
        self._own[size] = median(ratio for _, ratio in own)
        family = self._family(size)
        self._common[family] = median(factor for other, factor in self._own.items() if self._family(other) == family)

    def known(self, size: Hashable) -> int:
        """Figures of this size that still count."""
        return sum(count > self._count - _STALE for count, _ in self._seen.get(size, ()))

    def factor(self, size: Hashable) -> float:
        """To multiply a prediction with; a size that was never seen is as its family is."""
        many, common = len(self._seen.get(size, ())), self._common.get(self._family(size), 1.0)
        return self._pace * (many * self._own.get(size, 1.0) + _COMMON_WEIGHT * common) / (many + _COMMON_WEIGHT)


_WINDOW = 24
"""Figures of a kind that are kept."""
_PLAIN_STEPS = 3
"""Plain steps after which their cost counts as known."""
_CONTEXT_STEP = 256
"""Predictions are renewed when the context grows into the next multiple of this, tokens."""
_MOST_PREDICTIONS = 8192
"""Predictions kept before all are worked out anew."""
READING = 32
"""Tokens that a row's drafter may not have been shown yet and still catch up with in passing."""
_ASKING = 2.0
"""What asking adds to a step, over what those who are asked take for it, before that was seen."""
COPY = DraftCost(fixed_ms=0.02, level_ms=0.0)
"""First guess for a drafter that looks things up."""


class Nominal:
    """A pass cost for where none could be measured: memory-bound, a node more costs little. Arbitrary unit.

    Ratios seen while running turn it into milliseconds.

    Args:
        slope: what each node adds, in passes over one.
    """

    def __init__(self, slope: float = 0.04) -> None:
        self._slope = slope

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass in units of one of a single node."""
        return 1.0 + self._slope * (nodes * rows - 1)


class Times(Sequence[float]):
    """Entry s: a step with a pass of size s, ms; worked out when it is asked for."""

    def __init__(self, length: int, time: Callable[[int], float]) -> None:
        self._length, self._time = length, time
        self._known: dict[int, float] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, size: int) -> float: ...
    @overload
    def __getitem__(self, size: slice) -> list[float]: ...
    def __getitem__(self, size: int | slice) -> float | list[float]:
        if isinstance(size, slice):
            return [self[index] for index in range(*size.indices(self._length))]
        if not 0 <= size < self._length:
            raise IndexError(size)
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._time(size)
        return found


class _Latest:
    """The latest figures of each key."""

    def __init__(self) -> None:
        self._seen = dict[Hashable, deque[float]]()

    def add(self, key: Hashable, figure: float) -> None:
        self._seen.setdefault(key, deque(maxlen=_WINDOW)).append(figure)

    def count(self, key: Hashable) -> int:
        return len(self._seen.get(key, ()))

    def median(self, key: Hashable, unseen: float) -> float:
        return median(self._seen[key]) if key in self._seen else unseen


class StepCosts:
    """Times of passes and drafts in ms, for the sizes a controller weighs.

    Args:
        passes: what passes cost, over as many nodes in each row.
        drafts: what is known of drafters.
        filling: what size of a pass nodes of several rows make up.
    """

    def __init__(
        self, passes: PassCost, drafts: Mapping[str, DraftCost] | None = None, filling: Filling | None = None
    ) -> None:
        self._passes, self._drafts = passes, dict(drafts or {})
        self.filling = filling or Packed()
        self._predictions: dict[tuple[int, int, int], float] = {}
        self._pass, self._draft = Correction(_has_nodes), defaultdict[str, Correction](Correction)
        self._hosts = _Latest()
        """Host work of steps in which nobody was asked, by about how many rows."""
        self._askings = _Latest()
        """What was added where those that copy were asked, over the time that they took themselves."""
        self._readings = _Latest()
        """What a drafter's first look at a token took, ms, by its key."""

    def expect(self, key: str, cost: DraftCost) -> None:
        """A first guess of a drafter's cost, where it was not calibrated."""
        self._drafts.setdefault(key, cost)

    def times(self, rows: int, context: int, nodes: int) -> Times:
        """Entry s: a pass of size s over `rows` rows of up to `nodes` drafted nodes each, and a plain step's host work.

        What asking those that copy takes is no part of it: it is spent whatever is then submitted, and plain decoding
        does without.
        """
        host = self.host_ms(rows)

        def time(size: int) -> float:
            return self._predicted(size, rows, context) * self._pass.factor(_kind(size, rows)) + host

        return Times(self.filling.most(rows, nodes) + 1, time)

    def draft_ms(self, key: str, depth: int, rows: int) -> float:
        """A proposal down to `depth` by a drafter in a step of `rows` rows that it knows the text of."""
        return self._proposal(key, depth, rows) * self._draft[key].factor((depth, rows))

    def reading_ms(self, key: str, tokens: int) -> float:
        """A drafter's first look at so many tokens; 0 while that has never been seen."""
        return tokens * self._readings.median(key, 0.0) if tokens >= READING else 0.0

    def plain_is_due(self, rows: int) -> bool:
        """Whether plain decoding of about so many rows has been seen too seldom: everything is held against it.

        A believed cost that no step ever corrects would go on to justify the nodes that keep it from being seen.
        """
        return min(self._hosts.count(_about(rows)), self._pass.known(_kind(0, rows))) < _PLAIN_STEPS

    def saw_pass(self, size: int, rows: int, context: int, ms: float) -> None:
        """A pass of this size over `rows` rows, and its verification, took this long."""
        self._pass.add(_kind(size, rows), ms, self._predicted(size, rows, context))

    def saw_draft(self, key: str, depth: int, rows: int, ms: float, *, unread: int = 0) -> None:
        """The proposal of one drafter took this long, `unread` tokens being read before it."""
        if unread >= READING:
            self._readings.add(key, max(0.0, ms - self.draft_ms(key, depth, rows)) / unread)
        else:
            self._draft[key].add((depth, rows), ms, self._proposal(key, depth, rows))

    def host_ms(self, rows: int) -> float:
        """Host work of a step of so many rows in which nobody is asked; 0 while that was never seen."""
        return self._hosts.median(_about(rows), 0.0)

    def asking_ms(self, rows: int, ms: float) -> float:
        """What it adds to a step that drafters which copy are asked, if they themselves take `ms` for it.

        The rest is joining, ranking and handing over their trees, and learning from them.
        """
        return ms * self._askings.median(_about(rows), _ASKING)

    def saw_host(self, ms: float, rows: int, *, asked_ms: float) -> None:
        """The host work of a step without a drafter that costs a forward pass took this long.

        Args:
            asked_ms: what those that copy took of it themselves; 0 where none was asked.
        """
        if asked_ms == 0.0:
            self._hosts.add(_about(rows), ms)
        else:
            self._askings.add(_about(rows), max(1.0, (ms - self.host_ms(rows)) / asked_ms))

    def _proposal(self, key: str, depth: int, rows: int) -> float:
        """As calibrated on one row, growing with the rows as the target's pass does."""
        growth = self._predicted(0, rows, 0) / self._predicted(0, 1, 0) if rows > 1 else 1.0
        return self._drafts[key].ms(depth) * growth

    def _predicted(self, size: int, rows: int, context: int) -> float:
        place = size, rows, context // _CONTEXT_STEP
        found = self._predictions.get(place)
        if found is None:
            if len(self._predictions) > _MOST_PREDICTIONS:
                self._predictions.clear()
            found = self._predictions[place] = self._even(self.filling.nodes(size, rows), rows, place[2])
        return found

    def _even(self, nodes: float, rows: int, contexts: int) -> float:
        """A pass in which every row has that many drafted nodes; parts of one are interpolated."""
        whole, context = int(nodes), contexts * _CONTEXT_STEP
        below = self._passes.pass_ms(whole + 1, rows, context)
        if nodes == whole:
            return below
        return below + (nodes - whole) * (self._passes.pass_ms(whole + 2, rows, context) - below)


class FreeDrafts(StepCosts):
    """Drafts cost nothing, and a pass the same however many nodes."""

    def __init__(self, keys: Iterable[str], filling: Filling) -> None:
        """`keys`: of the drafters."""
        super().__init__(Nominal(slope=0.0), dict.fromkeys(keys, FREE), filling)

    def asking_ms(self, rows: int, ms: float) -> float:
        return 0.0


def _kind(size: int, rows: int) -> tuple[int, int]:
    """What passes are corrected alike: of about as many rows, and of about the same size, in steps of an eighth."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift, _about(rows)


def _has_nodes(kind: tuple[int, int]) -> bool:
    """Whatever their size, passes with drafted nodes are verified where plain ones are only sampled."""
    return kind[0] > 0


def _about(rows: int) -> int:
    return rows if rows < 4 else 2 ** rows.bit_length()
