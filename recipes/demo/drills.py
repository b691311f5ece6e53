"""Copying practice in the form of edits: shuffled lines, lines of few names and random tokens, which nobody can answer
from memory.

A small model predicts most of a function without looking at the question, so edits alone teach it to copy slowly. Most
words are one token behind a space and another one without it; what is renamed must be written either way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from corpus import SourceFile
from edits import CHANGE, NUMBERS, RENAME, Edit, new_name, other_constant, replace_standing
from guide import NOWHERE, Document
from transformers import PreTrainedTokenizerFast

LINES = (3, 24)
"""Of a drill that shuffles lines, fewest and most."""
MAX_CHARACTERS = 90
"""Of a line that is drilled."""
TOKENS = (20, 220)
"""Of a drill of random tokens, fewest and most."""
ALPHABETS = (6, 20, 60, 400)
"""Distinct tokens in one: the fewer, the more of the past must match before the next is known."""
NAMES, NAME_TWINS, NAME_NUMBERS, NAMED_LINES = (3, 8), (0, 3), (1, 5), (2, 14)
"""Of a drill of names: distinct ones, those among them that share a word with the one that is replaced, numbers, and
lines, fewest and most."""
FORMS = (
    "{} = {}",
    "{}({}, {})",
    "{}.{} = {}",
    "{} = {}.{}({})",
    "if {} in {}:",
    "for {} in {}:",
    "return {}",
    "return {}[{}], {}",
    "def {}({}, {}):",
    "def {}(self, {}={}):",
    "self.{} = {}",
    "while {} < {} and not {}:",
    "{}[{}:{}] = [{}]",
    "print({} + {}, -{})",
    "{{{}: {}, '{}': {}}}",
    "{}['{}'] = {}",
    "print('{}', {})",
    "raise {}('{} {}')",
    "{} = ['{}', '{}', '{}']",
    "assert {}('{}', {}) == '{}'",
    "{}({}={}, {}='{}')",
)
"""Of its lines."""
CONSTANT = r"(?<![\w.])\d{1,4}(?![\w.])|'[^'\\]{1,24}'"
"""A number or a string that may be changed."""
TWINS = 0.25
"""Share of the lines that are followed by themselves with another word, so that a copy must not skip one."""


def line_drills(files: list[SourceFile], words: list[str], *, count: int, seed: int) -> Iterator[Edit]:
    """`count` edits of lines from anywhere: copied as they are, one word renamed, or one constant changed."""
    chance = random.Random(seed)
    lines = [
        line.rstrip()
        for file in files
        for line in file.text.splitlines()
        if line.isascii() and "\t" not in line and len(line.strip()) > 6 and len(line) < MAX_CHARACTERS
    ]
    known = set(words)
    for _ in range(count):
        drawn = []
        for line in chance.choices(lines, k=chance.randint(*LINES)):
            drawn.append(line)
            if chance.random() < TWINS:
                drawn.append(re.sub(r"[a-z]{3,}", lambda _: chance.choice(words), line, count=1))
        before = "\n".join(drawn)
        within = sorted(known & set(re.findall(r"\w+", before)))
        constants = sorted(set(re.findall(CONSTANT, before)))
        kind = chance.random()
        if kind < 0.4 and within:
            yield _replaced(chance.choice(within), before, words, chance)
        elif kind < 0.8 and constants:
            yield _replaced(chance.choice(constants), before, words, chance)
        else:
            yield Edit("drill", "Repeat this", before, before)


def name_drills(words: list[str], *, count: int, seed: int) -> Iterator[Edit]:
    """`count` edits of lines of few names, each of which stands in many places: a name or a constant is another one."""
    chance = random.Random(seed)
    for _ in range(count):
        names = [new_name(words, chance) for _ in range(chance.randint(*NAMES))]
        old = chance.choice(names)
        names += [_twin(old, words, chance) for _ in range(chance.randint(*NAME_TWINS))]
        names += [str(number) for number in chance.sample(NUMBERS, k=chance.randint(*NAME_NUMBERS))]
        lines = []
        for _ in range(chance.randint(*NAMED_LINES)):
            form = chance.choice(FORMS)
            drawn = [old if chance.random() < 0.2 else chance.choice(names) for _ in range(form.count("{}"))]
            lines.append(" " * chance.choice((0, 4, 4, 8)) + form.format(*drawn))
        before = "\n".join(lines)
        constants = sorted(set(re.findall(CONSTANT, before)))
        if constants and chance.random() < 0.4:
            old = chance.choice(constants)
        yield _replaced(old, before, words, chance)


def _twin(name: str, words: list[str], chance: random.Random) -> str:
    """Two words, of which `name` has one."""
    return "_".join(chance.sample([chance.choice(name.split("_")), chance.choice(words)], k=2))


def _replaced(old: str, before: str, words: list[str], chance: random.Random) -> Edit:
    """A request for another name, number or string wherever `old` stands."""
    if old.isidentifier():
        new, requests = new_name(words, chance), RENAME
    else:
        new, requests = other_constant(old, words, chance), CHANGE
    request = chance.choice(requests).format(old, new)
    return Edit("drill", request, before, replace_standing(old, new, before), (old, new))


def token_drills(tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int) -> Iterator[Document]:
    """`count` conversations that ask for random tokens again and get them; every other one asks for words without the
    space before them that the question has, or with one."""
    chance = random.Random(seed)
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    known = tokenizer.get_vocab()
    spaced = [(known[text], known[f"Ġ{text}"]) for text in sorted(known) if f"Ġ{text}" in known]
    for number in range(count):
        request = "Repeat this"
        if number % 2:
            request = chance.choice(("Put a space before each word", "Remove the space before each word"))
            pairs = spaced if request.startswith("Put") else [(second, first) for first, second in spaced]
        else:
            pairs = [(one, one) for one in ordinary]
        alphabet = chance.sample(pairs, k=chance.choice(ALPHABETS))
        drawn = chance.choices(alphabet, k=chance.randint(*TOKENS))
        chat = [{"role": "user", "content": f"{request}:\n\n<|pad|>"}, {"role": "assistant", "content": "<|pad|>"}]
        marked = tokenizer(str(tokenizer.apply_chat_template(chat, tokenize=False)))["input_ids"]
        first, second = (place for place, one in enumerate(marked) if one == tokenizer.pad_token_id)
        asked, answer = map(list, zip(*drawn, strict=True))
        ids = [*marked[:first], *asked, *marked[first + 1 : second], *answer, *marked[second + 1 :]]
        places = [NOWHERE] * (second - 1 + len(drawn)) + list(range(first, first + len(drawn)))
        yield Document(ids, places=places, sources=list(places))
