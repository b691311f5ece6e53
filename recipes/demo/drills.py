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
from guide import NOWHERE, Document, mark
from transformers import PreTrainedTokenizerFast

LINES = (3, 24)
"""Of a drill that shuffles lines, fewest and most."""
MAX_CHARACTERS = 90
"""Of a line that is drilled."""
TOKENS = (20, 220)
"""Of a drill of random tokens, fewest and most."""
ALPHABETS = (6, 20, 60, 400)
"""Distinct tokens in one: the fewer, the more of the past must match before the next is known."""
NAMES, TEXTS, TWIN_COUNT, NAME_NUMBERS, NAMED_LINES = (3, 8), (2, 5), (0, 4), (1, 5), (2, 14)
"""Of a drill of names: distinct ones, strings, look-alikes of one name and of one string, numbers, and lines; fewest
and most."""
OLD_SHARE = 0.2
"""Of the places for a name or a string, how many hold the one that has look-alikes."""
EDGES = ("", "", "", "-", "--", ":", ".", "%", "<", "/", " ", "(", "#", "=")
"""What a string may begin and end with: signs that share a token with the quote beside them."""
REPLACED_KINDS = {"name": 5, "text": 4, "number": 1}
"""How likely a drill of names replaces which."""
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
    "{{}: {}, '{}': {}}",
    "{}['{}'] = {}",
    "print('{}', {})",
    "raise {}('{}')",
    "{} = ['{}', '{}', '{}']",
    "assert {}('{}', {}) == '{}'",
    "{}({}={}, {}='{}')",
)
"""Of its lines."""
CONSTANT = r"""(?<![\w.])\d{1,4}(?![\w.])|'[^'"\\]{1,24}'|"[^'"\\]{1,24}\""""
"""A number or a string that may be changed."""
OLD_TOKENS, PIECES = (1, 4), (4, 28)
"""Of a piece of random tokens that is replaced and of what replaces it, and pieces around it, fewest and most."""
SLOT = "<|pad|>"
"""Stands in a conversation where random tokens are put."""
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
    """`count` edits of lines of few names and strings, each of which stands in many places: one becomes another."""
    chance = random.Random(seed)
    made = 0
    while made < count:
        names = [new_name(words, chance) for _ in range(chance.randint(*NAMES))]
        names += [_twin(names[0], words, chance) for _ in range(chance.randint(*TWIN_COUNT))]
        texts = [_text(words, chance) for _ in range(chance.randint(*TEXTS))]
        texts += [_twin_text(texts[0], words, chance) for _ in range(chance.randint(*TWIN_COUNT))]
        numbers = [str(number) for number in chance.sample(NUMBERS, k=chance.randint(*NAME_NUMBERS))]
        quote = chance.choice("'\"")
        lines = [
            " " * chance.choice((0, 4, 4, 8)) + _filled(chance.choice(FORMS), names, numbers, texts, chance)
            for _ in range(chance.randint(*NAMED_LINES))
        ]
        old = {"name": names[0], "text": f"{quote}{texts[0]}{quote}", "number": numbers[0]}
        kind = chance.choices(list(REPLACED_KINDS), weights=list(REPLACED_KINDS.values()))[0]
        drill = _replaced(old[kind], "\n".join(lines).replace("'", quote), words, chance)
        if drill.after != drill.before:
            made += 1
            yield drill


def _filled(form: str, names: list[str], numbers: list[str], texts: list[str], chance: random.Random) -> str:
    """A line: a string in each place between quotes, a name or a number in each other one."""

    def drawn(place: re.Match[str]) -> str:
        known = texts if place[1] else [*names, *numbers]
        return place[1] + (known[0] if chance.random() < OLD_SHARE else chance.choice(known))

    return re.sub(r"('?)\{\}", drawn, form)


def _twin(name: str, words: list[str], chance: random.Random) -> str:
    """A longer name that holds `name`, or another one that begins or ends as it does."""
    word, kept = chance.choice(words), chance.choice(name.split("_"))
    longer = (f"{name}_{word}", f"{word}_{name}", f"{name}s", f"{word}{name}")
    return chance.choice((f"{kept}_{word}", f"{word}_{kept}", chance.choice(longer)))


def _text(words: list[str], chance: random.Random) -> str:
    """What stands between quotes: up to three words and what is around them, a space at least."""
    inner = chance.choice(" -_./:").join(chance.choices(words, k=chance.randint(0, 3)))
    return chance.choice(EDGES) + inner + chance.choice(EDGES) or " "


def _twin_text(text: str, words: list[str], chance: random.Random) -> str:
    """`text` with another last word, or with one more before or behind."""
    word = chance.choice(words)
    return chance.choice((re.sub(r"\w+(?=\W*$)", word, text), f"{text} {word}", f"{word}{text}"))


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
    ordinary = _ordinary(tokenizer)
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
        asked, answer = map(list, zip(*drawn, strict=True))
        document, (first, second) = _conversation(tokenizer, request, [asked, answer])
        for column in (document.places, document.sources):
            column[second : second + len(drawn)] = range(first, first + len(drawn))
        yield document


def piece_drills(tokenizer: PreTrainedTokenizerFast, *, count: int, seed: int) -> Iterator[Document]:
    """`count` conversations about random tokens, some of which, a piece that stands there several times, are replaced
    by others."""
    chance = random.Random(seed)
    ordinary = _ordinary(tokenizer)
    for _ in range(count):
        alphabet = chance.sample(ordinary, k=chance.choice(ALPHABETS[1:]))
        old = chance.choices(alphabet, k=chance.randint(*OLD_TOKENS))
        new = chance.choices(ordinary, k=chance.randint(*OLD_TOKENS))
        asked = _with_pieces(old, alphabet, chance)
        found, copies = [], []
        at = 0
        while at < len(asked):
            if asked[at : at + len(old)] == old:
                copies += [(at + min(number, len(old) - 1), number) for number in range(len(new))]
                at += len(old)
                found.append(at)
            else:
                copies.append((at, NOWHERE))
                at += 1
        answer = [asked[place] if number == NOWHERE else new[number] for place, number in copies]
        request = chance.choice((*RENAME, *CHANGE)).format(SLOT, SLOT)
        document, starts = _conversation(tokenizer, request, [old, new, new, old, asked, answer])
        named, given, _, _, code, answered = starts
        for at, (place, number) in enumerate(copies, start=answered):
            document.places[at] = document.sources[at] = code + place
            if number != NOWHERE:
                document.sources[at] = given + number
                document.ends[at] = code + next(end for end in found if end > place)
        others = [code + at for at in range(1, len(asked)) if at not in found]
        alike = [at for at in others if document.ids[at - 1] in old]
        mark(document, {code + end: named + len(old) - 1 for end in found}, others, alike, chance)
        yield document


def _with_pieces(old: list[int], alphabet: list[int], chance: random.Random) -> list[int]:
    """Tokens of `alphabet`, and among them `old` and pieces that differ from it in one token."""
    found = [*old]
    for _ in range(chance.randint(*PIECES)):
        piece, kind = [*old], chance.random()
        if kind < 0.5:
            piece = chance.choices(alphabet, k=chance.randint(1, 6))
        elif kind < 0.75:
            piece[chance.randrange(len(old))] = chance.choice(alphabet)
        found = [*found, *piece] if chance.random() < 0.5 else [*piece, *found]
    return found


def _conversation(
    tokenizer: PreTrainedTokenizerFast, request: str, parts: list[list[int]]
) -> tuple[Document, list[int]]:
    """A request about code, and its answer; and where each of the parts begins that stand for a `SLOT` of the request,
    for the code and for the answer."""
    chat = [{"role": "user", "content": f"{request}:\n\n{SLOT}"}, {"role": "assistant", "content": SLOT}]
    ids: list[int] = []
    starts = []
    left = iter(parts)
    for one in tokenizer(str(tokenizer.apply_chat_template(chat, tokenize=False)))["input_ids"]:
        if one == tokenizer.pad_token_id:
            starts.append(len(ids))
            ids += next(left)
        else:
            ids.append(one)
    return Document(ids), starts


def _ordinary(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
