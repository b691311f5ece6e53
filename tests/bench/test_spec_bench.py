"""The board of Spec-Bench says of every drafter what it brought in each category."""

import pytest

from benchmarks import spec_bench


def line(arm: str, category: str, question: str, *, tokens: int, seconds: float, passes: int) -> dict[str, object]:
    return {
        "arm": arm,
        "category": category,
        "question": question,
        "tokens": tokens,
        "seconds": seconds,
        "passes": passes,
    }


LINES = [
    line(spec_bench.PLAIN, "math", "1", tokens=40, seconds=4.0, passes=40),
    line(spec_bench.PLAIN, "qa", "2", tokens=20, seconds=2.0, passes=20),
    line("forerun ngram", "math", "1", tokens=40, seconds=2.0, passes=20),
    line("forerun ngram", "qa", "2", tokens=20, seconds=2.5, passes=20),
    line("forerun auto", "math", "1", tokens=40, seconds=1.0, passes=10),
    line("forerun auto", "qa", "2", tokens=20, seconds=2.0, passes=20),
    line("transformers plain", "math", "1", tokens=40, seconds=16.0, passes=0),
]


def test_a_summary_has_tokens_per_pass_and_speed_by_category() -> None:
    found = spec_bench.summary(LINES)
    assert found["tokens_per_pass"]["forerun auto"] == {"all": 2.0, "math": 4.0, "qa": 1.0}
    assert found["speedup"]["forerun ngram"] == {"math": 2.0, "qa": 0.8}
    assert found["forerun auto over"]["transformers plain"] == {"math": 16.0, "mean": 16.0, "worst question": 16.0}


def test_the_board_is_markdown_with_the_fastest_drafter_first(capsys: pytest.CaptureFixture[str]) -> None:
    spec_bench.write_board(spec_bench.summary(LINES))
    assert capsys.readouterr().out.splitlines() == [
        "|  | math | qa | mean |",
        "| --- | --- | --- | --- |",
        "| `auto` | 4.00, 4.00 x | 1.00, 1.00 x | 2.00, 2.50 x |",
        "| `ngram` | 2.00, 2.00 x | 1.00, 0.80 x | 1.50, 1.40 x |",
    ]
