"""Structured outputs: a JSON schema, a regular expression, a choice or a grammar as a logits processor (llguidance).

The mask after a node depends on the node's path only, so drafting, sampling and verification need no special case: for
every branch the rule sees the masked distribution.

The cost of a grammar is bounded: its size and depth are checked in linear time, a separate process compiles it first
(`grammar_trial`) with less stack than the engine has, and each request has a time budget for its masks.
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
    """Raise ArgumentError for a grammar that is too large or too deep, before it is compiled."""
    most = MAX_CHARACTERS[kind]
    if len(text) > most:
        raise ArgumentError(f"structured outputs: the {kind} has {len(text)} characters; at most {most} are compiled")
    if (depth := nesting(text).depth) > MAX_DEPTH:
        raise ArgumentError(
            f"structured outputs: the {kind} nests {depth} levels deep; at most {MAX_DEPTH} are compiled"
        )


# --- the processor ----------------------------------------------------------------------------------------------------

GRACE_S = 0.1  # Thread time that all masks of one request may take, seconds, plus
MASK_S = 0.005
"""this time for each mask. A slower grammar would delay all other requests. With a vocabulary of 128,000 tokens, common
schemas take 0.1 ms for a mask and up to 15 ms for the first one; the grammar of a programming language takes 2 ms.
"""
MAX_KNOWN = 64  # Compiled grammars that are cached


class MaskBudget:
    """A time budget for the masks of one request, all its completions together."""

    def __init__(self) -> None:
        self._spent_s, self._asked = 0.0, 0

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the block's time, which runs a parser. Raises ArgumentError if the budget is used up."""
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
    """A logits processor that masks the tokens that the grammar forbids after an output. End tokens are allowed where
    the output may end.

    One parser follows the output of the latest call: it rolls back the tokens that differ and consumes the new ones.
    After an end token, or after a token that the grammar forbids, only end tokens are allowed.

    Args:
        beginning: a matcher at the beginning of the grammar; copied for the first mask.
        prompt_length: number of first tokens of each call that belong to the prompt.
    """

    def __init__(self, beginning: Any, prompt_length: int, end_ids: Sequence[int], budget: MaskBudget) -> None:
        self._beginning, self._prompt_length, self._end_ids = beginning, prompt_length, list(end_ids)
        self._read: list[int] = []
        self._budget = budget

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor:
        """Return (V,) logits in which the tokens that are forbidden after `tokens` are minus infinity. Raises
        ArgumentError if the grammar exceeds its limits or the request's time budget.
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
        """Return how many of the drafted tokens the grammar allows after an output; raises as a call does."""
        with self._asking():
            return int(self._matcher.validate_tokens(list(draft))) if self._follow(output) else 0

    @cached_property
    def _matcher(self) -> Any:
        return self._beginning.deep_copy()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Run the block, which runs the parser; raise ArgumentError for a parser error or if the time budget is
        used up.
        """
        with self._budget.spent():
            yield
        if self._matcher.is_error():
            raise ArgumentError(f"structured outputs: the grammar failed: {complaint(self._matcher)}")

    def _bits(self) -> Tensor:
        """Return the parser's mask as bool, for every token id and some padding."""
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        return ((words.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten().bool()

    def _follow(self, output: Sequence[int]) -> bool:
        """Move the parser to the end of `output`, or return False if the grammar forbids that output. Tokens are
        checked before the parser consumes them, because it does not recover from a forbidden one.
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
    """Compiles grammars to logits processors for one model's tokenizer. Raises ArgumentError if llguidance is not
    installed.

    Args:
        vocab_size: the model's, which may be larger than the tokenizer's.
        end_ids: token ids that may end an output.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_ids: Sequence[int]) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ArgumentError("structured outputs need llguidance: pip install 'forerun[serve]'")
        self.tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, sorted(end_ids)
        self._known: OrderedDict[tuple[str, str], Any] = OrderedDict()
        """Compiled grammars, the most recently used one last."""
        self._compiling = threading.Lock()

    def processor(
        self, outputs: StructuredOutputs, prompt_length: int, budget: MaskBudget | None = None
    ) -> GrammarProcessor:
        """Return a processor for one completion; those of one request share a budget. Raises ArgumentError with the
        reason if the schema, expression or grammar is too large, or llguidance refuses it.
        """
        key = source(outputs)
        if (
            beginning := self._known.get(key)
        ) is None:  # A compiled grammar does not wait for the compilation of others
            with self._compiling:
                beginning = self._known.get(key) or self._compile(*key)
                self._known[key] = beginning
                if len(self._known) > MAX_KNOWN:
                    self._known.popitem(last=False)
        with suppress(KeyError):  # It was dropped meanwhile
            self._known.move_to_end(key)
        return GrammarProcessor(beginning, prompt_length, self._end_ids, budget or MaskBudget())

    def knows(self, outputs: StructuredOutputs) -> bool:
        """Return whether a grammar is compiled already, so that a processor is cheap."""
        return source(outputs) in self._known

    def mark(self, text: str) -> str:
        """Return `text` in Lark's notation: as a string, or as a token id, if the tokenizer has a token for it that
        llguidance does not match as text.
        """
        token = self._marks.get(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    @cached_property
    def _marks(self) -> dict[str, int]:
        """Added tokens that no string of a grammar matches: special tokens, and all others of the form ``<...>``, such
        as the marks of Qwen, GLM and DeepSeek R1, which are not special.
        """
        added = self.tokenizer.added_tokens_decoder.items()
        return {token.content: number for number, token in added if self._tokenizer.is_special_token(number)}

    @cached_property
    def _described(self) -> dict[str, Any]:
        """Arguments of llguidance's tokenizer, which, unlike that of transformers, never truncates or pads."""
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
    """Return the grammar's kind (``json``, ``regex`` or ``grammar``) and its text for llguidance."""
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
    """Return the trees of a step of `rows` without the deterministic nodes that a row's grammar forbids, and without
    everything below these.
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

DEADLINE_S = 20.0  # Wall time for compiling one grammar, which may take `TRIAL_S` of processor time
START_S = 60.0  # Wall time for the process to start: a tokenizer of 256,000 tokens takes seconds on a busy machine


class GrammarTrials:
    """Compiles one grammar at a time in a child process (`grammar_trial`), which is started on demand, and again after
    a grammar has crashed it. `tokenizer` holds the arguments of llguidance's tokenizer.

    llguidance's own limits (`LLParserLimits`) cannot take its place. With all of them set, a chain of 3,000 rules or
    references (``r0: r1``, ``r1: r2``, ...) overflows a stack of 8 MiB and ends the process, and the intersection of
    25 expressions such as ``/(.*[a-b].{20})/`` compiles for more than a minute, in which no thread can be stopped.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        self._tokenizer = dict(tokenizer)
        self._process: subprocess.Popen[str] | None = None
        self._over: Callable[[], object] = lambda: None

    def refusal(self, kind: str, text: str) -> str:
        """Return the reason for which a grammar is refused; empty if it is accepted."""
        reply = _ask(self._started(), {"kind": kind, "text": text}, DEADLINE_S)
        if reply is not None:
            return reply
        taken = f"more than {TRIAL_S:g} s or more memory than there is"
        return f"is too complex: compiling it took {taken}, or its references go too deep"

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._over()
            # -P: the script must not import the modules beside it.
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
                raise RuntimeError("the process that compiles grammars first does not start")
        return self._process


def _ask(process: subprocess.Popen[str], question: Mapping[str, Any], seconds: float) -> str | None:
    """Return the process's reply. If it does not come in time, end the process and return None."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        reply = process.stdout.readline()
    except OSError:
        reply = ""
    finally:
        timer.cancel()
    if reply.endswith("\n"):
        return str(json.loads(reply))
    _end(process)
    return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError), process:  # Closes its pipes, which may hold unread data, and waits for it
        pass
