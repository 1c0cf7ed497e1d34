"use strict";
// The table of all responses: filters, sorting, pages, and histograms of what the filters let through.

const ROWS_ON_PAGE = 50;
const COLUMNS = [["step", "step"], ["row", "row"], ["score", "score"], ["response", ""], ["length", "length"], ["prompt", "prompt_id"],
  ["finish reason", "finish_reason"], ["data source", "data_source"], ["reward failed", "failed"], ["staleness", "staleness"]];
const CODED = ["prompt_id", "data_source", "finish_reason", "failed"];

function showRollouts(main) {
  const run = theRun();
  const { rollouts } = run;
  const isKnown = (name) => CODED.includes(name) ? rollouts.texts[name].some((text) => text !== "") : rollouts[name].some((value) => value !== null);
  const columns = COLUMNS.filter(([, name]) => name === "" || name === "failed" || isKnown(name));
  const count = make("p", { class: "note", role: "status", id: "count" });
  const texts = make("p", { class: "note" });
  const histograms = make("div", { class: "charts" }), rows = make("div", {}), pager = make("div", { class: "pager" });
  const later = delayed(() => { chosen.page = 0; update(); }, 60);
  const filter = (label, name, attributes) => {
    const input = make("input", { ...attributes, value: chosen.filters[name], input: () => { chosen.filters[name] = input.value.trim(); later(); } });
    return labelled(label, input);
  };
  const among = (label, name) => choice(label, [["", "all"], ...rollouts.texts[name].map((text, code) => [String(code), text === "" ? "no" : oneLine(text, 60)])],
    chosen.filters[name], (value) => { chosen.filters[name] = value; chosen.page = 0; update(); });
  main.append(
    make("div", { class: "tools" }, runChoice(),
      filter("steps, as 10 or 10-20", "step", { type: "text", size: 8, inputmode: "numeric" }),
      filter("prompt", "prompt_id", { type: "search", size: 11 }),
      filter("score from", "low", { type: "number", step: "any" }), filter("score to", "high", { type: "number", step: "any" }),
      isKnown("staleness") ? filter("staleness from", "stale", { type: "number", step: "1" }) : null,
      among("data source", "data_source"), among("finish reason", "finish_reason"), among("reward failed", "failed"),
      choice("has text", [["", "all"], ["yes", "yes"]], chosen.filters.kept, (value) => { chosen.filters.kept = value; chosen.page = 0; update(); }),
      filter("text", "text", { type: "search", size: 18, id: "search" }),
      make("button", { type: "button", click: () => {
        for (const name of Object.keys(chosen.filters)) chosen.filters[name] = "";
        chosen.page = 0;
        show();
      } }, "clear")),
    count, texts, rows, pager, make("h2", {}, "Histograms"), histograms);

  let found = [];
  function update() {
    found = sortRows(run, filterRows(run));
    count.textContent = `${found.length} of ${rollouts.step.length} responses`;
    texts.textContent = `${run.samples.length} responses have their text: the run kept trainer.log_samples=${run.config["trainer.log_samples"] ?? "…"} of each step.`;
    drawRows();
    drawHistograms();
  }

  function drawRows() {
    const pages = Math.max(1, Math.ceil(found.length / ROWS_ON_PAGE));
    chosen.page = Math.min(chosen.page, pages - 1);
    const part = Array.from(found.slice(chosen.page * ROWS_ON_PAGE, (chosen.page + 1) * ROWS_ON_PAGE));
    const head = columns.map(([label, name]) => name === "" ? make("th", { scope: "col" }, label) : make("th", { scope: "col", class: CODED.includes(name) ? null : "number",
      "aria-sort": chosen.sort === name ? (chosen.ascending ? "ascending" : "descending") : null },
    make("button", { type: "button", "data-sort": name, click: () => {
      Object.assign(chosen, { ascending: chosen.sort === name ? !chosen.ascending : false, sort: name, page: 0 });
      update();
      rows.querySelector(`[data-sort="${name}"]`).focus();
    } }, label, chosen.sort === name ? (chosen.ascending ? " ▲" : " ▼") : "")));
    rows.replaceChildren(make("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "responses" },
      make("table", { id: "responses" }, make("thead", {}, make("tr", {}, head)),
        make("tbody", {}, part.map((i) => make("tr", {}, columns.map(([label, name]) => name === "" ? responseCell(run, i) : cellOf(run, label, name, i))))))));
    const move = (label, page, id) => make("button", { type: "button", id, disabled: page < 0 || page >= pages, click: () => {
      chosen.page = page;
      drawRows();
      (document.getElementById(id).disabled ? pager.querySelector("button:not([disabled])") : document.getElementById(id))?.focus();
    } }, label);
    pager.replaceChildren(move("previous", chosen.page - 1, "previous"), make("span", {}, `page ${chosen.page + 1} of ${pages}`), move("next", chosen.page + 1, "next"));
  }

  const drawHistograms = delayed(() => {
    const numbers = ["score", "length", ...(isKnown("staleness") ? ["staleness"] : [])];
    histograms.replaceChildren(...numbers.map((name) => histogram(name, Float64Array.from(found, (i) => rollouts[name][i] ?? NaN))));
    for (const box of histograms.children) box.draw();
  }, 150);
  update();
}

function cellOf(run, label, name, i) {
  const value = run.rollouts[name][i];
  if (name === "prompt_id") return make("td", { class: "prompt", "data-label": "prompt" }, promptLink(run, run.rollouts.texts[name][value]));
  if (CODED.includes(name)) return make("td", { class: "cut", "data-label": label }, oneLine(run.rollouts.texts[name][value] || (name === "failed" ? "no" : ""), 60));
  return make("td", { class: "number", "data-label": label }, formatNumber(value));
}

function responseCell(run, i) {
  const place = run.sampleOf[i];
  if (place < 0) return make("td", { class: "response", "data-label": "response" }, "–");
  return make("td", { class: "response", "data-label": "response" }, make("button", { type: "button", class: "link", click: () => openSample(place) }, oneLine(run.samples[place].response || "", 60) || "(empty)"));
}

/** Return a link to the responses to a prompt over the steps: its text if a sample has it, its name otherwise. */
function promptLink(run, id) {
  return make("button", { type: "button", class: "link", title: `prompt ${id} over the steps`, click: () => {
    for (const name of Object.keys(chosen.filters)) chosen.filters[name] = "";
    chosen.filters.prompt_id = id;
    Object.assign(chosen, { tab: "rollouts", sample: null, page: 0, sort: "step", ascending: true });
    show();
  } }, oneLine(run.promptOf.get(id) ?? id, 60));
}

/** Return the rows that all filters let through, in the order of the file. */
function filterRows(run) {
  const { rollouts } = run, filters = chosen.filters, tests = [];
  const steps = /^(\d+)(?:\s*-\s*(\d+))?$/.exec(filters.step);
  if (filters.step) {
    const [low, high] = steps ? [Number(steps[1]), Number(steps[2] ?? steps[1])] : [1, 0];
    tests.push((i) => rollouts.step[i] >= low && rollouts.step[i] <= high);
  }
  for (const name of ["data_source", "finish_reason", "failed"]) {
    if (filters[name] !== "") { const code = Number(filters[name]); tests.push((i) => rollouts[name][i] === code); }
  }
  if (filters.prompt_id) {
    const codes = new Set(rollouts.texts.prompt_id.flatMap((id, code) => id.startsWith(filters.prompt_id) || run.promptOf.get(id)?.includes(filters.prompt_id) ? [code] : []));
    tests.push((i) => codes.has(rollouts.prompt_id[i]));
  }
  const [low, high] = [filters.low, filters.high].map((text) => text === "" ? NaN : Number(text));
  if (!Number.isNaN(low)) tests.push((i) => rollouts.score[i] !== null && rollouts.score[i] >= low);
  if (!Number.isNaN(high)) tests.push((i) => rollouts.score[i] !== null && rollouts.score[i] <= high);
  if (filters.stale !== "") { const stale = Number(filters.stale); tests.push((i) => rollouts.staleness[i] !== null && rollouts.staleness[i] >= stale); }
  if (filters.kept || filters.text) tests.push((i) => run.sampleOf[i] >= 0);
  if (filters.text) {
    const text = filters.text.toLowerCase();
    const places = new Set(run.samples.flatMap((sample, place) =>
      `${sample.prompt}\n${sample.response}`.toLowerCase().includes(text) ? [place] : []));
    tests.push((i) => places.has(run.sampleOf[i]));
  }
  const found = new Int32Array(rollouts.step.length);
  let size = 0;
  for (let i = 0; i < found.length; i++) if (tests.every((test) => test(i))) found[size++] = i;
  return found.subarray(0, size);
}

/** Sort rows by the chosen column, equal ones by whether they have text, then step and row; rows without a value come last. */
function sortRows(run, rows) {
  const { rollouts } = run, name = chosen.sort, sign = chosen.ascending ? 1 : -1;
  let keys = rollouts[name];
  if (CODED.includes(name)) {
    const texts = rollouts.texts[name], ranks = [];
    texts.map((text, code) => [text, code]).sort((a, b) => (a[0] < b[0] ? -1 : 1)).forEach(([, code], rank) => { ranks[code] = rank; });
    keys = keys.map((code) => ranks[code]);
  }
  const lowest = -sign * Infinity;
  return rows.slice().sort((a, b) => {
    const [x, y] = [keys[a] ?? -lowest, keys[b] ?? -lowest];
    return x === y ? (run.sampleOf[b] >= 0) - (run.sampleOf[a] >= 0) || a - b : x < y ? -sign : sign;
  });
}

/** Return a box with the histogram of some numbers; `draw` draws it once the box has a width. */
function histogram(name, values) {
  const finite = values.filter((value) => !Number.isNaN(value));
  const plot = make("div", { class: "plot" }), box = make("section", { class: "chart" }, make("h2", {}, name), plot);
  box.draw = () => {
    if (!finite.length) { plot.append(note("no values")); return; }
    let low = Infinity, high = -Infinity;
    for (const value of finite) { low = Math.min(low, value); high = Math.max(high, value); }
    const bins = 24, width = (high - low) / bins || 1;
    const counts = new Array(bins).fill(0), middles = counts.map((_, bin) => low + (bin + 0.5) * width);
    for (const value of finite) counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
    drawPlot(plot, [middles, counts], [{ label: name, value: (_, value) => formatNumber(value) }, { label: "responses", stroke: COLORS[0],
      fill: `${COLORS[0]}66`, paths: uPlot.paths.bars({ size: [0.95, 60] }), points: { show: false } }], false, 170);
  };
  return box;
}
