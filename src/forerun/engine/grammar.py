"""Structured outputs: a JSON schema, a regular expression, a choice or a grammar as a logits processor (llguidance).

The mask after a node is a function of the node's own path, so drafts, sampling and verification need nothing of their
own for it: the distribution that a rule sees is the masked one, for every branch.

What a grammar costs is bounded: its size and depth are checked in linear time, a process of its own compiles it first
(`grammar_trial`) with less stack than the engine has, and each answer has a budget of time for its masks.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.core.tree import TokenTree, prune
from forerun.decode.row import Row
from forerun.engine import grammar_trial
from forerun.engine.grammar_trial import TRIAL_S, compile_grammar, complaint
from forerun.errors import ArgumentError, Isolation
from forerun.nesting import MAX_DEPTH, nesting
from forerun.types import StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = {"json": 200_000, "regex": 20_000, "grammar": 200_000}  # Most characters of a text, by its kind
MAX_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 4096


def check(kind: str, text: str) -> None:
    """Raise ArgumentError for a grammar that is too large or too deep, before a process tries it."""
    most = MAX_CHARACTERS[kind]
    if len(text) > most:
        raise ArgumentError(f"structured outputs: the {kind} has {len(text)} characters; at most {most} are compiled")
    if (depth := nesting(text).depth) > MAX_DEPTH:
        raise ArgumentError(
            f"structured outputs: the {kind} nests {depth} levels deep; at most {MAX_DEPTH} are compiled"
        )


# --- the processor ----------------------------------------------------------------------------------------------------

GRACE_S = 0.1  # Time that the masks of one request may take together, seconds of the thread, and
MASK_S = 0.005
"""Further time for each mask. A grammar that needs more would keep all others waiting. With 128,000
tokens ordinary schemas take 0.1 ms for a mask and up to 15 ms for the first; a programming language
takes 2 ms.
"""
MAX_KNOWN = 64  # Compiled grammars that are kept for requests to come


class MaskBudget:
    """A time budget for the masks of one request, all of its answers together."""

    def __init__(self) -> None:
        self._spent_s, self._asked = 0.0, 0

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Time the block, which asks a parser for something. Raises ArgumentError if no time is
        left.
        """
        self._check()
        began = time.thread_time()
        yield
        self._spent_s += time.thread_time() - began
        self._asked += 1
        self._check()

    def _check(self) -> None:
        if self._spent_s > GRACE_S + MASK_S * self._asked:
            took = f"{self._spent_s:.1f} s for {self._asked} tokens"
            why = "it is ambiguous, or its expressions are too large"
            raise ArgumentError(f"structured outputs: the grammar took {took}; {why}")


class GrammarProcessor:
    """A logits processor that leaves only the tokens that the grammar allows after an output, and
    the end tokens where it may end.

    One parser follows whatever output was asked about last: it takes back what differs and reads what is new. Behind
    an end token, or any other that the grammar forbids, nothing can be kept: there only the end tokens are left.

    Args:
        beginning: a matcher at the beginning of the grammar; copied when the first mask is asked for.
        prompt_length: tokens of each call that are not the output.
    """

    def __init__(self, beginning: Any, prompt_length: int, end_ids: Sequence[int], budget: MaskBudget) -> None:
        self._beginning, self._prompt_length, self._end_ids = beginning, prompt_length, list(end_ids)
        self._read: list[int] = []
        self._budget = budget

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Return (V,) logits with what is forbidden after `tokens` at minus infinity. Raises
        ArgumentError if the grammar failed at its limits, or took more time than an answer has for
        it.
        """
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        with self._asking():
            if self._follow(tokens[self._prompt_length :]):
                bits = self._bits()[: len(logits)]
                allowed[: len(bits)] = bits
            else:
                allowed[self._end_ids] = True
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def valid(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """Return how many of the drafted tokens the grammar allows behind an output; raises as a
        call does.
        """
        with self._asking():
            return int(self._matcher.validate_tokens(list(draft))) if self._follow(output) else 0

    @cached_property
    def _matcher(self) -> Any:
        return self._beginning.deep_copy()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Run the block, which asks the parser: an error of the parser, or too much time, ends the
        request.
        """
        with self._budget.spent():
            yield
        if self._matcher.is_error():
            raise ArgumentError(f"structured outputs: the grammar could not go on: {complaint(self._matcher)}")

    def _bits(self) -> Tensor:
        """Return the parser's mask as bool, one for each token id and some more."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((words.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the parser to the end of `output`. Returns False if the grammar does not allow it
        that far: a parser that was made to read a forbidden token never recovers, so it is asked
        first.
        """
        pairs = enumerate(zip(self._read, output, strict=False))
        same = next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(self._read), len(output)))
        if same < len(self._read):
            self._matcher.rollback(len(self._read) - same)
            del self._read[same:]
        for token in output[same:]:
            if (self._read and self._read[-1] in self._end_ids) or not self._matcher.validate_tokens([token]):
                return False
            self._matcher.consume_token(token)
            self._read.append(token)
        return True


class GrammarCompiler:
    """Makes processors for one model's tokenizer; `vocab_size` is the model's, which may be larger,
    `end_ids` may end an answer. Raises ArgumentError if llguidance is not installed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Sequence[int]) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ArgumentError("structured outputs need llguidance: pip install 'forerun[serve]'")
        self.tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, sorted(end_ids)
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()
        """Compiled grammars, the one used last at the end."""
        self._compiling = threading.Lock()

    def processor(
        self, outputs: StructuredOutputs, prompt_length: int, budget: MaskBudget | None = None
    ) -> GrammarProcessor:
        """Return a processor for one answer; those of one request share a budget. Raises
        ArgumentError, saying why, if the schema, expression or grammar is too large, or llguidance
        does not accept it.
        """
        key = source(outputs)
        if (beginning := self._known.get(key)) is None:  # who is known does not wait for who is not
            with self._compiling:
                beginning = self._known.get(key) or self._compile(*key)
                self._known[key] = beginning
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        with suppress(KeyError):  # dropped meanwhile
            self._known.move_to_end(key)
        return GrammarProcessor(beginning, prompt_length, self._end_ids, budget or MaskBudget())

    def knows(self, outputs: StructuredOutputs) -> bool:
        """Return whether a grammar has been compiled already, so that a processor costs next to
        nothing.
        """
        return source(outputs) in self._known

    def mark(self, text: str) -> str:
        """Return how a grammar in Lark's notation names `text`: as a string, or by its token's id
        if the tokenizer has one token for it that llguidance never matches as text.
        """
        token = self._marks.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Added tokens that no string of a grammar matches: the special ones, and all others that
        look like ``<...>``, as the marks of Qwen, GLM and DeepSeek R1 do, which are not special.
        """
        added = self.tokenizer.added_tokens_decoder.items()
        return {token.content: number for number, token in added if self._tokenizer.is_special_token(number)}

    @cached_property
    def _described(self) -> dict[str, Any]:
        """Arguments of llguidance's tokenizer; transformers' may cut and pad, this one never does."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ArgumentError("structured outputs need a tokenizer of the tokenizers library, one that is_fast")
        own = copy(self.tokenizer.backend_tokenizer)
        own.no_padding()
        own.no_truncation()
        return {"tokenizer": own.to_str(), "n_vocab": self._vocab_size, "eos_token": self._end_ids}

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(**self._described)

    @cached_property
    def _trials(self) -> GrammarTrials:
        return GrammarTrials(self._described)

    def _compile(self, kind: str, text: str) -> Any:
        check(kind, text)
        if why := self._trials.refusal(kind, text):
            raise ArgumentError(f"structured outputs: the {kind} {why}")
        return compile_grammar(self._tokenizer, kind, text)


def source(outputs: StructuredOutputs) -> tuple[str, str]:
    """Return kind (``json``, ``regex`` or ``grammar``) and text, as llguidance reads them."""
    if outputs.json is not None:
        try:
            return "json", outputs.json if isinstance(outputs.json, str) else json.dumps(outputs.json)
        except RecursionError as error:
            raise ArgumentError("structured outputs: the schema nests too deeply") from error
    if outputs.json_object:
        return "json", '{"type": "object"}'
    if outputs.regex is not None:
        return "regex", outputs.regex
    if outputs.choice is not None:
        if len(outputs.choice) > MAX_CHOICES:
            raise ArgumentError(f"structured outputs: there are more than {MAX_CHOICES} choices")
        if max(map(len, outputs.choice), default=0) > MAX_CHOICE_CHARACTERS:
            raise ArgumentError(f"structured outputs: a choice has more than {MAX_CHOICE_CHARACTERS} characters")
        options = " | ".join(json.dumps(option) for option in outputs.choice)
        return "grammar", f"start: CHOICE\nCHOICE: {options}"
    assert outputs.grammar is not None, "checked when it was made"
    return "grammar", outputs.grammar


def drop_forbidden(trees: list[TokenTree], rows: Sequence[Row]) -> list[TokenTree]:
    """Return the trees of a step of `rows` without the deterministic nodes that their grammars
    forbid, and everything below those.
    """
    keep = dict[int, list[int]]()
    for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
        grammar = next((p for p in row.sampler.params.logits_processors if isinstance(p, GrammarProcessor)), None)
        if grammar is None or not tree.prunable:
            continue
        with Isolation(row):
            allowed = _allowed(grammar, row.tokens[row.prompt_length :], tree)
            if len(allowed) < tree.size:
                keep[index] = allowed
    return prune(trees, keep) if keep else trees


def _allowed(grammar: GrammarProcessor, output: list[int], tree: TokenTree) -> list[int]:
    paths = {0: output}
    for node in range(1, tree.size + 1):
        parent, token = tree.parents[node], tree.tokens[node]
        if parent in paths and grammar.valid(paths[parent], [token]):
            paths[node] = [*paths[parent], token]
    return [node for node in paths if node]


# --- the process that tries grammars ----------------------------------------------------------------------------------

DEADLINE_S = 20.0  # Until one grammar has been compiled, which has `TRIAL_S` of the processor's time for it
START_S = 60.0  # Time for the process to start: a tokenizer of 256,000 tokens takes seconds on a machine that is busy


class GrammarTrials:
    """Tries one grammar at a time, in a process (`grammar_trial`) that is started when first
    needed, and again when a grammar has ended it. `tokenizer` holds the arguments of llguidance's
    tokenizer.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        self._tokenizer = dict(tokenizer)
        self._process: subprocess.Popen[str] | None = None
        self._over: Callable[[], object] = lambda: None

    def refusal(self, kind: str, text: str) -> str:
        """Return why a grammar is refused; empty if it is not."""
        answer = _ask(self._started(), {"kind": kind, "text": text}, DEADLINE_S)
        if answer is not None:
            return answer
        taken = f"more than {TRIAL_S:g} s or more memory than there is"
        return f"is too complex: compiling it took {taken}, or its references go too deep"

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._over()
            # -P: the modules beside the script are not its own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(grammar_trial.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            self._over = weakref.finalize(self, _end, self._process)
            if _ask(self._process, self._tokenizer, START_S) is None:
                raise RuntimeError("the process that tries grammars does not start")
        return self._process


def _ask(process: subprocess.Popen[str], question: Mapping[str, Any], seconds: float) -> str | None:
    """Return the process's answer; None, and the process is ended, if there is none in so many
    seconds.
    """
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    finally:
        timer.cancel()
    if answer.endswith("\n"):
        return str(json.loads(answer))
    _end(process)
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError), process:  # closes its pipes, in which something may be left, and waits for it
        pass
