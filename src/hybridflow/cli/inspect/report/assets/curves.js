"use strict";
// Curves of all metrics, of several runs over each other, drawn by uPlot as they come into view.

const FIRST = ["critic/score/mean", "val/accuracy", "val/score/mean", "response_length/mean", "response_length/clip_ratio",
  "actor/entropy", "actor/loss", "actor/grad_norm", "actor/ppo_kl", "actor/kl_loss", "critic/kl", "actor/clipfrac", "sft/loss",
  "dpo/loss", "reward_model/loss", "reward/error_rate", "timing_s/step", "perf/tokens_per_s"];

const MANY = 400;  // values of a curve that is smoothed unless the reader chooses otherwise

function showCurves(main) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.values)))];
  const order = (name) => (FIRST.indexOf(name) + 1 || FIRST.length + 1);
  names.sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  const search = make("input", { type: "search", value: chosen.metric, placeholder: "such as kl or timing_s", input: delayed(() => {
    chosen.metric = search.value;
    draw();
  }, 120) });
  const smoothing = make("input", { type: "range", min: "0", max: "0.98", step: "0.02", value: String(chosen.smoothing ?? 0), input: delayed(() => {
    chosen.smoothing = Number(smoothing.value);
    draw();
  }, 60) });
  const charts = make("div", { class: "charts" });
  const count = make("p", { class: "note", role: "status" });
  main.append(
    make("div", { class: "tools" }, labelled("metrics with", search), labelled("smoothing", smoothing),
      choice("axis", [["step", "linear"], ["log", "logarithmic"]], chosen.axis, (value) => { chosen.axis = value; draw(); })),
    make("div", { class: "legend" }, runs.map((run) => make("span", {},
      make("span", { class: "swatch", style: { background: run.color } }), run.name))),
    count, charts);

  function draw() {
    const words = chosen.metric.toLowerCase().split(/\s+/).filter(Boolean);
    const found = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    count.textContent = `${found.length} of ${names.length} metrics`;
    charts.replaceChildren(...found.map((name) => lazyChart(name)));
  }
  draw();
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    seen.unobserve(entry.target);
    drawChart(entry.target, entry.target.dataset.metric);
  }
}, { rootMargin: "200px" });

/** Return the box of a metric with its meaning and the advice about it; the curve is drawn when it comes into view. */
function lazyChart(name, label) {
  const advice = runs.flatMap((run) => run.advice.filter((each) => each.metric === name).map((each) => adviceBox(run, each)));
  const plot = make("div", { class: "plot", "data-metric": name });
  seen.observe(plot);
  return make("section", { class: advice.length ? "chart advised" : "chart" },
    make("h2", {}, label ?? name, meaningOf(name)), plot, make("div", {}, advice));
}

/** Return a mark that tells what a metric means and when to worry, by pointer, focus or touch; null if that is not known. */
function meaningOf(name) {
  if (!Object.hasOwn(metrics, name)) return null;
  const [meaning, worry] = metrics[name], id = `meaning-${name}`;
  return make("span", { class: "meaning" }, make("button", { type: "button", "aria-label": `meaning of ${name}`, "aria-describedby": id }, "?"),
    make("span", { role: "tooltip", id }, make("code", {}, name), make("span", {}, meaning), worry ? make("span", {}, make("strong", {}, "When to worry: "), worry) : null));
}

function drawChart(box, name) {
  const shown = runs.filter((run) => Object.hasOwn(run.curves.values, name));
  const steps = [...new Set(shown.flatMap((run) => run.curves.steps))].sort((a, b) => a - b);
  const places = new Map(steps.map((step, place) => [step, place]));
  const data = [steps], series = [{ label: "step" }], bands = [];
  const aligned = (run, metric) => {
    const values = new Array(steps.length).fill(null);
    run.curves.steps.forEach((step, i) => { values[places.get(step)] = run.curves.values[metric][i]; });
    return values;
  };
  for (const run of shown) {
    const values = aligned(run, name), half = Object.hasOwn(run.curves.values, `${name}/ci95`) ? aligned(run, `${name}/ci95`) : null;
    const count = values.filter((value) => value !== null).length, weight = chosen.smoothing ?? (count > MANY ? 0.98 : 0);
    for (const sign of half ? [1, -1] : []) {  // the interval of 95%
      data.push(values.map((value, i) => (value === null ? null : value + sign * half[i])));
      series.push({ class: "bound", spanGaps: true, points: { show: false } });
    }
    if (half) bands.push({ series: [data.length - 2, data.length - 1], fill: `${run.color}33` });
    if (weight > 0) {
      data.push(values);
      series.push({ label: run.name, stroke: `${run.color}44`, width: 1, spanGaps: true, points: { show: false }, value: (_, value) => formatNumber(value) });
    }
    data.push(smoothed(values, weight));
    series.push({ label: weight > 0 ? `${run.name}, smoothed` : run.name, stroke: run.color, width: 1.6, spanGaps: true, points: { show: count < 40, size: 4 },
      value: (_, value, __, i) => formatNumber(value) + (half?.[i] ? ` ± ${formatNumber(half[i])}` : "") });
  }
  keepZoom(drawPlot(box, data, series, chosen.axis === "log", 190, bands), name);
  box.append(...shown.filter((run) => Object.hasOwn(run.curves.not_finite, name)).map((run) =>
    make("p", { class: "note error" }, `${run.name}: not finite at step ${run.curves.not_finite[name].slice(0, 5).join(", ")}`)));
}

const zooms = new Map();

/** Show a curve in the part that the reader has chosen before, which a double click gives up. */
function keepZoom(plot, name) {
  if (zooms.has(name)) plot.setScale("x", zooms.get(name));
  plot.over.addEventListener("dblclick", () => zooms.delete(name));
  (plot.hooks.setSelect ??= []).push(({ select }) => {
    if (select.width > 0) zooms.set(name, { min: plot.posToVal(select.left, "x"), max: plot.posToVal(select.left + select.width, "x") });
  });
}

/** Return the range of an axis: values that are all equal are in its middle. */
function rangeOfValues(_, low, high) {
  if (low === null) return [0, 1];
  const pad = low === high ? Math.abs(low) / 10 || 1 : 0;
  return pad ? [low - pad, high + pad] : uPlot.rangeNum(low, high, 0.1, true);
}

let drawn = [];  // the plots of the page

function drawPlot(box, data, series, isLogarithmic, height, bands) {
  const style = getComputedStyle(document.documentElement);
  const line = style.getPropertyValue("--line"), text = style.getPropertyValue("--soft");
  const axis = { stroke: text, grid: { stroke: line, width: 0.5 }, ticks: { stroke: line, width: 0.5 } };
  const hasPositive = data.slice(1).some((values) => values.some((value) => value > 0));
  const options = {
    width: Math.max(200, box.clientWidth), height, series, bands,
    scales: { x: { time: false }, y: isLogarithmic && hasPositive ? { distr: 3 } : { range: rangeOfValues } },
    axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatNumber(tick))) }],
    legend: { live: true }, hooks: { ready: [(plot) => plot.setLegend({ idx: data[0].length - 1 })] }, cursor: { drag: { x: true, y: false } },
  };
  const clean = isLogarithmic && hasPositive
    ? [data[0], ...data.slice(1).map((values) => values.map((value) => (value > 0 ? value : null)))] : data;
  drawn = drawn.filter((plot) => plot.root.isConnected || plot.destroy());  // a live page draws for days
  drawn.push(new uPlot(options, clean, box));
  return drawn.at(-1);
}

/** Return the exponential moving average, corrected for its start; null stays null. */
function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}
