"use strict";
// Asks the server the same thing twice, one after the other, and replays both answers from their recorded times.

const at = (id) => document.getElementById(id);
const saved = window.SAVED_RESULT || null;
let result = null, player = null;
const QUESTIONS = {
  chat: `Rename \`rows\` to \`items\`: write items for rows:

def read_table(path, rows=None):
    """Return all lines of a table, each a list of its cells."""
    if rows is None:
        rows = []
    with open(path, newline="") as file:
        for line in file:
            cells = line.rstrip().split(",")
            if not cells:
                continue
            rows.append(cells)
    if not rows:
        raise ValueError(f"nothing in {path}")
    return rows`,
  text: `"""Read and write small tables."""

import csv
import io


class Table:
    """Rows of cells, with a header."""

    def __init__(self, header, rows=()):
        self.header = list(header)
        self.rows = [list(row) for row in rows]

    def append(self, row):
        """Add a row; it must be as long as the header."""
        if len(row) != len(self.header):
            raise ValueError(f"expected {len(self.header)} cells, got {len(row)}")
        self.rows.append(list(row))

    def column(self, name):
`,
};

const made = (tag, attributes = {}, ...children) => {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
};

// --- asking -----------------------------------------------------------------------------------------------------------

async function call(path, body) {
  const headers = { "content-type": "application/json" };
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  const answer = await fetch(path, options);
  if (answer.status === 401) at("key-field").hidden = false;
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error ? found.error.message : `the server answered ${answer.status}`);
  return found;
}

function requestBody(speculative) {
  const asked = at("prompt").value;
  return {
    ...(at("mode").value === "chat" ? { messages: [{ role: "user", content: asked }] } : { prompt: asked }),
    max_tokens: Number(at("length").value),
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    speculative,
    return_speculation_trace: true,
  };
}

async function run() {
  at("run").disabled = true;
  say("plain decoding ...");
  try {
    const path = at("mode").value === "chat" ? "v1/chat/completions" : "v1/completions";
    const plain = read(await call(path, requestBody({ enabled: false })));
    say("speculative decoding ...");
    const drafter = at("drafter").value;
    const speculative = { drafter, num_speculative_tokens: Number(at("count").value) };
    const fast = read(await call(path, requestBody(speculative)));
    const measured = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    show({ plain, fast, temperature: Number(at("temperature").value), drafter, measured, model: at("model").textContent });
    say("");
  } catch (error) {
    say(error.message, true);
  } finally {
    at("run").disabled = false;
  }
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

// --- reading ----------------------------------------------------------------------------------------------------------

// One answer as moments: what was emitted and rejected in a step, and when it was there, in ms from the start.
function read(answer) {
  const trace = answer.speculation_trace[0];
  let clock = trace.first_token_ms;
  const numbers = new Set(trace.steps.map((step) => step.step));
  const first = trace.tokens.filter((token) => !numbers.has(token.step));
  const moments = [{ at: clock, tokens: first, nodes: [], step: null, ms: clock }];
  for (const step of trace.steps) {
    const ms = step.draft_ms + step.verify_ms + step.commit_ms;
    clock += ms;
    moments.push({ at: clock, tokens: trace.tokens.filter((token) => token.step === step.step), nodes: step.nodes, step, ms });
  }
  const decoded = trace.tokens.length - first.length;
  const perSecond = (1000 * decoded) / Math.max(1e-9, clock - trace.first_token_ms);
  const { text, message } = answer.choices[0];
  return { text: message ? message.content : text, moments, perSecond, counts: answer.metrics.speculative_decoding, trace };
}

// --- showing ----------------------------------------------------------------------------------------------------------

function show(found) {
  result = found;
  at("result").hidden = false;
  summarise(found);
  at("replayed").textContent =
    `Measured ${found.measured}, one run after the other on one device; what you see is a replay of the recorded times.`;
  at("plain-speed").textContent = `${found.plain.perSecond.toFixed(1)} tokens/s`;
  at("fast-speed").textContent = `${found.fast.perSecond.toFixed(1)} tokens/s, ${found.drafter}`;
  drawRuler(found.fast);
  drawPositions(found.fast.counts);
  const drafting = found.fast.moments.findIndex((moment) => moment.nodes.length);
  choose(drafting < 0 ? 0 : drafting);
  stop();
  for (const side of ["plain", "fast"]) {
    at(side).replaceChildren();
    for (const moment of found[side].moments) append(at(side), moment);
  }
}

function summarise(found) {
  const { plain, fast, temperature } = found;
  const same = plain.text === fast.text;
  const lossy = fast.moments.find((moment) => moment.step && !moment.step.lossless);
  const cards = [
    [`${(fast.perSecond / plain.perSecond).toFixed(2)} x`, "speed-up of decoding", fast.perSecond >= plain.perSecond ? "good" : "bad"],
    [fast.counts.tokens_per_pass.toFixed(2), "tokens per pass", ""],
    [`${Math.round(100 * fast.counts.draft_acceptance_rate)} %`, "of drafted tokens accepted", ""],
    [`${fast.moments.length - 1} / ${plain.moments.length - 1}`, "passes, speculative / plain", ""],
    temperature === 0
      ? [same ? "identical" : "different", "output, checked", same ? "good" : "bad"]
      : lossy
        ? ["another distribution", `sampled: the rule ${lossy.step.rule} is lossy`, "bad"]
        : ["same distribution", "sampled: the rule is lossless, texts may differ", ""],
  ];
  at("summary").replaceChildren(
    ...cards.map(([value, name, kind]) => made("div", { class: kind }, made("b", {}, value), made("small", {}, name))));
}

function append(pane, moment) {
  const accepted = new Map(moment.nodes.map((node, index) => [index + 1, node]).filter(([, node]) => node.accepted));
  const path = [...accepted.values()];
  moment.tokens.forEach((token, index) => {
    const node = token.source === "draft" ? path[index] : null;
    pane.append(shown(token.text, token.source === "draft" ? "accepted" : token.source, moment, node));
  });
  const ghosts = moment.nodes.filter((node) => !node.accepted && !node.probe).slice(0, 12);
  for (const node of ghosts) pane.append(shown(folded(node.text), "rejected", moment, node));
  pane.scrollTop = pane.scrollHeight;
}

// A token that was not accepted must not break the lines of those that were.
const folded = (text) => text.replace(/\n+/g, "↵").replace(/[ \t]{2,}/g, "␣");

const counted = (count) => `${count} token${count === 1 ? "" : "s"}`;

function shown(text, kind, moment, node) {
  const span = made("span", { class: `token ${kind}` }, text);
  span.dataset.hint = hintOf(kind, moment, node);
  return span;
}

function hintOf(kind, moment, node) {
  const lines = [kind + (moment.step ? ` in step ${moment.step.step}, ${moment.ms.toFixed(1)} ms` : ", first token")];
  if (node && node.draft_prob !== null) lines.push(`draft probability ${node.draft_prob.toFixed(3)}`);
  if (node && node.target_prob !== null) lines.push(`target probability ${node.target_prob.toFixed(3)}`);
  return lines.join("\n");
}

function drawRuler(answer) {
  const most = Math.max(...answer.moments.map((moment) => moment.tokens.length), 1);
  const bars = answer.moments.map((moment, index) => made("button", {
    type: "button", class: moment.nodes.length ? "drafted" : "", style: `height:${(100 * moment.tokens.length) / most}%`,
    "aria-label": `step ${index}: ${counted(moment.tokens.length)}`, onclick: () => choose(index),
  }, `+${moment.tokens.length}`));
  at("ruler").replaceChildren(...bars);
}

function drawPositions(counts) {
  const steps = counts.num_spec_steps;
  let left = steps;
  const rows = counts.acceptance_histogram.slice(0, -1).map((here, place) => {
    left -= here;
    const share = steps ? left / steps : 0;
    return made("div", { class: "bar" }, `${place + 1}`, made("i", {}, made("b", { style: `width:${100 * share}%` })),
      `${Math.round(100 * share)} %`);
  });
  at("positions").replaceChildren(...(rows.length ? rows : ["nothing was drafted"]));
}

function choose(index) {
  [...at("ruler").children].forEach((bar, other) => bar.setAttribute("aria-current", other === index));
  const moment = result.fast.moments[index];
  at("step-title").textContent = index ? `Step ${index}: ${counted(moment.tokens.length)}` : "First token";
  drawTree(moment);
}

function drawTree(moment) {
  const nodes = [{ text: "", parent: -1 }, ...moment.nodes];
  const last = moment.tokens[moment.tokens.length - 1];
  const depth = nodes.map(() => 0), row = nodes.map(() => 0);
  let rows = 0;
  const children = nodes.map(() => []);
  nodes.forEach((node, index) => { if (index) { depth[index] = depth[node.parent] + 1; children[node.parent].push(index); } });
  const place = (index) => {
    row[index] = rows;
    children[index].forEach((child, order) => { if (order) rows += 1; place(child); });
  };
  place(0);
  const wide = 104, high = 34, parts = [];
  const x = (index) => 8 + depth[index] * wide, y = (index) => 8 + row[index] * high;
  nodes.forEach((node, index) => {
    if (index) parts.push(svg("line", { x1: x(node.parent) + 86, y1: y(node.parent) + 13, x2: x(index), y2: y(index) + 13, class: node.accepted ? "accepted" : "" }));
  });
  nodes.forEach((node, index) => parts.push(box(x(index), y(index), index ? node.text : "root", index ? (node.accepted ? "accepted" : "rejected") : "", index ? hintOf(node.accepted ? "accepted" : "rejected", moment, node) : "")));
  if (last && last.source !== "draft") {
    const end = Math.max(0, ...nodes.map((node, index) => (node.accepted ? index : 0)));
    rows += 1;
    parts.push(svg("line", { x1: x(end) + 43, y1: y(end) + 26, x2: x(end) + 43, y2: 8 + rows * high, class: "accepted" }));
    parts.push(box(x(end), 8 + rows * high, last.text, last.source, hintOf(last.source, moment, null)));
  }
  const size = { width: 16 + (Math.max(...depth) + 1) * wide, height: 16 + (rows + 1) * high };
  at("tree").replaceChildren(svg("svg", { ...size, role: "img", "aria-label": "tree of drafted tokens" }, ...parts));
}

function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function box(x, y, text, kind, hint) {
  const plain = JSON.stringify(text).slice(1, -1);
  const label = svg("text", { x: x + 6, y: y + 17 });
  label.textContent = plain.length > 10 ? `${plain.slice(0, 9)}…` : plain;
  const group = svg("g", { class: kind }, svg("rect", { x, y, width: 86, height: 26, rx: 5 }), label);
  group.dataset.hint = hint;
  return group;
}

// --- replay -----------------------------------------------------------------------------------------------------------

function start() {
  stop();
  at("plain").replaceChildren();
  at("fast").replaceChildren();
  player = { next: { plain: 0, fast: 0 }, clock: 0, from: performance.now(), frame: 0, playing: true };
  at("play").setAttribute("aria-pressed", true);
  at("play").textContent = "Pause";
  player.frame = requestAnimationFrame(tick);
}

function tick(now) {
  player.clock += (now - player.from) * Number(at("pace").value);
  player.from = now;
  reveal();
  if (player.playing && !finished()) player.frame = requestAnimationFrame(tick);
  if (finished()) stop();
}

function reveal() {
  for (const side of ["plain", "fast"]) {
    const moments = result[side].moments;
    while (player.next[side] < moments.length && moments[player.next[side]].at <= player.clock) {
      append(at(side), moments[player.next[side]]);
      if (side === "fast") choose(player.next[side]);
      player.next[side] += 1;
    }
  }
}

const finished = () => ["plain", "fast"].every((side) => player.next[side] >= result[side].moments.length);

function pause() {
  player.playing = !player.playing;
  at("play").textContent = player.playing ? "Pause" : "Go on";
  player.from = performance.now();
  if (player.playing) player.frame = requestAnimationFrame(tick);
}

function forward() {
  if (!player) start();
  if (player.playing) pause();
  const times = ["plain", "fast"].map((side) => result[side].moments[player.next[side]]).filter(Boolean).map((moment) => moment.at);
  if (!times.length) return stop();
  player.clock = Math.min(...times);
  reveal();
  if (finished()) stop();
}

function stop() {
  if (player) cancelAnimationFrame(player.frame);
  player = null;
  at("play").textContent = "Replay";
  at("play").setAttribute("aria-pressed", false);
}

// --- keeping ----------------------------------------------------------------------------------------------------------

function offer(name, type, text) {
  const link = made("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function savePage() {
  const source = async (name) => (await fetch(name)).text();
  const [css, script] = [await source("playground.css"), await source("playground.js")];
  const copy = document.documentElement.cloneNode(true);
  copy.querySelector("link[rel=stylesheet]").replaceWith(made("style", {}, css));
  copy.querySelector("#ask").remove();
  copy.querySelector("script").remove();
  const data = JSON.stringify(result).replace(/</g, "\\u003c");
  const body = `<script>window.SAVED_RESULT=${data}</script><script>${script.replace(/<\/script/g, "<\\/script")}</script>`;
  const html = `<!doctype html>\n${copy.outerHTML.replace("</body>", () => `${body}</body>`)}`;
  offer("forerun.html", "text/html", html);
}

// --- beginning --------------------------------------------------------------------------------------------------------

function listen() {
  at("play").addEventListener("click", () => (player ? pause() : start()));
  at("forward").addEventListener("click", forward);
  at("ghosts").addEventListener("change", () => document.body.classList.toggle("hide-ghosts", !at("ghosts").checked));
  at("download").addEventListener("click", () => offer("forerun-trace.json", "application/json", JSON.stringify(result, null, 1)));
  at("save").addEventListener("click", savePage);
  document.addEventListener("pointerover", (event) => {
    const owner = event.target.closest && event.target.closest("[data-hint]");
    const hint = at("hint");
    hint.hidden = !owner || !owner.dataset.hint;
    if (hint.hidden) return;
    hint.textContent = owner.dataset.hint;
    const box = owner.getBoundingClientRect();
    hint.style.left = `${Math.max(4, Math.min(box.left, innerWidth - hint.offsetWidth - 8))}px`;
    hint.style.top = `${box.bottom + hint.offsetHeight + 8 < innerHeight ? box.bottom + 6 : box.top - hint.offsetHeight - 6}px`;
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(TEXTAREA|INPUT|SELECT|BUTTON)$/.test(event.target.tagName);
    if (event.key === "Enter" && event.ctrlKey && at("ask")) at("ask").requestSubmit();
    else if (!typing && result && event.key === " ") { event.preventDefault(); at("play").click(); }
    else if (!typing && result && event.key === "ArrowRight") forward();
  });
}

async function begin() {
  listen();
  if (saved) {
    at("model").textContent = saved.model;
    at("save").hidden = true;
    return show(saved);
  }
  at("ask").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  const suggest = () => {
    const unchanged = ["", ...Object.values(QUESTIONS)].includes(at("prompt").value);
    if (!unchanged) return;
    const mode = at("mode").value;
    at("prompt").value = QUESTIONS[mode];
    at("temperature").value = mode === "chat" ? 0 : 0.8;
    at("length").value = mode === "chat" ? 256 : 96;
  };
  at("mode").addEventListener("change", suggest);
  suggest();
  try {
    const model = (await call("v1/models")).data[0];
    at("model").textContent = model.id;
    at("mode").disabled = !model.chat;
    if (!model.chat) { at("mode").value = "text"; suggest(); }
    at("drafter").replaceChildren(...model.speculation.drafters.map((name) => made("option", {}, name)));
    const limit = () => { at("count").max = model.speculation.max_speculative_tokens[at("drafter").value]; };
    at("drafter").addEventListener("change", limit);
    limit();
    if (!model.speculation.traces) {
      at("run").disabled = true;
      say("this page shows traces of answers, and this server gives none; start it with --allow-traces", true);
    }
  } catch (error) {
    say(`${error.message}; reload the page when the server is ready`, true);
  }
}

begin();
