"use strict";
// One response: its conversation, its tokens colored by a number, and the other responses to its prompt beside it.

const NUMBERS_OF_TOKENS = [
  ["log_probs", "log-prob", (t, i) => at(t.log_probs, i)],
  ["advantages", "advantage", (t, i) => at(t.advantages, i)],
  ["ratio", "importance ratio, trainer / rollout", (t, i) => exp(at(t.old_log_probs, i), at(t.log_probs, i))],
  ["mismatch", "log-prob mismatch, trainer - rollout", (t, i) => less(at(t.old_log_probs, i), at(t.log_probs, i))],
  ["reference", "ratio to the reference policy", (t, i) => exp(at(t.old_log_probs ?? t.log_probs, i), at(t.ref_log_probs, i))],
  ["weights", "importance weight", (t, i) => at(t.weights, i)],
  ["versions", "version of the weights", (t, i) => at(t.versions, i)],
];

/** Return a number of a token: a list of one is that of all tokens; texts are numbers that are not finite. */
function at(list, i) {
  if (!list || !list.length) return null;
  const value = list.length === 1 ? list[0] : list[i];
  return value === undefined ? null : value;
}
function less(a, b) { return typeof a === "number" && typeof b === "number" ? a - b : null; }
function exp(a, b) { const d = less(a, b); return d === null ? null : Math.exp(d); }

function openSample(place) {
  Object.assign(chosen, { tab: "rollouts", sample: place });
  show();
  document.getElementById("back")?.focus();
}

function closeSample() {
  const place = chosen.sample;
  chosen.sample = null;
  show();
  const run = theRun(), text = oneLine(run.samples[place]?.response || "", 60);
  [...document.querySelectorAll("#responses td.response .link")].find((link) => link.textContent === text)?.focus();
}

function showSample(main, place) {
  const run = theRun(), sample = run.samples[place];
  if (!sample) { chosen.sample = null; showRollouts(main); return; }
  const others = run.samples.flatMap((other, i) => other.prompt_id === sample.prompt_id && sample.prompt_id !== undefined ? [i] : []);
  const beside = others.filter((i) => run.samples[i].step === sample.step);
  const earlier = others.filter((i) => run.samples[i].step !== sample.step);
  const hasTokens = beside.concat(place).some((i) => run.samples[i].tokens);
  const available = NUMBERS_OF_TOKENS.filter(([, , of]) => beside.concat(place).some((i) => run.samples[i].tokens && of(run.samples[i].tokens, 0) !== null));
  if (available.length && !available.some(([key]) => key === chosen.color)) chosen.color = available[0][0];
  addAll(main,
    make("div", { class: "tools" },
      make("button", { type: "button", id: "back", click: closeSample }, "back to the table"),
      make("button", { type: "button", disabled: place === 0, click: () => openSample(place - 1) }, "previous"),
      make("button", { type: "button", disabled: place + 1 >= run.samples.length, click: () => openSample(place + 1) }, "next"),
      available.length ? choice("color of tokens", available.map(([key, label]) => [key, label]), chosen.color, (value) => { chosen.color = value; show(); }) : null),
    make("h2", {}, `Step ${sample.step}, row ${sample.row}`),
    table("facts of the response", ["score", "length", "finish reason", "data source", "reward failed", "staleness", "weight version", "prompt"],
      [[sample.score ?? "–", sample.length ?? "–", sample.finish_reason ?? "–", oneLine(sample.data_source ?? "–", 60), sample.failed || "no",
        sample.staleness ?? "–", at(sample.tokens?.versions, 0) ?? "–", sample.prompt_id ? promptLink(run, sample.prompt_id) : "–"]]),
    make("h3", {}, "Prompt"), textBlock(sample.prompt ?? "", "prompt"),
    sample.rendered_prompt !== undefined && sample.rendered_prompt !== sample.prompt
      ? make("details", {}, make("summary", {}, "as the model reads it"), textBlock(sample.rendered_prompt, "rendered prompt")) : null,
    make("h3", {}, "Ground truth"), textBlock(typeof sample.ground_truth === "string" ? sample.ground_truth : JSON.stringify(sample.ground_truth), "ground truth"),
    make("h3", {}, beside.length > 1 ? `${beside.length} responses to this prompt in this step` : "Response"),
    hasTokens ? scaleOf(beside.length ? beside : [place]) : null,
    make("div", { class: "sides", tabindex: "0", role: "region", "aria-label": "responses to the prompt" },
      (beside.length ? beside : [place]).map((i) => sideOf(run, i, i === place))),
    groupTable(run, sample),
    earlier.length ? make("h3", {}, "The same prompt at other steps") : null,
    earlier.length ? table("the same prompt at other steps", ["step", "score", "length", "response"], earlier.map((i) => [run.samples[i].step,
      run.samples[i].score ?? "–", run.samples[i].length ?? "–",
      make("button", { type: "button", class: "link", click: () => openSample(i) }, oneLine(run.samples[i].response || "", 80) || "(empty)")])) : null);
}

function sideOf(run, place, isOwn) {
  const sample = run.samples[place];
  const title = `row ${sample.row}: score ${formatNumber(sample.score)}, ${formatNumber(sample.length)} tokens`;
  const head = isOwn ? make("strong", {}, title) : make("button", { type: "button", class: "link", click: () => openSample(place) }, title);
  return make("section", { class: isOwn ? "side own" : "side", "aria-label": title }, head,
    sample.tokens ? tokensOf(sample) : null,
    make("details", { open: !sample.tokens }, make("summary", {}, "text"), textBlock(sample.response ?? "", "response")));
}

function theNumber() {
  return NUMBERS_OF_TOKENS.find(([key]) => key === chosen.color) ?? NUMBERS_OF_TOKENS[0];
}

function rangeOf(places) {
  const [key, , of] = theNumber();
  let low = Infinity, high = -Infinity;
  for (const place of places) {
    const { tokens } = theRun().samples[place];
    for (let i = 0; tokens && i < tokens.ids.length; i++) {
      const value = of(tokens, i);
      if (typeof value === "number") { low = Math.min(low, value); high = Math.max(high, value); }
    }
  }
  if (low > high) return [0, 0, 0];
  const middle = { advantages: 0, mismatch: 0, ratio: 1, reference: 1, weights: 1 }[key];
  if (middle === undefined) return [low, null, high];
  const width = Math.max(Math.abs(low - middle), Math.abs(high - middle)) || 1;
  return [middle - width, middle, middle + width];
}

let tokenRange = [0, null, 0];

function scaleOf(places) {
  tokenRange = rangeOf(places);
  const [low, , high] = tokenRange, [, label] = theNumber();
  const stops = [0, 0.25, 0.5, 0.75, 1].map((part) => colorAt(low + part * (high - low)));
  return make("p", { class: "note scale" }, `${label}: ${formatNumber(low)}`,
    make("i", { style: { background: `linear-gradient(90deg, ${stops.join(",")})` } }), formatNumber(high));
}

/** Return a light background, on which dark text has contrast in both themes: red below, white, blue above. */
function colorAt(value) {
  const [low, middle, high] = tokenRange;
  if (typeof value !== "number" || high <= low) return "#eceff3";
  if (middle === null) {
    const part = (value - low) / (high - low);
    return `rgb(${Math.round(255 - 15 * part)}, ${Math.round(170 + 75 * part)}, ${Math.round(140 + 110 * part)})`;
  }
  const part = Math.max(-1, Math.min(1, (value - middle) / (high - middle)));
  return part < 0 ? `rgb(255, ${Math.round(245 + 85 * part)}, ${Math.round(240 + 110 * part)})`
    : `rgb(${Math.round(245 - 105 * part)}, ${Math.round(248 - 48 * part)}, 255)`;
}

/** Move the focus to the tokens of the opened response. */
function focusTokens() {
  document.querySelector(".side.own .token[tabindex='0']")?.focus();
}

/** Return the tokens of a response; the arrow keys go from one to the next, and the line below tells its numbers. */
function tokensOf(sample) {
  const { tokens } = sample, [, , of] = theNumber();
  const details = make("p", { class: "note", role: "status" }, "a token's numbers: choose it by mouse or arrow keys");
  const tell = (i) => {
    const numbers = NUMBERS_OF_TOKENS.map(([, label, read]) => [label, read(tokens, i)]).filter(([, value]) => value !== null);
    const masked = at(tokens.mask, i) === false ? ", not trained (mask)" : "";
    details.textContent = `token ${i + 1}, id ${tokens.ids[i]}, ${JSON.stringify(visible(tokens.texts[i]))}: ` +
      numbers.map(([label, value]) => `${label} ${formatNumber(value)}`).join(", ") + masked;
  };
  const spans = tokens.ids.map((_, i) => make("span", {
    class: at(tokens.mask, i) === false ? "token unmasked" : "token", "data-i": i, role: "option", "aria-selected": "false", tabindex: i ? "-1" : "0",
    style: { background: at(tokens.mask, i) === false ? "" : colorAt(of(tokens, i)) },
  }, visible(tokens.texts[i]) || "∅"));
  const focus = (i) => {
    if (i < 0 || i >= spans.length) return;
    for (const span of spans) { span.tabIndex = -1; span.setAttribute("aria-selected", "false"); }
    spans[i].tabIndex = 0;
    spans[i].setAttribute("aria-selected", "true");
    spans[i].focus();
    tell(i);
  };
  const own = (event) => Number(event.target.closest?.(".token")?.dataset.i ?? -1);
  const box = make("div", { class: "tokens", dir: "auto", role: "listbox", "aria-label": "tokens",
    click: (event) => focus(own(event)), mouseover: (event) => { if (own(event) >= 0) tell(own(event)); },
    focusin: (event) => { if (own(event) >= 0) tell(own(event)); },
    keydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
      if (step && own(event) >= 0) { event.preventDefault(); focus(Math.max(0, Math.min(spans.length - 1, own(event) + step))); }
    } }, spans);
  const missing = (sample.length ?? tokens.ids.length) - tokens.ids.length;
  return make("div", {}, box, missing > 0 ? note(`${missing} further tokens have no numbers (trainer.log_tokens)`) : null, details);
}

/** Return the numbers of all responses to the prompt in its step, also of those that were not kept. */
function groupTable(run, sample) {
  const { rollouts } = run, own = run.rowOf[run.samples.indexOf(sample)];
  if (!(own >= 0) || rollouts.group[own] < 0) return null;
  const rows = rollouts.step.flatMap((step, i) => step === sample.step && rollouts.group[i] === rollouts.group[own] ? [i] : []);
  if (rows.length < 2) return null;
  return make("details", {}, make("summary", {}, `numbers of all ${rows.length} responses to this prompt`),
    table("responses to this prompt", ["row", "score", "length", "finish reason"], rows.map((i) => ({
      differs: i === own,
      cells: [rollouts.row[i], rollouts.score[i] ?? "–", rollouts.length[i] ?? "–", rollouts.texts.finish_reason[rollouts.finish_reason[i]] || "–"],
    }))));
}
