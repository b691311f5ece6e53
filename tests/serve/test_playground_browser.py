"""The page in a real browser, on the demo models: Debian's Chromium, driven by Playwright.

``FORERUN_SCREENSHOTS=folder`` keeps the screenshots.
"""

import itertools
import os
import re
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from forerun import AsyncLLM
from forerun.engine.core import Engine
from forerun.types import StreamChunk
from serve.conftest import Live, serving, wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (apt-get install chromium)")

DRAFTER = {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 5, "adaptive": False}
TOKENS = 48
REPLAY = "Replay side by side"
KINDS = ("accepted", "recovered", "bonus", "target", "rejected")


def model(drafter: dict[str, Any]) -> AsyncLLM:
    return AsyncLLM("demo", speculative_config=drafter, dtype="float32", max_num_seqs=2, max_model_len=512)


@pytest.fixture(scope="module")
def demo() -> Iterator[Live]:
    with serving(partial(model, DRAFTER), client_drafters=("auto", "ngram", "suffix"), allow_traces=True) as running:
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

    def ask(self, temperature: float, drafter: str = "eagle3", tokens: int = TOKENS) -> None:
        """Fill in and press Run."""
        self.page.fill("#temperature", str(temperature))
        self.page.fill("#length", str(tokens))
        self.page.select_option("#drafter", drafter)
        self.page.click("#run")
        self.finished()

    def finished(self) -> None:
        self.page.wait_for_selector("#run:enabled", timeout=120_000)
        assert self.page.text_content("#status") == ""
        assert self.page.is_visible("#after")

    def figures(self, side: str) -> dict[str, Any]:
        found: dict[str, Any] = self.page.evaluate(f"figures(result.{side})")
        return found

    def text(self, side: str) -> str:
        return str(self.page.evaluate(f"tokensOf(result.{side}).map((token) => token.text).join('')"))

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


@pytest.fixture(scope="module")
def copying_server() -> Iterator[Live]:
    """`suffix` drafts alike whatever passes cost, so that a run can be repeated pass by pass."""

    with serving(partial(model, {"method": "suffix", "adaptive": False}), allow_traces=True) as running:
        yield running


@pytest.fixture
def copying(browser: Any, copying_server: Live) -> Iterator[Page]:
    page = Page(browser, copying_server.url, viewport={"width": 1280, "height": 900})
    yield page
    page.close()


def overflow(page: Page) -> int:
    """Pixels that the page is wider than the window."""
    return int(page.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_greedy_fills_both_panes_equally_with_figures_and_hints(opened: Page) -> None:
    opened.ask(0)
    opened.keep("greedy")
    text = {side: opened.text(side) for side in ("plain", "fast")}
    assert text["plain"] == text["fast"] and len(text["plain"]) > 40
    assert "same text" in opened.page.inner_text("#facts .good >> text=token by token")
    assert opened.figures("plain")["tokens"] == opened.figures("plain")["passes"] == TOKENS
    for side in ("plain", "fast"):
        kept = opened.page.locator(f"#{side} .token:not(.rejected)").all_text_contents()
        assert len(kept) == TOKENS and "".join(kept) == text[side]
    assert opened.count("#plain .token.target") == TOKENS and opened.count("#plain .accepted") == 0
    assert opened.count("#fast .accepted") > 0 and opened.count("#fast .rejected") > 0
    assert opened.count("#ruler button") == opened.figures("fast")["passes"] < TOKENS
    assert "tokens/s" in opened.page.inner_text("#fast-speed") and opened.count("#positions .bar") == 5

    per_pass = pytest.approx(TOKENS / opened.figures("fast")["passes"], abs=0.005)
    assert (
        float(opened.page.inner_text("#lead-figure"))
        == per_pass
        == opened.page.evaluate("result.fast.counts.tokens_per_pass")
    ), "all tokens over all passes, as the API has it"
    column = opened.page.locator("#origins td:nth-child(2)").all_inner_texts()
    assert sum(map(int, column)) == TOKENS and int(column[0]) == opened.figures("fast")["passes"], "none twice"
    assert opened.page.locator("#origins td:first-child").all_inner_texts() == ["the model", "eagle3"]

    opened.page.locator("#fast .accepted").first.hover()
    hint = opened.page.inner_text("#hint")
    assert "draft probability 0." in hint and "pass" in hint and " ms" in hint
    opened.page.locator("#tree g.accepted, #tree g.rejected").first.hover()
    assert "probability" in opened.page.inner_text("#hint")
    opened.page.mouse.move(1, 1)
    assert not opened.page.is_visible("#hint")


def test_the_text_appears_while_it_is_written_and_nothing_jumps(opened: Page) -> None:
    opened.page.evaluate(
        """() => {
          window.seen = { plain: new Set(), fast: new Set(), places: new Set() };
          const place = (id) => at(id).getBoundingClientRect().top + scrollY;
          for (const side of ["plain", "fast"])
            new MutationObserver(() => {
              window.seen[side].add(at(side).textContent.length);
              window.seen.places.add(["summary", "plain", "fast", "legend"].map(place).join());
            }).observe(at(side), { childList: true });
        }"""
    )
    opened.ask(0)
    plain, fast, places = opened.page.evaluate("Object.values(window.seen).map((one) => one.size)")
    assert plain > 20 and fast > 5, "the panes grew in that many pieces"
    assert places == 1


def test_stop_ends_the_answer_and_keeps_what_there_is(
    opened: Page, demo: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, brought, clicked = Engine.step, itertools.count(), threading.Event()

    def few(engine: Engine) -> list[StreamChunk]:
        """The answer cannot end before the click."""
        chunks = step(engine)
        if chunks and next(brought) > 3:
            assert clicked.wait(120)
        return chunks

    monkeypatch.setattr(Engine, "step", few)
    opened.page.fill("#prompt", "Count without an end.")
    opened.page.fill("#length", "800")
    opened.page.click("#run")
    opened.page.wait_for_function("result && result.plain.moments.length > 1")
    opened.page.click("#stop")
    clicked.set()
    opened.page.wait_for_selector("#run:enabled")
    assert "nothing to compare" in opened.page.inner_text("#status") and not opened.page.is_visible("#after")
    assert "did not run" in opened.page.evaluate("getComputedStyle(at('fast'), '::before').content")
    assert 1 < opened.figures("plain")["tokens"] < 6
    wait_for(lambda: demo.session.in_flight == 0)
    opened.ask(0)
    assert len(opened.complaints) == 1 and "completions" in opened.complaints.pop(), "what was cut off"


def test_what_a_stop_leaves_is_said(opened: Page) -> None:
    said = opened.page.evaluate(
        """[[0, 0, false], [5, 0, false], [5, 1, true], [5, 4, true]].map(([plain, fast, finished]) => stopped({
          plain: { moments: Array(plain), finished }, fast: { moments: Array(fast) } }))"""
    )
    assert len(set(said)) == 4 and [line.endswith("is compared.") for line in said] == [False, False, False, True]


def test_a_drafter_has_one_colour_whoever_came_first(opened: Page) -> None:
    """In the text, in the legend, in the table and in the tree."""
    seen = []
    for first, second in (("ngram", "suffix"), ("suffix", "ngram")):
        opened.page.evaluate(
            """(drafters) => {
              const known = { draft_prob: 1, target_prob: null, probe: false };
              const node = { ...known, token: 1, text: "a", parent: 0, accepted: true };
              const one = (drafter, step) => ({ nodes: [node], ms: 1, tokens: [{ id: 1, text: "a", source: "draft" }],
                step: { step, drafter, lossless: true, rule: "argmax_walk" } });
              const answer = () => ({ moments: drafters.map(one), finished: true });
              show({ plain: answer(), fast: answer(), drafter: "auto", memory: "cold", temperature: 0, count: null });
            }""",
            [first, second],
        )
        colour = "(all) => all.map((one) => getComputedStyle(one).backgroundColor)"
        text = opened.page.locator("#fast .accepted").evaluate_all(colour)
        legend = opened.page.locator("#drafters .token")
        named = dict(zip(legend.all_inner_texts(), legend.evaluate_all(colour), strict=True))
        assert named == dict(zip((first, second), text, strict=True))
        table = opened.page.locator("#origins .swatch").evaluate_all(colour)[1:]
        assert table == list(named.values())
        seen.append(named)
    assert seen[0] == seen[1] and len(set(seen[0].values())) == 2
    assert [*seen[0]] == [*seen[1]], "the legend has one order"


@pytest.mark.parametrize(
    ("run", "words", "shown"),
    [
        (
            {"passes": 119, "ratio": 0.93, "drafted": 20},
            "(0.93 x, within the noise of one run), so the text came no",
            "",
        ),
        ({"passes": 120, "ratio": 0.9, "drafted": 0}, "in 120 passes, one for each. Nothing was drafted", ""),
        ({"passes": 60, "ratio": 0.98, "drafted": 90}, "as long as a plain one (0.98 x, within the noise", "good"),
        ({"passes": 60, "ratio": 1.2, "drafted": 90}, "1.20 x as long as a plain one, drafting included", "good"),
        ({"passes": 110, "ratio": 1.5, "drafted": 900}, "instead of 120. A pass took 1.50 x", "bad"),
    ],
)
def test_no_gain_is_made_of_noise(opened: Page, run: dict[str, Any], words: str, shown: str) -> None:
    """A pass with drafts is never cheaper than one without: where it was, the clock was uneven."""
    verdict, [fact, kind] = opened.page.evaluate(
        """({ passes, ratio, drafted }) => {
          const written = (passes, index) => Math.floor((120 * index) / passes);
          const moment = (passes, ms, drafted) => (_, index) => ({
            ms, step: { step: index, drafter: "ngram", lossless: true },
            tokens: Array(written(passes, index + 1) - written(passes, index)).fill({ id: 1, source: "draft" }),
            nodes: Array(index === 1 ? drafted : 0).fill({ accepted: true, parent: 0 }) });
          const answer = (...all) => ({ finished: true, moments: Array.from({ length: all[0] }, moment(...all)) });
          const arms = { plain: answer(120, 10, 0), fast: answer(passes, 10 * ratio, drafted) };
          const found = { ...arms, memory: "cold", temperature: 0 };
          return [verdict(found), facts(found, speedUp(found))[0]];
        }""",
        run,
    )
    assert words in verdict and kind == shown and ("noise" in fact) == (shown == "")


def test_cold_runs_of_the_same_prompt_are_equal_and_warm_ones_say_so(copying: Page) -> None:
    """Drafters remember answers: what they learned must not be taken for what they bring."""
    copying.page.locator("#examples button").last.click()
    passes = []
    for memory in ("cold", "cold", "warm", "warm", "cold"):
        copying.page.check(f"[name=memory][value={memory}]")
        copying.ask(0, drafter="suffix")
        passes.append(copying.figures("fast")["passes"])
        known = "knew 1 earlier completion" if len(passes) == 4 else "knew 0 earlier completions"
        assert copying.page.locator("#facts li", has_text=known if memory == "warm" else "cold").count() == 1
    assert passes[0] == passes[1] == passes[2] == passes[4], "nothing was left of earlier answers"
    told = copying.page.locator("#facts li", has_text="3 runs").inner_text()
    figure = copying.page.inner_text("#lead-figure")
    assert told == f"3 runs: {figure} to {figure} tokens per pass, median {figure}"
    assert passes[3] < passes[2], "it copied its first warm answer"


def test_several_runs_of_a_question_are_told_with_their_range(opened: Page) -> None:
    """What is drafted depends on times: one run alone may be luck."""
    assert opened.page.evaluate("spread([1.5, 1.2, 2])") == "3 runs: 1.20 to 2.00 tokens per pass, median 1.50"
    assert opened.page.evaluate("spread([2, 1])") == "2 runs: 1.00 to 2.00 tokens per pass, median 1.50"
    opened.ask(0)
    assert opened.count("#facts li >> text=runs:") == 0
    opened.ask(0)
    assert opened.count("#facts li >> text=2 runs:") == 1
    opened.ask(0, tokens=TOKENS // 2)
    assert opened.count("#facts li >> text=runs:") == 0, "another question"


def test_the_end_mark_is_counted_once_and_never_struck(opened: Page) -> None:
    """Of an answer that ends within a draft, as the server tells it: the mark has no text, and was accepted."""
    opened.ask(0)
    opened.page.evaluate(
        """() => {
          const node = (token, text, parent, accepted) => (
            { token, text, parent, accepted, probe: false, draft_prob: 1, target_prob: null });
          const token = (id, text) => ({ id, text, source: "draft", step: 9 });
          const nodes = [node(7, ".", 0, true), node(2, "<|im_end|>", 1, true), node(3, "no", 2, false)];
          const step = { step: 9, drafter: "eagle3", nodes, lossless: true, draft_ms: 1, verify_ms: 1, commit_ms: 1 };
          window.before = figures(result.fast);
          take("fast", { tokens: [token(7, "."), token(2, "")], steps: [step] });
          drawOrigins(result.fast);
        }"""
    )
    before, after = opened.page.evaluate("[window.before, figures(result.fast)]")
    assert [after[name] - before[name] for name in ("tokens", "passes", "accepted")] == [2, 1, 2]
    last = opened.page.evaluate("result.fast.moments.length - 1")
    assert opened.page.locator(f"#fast [data-pass='{last}'].accepted").all_text_contents() == [".", ""]
    assert opened.page.locator(f"#fast [data-pass='{last}'].rejected").all_text_contents() == ["no"]


def test_examples_and_advice_can_be_followed(opened: Page) -> None:
    prompts = set()
    for button in opened.page.locator("#examples button").all():
        button.click()
        prompts.add(opened.page.input_value("#prompt"))
        assert opened.count("#examples [aria-pressed=true]") == 1
    assert len(prompts) == 3
    assert "auto" in opened.page.locator("#drafter option").all_inner_texts()
    opened.ask(0, drafter="ngram")
    opened.page.click("#advice button >> text=Run warm")
    opened.finished()
    assert opened.page.evaluate("result.memory") == "warm" and opened.page.is_checked("[name=memory][value=warm]")


@pytest.mark.parametrize(
    ("found", "offered"),
    [
        ({"faster": 0.8, "drafted": 100}, "Draft at most 3"),
        ({"faster": 1.1, "drafted": 40}, "Run with auto"),
        ({"faster": 3.0, "drafted": 0}, "Run “Correct a letter”"),
        ({"faster": 3.0, "drafted": 40, "memory": "warm", "earlier": 1}, "Run cold"),
    ],
)
def test_the_next_step_fits_what_was_seen(opened: Page, found: dict[str, Any], offered: str) -> None:
    own, example = opened.page.evaluate(
        """({ faster, drafted, memory = "cold", earlier = 0 }) => {
          const step = { step: 1, drafter: "suffix" };
          at("prompt").value = "An own prompt";
          const answer = (ms, nodes) => ({ moments: Array.from({ length: 20 }, (_, index) => (
            { tokens: [{ id: 1, source: "target" }], nodes, step, ms })) });
          const nodes = Array(drafted / 20).fill({ accepted: false, parent: 0 });
          const found = { plain: answer(10 * faster, []), fast: answer(10, nodes), drafter: "suffix", count: null };
          const run = { ...found, memory, earlier, temperature: 0 }, offered = ["suffix", "auto"];
          const own = advice(run, offered).map((one) => one[1]);
          useExample(EXAMPLES[0]);
          return [own, advice(run, offered).map((one) => one[1])];
        }""",
        found,
    )
    assert offered in own
    assert not any(label.startswith("Run “") for label in example), "it is the example that would be offered"


def test_a_limit_is_advised_only_where_it_would_change_the_drafts(opened: Page) -> None:
    offered = opened.page.evaluate(
        """[[20, 2], [2, 9]].map(([passes, each]) => {
          const node = { accepted: false, parent: 0 }, step = { step: 1, drafter: "ngram" };
          const tokens = [{ id: 1, source: "target" }];
          const nodes = (drafts) => Array(drafts ? each : 0).fill(node);
          const moment = (ms, drafting) => (_, index) => ({ tokens, nodes: nodes(index < drafting), step, ms });
          const answer = (...all) => ({ moments: Array.from({ length: 20 }, moment(...all)) });
          const found = { plain: answer(8, 0), fast: answer(10, passes), memory: "cold", earlier: 0 };
          return advice({ ...found, temperature: 0, count: null, drafter: "auto" }, ["auto"]).map((one) => one[1]);
        })"""
    )
    assert all("Draft at most 3" not in labels for labels in offered)


def test_a_sampled_run_shows_every_kind_in_its_own_shape(opened: Page) -> None:
    opened.ask(0.8)
    opened.keep("sampled")
    assert opened.page.locator("#facts li", has_text=re.compile("same text|same distribution")).count() == 1
    assert not opened.page.locator("#fast .rejected").first.is_visible()
    opened.page.check("#details")
    assert opened.page.locator("#fast .rejected").first.is_visible()
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


def test_the_keyboard_is_enough(opened: Page) -> None:
    keys = opened.page.keyboard
    opened.page.focus("#prompt")
    keys.press("Control+A")
    keys.type("def add(a, b):")
    for name in ("drafter", "", "temperature", "length"):
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
    assert opened.count("#fast .token") < opened.figures("fast")["tokens"]
    for _ in range(80):
        keys.press("ArrowRight")
        if opened.page.text_content("#play") == REPLAY:
            break
    written = opened.figures("plain")["tokens"]
    assert 0 < opened.page.locator("#fast .token:not(.rejected)").count() == written <= 24
    opened.page.focus("#ruler [tabindex='0']")
    assert opened.count("#ruler [tabindex='0']") == 1, "one stop for the tabulator"
    keys.press("ArrowLeft")
    keys.press("ArrowRight")
    number = opened.page.evaluate("[...at('ruler').children].indexOf(document.activeElement) + 1")
    assert str(opened.page.text_content("#step-title")).startswith(f"Pass {number}:")
    assert opened.count("#fast .chosen") > 0
    outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none", "focus can be seen"


def test_replay_shows_what_was_measured(opened: Page) -> None:
    opened.ask(0, drafter="ngram")
    opened.page.click("#play")
    opened.page.wait_for_function(f"at('play').textContent === '{REPLAY}'", timeout=60_000)
    assert opened.page.locator("#fast .token:not(.rejected)").count() == TOKENS
    assert "one run after the other" in opened.page.inner_text("#facts")


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1280, "light")])
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
    assert not opened.page.is_visible("#result"), "nothing was written, so no card is shown"


def test_a_tree_that_is_deeper_than_its_box_goes_on_below(opened: Page) -> None:
    """A chain of sixteen drafted tokens; all that is drawn lies within the box."""
    chain = """{
      const known = { draft_prob: null, target_prob: null };
      const nodes = [...Array(16).keys()].map((parent) => ({ ...known, text: "word", parent, accepted: parent < 9 }));
      at("result").hidden = at("after").hidden = false;
      const step = { step: 1, drafter: "ngram", rule: "argmax_walk" };
      drawTree({ nodes, tokens: [{ text: "end", source: "recovered" }], step, ms: 1 });
    }"""
    opened.page.evaluate(chain)
    box = opened.page.evaluate(
        "[at('tree').clientWidth, at('tree').scrollWidth, at('tree').querySelectorAll('rect').length]"
    )
    assert box[1] <= box[0] and box[2] == 18


def test_a_server_that_gives_no_traces_is_said_to(browser: Any) -> None:
    with serving(partial(model, DRAFTER)) as live:
        page = Page(browser, live.url)
        page.page.wait_for_selector("#run[disabled]")
        assert "--allow-traces" in str(page.page.text_content("#status"))
        assert page.page.evaluate("at('status').getBoundingClientRect().top < at('ask').getBoundingClientRect().top")
        page.close()
