"use strict";
// The runs of the page, and what the reader has chosen. `chosen` survives a change of the data in a live page.

const COLORS = ["#2b7cc9", "#c2410c", "#15803d", "#9333ea", "#b45309", "#0e7490", "#be185d", "#4d7c0f"];

const chosen = {
  tab: "overview", run: 0, smoothing: null, axis: "step", metric: "", page: 0, sort: "step", ascending: false, sample: null,
  color: "log_probs", step: null,
  filters: { step: "", prompt_id: "", data_source: "", finish_reason: "", failed: "", low: "", high: "", stale: "", kept: "", text: "" },
};

let runs = [], metrics = {};

function useData(data) {
  const open = chosen.sample === null ? null : theRun().samples[chosen.sample];
  metrics = data.metrics;
  runs = data.runs.map((run, index) => prepare(run, index));
  if (chosen.run >= runs.length) chosen.run = 0;
  if (open) chosen.sample = placeOf(theRun(), open.step, open.row) ?? theRun().samples.push(open) - 1;  // newer data may not keep it
}

/** Return the place of a kept response, null if it is not kept. */
function placeOf(run, step, row) {
  const place = run.samples.findIndex((sample) => sample.step === step && sample.row === row);
  return place < 0 ? null : place;
}

/** Add what the page looks up often: the color, the texts of prompts, and for each row of `rollouts` its sample, -1 without one. */
function prepare(run, index) {
  const { step, row } = run.rollouts;
  const places = new Map(run.samples.map((sample, place) => [`${sample.step}/${sample.row}`, place]));
  run.sampleOf = Int32Array.from(step, (each, i) => places.size ? places.get(`${each}/${row[i]}`) ?? -1 : -1);
  run.rowOf = new Int32Array(run.samples.length).fill(-1);
  run.sampleOf.forEach((place, i) => { if (place >= 0) run.rowOf[place] = i; });
  run.promptOf = new Map(run.samples.map((sample) => [sample.prompt_id, sample.prompt]));
  run.color = COLORS[index % COLORS.length];
  return run;
}

function theRun() {
  return runs[chosen.run];
}

/** Return a control that chooses the run; null if there is only one. */
function runChoice() {
  if (runs.length < 2) return null;
  return choice("run", runs.map((run, index) => [String(index), run.name]), String(chosen.run), (value) => {
    Object.assign(chosen, { run: Number(value), page: 0, sample: null, step: null });
    show();
  });
}
