"use strict";
// Asks the server the same thing twice, one after the other, shows both answers as they come, and replays them.

const at = (id) => document.getElementById(id);
const saved = window.SAVED_RESULT || null;
const SIDES = ["plain", "fast"];
const COLOURS = { ngram: "d0", suffix: "d1", prediction: "d2", recycling: "d4", rest: "d5" };
const colourOf = (drafter) => COLOURS[drafter] || "d3"; // Heads and draft models, of which a server has one
let result = null, player = null, stopping = null;
let remembered = 0; // Answers that the drafter's warm memory holds
const repeated = new Map(); // Tokens per pass of each run of a question, by all that was asked
const newSalt = () => `playground-${Math.random().toString(36).slice(2)}`;
const WARM = newSalt();

const LETTER = "Dear Mr Smith, thank you for you letter of 3 May. We has looked into the matter and found that the parcel were sent to the wrong adress. We are very sorry for this mistake. A new parcel will be send to you today, and it should arive on Friday.";
const ARTICLE = `The lighthouse of Port Ellis was built in 1846 from grey granite. It stands 31 metres high, and its lamp can be seen from 18 miles away. The first keeper was Anna Reed, who lived there with her two sons until 1871. In 1903 a storm broke the lamp, and the keeper burned his own furniture to keep a fire alight. The tower has been empty since 1984, when the lamp became automatic, and it opened as a museum in 1992.`;
const EXAMPLES = [
  {
    name: "Correct a letter", expect: "the completion repeats the prompt: drafting pays most", temperature: 0,
    chat: `Correct the spelling and grammar mistakes in this letter:\n\n${LETTER}`,
    text: `${LETTER}\n\nThe same letter, without its mistakes:\n\nDear Mr Smith, thank you`,
  },
  {
    name: "Summarise a text", expect: "names and phrases come back: it pays somewhat", temperature: 0,
    chat: `${ARTICLE}\n\nSummarise this text in three sentences.`,
    text: `${ARTICLE}\n\nIn short:`,
  },
  {
    name: "Invent a story", expect: "nothing to copy: it hardly pays", temperature: 0.8,
    chat: "Tell a short story about a robot who learns to paint.",
    text: "Once upon a time there was a robot who wanted to paint. One morning it",
  },
];

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
const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);
const counted = (count, what = "token") => `${count} ${what}${count === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;

// --- asking -----------------------------------------------------------------------------------------------------------

async function call(path, body, signal) {
  const headers = { "content-type": "application/json" };
  if (at("key").value) headers.authorization = `Bearer ${at("key").value}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body), signal } : { headers };
  const answer = await fetch(path, options);
  if (answer.ok) return answer;
  if (answer.status === 401) at("more").open = !(at("key-field").hidden = false);
  const { error } = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(error ? error.message : `the server responded with ${answer.status}`), { status: answer.status });
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const pieces = (rest + value).split("\n\n");
    rest = pieces.pop();
    for (const piece of pieces) if (piece !== "data: [DONE]") yield JSON.parse(piece.slice("data: ".length));
  }
}

const chosenMemory = () => document.querySelector("[name=memory]:checked").value;

// Each run has a salt of its own, so it finds nothing that earlier ones left; warm ones share theirs.
function requestBody(speculative, salt) {
  const asked = at("prompt").value;
  return {
    ...(at("mode").value === "chat" ? { messages: [{ role: "user", content: asked }] } : { prompt: asked }),
    max_tokens: Number(at("length").value),
    temperature: Number(at("temperature").value),
    seed: Number(at("seed").value),
    cache_salt: salt,
    speculative,
    stream: true,
    return_speculation_trace: true,
  };
}

async function write(side, speculative, salt) {
  const answer = result[side];
  const path = at("mode").value === "chat" ? "v1/chat/completions" : "v1/completions";
  at(side).classList.add("writing");
  try {
    for await (const event of events(await call(path, requestBody(speculative, salt), stopping.signal))) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) if (choice.speculation_trace) take(side, choice.speculation_trace);
      if (event.speculation_trace) finish(answer, event);
    }
  } finally {
    at(side).classList.remove("writing");
  }
}

async function run() {
  stop();
  const drafter = at("drafter").value, memory = chosenMemory(), count = at("count").value;
  const measured = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const asked = { drafter, memory, count: count ? Number(count) : null, temperature: Number(at("temperature").value) };
  result = { plain: emptyAnswer(), fast: emptyAnswer(), ...asked, earlier: remembered, measured, model: at("model").textContent };
  const question = JSON.stringify([drafter, memory, count, requestBody(null, null)]);
  stopping = new AbortController();
  busy(true);
  clear();
  try {
    say("Plain decoding ...");
    await write("plain", { enabled: false }, newSalt());
    say("Speculative decoding ...");
    if (memory === "warm") remembered += 1;
    await write("fast", { drafter, ...(count ? { num_speculative_tokens: Number(count) } : {}) }, memory === "warm" ? WARM : newSalt());
    result.runs = [...(repeated.get(question) || []), figures(result.fast).tokensPerPass];
    repeated.set(question, result.runs);
    say("");
  } catch (error) {
    if (error.name === "AbortError") say(stopped(result));
    else say(error.message, true);
  } finally {
    busy(false);
    note();
    if (result.fast.moments.length > 1) show(result);
    else at("fast").dataset.waiting = "speculative decoding did not run";
    if (!result.plain.moments.length) at("result").hidden = true; // The prompt was refused
  }
}

const stopped = ({ plain, fast }) => {
  if (fast.moments.length > 1) return "Stopped. What was written until then is compared.";
  if (plain.finished) return "Stopped as speculative decoding began: there is nothing to compare yet.";
  if (!plain.moments.length) return "Stopped before anything was written.";
  return "Stopped during plain decoding: speculative decoding did not run, so there is nothing to compare.";
};

function busy(running) {
  at("run").disabled = running;
  at("stop").disabled = !running;
  at("result").setAttribute("aria-busy", running);
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function note() {
  at("memory-note").textContent = chosenMemory() === "cold"
    ? "Cold: both runs start without anything that earlier completions left in the drafter's memory. How much is drafted follows the times that were measured: run again to see how far that varies."
    : `Warm: the drafter also copies from ${remembered ? `the ${counted(remembered, "completion")} that it wrote` : "what it writes"} warm on this page. The same prompt again is then easy.`;
}

// --- reading ----------------------------------------------------------------------------------------------------------

// An answer as moments, one for each pass of the model: what it brought, what was drafted for it, and how long it took.
const emptyAnswer = () => ({ moments: [], finished: false });

function take(side, part) {
  const [step = null] = part.steps;
  if (!step && !part.tokens.length) return;
  const ms = step ? step.draft_ms + step.verify_ms + step.commit_ms : 0;
  const moment = { tokens: part.tokens, nodes: step ? step.nodes : [], step, ms };
  result[side].moments.push(moment);
  append(side, moment);
  tell(result);
}

function finish(answer, event) {
  answer.counts = event.metrics.speculative_decoding;
  answer.moments[0].ms = event.speculation_trace[0].first_token_ms;
  answer.finished = true;
}

const tokensOf = (answer) => answer.moments.flatMap((moment) => moment.tokens);
const acceptedIn = (moment) => moment.tokens.filter((token) => token.source === "draft").length;

// What both the page and its advice read off an answer; speeds leave out the pass over the prompt.
function figures(answer) {
  const later = answer.moments.slice(1), tokens = tokensOf(answer).length;
  const ms = sum(later.map((moment) => moment.ms));
  const drafted = sum(later.map((moment) => moment.nodes.filter((node) => !node.probe).length));
  return {
    tokens, passes: answer.moments.length, drafted, accepted: sum(later.map(acceptedIn)),
    tokensPerPass: tokens / Math.max(1, answer.moments.length),
    perSecond: ms ? (1000 * sum(later.map((moment) => moment.tokens.length))) / ms : 0,
    msPerPass: ms / Math.max(1, later.length),
  };
}

// Every token was either drafted, by somebody, or it is the one that each pass gives by itself.
function origins(answer) {
  const found = new Map();
  for (const moment of answer.moments) {
    if (!moment.nodes.length) continue;
    const name = moment.step.drafter;
    const one = found.get(name) || { name, passes: 0, drafted: 0, accepted: 0 };
    found.set(name, { name, passes: one.passes + 1, accepted: one.accepted + acceptedIn(moment),
      drafted: one.drafted + moment.nodes.filter((node) => !node.probe).length });
  }
  return [...found.values()].sort((one, other) => (colourOf(one.name) + one.name).localeCompare(colourOf(other.name) + other.name));
}

// --- showing ----------------------------------------------------------------------------------------------------------

function clear() {
  at("result").hidden = false;
  at("after").hidden = true;
  at("plain").dataset.waiting = "";
  at("fast").dataset.waiting = "waits for plain decoding: one after the other, so that neither slows the other down";
  for (const side of SIDES) {
    at(side).replaceChildren();
    at(`${side}-bar`).style.width = 0;
    at(`${side}-count`).textContent = at(`${side}-speed`).textContent = "";
  }
  at("lead-figure").textContent = "–";
  tell(result);
  if (matchMedia("(max-width: 40rem)").matches) at("status").scrollIntoView();
  else at("panes").scrollIntoView({ block: "nearest" });
}

// The figures, as far as there are any.
function tell(found) {
  const numbers = { plain: figures(found.plain), fast: figures(found.fast) };
  const most = Math.max(...SIDES.map((side) => numbers[side].perSecond), 1e-9);
  for (const side of SIDES) {
    const { tokens, passes, perSecond } = numbers[side];
    at(`${side}-bar`).style.width = `${(100 * perSecond) / most}%`;
    at(`${side}-speed`).textContent = perSecond ? `${perSecond.toFixed(1)} tokens/s` : "";
    at(`${side}-count`).textContent = passes ? `${counted(tokens)}, ${counted(passes, "pass")}` : "";
  }
  if (numbers.fast.passes > 1) at("lead-figure").textContent = numbers.fast.tokensPerPass.toFixed(2);
  at("verdict").textContent = numbers.fast.passes > 1 ? verdict(found) : "Plain decoding: a pass of the model for each token.";
  const drafters = origins(found.fast).map(({ name }) => made("span", { class: `token accepted ${colourOf(name)}` }, name));
  at("drafters").replaceChildren(...drafters.flatMap((chip) => [chip, " "]), drafters.length ? "drafted, and accepted by the model" : "nothing drafted yet");
  at("facts").replaceChildren(...facts(found, speedUp(found)).map(([text, kind]) => made("li", { class: kind }, text)));
}

function show(found) {
  result = found;
  at("result").hidden = at("after").hidden = false;
  stop();
  for (const side of SIDES) at(side).replaceChildren();
  for (const side of SIDES) for (const moment of found[side].moments) append(side, moment);
  tell(found);
  drawOrigins(found.fast);
  drawAdvice(found);
  drawRuler(found.fast);
  drawPositions(found.fast);
  const sizes = found.fast.moments.map((moment) => moment.tokens.length);
  choose(sizes.indexOf(Math.max(...sizes)));
  for (const side of SIDES) at(side).scrollTop = 0;
}

// Of several runs of one question: what is drafted depends on times, so that one run alone says little on a busy machine.
function spread(runs) {
  const sorted = [...runs].sort((one, other) => one - other), last = sorted.length - 1;
  const middle = (sorted[Math.floor(last / 2)] + sorted[Math.ceil(last / 2)]) / 2;
  return `${runs.length} runs: ${sorted[0].toFixed(2)} to ${sorted[last].toFixed(2)} tokens per pass, median ${middle.toFixed(2)}`;
}

const speedUp = (found) => (found.fast.moments.length > 1 ? figures(found.fast).perSecond / figures(found.plain).perSecond : NaN);
const NOISE = 0.05; // Two runs of the same thing differ by that much
const passRatio = (found) => figures(found.fast).msPerPass / figures(found.plain).msPerPass;

// What drafting changed: it makes no pass cheaper, so a pass that took less time than a plain one did so by chance, and
// so did every pass of a run without drafts.
const gain = (found) => (figures(found.fast).drafted ? speedUp(found) * Math.min(1, passRatio(found)) : 1);
const isNoise = (found) => Math.abs(gain(found) - 1) <= NOISE;

function verdict(found) {
  const { tokens, passes, drafted } = figures(found.fast), ratio = `${passRatio(found).toFixed(2)} x`;
  const wrote = `The model wrote ${counted(tokens)} in ${counted(passes, "pass")}` + (passes < tokens ? ` instead of ${tokens}. ` : ", one for each. ");
  if (!drafted) return `${wrote}Nothing was drafted, so what differs between the speeds is the noise of one run.`;
  const pace = isNoise(found) ? "no faster and no slower" : `${speedUp(found).toFixed(2)} x as fast`;
  const took = passRatio(found) < 1 ? `A pass took as long as a plain one (${ratio}, within the noise of one run)` : `A pass took ${ratio} as long as a plain one, drafting included`;
  return `${wrote}${took}, so the text came ${pace}.`;
}

// What is true of both runs; the last two are known before they have begun.
function facts(found, faster) {
  const { accepted, drafted } = figures(found.fast);
  const lossy = found.fast.moments.find((moment) => moment.step && !moment.step.lossless);
  const ids = SIDES.map((side) => tokensOf(found[side]).map((token) => token.id));
  const length = Math.min(ids[0].length, ids[1].length), whole = SIDES.every((side) => found[side].finished);
  const same = ids[0].slice(0, length).join() === ids[1].slice(0, length).join() && (!whole || ids[0].length === ids[1].length);
  const memory = found.memory === "cold" ? "cold" : `warm: knew ${counted(found.earlier, "earlier completion")}`;
  const setting = [[memory, found.memory === "cold" ? "" : "bad"], [`${found.drafter}, ${found.measured}, one run after the other`, ""]];
  if (!Number.isFinite(faster)) return setting;
  return [
    [`${faster.toFixed(2)} x the plain speed${isNoise(found) ? ", within noise" : ""}`, isNoise(found) ? "" : gain(found) > 1 ? "good" : "bad"],
    same ? ["same text, token by token", "good"]
      : found.temperature === 0 ? ["different text", "bad"]
        : lossy ? [`another distribution: the rule ${lossy.step.rule} is lossy`, "bad"] : ["sampled: another text of the same distribution", ""],
    ...((found.runs || []).length > 1 ? [[spread(found.runs), ""]] : []),
    [drafted ? `${accepted} of ${counted(drafted, "drafted token")} accepted` : "nothing was drafted", ""],
    ...setting,
  ];
}

const tint = (moment) => (moment.nodes.length ? colourOf(moment.step.drafter) : "");

function append(side, moment) {
  const pane = at(side), colour = tint(moment), number = result[side].moments.indexOf(moment);
  const below = pane.scrollHeight - pane.scrollTop - pane.clientHeight < 40;
  const path = moment.nodes.filter((node) => node.accepted);
  const spans = moment.tokens.map((token, index) => {
    const drafted = token.source === "draft";
    return shown(token.text, drafted ? `accepted ${colour}` : token.source, moment, drafted ? path[index] : null);
  });
  const ghosts = moment.nodes.filter((node) => !node.accepted && !node.probe).slice(0, 12);
  spans.push(...ghosts.map((node) => shown(folded(node.text), "rejected", moment, node)));
  for (const span of spans) span.dataset.pass = number;
  pane.append(...spans);
  if (below) pane.scrollTop = pane.scrollHeight; // unless the reader has scrolled back
}

// A token that was not accepted must not break the lines of those that were.
const folded = (text) => text.replace(/\n+/g, "↵").replace(/[ \t]{2,}/g, "␣");

function shown(text, kind, moment, node) {
  const span = made("span", { class: `token ${kind}` }, text);
  span.dataset.hint = hintOf(kind.split(" ")[0], moment, node);
  return span;
}

function hintOf(kind, moment, node) {
  const { step, ms } = moment;
  const lines = [(kind === "target" ? "plain" : kind) + (step ? `, pass ${step.step + 1}, ${ms.toFixed(1)} ms` : ", by the pass over the prompt")];
  if (node) lines.push(`drafted by ${step.drafter}`);
  if (node && node.draft_prob !== null) lines.push(`draft probability ${node.draft_prob.toFixed(3)}`);
  if (node && node.target_prob !== null) lines.push(`target probability ${node.target_prob.toFixed(3)}`);
  return lines.join("\n");
}

function drawOrigins(answer) {
  const { tokens, passes } = figures(answer), found = origins(answer);
  const own = tokens - sum(found.map((one) => one.accepted));
  const share = (count) => `${((100 * count) / tokens).toFixed(0)} %`;
  const stack = made("div", { id: "stack", "aria-hidden": true }, made("i", { style: `flex:${own}` }),
    ...found.filter((one) => one.accepted).map((one) => made("i", { style: `flex:${one.accepted}`, class: colourOf(one.name) })));
  const line = (kind, cells) => made("tr", {}, ...cells.map((cell, index) => made("td", index === 2 ? { class: "share" } : {}, ...(index ? [] : [made("i", { class: `swatch ${kind}` })]), `${cell}`)));
  const head = made("tr", {}, ...["", "tokens", "share", "drafted", "accepted", "passes"].map((name) => made("th", { scope: "col", class: name }, name)));
  at("origins").replaceChildren(stack, made("table", {}, head, line("", ["the model", own, share(own), "", "", passes]),
    ...found.map((one) => line(colourOf(one.name), [one.name, one.accepted, share(one.accepted), one.drafted,
      one.drafted ? `${Math.round((100 * one.accepted) / one.drafted)} %` : "", one.passes]))));
}

// What is worth trying next, by what was just seen: [why, what the button says, what it changes].
function advice(found, offered) {
  const fast = figures(found.fast), faster = gain(found), options = [];
  const drafts = sum(origins(found.fast).map((one) => one.passes));
  const depth = Math.max(0, ...found.fast.moments.map((moment) => moment.nodes.length ? moment.tokens.length : 0));
  if (fast.drafted > 3 * drafts && fast.drafted >= fast.passes && faster < 1 - NOISE)
    options.push(["The passes got longer by more than the drafts saved. Draft less per pass.", "Draft at most 3", { count: 3 }]);
  if (found.drafter !== "auto" && offered.includes("auto") && faster < 2)
    options.push(["Another drafter may know more of this text. auto chooses among those that copy, or none, by what passes cost here.", "Run with auto", { drafter: "auto" }]);
  if (found.count && depth > found.count && faster > 1)
    options.push([`Whole drafts of ${found.count} were accepted. Longer ones may bring more.`, "No limit", { count: "" }]);
  if (found.temperature > 0 && fast.accepted < fast.drafted / 2)
    options.push([`At temperature ${found.temperature} a draft is accepted less often: the model samples.`, "Temperature 0", { temperature: 0 }]);
  if (fast.tokensPerPass < 1.2 && !Object.values(EXAMPLES[0]).includes(at("prompt").value))
    options.push(["This completion repeats little that could be copied. See one that does.", `Run “${EXAMPLES[0].name}”`, { example: 0 }]);
  if (found.memory === "cold" && fast.drafted)
    options.push(["A server gets the same prompts again. Let the drafter remember its completions on this page, and run this twice.", "Run warm", { memory: "warm" }]);
  if (found.memory === "warm")
    options.push([found.earlier ? "Part of this gain is that the drafter had seen such a completion. Without:" : "The drafter has now seen this completion. With that:",
      found.earlier ? "Run cold" : "Run again", { memory: found.earlier ? "cold" : "warm" }]);
  return options.slice(0, 3);
}

function drawAdvice(found) {
  const offered = [...at("drafter") ? at("drafter").options : []].map((option) => option.value);
  at("advice").replaceChildren(...advice(found, offered).map(([why, label, change]) =>
    made("li", {}, why, ...(saved ? [] : [made("button", { type: "button", onclick: () => { apply(change); at("ask").requestSubmit(); } }, label)]))));
}

function apply({ example, memory, ...values }) {
  if (example !== undefined) useExample(EXAMPLES[example]);
  if (memory) document.querySelector(`[name=memory][value=${memory}]`).checked = true;
  for (const [id, value] of Object.entries(values)) at(id).value = value;
  if ("count" in values) at("more").open = true;
  limit();
  note();
}

function drawRuler(answer) {
  const most = Math.max(...answer.moments.map((moment) => moment.tokens.length), 1);
  at("ruler").replaceChildren(...answer.moments.map((moment, index) => made("button", {
    type: "button", class: tint(moment), style: `height:${(100 * moment.tokens.length) / most}%`, tabindex: -1,
    "aria-label": `pass ${index + 1}: ${counted(moment.tokens.length)}`, "data-hint": `pass ${index + 1}: ${counted(moment.tokens.length)}`,
    onclick: () => choose(index), onfocus: () => choose(index),
  })));
}

function drawPositions(answer) {
  const depths = answer.moments.filter((moment) => moment.nodes.length).map((moment) => {
    const depth = [0];
    moment.nodes.forEach((node, index) => { depth[index + 1] = node.probe ? 0 : depth[node.parent] + 1; });
    return { tried: Math.max(...depth), kept: acceptedIn(moment) };
  });
  const rows = [];
  for (let place = 1; place <= Math.max(0, ...depths.map((one) => one.tried)); place += 1) {
    const tried = depths.filter((one) => one.tried >= place).length, kept = depths.filter((one) => one.kept >= place).length;
    rows.push(made("div", { class: "bar" }, `${place}`, made("i", {}, made("b", { style: `width:${(100 * kept) / tried}%` })), made("span", {}, `${kept} of ${tried}`)));
  }
  at("positions").replaceChildren(...(rows.length ? rows : ["nothing was drafted"]));
}

function choose(index) {
  const moment = result.fast.moments[index];
  [...at("ruler").children].forEach((bar, other) => {
    bar.setAttribute("aria-current", other === index);
    if (other === index) at("ruler").scrollLeft = bar.offsetLeft - at("ruler").offsetLeft - at("ruler").clientWidth / 2;
    bar.tabIndex = other === index ? 0 : -1; // One stop for the tabulator; the arrows go from pass to pass
  });
  for (const token of document.querySelectorAll("#fast .chosen")) token.classList.remove("chosen");
  for (const token of document.querySelectorAll(`#fast [data-pass="${index}"]`)) token.classList.add("chosen");
  const who = moment.nodes.length ? `, drafted by ${moment.step.drafter}` : index ? ", nothing drafted" : ", the prompt's";
  at("step-title").textContent = `Pass ${index + 1}: ${counted(moment.tokens.length)}${who}`;
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
  const ended = last && last.source !== "draft";
  // What is deeper than the box is wide goes on below: a chain of sixteen would be cut at the edge.
  const across = Math.max(2, Math.floor(((at("tree").clientWidth || 800) - 16) / wide));
  const below = rows + (ended ? 2 : 1), folds = (index) => Math.floor(depth[index] / across);
  const x = (index) => 8 + (depth[index] % across) * wide, y = (index) => 8 + (folds(index) * below + row[index]) * high;
  nodes.forEach((node, index) => {
    if (!index) return;
    const kind = node.accepted ? "accepted" : "", from = { x: x(node.parent) + 86, y: y(node.parent) + 13 }, to = { x: x(index), y: y(index) + 13 };
    const lines = folds(node.parent) === folds(index) ? [[from, to]] : [[from, { ...from, x: from.x + 14 }], [{ ...to, x: to.x - 8 }, to]];
    for (const [one, other] of lines) parts.push(svg("line", { x1: one.x, y1: one.y, x2: other.x, y2: other.y, class: kind }));
  });
  nodes.forEach((node, index) => parts.push(box(x(index), y(index), index ? node.text : "root", index ? (node.accepted ? `accepted ${tint(moment)}` : "rejected") : "", index ? hintOf(node.accepted ? "accepted" : "rejected", moment, node) : "")));
  const deepest = Math.max(...depth);
  if (ended) {
    const end = Math.max(0, ...nodes.map((node, index) => (node.accepted ? index : 0)));
    const under = 8 + (folds(end) * below + rows + 1) * high;
    parts.push(svg("line", { x1: x(end) + 43, y1: y(end) + 26, x2: x(end) + 43, y2: under, class: "accepted" }));
    parts.push(box(x(end), under, last.text, last.source, hintOf(last.source, moment, null)));
  }
  const size = { width: 16 + Math.min(deepest + 1, across) * wide, height: 16 + (Math.floor(deepest / across) + 1) * below * high };
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
  for (const side of SIDES) at(side).replaceChildren();
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

// When a pass was over, ms from the beginning of its answer.
const over = (side, index) => sum(result[side].moments.slice(0, index + 1).map((moment) => moment.ms));

function reveal() {
  for (const side of SIDES) {
    const moments = result[side].moments;
    while (player.next[side] < moments.length && over(side, player.next[side]) <= player.clock) {
      append(side, moments[player.next[side]]);
      if (side === "fast") choose(player.next[side]);
      player.next[side] += 1;
    }
  }
}

const finished = () => SIDES.every((side) => player.next[side] >= result[side].moments.length);

function pause() {
  player.playing = !player.playing;
  at("play").textContent = player.playing ? "Pause" : "Go on";
  player.from = performance.now();
  if (player.playing) player.frame = requestAnimationFrame(tick);
}

function forward() {
  if (!player) start();
  if (player.playing) pause();
  const times = SIDES.filter((side) => player.next[side] < result[side].moments.length).map((side) => over(side, player.next[side]));
  if (!times.length) return stop();
  player.clock = Math.min(...times);
  reveal();
  if (finished()) stop();
}

function stop() {
  if (player) cancelAnimationFrame(player.frame);
  player = null;
  at("play").textContent = "Replay side by side";
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
  at("details").addEventListener("change", () => document.body.classList.toggle("details", at("details").checked));
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
  document.addEventListener("scroll", () => { at("hint").hidden = true; }, true);
  at("ruler").addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const bar = next && event.target[next];
    if (bar) bar.focus();
  });
  document.addEventListener("keydown", (event) => {
    const typing = /^(TEXTAREA|INPUT|SELECT|BUTTON|SUMMARY)$/.test(event.target.tagName);
    const ready = !typing && result && !at("after").hidden;
    if (event.key === "Enter" && event.ctrlKey && at("ask") && !at("run").disabled) at("ask").requestSubmit();
    else if (event.key === "Escape" && stopping) stopping.abort();
    else if (ready && event.key === " ") { event.preventDefault(); at("play").click(); }
    else if (ready && event.key === "ArrowRight") forward();
  });
}

function useExample(example) {
  at("prompt").value = example[at("mode").value];
  at("temperature").value = example.temperature;
  markExample();
}

function markExample() {
  [...at("examples").children].forEach((button, index) =>
    button.setAttribute("aria-pressed", Object.values(EXAMPLES[index]).includes(at("prompt").value)));
}

let limits = {};
const limit = () => { at("count").max = limits[at("drafter").value]; };

function listenToForm() {
  at("ask").addEventListener("submit", (event) => { event.preventDefault(); run(); });
  at("stop").addEventListener("click", () => stopping.abort());
  at("drafter").addEventListener("change", limit);
  at("memory").addEventListener("change", note);
  at("prompt").addEventListener("input", markExample);
  at("examples").append(...EXAMPLES.map((example) =>
    made("button", { type: "button", onclick: () => useExample(example) }, example.name, made("small", {}, example.expect))));
  at("mode").addEventListener("change", () => {
    const shown = EXAMPLES.find((example) => Object.values(example).includes(at("prompt").value));
    if (shown) useExample(shown);
  });
}

async function begin() {
  listen();
  if (saved) {
    at("model").textContent = saved.model;
    at("save").hidden = true;
    return show(saved);
  }
  listenToForm();
  useExample(EXAMPLES[0]);
  note();
  at("run").disabled = true;
  meet();
}

// Ask the server what it has; one that still loads its model is asked again.
async function meet() {
  try {
    const model = (await (await call("v1/models")).json()).data[0];
    at("model").textContent = `${model.id}, ${model.runs_as}`;
    at("mode").disabled = !model.chat;
    if (!model.chat) { at("mode").value = "text"; useExample(EXAMPLES[0]); }
    limits = model.speculation.max_speculative_tokens;
    at("drafter").replaceChildren(...model.speculation.drafters.map((name) => made("option", {}, name)));
    limit();
    at("run").disabled = !model.speculation.traces;
    say(model.speculation.traces ? "" : "This page shows traces of completions, and this server gives none: start it with --allow-traces.", !model.speculation.traces);
    if (!model.speculation.traces) at("ask").before(at("status")); // Above what cannot be used
  } catch (error) {
    const loading = error.status === 503;
    say(loading ? "The model is being loaded ..." : error.message, !loading);
    if (loading) setTimeout(meet, 1000);
    else if (error.status === 401) at("key").addEventListener("change", meet, { once: true });
  }
}

begin();
