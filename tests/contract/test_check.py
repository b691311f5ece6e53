"""What ``forerun drafters check`` says of drafters that are right, and of those with a fault of each kind."""

import itertools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contract.harness import installed
from contract.test_isolated import Leaking, OneStore
from contract.wrong import NoOptions, Whimsical, Wrong
from forerun.certify import checks, contract
from forerun.certify.contract import CHECKS, GREEDY, answer, tokens_of
from forerun.cli import main
from forerun.cli.certify import show_checks
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, PerDomain
from forerun.types import Budget, Drawn
from selection import slow

SOUND, EVERY_DRAW = "drafts are sound", "every draw of a step"


class Fine(Wrong):
    """Repeats the last token."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = context.trees()[row]
        tree.add_path([tree.tokens[0]] * min(depth, 3))
        return tree


class Raising(Fine):
    """Fails at every third proposal."""

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = super().propose(context, budget)
        if self.calls % 3 == 0:
            raise KeyError("nothing is known of this row")
        return trees


class Greedy(Fine):
    """Drafts more than it may."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = context.trees()[row]
        tree.add_path([1] * (depth + 1))
        return tree


class Silent(Fine):
    """Drafts nothing."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        return context.trees()[row]


class OwnDice(Fine):
    """Draws from a generator of its own."""

    dice = random.Random(1)

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = context.trees()[row]
        tree.add_path([self.dice.randrange(12) for _ in range(min(depth, 3))])
        return tree


class CountingPieces(Fine):
    """Drafts by how often it was shown something, which depends on how a prompt was cut."""

    shown = 0

    def extend(self, context: DraftContext) -> None:
        self.shown += 1

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = context.trees()[row]
        tree.add_path([self.shown % 12] * min(depth, 3))
        return tree


class Dice(Wrong):
    """Draws two tokens, each as likely as any other."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree, probs = context.trees()[row], torch.full((self.vocabulary,), 1 / self.vocabulary)
        for node in range(min(depth, 2)):
            tree.set_probs(node, probs)
            tree.add(context.rng[row].drafted(probs, self.key(node)), node, drawn=Drawn.IID)
        return tree

    def key(self, node: int) -> int:
        return node


class Peeking(Dice):
    """Drops its draft where the first token that it drew is odd."""

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = super().chain(context, row, depth)
        return context.trees()[row] if tree.size and tree.tokens[1] % 2 else tree


class Reusing(Dice):
    """Draws both tokens with the same random number."""

    def key(self, node: int) -> int:
        return 0


class Turning(Whimsical):
    """Takes the tokens in turn and says that it drew them."""

    turn = itertools.count()

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree = context.trees()[row]
        if depth > 0:
            tree.set_probs(0, torch.full((self.vocabulary,), 1 / self.vocabulary))
            tree.add(next(self.turn) % self.vocabulary, 0, drawn=Drawn.IID)
        return tree


class Learning(Dice):
    """Draws what is frequent in all rows of a domain."""

    def __init__(self, config: NoOptions, setup: DrafterSetup) -> None:
        super().__init__(config, setup)
        self.seen = PerDomain(Counter[int])

    def extend(self, context: DraftContext) -> None:
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            self.seen.of(context.salt(index)).update(tokens[len(tokens) - fresh :])

    def chain(self, context: DraftContext, row: int, depth: int) -> TokenTree:
        tree, seen = context.trees()[row], self.seen.of(context.salt(row))
        probs = torch.tensor([float(seen[token]) for token in range(self.vocabulary)])
        if depth > 0 and context.samplers[row].greedy:
            tree.add(int(probs.argmax()), 0)
        elif depth > 0:
            tree.set_probs(0, probs / probs.sum())
            tree.add(context.rng[row].drafted(probs, 0), 0, drawn=Drawn.IID)
        return tree


class Exiting(Fine):
    """Ends the process."""

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        raise SystemExit(3)


def failures(cls: type[Drafter], checks: Iterable[str] = CHECKS) -> set[str]:
    """The checks that a drafter fails, of these; those of answers are left out."""
    if not hasattr(cls, "Config"):
        cls.Config = NoOptions
    with installed("planted", cls):
        return {name for name in checks if not CHECKS[name][1]({"method": "planted"})[0]}


@pytest.mark.parametrize("cls", [Fine, Whimsical, Dice])
def test_a_drafter_that_is_only_wrong_fails_nothing(cls: type[Drafter]) -> None:
    assert failures(cls) == set()


@pytest.mark.parametrize(
    ("cls", "fails"),
    [
        (Raising, SOUND),
        (Greedy, SOUND),
        (Silent, SOUND),
        (OwnDice, "seeds repeat"),
        (CountingPieces, "prompts in pieces"),
        (Leaking, "isolation domains"),
        (OneStore, "isolation domains"),
        (Peeking, EVERY_DRAW),
        (Reusing, EVERY_DRAW),
    ],
)
def test_each_fault_is_found_by_its_check(cls: type[Drafter], fails: str) -> None:
    assert failures(cls, [fails])


def test_who_learns_for_each_domain_disturbs_no_row() -> None:
    assert failures(Learning, ["rows do not disturb each other"]) == set()


def test_what_cannot_be_enumerated_is_left_out() -> None:
    with pytest.raises(contract.LeftOut, match=r"the same draws of .* gave different drafts"):
        failures(Turning, [EVERY_DRAW])


@pytest.mark.parametrize("method", ["suffix", *slow("lookahead")])
def test_drafters_that_need_nothing_keep_their_contract(method: str) -> None:
    config = {"method": method}
    assert [(name, said) for name, (_, look) in CHECKS.items() for passed, said in [look(config)] if not passed] == []


MINE = """
from dataclasses import dataclass
from forerun.decode.drafter import Drafter

@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    fail: bool = False

class Mine(Drafter):
    name, Config = "mine", Options

    def __init__(self, config, setup):
        self.config = config

    def propose(self, context, budget):
        trees = context.trees()
        for tree, depth in zip(trees, budget.depth):
            tree.add_path([tree.tokens[0]] * min(2, depth + self.config.fail))
        return trees
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_drafter.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_drafter:Mine"
    sys.modules.pop("my_drafter", None)


def test_the_command_checks_a_file_outside_the_tree(
    mine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = replace(contract.PLAN, prompts=1, detect=0.9)
    settings_for, check_rules = checks.settings_for, checks.check_rules  # tests/certify and tests/core make every one
    monkeypatch.setattr(contract, "PLAN", quick)
    monkeypatch.setattr(checks, "settings_for", lambda run, warm: settings_for(run, warm)[:1])
    monkeypatch.setattr(checks, "check_rules", lambda names: itertools.islice(check_rules(names), 3))
    assert main(["drafters", "check", mine, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in found["checks"]}
    assert found["passed"] and {*CHECKS, "greedy equality", "rule argmax_walk", "rule sample_walk"} <= names
    monkeypatch.setattr(contract, "PLAN", replace(quick, temperatures=(0.0,)))
    assert main(["drafters", "check", mine, "--drafter-option", "fail=true"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  drafts are sound" in said and "breaks its contract" in said


@pytest.mark.parametrize(
    ("cls", "said", "line"),
    [
        (Raising, "failed to propose: KeyError('nothing is known of this row') (test_check.py:", "raise KeyError("),
        (Exiting, "it ends the process by SystemExit(3) (test_check.py:", "raise SystemExit(3)"),
    ],
)
def test_a_failure_is_shown_where_it_is_and_what_follows_from_it_is_marked(
    cls: type[Drafter], said: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    later = {"later": ("later", lambda _: (False, "another fault"))}
    monkeypatch.setattr(contract, "CHECKS", {SOUND: CHECKS[SOUND], **later})
    monkeypatch.setattr(contract, "examined", lambda run: tokens_of(answer(run.llm, [[1, 2]], GREEDY)) and [])
    with installed("planted", cls):
        found = contract.check_drafter({"method": "planted"})
    assert not found[0].passed and said in found[0].summary
    assert found[1].summary == f"another fault; this may follow from the first failure, {SOUND!r}"
    assert [one.passed for one in found[2:]] == ([False] if cls is Exiting else [])
    show_checks(found)
    assert line in capsys.readouterr().out


BROKEN = """
class NoSignature(Mine):
    def __init__(self):
        pass

class Unready(Mine):
    def __init__(self, config, setup):
        raise RuntimeError("no file counts.bin")

class Leaving(Mine):
    def __init__(self, config, setup):
        raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSignature", "is made with (config, setup): define __init__(self, config, setup)"),
        ("Unready", "cannot be made: RuntimeError('no file counts.bin') (my_drafter.py:27)"),
        ("Leaving", "cannot be made: it ends the process by SystemExit(3) (my_drafter.py:31)"),
        ("None", "cannot be imported: ZeroDivisionError('division by zero') (my_drafter.py:32)"),
    ],
)
def test_what_cannot_be_made_says_why_and_where(
    name: str, said: str, mine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_drafter.py").write_text(MINE + BROKEN + ("1 / 0" if name == "None" else ""))
    assert main(["drafters", "check", f"my_drafter:{name}"]) == 2
    assert " ".join(said.split()) in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_built_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nowhere:Mine"], ["draft_model"], ["ngram", "--drafter-option", "window=1"], ["ngrams"]):
        assert main(["drafters", "check", *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")
