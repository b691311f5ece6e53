"""The page in a real browser, on the demo models: Debian's Chromium, driven by Playwright.

``FORERUN_SCREENSHOTS=folder`` keeps the screenshots.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import AsyncLLM
from serve.conftest import Live, serving

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (apt-get install chromium)")

DRAFTER = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5, "adaptive": False}
TOKENS = 48
KINDS = ("accepted", "recovered", "bonus", "target", "rejected")


@pytest.fixture(scope="module")
def demo() -> Iterator[Live]:
    def load() -> AsyncLLM:
        return AsyncLLM("demo", speculative_config=DRAFTER, dtype="float32", max_num_seqs=2, max_model_len=512)

    with serving(load, client_drafters=("ngram", "suffix"), allow_traces=True) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Page:
    """One opened page, and what its console said."""

    def __init__(self, browser: Any, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.complaints: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self._heard(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("requestfailed", lambda request: self.complaints.append(request.url))
        self.page.goto(url)
        self.page.wait_for_selector("#drafter option", state="attached")

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def ask(self, temperature: float, drafter: str = "eagle3") -> None:
        """Fill in and press Run."""
        self.page.fill("#temperature", str(temperature))
        self.page.fill("#length", str(TOKENS))
        self.page.select_option("#drafter", drafter)
        self.page.click("#run")
        self.finished()

    def finished(self) -> None:
        self.page.wait_for_function("!document.getElementById('run').disabled && result !== null", timeout=60_000)
        assert self.page.text_content("#status") == ""

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def keep(self, name: str) -> None:
        if folder := os.environ.get("FORERUN_SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []


@pytest.fixture
def opened(browser: Any, demo: Live) -> Iterator[Page]:
    page = Page(browser, demo.url, viewport={"width": 1280, "height": 900})
    yield page
    page.close()


def overflow(page: Page) -> int:
    """Pixels that the page is wider than the window."""
    return int(page.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_greedy_fills_both_panes_and_says_that_they_are_equal(opened: Page) -> None:
    opened.ask(0)
    opened.keep("greedy")
    text = {side: opened.page.evaluate(f"result.{side}.text") for side in ("plain", "fast")}
    assert text["plain"] == text["fast"] and len(text["plain"]) > 40
    assert "identical" in str(opened.page.text_content("#summary .good b >> text=identical"))
    assert opened.page.evaluate("result.plain.moments.flatMap((moment) => moment.tokens).length") == TOKENS
    for side in ("plain", "fast"):
        kept = opened.page.locator(f"#{side} .token:not(.rejected)").all_text_contents()
        assert len(kept) == TOKENS and "".join(kept) == text[side]
    assert opened.count("#plain .token.target") == TOKENS and opened.count("#plain .accepted") == 0
    assert opened.count("#fast .accepted") > 0 and opened.count("#fast .rejected") > 0
    steps = opened.page.evaluate("result.fast.moments.length")
    assert opened.count("#ruler button") == steps < TOKENS
    assert "tokens/s" in opened.page.inner_text("#fast-speed") and opened.count("#positions .bar") == 5


def test_a_sampled_run_shows_every_kind_in_its_own_shape(opened: Page) -> None:
    opened.ask(0.8)
    opened.keep("sampled")
    assert "same distribution" in opened.page.inner_text("#summary")
    for kind in ("accepted", "recovered", "rejected"):
        assert opened.count(f"#fast .{kind}") > 0, kind
    shapes = {
        kind: opened.page.locator(f"#legend .{kind}").evaluate(
            "(one) => { const style = getComputedStyle(one); return [style.textDecorationLine, style.borderBottomStyle,"
            " style.backgroundColor !== 'rgba(0, 0, 0, 0)'].join(' '); }"
        )
        for kind in KINDS
    }
    assert len(set(shapes.values())) == len(KINDS), "not told apart by colour alone"
    opened.page.uncheck("#ghosts")
    assert not opened.page.locator("#fast .rejected").first.is_visible()


def test_hovering_tells_probabilities(opened: Page) -> None:
    opened.ask(0)
    opened.page.locator("#fast .accepted").first.hover()
    hint = opened.page.inner_text("#hint")
    assert "draft probability 0." in hint and "step" in hint and " ms" in hint
    opened.page.locator("#tree g.accepted, #tree g.rejected").first.hover()
    assert "probability" in opened.page.inner_text("#hint")
    opened.page.mouse.move(1, 1)
    assert not opened.page.is_visible("#hint")


def test_the_keyboard_is_enough(opened: Page) -> None:
    keys = opened.page.keyboard
    opened.page.focus("#prompt")
    keys.press("Control+A")
    keys.type("def add(a, b):")
    for name in ("mode", "drafter", "count", "temperature", "length"):
        keys.press("Tab")
        assert opened.page.evaluate("document.activeElement.id") == name
        if name == "temperature":
            keys.type("0")
    keys.type("24")
    keys.press("Control+Enter")
    opened.finished()
    assert opened.page.evaluate("result.temperature") == 0
    opened.page.evaluate("document.activeElement.blur()")
    keys.press("ArrowRight")
    assert opened.count("#fast .token") < opened.page.evaluate("result.fast.trace.tokens.length")
    for _ in range(80):
        keys.press("ArrowRight")
        if opened.page.text_content("#play") == "Replay":
            break
    written = opened.page.evaluate("result.plain.trace.tokens.length")
    assert 0 < opened.page.locator("#fast .token:not(.rejected)").count() == written <= 24
    opened.page.focus("#ruler button:nth-child(3)")
    keys.press("Enter")
    assert str(opened.page.text_content("#step-title")).startswith("Step 2")
    outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "focus can be seen"


def test_replay_shows_what_was_measured(opened: Page) -> None:
    opened.ask(0, drafter="ngram")
    opened.page.click("#play")
    opened.page.wait_for_function("document.getElementById('play').textContent === 'Replay'", timeout=60_000)
    assert opened.page.locator("#fast .token:not(.rejected)").count() == TOKENS
    assert "one run after the other" in opened.page.inner_text("#replayed")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_narrow_and_wide_light_and_dark(browser: Any, demo: Live, scheme: str, width: int) -> None:
    page = Page(browser, demo.url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert overflow(page) == 0
    page.ask(0)
    page.keep(f"{scheme}-{width}")
    assert overflow(page) == 0
    ink, ground = page.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    brighter = sum(map(int, ground[4:-1].split(","))) > sum(map(int, ink[4:-1].split(",")))
    assert brighter == (scheme == "light")
    page.close()


def test_what_is_kept_can_be_opened_alone(opened: Page, browser: Any, tmp_path: Path) -> None:
    opened.ask(0)
    with opened.page.expect_download() as found:
        opened.page.click("#download")
    assert '"speculative' in found.value.path().read_text() or '"fast"' in found.value.path().read_text()
    with opened.page.expect_download() as found:
        opened.page.click("#save")
    file = tmp_path / "saved.html"
    found.value.save_as(file)
    context = browser.new_context(offline=True)
    alone, errors = context.new_page(), list[str]()
    alone.on("pageerror", lambda error: errors.append(str(error)))
    alone.goto(file.as_uri())
    assert alone.locator("#fast .token:not(.rejected)").count() == TOKENS and errors == []
    context.close()


def test_errors_are_said(opened: Page) -> None:
    opened.page.fill("#prompt", "x " * 2000)
    opened.page.click("#run")
    opened.page.wait_for_selector("#status.wrong")
    assert "token" in opened.page.inner_text("#status")
    assert len(opened.complaints) == 1 and "400" in opened.complaints.pop(), "the browser's own line"


def test_a_server_that_gives_no_traces_is_said_to(browser: Any) -> None:
    def load() -> AsyncLLM:
        return AsyncLLM("demo", speculative_config=DRAFTER, dtype="float32", max_num_seqs=1, max_model_len=128)

    with serving(load) as live:
        page = Page(browser, live.url)
        page.page.wait_for_selector("#run[disabled]")
        assert "--allow-traces" in str(page.page.text_content("#status"))
        page.close()
