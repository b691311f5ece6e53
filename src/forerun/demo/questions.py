"""These questions are put to a real model in ``forerun demo`` and in the tests. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A `Question` is one question to a chat model, as a user would put it."""

    name: str  # For example ``"edit"``
    title: str  # The kind of question, in a few words
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation that asks the question."""
        return [{"role": "user", "content": self.text}]


_LETTER = """\
Dear Mr Smith, thank you for you letter of 3 May. We has looked into the matter and found that the parcel were sent to
the wrong adress. We are very sorry for this mistake. A new parcel will be send to you today, and it should arive on
Friday."""

_HARBOUR = """\
The lighthouse at Sandhope was built in 1871, after four ships had been lost on the reef in one winter. For ninety
years a keeper lived there with his family, carried oil up its 144 steps every evening, and wrote the weather into a
book every three hours. In 1961 the lamp became electric, and the last keeper, Ada Finch, left the tower but stayed in
the village. The books that she and the keepers before her wrote are now read by scientists, who learn from them how
the storms on this coast have changed. Since 2009 the tower belongs to the village, which lets rooms to guests in
summer and pays for its paint with what they bring."""

QUESTIONS = (
    Question(
        name="chat",
        title="a question",
        text="Why is the sky blue by day and red at sunset? Explain it to a child in one paragraph.",
    ),
    Question(
        name="edit",
        title="an edit",
        text="Correct the spelling and grammar mistakes in this letter:\n\n" + _LETTER.replace("\n", " "),
    ),
    Question(
        name="summary",
        title="a summary",
        text=_HARBOUR.replace("\n", " ") + "\n\nSummarise this text in two sentences.",
    ),
)
