"use strict";
// What one looks for first: the figures of each run, their curves with advice, where the time goes, and samples.

const OUT_OF_ROOM = ["length", "tokens"];  // finish reasons of responses that were cut

function showOverview(main) {
  const labels = new Map(runs.flatMap((run) => Object.entries(run.figures)).filter(([, name]) => name !== "timing_s/step").map(([label, name]) => [name, label]));
  const told = runs.flatMap((run) => run.advice.map((each) => each.metric)).filter(Boolean);
  const charts = [...new Set([...labels.keys(), ...told])].map((name) => lazyChart(name, labels.get(name)));
  addAll(main, runs.map(figuresOf), make("div", { class: "charts" }, charts), runs.flatMap((run) => [...stagesOf(run), ...newestSamples(run)]));
}

/** Return the name of a run and its figures as cards. */
function figuresOf(run) {
  const { steps, values } = run.curves, total = run.total_steps ? ` / ${run.total_steps}` : "";
  const cards = [["state", run.state], ["step", `${steps.at(-1) ?? 0}${total}`],
    ...Object.entries(run.figures).map(([label, name]) => [label, formatNumber(values[name].findLast((value) => value !== null))])];
  return make("section", { "aria-label": run.name }, runs.length > 1 ? runHeading("h2", run) : null,
    make("dl", { class: "cards" }, cards.map(([label, value]) => make("div", {}, make("dt", {}, label), make("dd", {}, value)))),
    run.advice.length ? null : note("No finding: no metric is beyond its threshold."));
}

function runHeading(level, run, text) {
  const swatch = runs.length > 1 ? make("span", { class: "swatch", style: { background: run.color } }) : null;
  return make(level, {}, swatch, [text, runs.length > 1 || !text ? run.name : null].filter(Boolean).join(": "));
}

function adviceBox(run, each) {
  return make("div", { class: each.is_note ? "advice soft" : "advice" }, runHeading("h3", run, each.title), make("p", {}, each.seen), make("p", {}, each.why), make("p", {}, each.change));
}

/** Return the bar of a run's newest steps. */
function stagesOf(run) {
  const steps = run.timeline.filter((each) => each.step > 0);
  if (!steps.length) return [];
  const which = steps.length > 1 ? `mean of steps ${steps[0].step} to ${steps.at(-1).step}` : `step ${steps[0].step}`;
  return [runHeading("h2", run, "Time of a step"), splitBar(steps, which)];
}

/** Return the best, the worst and the newest cut response of the newest step that kept some, with their texts. */
function newestSamples(run) {
  const { samples } = run, newest = samples.at(-1)?.step;
  const scored = samples.flatMap((sample, place) => sample.step === newest && typeof sample.score === "number" ? [place] : []);
  const byScore = scored.sort((a, b) => samples[b].score - samples[a].score);
  const cut = samples.findLastIndex((sample, place) => OUT_OF_ROOM.includes(sample.finish_reason) && place !== byScore[0] && place !== byScore.at(-1));
  const shown = Object.entries({ best: byScore[0], worst: byScore.length > 1 ? byScore.at(-1) : -1, cut }).filter(([, place]) => place >= 0);
  const ofSamples = run.advice.filter((each) => !each.metric).map((each) => adviceBox(run, each));
  return [shown.length || ofSamples.length ? runHeading("h2", run, "Newest samples") : null, ...ofSamples,
    make("div", { class: "charts" }, shown.map(([kind, place]) => sampleCard(run, kind, place)))];
}

function sampleCard(run, kind, place) {
  const sample = run.samples[place];
  return make("section", { class: `chart sample ${kind}` },
    make("h3", {}, kind, make("span", { class: "note" }, [`score ${formatNumber(sample.score)}`, `${formatNumber(sample.length)} tokens`, sample.finish_reason, `step ${sample.step}`].filter(Boolean).join(", "))),
    textBlock(shortened(sample.prompt ?? ""), `prompt of the ${kind} response`),
    textBlock(shortened(sample.response || "(empty)"), `${kind} response`),
    make("button", { type: "button", class: "link", click: () => { chosen.run = runs.indexOf(run); openSample(place); } }, "all tokens"));
}

/** Return the start and the end of a long text. */
function shortened(text) {
  const most = 1200;
  return text.length > most ? `${text.slice(0, most / 2)}\n[… ${text.length - most} characters …]\n${text.slice(-most / 2)}` : text;
}
