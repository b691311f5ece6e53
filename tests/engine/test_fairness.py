"""Nobody waits long for others' long prompts and many answers, counted in passes, in tokens, on a simulated clock."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.loads import engine, greedy, run, sampled
from engine.test_scheduling import Clock, passes
from forerun import LLM
from forerun.engine import core
from forerun.engine.scheduling import CUT, MAX_GAP, PassTimes, Prefill, PrefillQueue, Scheduling
from forerun.model import TransformersTarget

BUDGET = 16


def long_prompt(seed: int, length: int = 150) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 250) for _ in range(length)]


def first_token(llm: LLM, request_id: str) -> int:
    """Steps until the request's first token."""
    for steps in range(1, 500):
        if any(chunk.request_id == request_id for chunk in llm.engine.step()):
            return steps
    raise AssertionError("no token came")


@pytest.mark.parametrize(
    ("clients", "long", "scored", "padded"),
    [
        ("ab", 1, False, False),
        ("ab", 7, True, False),
        ("aa", 7, False, True),
        ("aa", 1, True, True),
        ((None, None), 7, True, False),
    ],
)
def test_a_short_prompt_waits_for_at_most_two_chunks(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, clients: Any, long: int, scored: bool, padded: bool
) -> None:
    monkeypatch.setattr(TransformersTarget, "pads_prompts", property(lambda _: padded))
    llm = engine(checkpoint, max_num_seqs=4, max_num_batched_tokens=BUDGET, enable_prefix_caching=False)
    stream = llm.submit("the dog", greedy(100), client=clients[0])
    first_token(llm, stream)
    for index in range(long):
        params = greedy(1, prompt_logprobs=1) if scored else greedy(1)
        llm.submit(long_prompt(index), params, client=clients[0])
    for _ in range(7):
        llm.engine.step()
    for _ in range(3):  # also who comes back at once
        seen = passes(llm, monkeypatch)
        short = llm.submit("the cat", greedy(1), client=clients[1])
        first_token(llm, short)
        others = sum(max(end - begin for begin, end in one.values()) > 10 for one in seen)
        assert others <= 2
    outputs, _ = run(llm)
    assert len(outputs) == long + 1


def rows_of(llm: LLM) -> dict[str | None, int]:
    held = [answer.request.client for answer in llm.engine._running]
    return {client: held.count(client) for client in set(held)}


def test_who_holds_more_than_its_share_gives_rows_to_who_waits(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_num_seqs=4)
    many = llm.submit("the cat", sampled(30, n=8), client="a")
    while not llm.engine.step():
        pass
    assert rows_of(llm) == {"a": 4}
    shorts = [llm.submit(prompt, greedy(3), client=who) for who, prompt in (("b", "the dog"), ("c", "the mat"))]
    llm.engine.step()
    assert rows_of(llm) == {"a": 2, "b": 1, "c": 1} and llm.engine.preemptions == 2
    shorts += [llm.submit("the log", greedy(3), client=who) for who in "bb"]
    llm.engine.step()
    assert rows_of(llm) == {"a": 2, "b": 1, "c": 1} and llm.engine.preemptions == 2, "that is an even share"
    outputs, _ = run(llm)
    [expected] = engine(checkpoint, max_num_seqs=8).generate("the cat", sampled(30, n=8))
    assert [one.token_ids for one in outputs[many].outputs] == [one.token_ids for one in expected.outputs]
    assert outputs.keys() == {many, *shorts}


@pytest.mark.parametrize(("rows", "given"), [(1, 0), (2, 1)])
def test_nobody_gives_up_a_row_that_is_its_share(checkpoint: Path, rows: int, given: int) -> None:
    llm = engine(checkpoint, max_num_seqs=rows)
    for prompt in ("the cat", "the mat")[:rows]:
        llm.submit(prompt, greedy(20), client="a")
    llm.engine.step()
    llm.submit("the dog", greedy(3), client="b")
    run(llm)
    assert llm.engine.preemptions == given


def test_a_user_and_a_request_of_a_client_share_its_rows_too(checkpoint: Path) -> None:
    for other in ({"user": "two"}, {"user": "one"}):
        llm = engine(checkpoint, max_num_seqs=3)
        llm.submit("the cat", sampled(30, n=3), client="a", user="one")
        llm.engine.step()
        short = llm.submit("the dog", greedy(3), client="a", **other)
        llm.engine.step()
        assert llm.engine.preemptions == 1
        assert short in {answer.request.id for answer in llm.engine._running}
        run(llm)


def test_the_row_with_least_to_be_read_again_is_given_up(checkpoint: Path) -> None:
    llm = engine(checkpoint, max_num_seqs=3)
    ids = [llm.submit(long_prompt(length, length), greedy(40), client="a") for length in (90, 20, 60)]
    for _ in range(6):
        llm.engine.step()
    llm.submit("the dog", greedy(3), client="b")
    llm.engine.step()
    assert {answer.request.id for answer in llm.engine._waiting} == {ids[1]}
    run(llm)


def test_nobody_is_preempted_in_vain(checkpoint: Path) -> None:
    """Where its rows would not make enough memory free."""
    llm = engine(checkpoint, max_num_seqs=4, kv_cache_tokens=130)
    for _ in range(2):
        llm.submit(long_prompt(1, 50), greedy(8), client="a")
    llm.engine.step()
    llm.submit(long_prompt(2, 100), greedy(8), client="b")
    llm.engine.step()
    assert llm.engine.preemptions == 0 and rows_of(llm) == {"a": 2}
    run(llm)


# --- the queue of prompts alone ---------------------------------------------------------------------------------------


class Line:
    """Prompts of clients in a `PrefillQueue`, without a model."""

    def __init__(self, budget: int, *, padded: bool = False) -> None:
        self.queue = PrefillQueue(Scheduling(), padded=padded)
        self.budget, self.prefills, self.read = budget, list[Prefill](), dict[str, int]()

    def come(self, client: str, tokens: int) -> Prefill:
        params = SimpleNamespace(n=1, prompt_logprobs=None)
        request = SimpleNamespace(client=client, params=params, arrived=self.queue.clock, prompt_tokens=[0] * tokens)
        answer: Any = SimpleNamespace(request=request, tokens=[], index=0, row=SimpleNamespace(cache_row=0))
        made = Prefill(completions=[answer], tokens=[0] * tokens, requires=frozenset())
        self.prefills.append(made)
        return made

    def step(self) -> list[tuple[Prefill, int]]:
        """One pass."""
        chosen = self.queue.next_pass(self.prefills, self.budget)
        for prefill, piece in chosen:
            prefill.done += len(piece)
            client = prefill.request.client or ""
            self.read[client] = self.read.get(client, 0) + len(piece)
        self.prefills = [one for one in self.prefills if not one.finished]
        return [(prefill, len(piece)) for prefill, piece in chosen]


def test_two_clients_with_more_than_fits_get_as_much() -> None:
    line = Line(64)
    for _ in range(30):
        line.come("many", 90)
    line.come("one", 2000)
    for _ in range(40):
        line.step()
    assert abs(line.read["many"] - line.read["one"]) <= 2 * 64


def test_who_comes_back_has_saved_nothing() -> None:
    line = Line(64)
    line.come("early", 30)
    line.come("busy", 10_000)
    for _ in range(50):
        line.step()
    line.come("early", 3000)
    before = dict(line.read)
    for _ in range(20):
        line.step()
    assert abs((line.read["busy"] - before["busy"]) - (line.read["early"] - before["early"])) <= 2 * 64


@pytest.mark.parametrize("shorts", [3, 40])
def test_no_long_prompt_starves(shorts: int) -> None:
    """Under short ones of its own client and of another that never end."""
    for client in ("same", "other"):
        line = Line(64)
        long = line.come("same", 1000)
        steps = 0
        while not long.finished:
            line.come(client, shorts)
            line.step()
            steps += 1
            assert steps < 160, "ten times as long as alone"


@pytest.mark.parametrize("padded", [False, True])
def test_passes_keep_to_their_budget_and_advance(padded: bool) -> None:
    draw = random.Random(1)
    for budget in (1, 5, 8, 64, 512):
        line = Line(budget, padded=padded)
        for _ in range(300):
            if draw.random() < 0.3:
                line.come(draw.choice("abc"), draw.choice((1, 3, 20, 100, 700)))
            if not line.prefills:
                continue
            sizes = [size for _, size in line.step()]
            assert sizes and min(sizes) >= 1
            assert (len(sizes) * max(sizes) if padded else sum(sizes)) <= budget
            cut = [one.done for one in line.prefills]
            assert all(done % min(CUT, budget) == 0 for done in cut)


def test_shortest_first_and_long_ones_last() -> None:
    line = Line(64)
    prompts = [line.come("a", tokens) for tokens in (500, 40, 9, 100, 200)]
    ended = list[Prefill]()
    while line.prefills:
        ended += [prefill for prefill, _ in line.step() if prefill.finished]
    assert [len(one.tokens) for one in ended][2:] == [100, 200, 500]
    assert {len(one.tokens) for one in ended[:2]} == {9, 40} and len(prompts) == 5


# --- how long a pass is -----------------------------------------------------------------------------------------------


def test_whoever_runs_cuts_prompts_alike_if_reproducible(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.scheduling.PREFILL_CHUNK", 32)
    llm = engine(checkpoint, reproducible=True, max_num_seqs=4, max_num_batched_tokens=48)
    seen = passes(llm, monkeypatch)
    for index, client in enumerate("abcab"):
        llm.submit(long_prompt(index, 150), greedy(2), client=client)
        llm.submit(long_prompt(index, 20), greedy(2), client=client)
    run(llm)
    assert {begin % 32 for one in seen for begin, _ in one.values()} == {0}


class Machine(Clock):
    """A clock that goes on by what each pass costs: a step, and so much for each token of a prompt and for each that it
    stands behind."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, *, token: float, behind: float = 0.0) -> None:
        super().__init__()
        self.now, self.waited = 0.0, list[float]()
        monkeypatch.setattr(core, "time", self)
        score, prefill = llm.target.score, llm.target.prefill

        def scoring(*given: Any, **more: Any) -> Any:
            self.now += 1.0
            return score(*given, **more)

        def reading(rows: Any, tokens: Any, **more: Any) -> Any:
            lengths = zip(rows, tokens, strict=True)
            self.waited.append(1.0 + sum(len(one) * (token + behind * llm.target.lengths[row]) for row, one in lengths))
            self.now += self.waited[-1]
            return prefill(rows, tokens, **more)

        monkeypatch.setattr(llm.target, "score", scoring)
        monkeypatch.setattr(llm.target, "prefill", reading)


@pytest.mark.parametrize(("token", "behind"), [(0.002, 0.0002), (0.03, 0.0), (0.1, 0.0002)])
def test_a_streams_gap_is_bounded_by_what_passes_take(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, token: float, behind: float
) -> None:
    llm = engine(checkpoint, max_num_seqs=4, max_num_batched_tokens=None, enable_prefix_caching=False)
    machine = Machine(llm, monkeypatch, token=token, behind=behind)
    llm.submit(long_prompt(0, 100), greedy(1))  # which teaches it
    run(llm)
    stream, gaps, last = llm.submit("the cat", greedy(200)), list[float](), None
    lengths = iter(range(1, 10))
    while llm.engine.busy:
        chunks = llm.engine.step()
        if not llm.engine.waiting and len(gaps) % 25 == 5 and (seed := next(lengths, None)):
            llm.submit(long_prompt(seed, 220), greedy(1), client="a")
        if any(chunk.request_id == stream for chunk in chunks):
            gaps += [machine.now - last] if last is not None else []
            last = machine.now
    tokens = max(CUT * (token + 220 * behind) + 2.0, MAX_GAP)  # No pass is shorter than a cut
    late = sorted(gaps)[int(0.95 * len(gaps))]
    assert late <= 1.2 * tokens and max(machine.waited[-9:]) > 1.0


def test_a_pass_is_as_long_as_it_may_be() -> None:
    times = PassTimes()
    first = times.tokens(beside=True)
    for _ in range(9):
        times.add_step(0.02)
        times.add_pass(64, 0.02 + 64 * 0.0005)
    assert first >= CUT and times.tokens(beside=True) == 24 and times.tokens(beside=False) == 64
    times.add_pass(3, 5.0), times.add_pass(64, 9.0), times.add_step(7.0)
    assert times.tokens(beside=True) == 24, "an accident changes nothing"
    for _ in range(9):
        times.add_pass(64, 0.001)
    assert times.tokens(beside=True) == 512
