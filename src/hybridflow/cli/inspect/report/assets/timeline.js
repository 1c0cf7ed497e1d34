"use strict";
// The timeline: for each step its critical path in a line, and the calls of each process drawn over time.

function showTimeline(main) {
  const run = theRun();
  addAll(main, make("div", { class: "tools" }, runChoice()));
  showStages(main, run);
  if (!run.timeline.length) {
    main.append(note("The run has no trace of a step."));
    return;
  }
  const steps = run.timeline.map((each) => each.step);
  if (!steps.includes(chosen.step)) chosen.step = steps.at(-1);
  const box = make("div", {});
  const draw = () => box.replaceChildren(...stepParts(run.timeline.find((each) => each.step === chosen.step)));
  main.append(make("h2", {}, "Critical paths"),
    make("ul", {}, run.timeline.slice(-10).map((each) => make("li", {}, each.line))),
    make("div", { class: "tools" }, choice("step", steps.map((step) => [String(step), String(step)]), String(chosen.step), (value) => {
      chosen.step = Number(value);
      draw();
    })), box);
  draw();
}

/** Show the mean seconds of each stage over the last steps, and their share of a step. */
function showStages(main, run) {
  const { steps, values } = run.curves, last = Math.max(0, steps.length - 20);
  const mean = (name) => {
    const rows = values[name].slice(last), known = rows.filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / rows.length : null;
  };
  const whole = Object.hasOwn(values, "timing_s/step") ? mean("timing_s/step") : null;
  if (!whole) return;
  const stages = Object.keys(values).filter((name) => name.startsWith("timing_s/") && name !== "timing_s/step")
    .map((name) => [name.slice("timing_s/".length), mean(name)]).filter(([, value]) => value !== null).sort((a, b) => b[1] - a[1]);
  main.append(make("h2", {}, "Time of each stage"), note(`Means of the last ${steps.length - last} rows; a step takes ${formatNumber(whole)} s. Stages may overlap; what does not run at each step counts by its mean.`),
    table("time of each stage", ["stage", "seconds", "share of a step", ""], stages.map(([name, value]) => [name, value, `${(100 * value / whole).toFixed(1)}%`,
      make("span", { class: "bar", style: { width: `${Math.min(100, 100 * value / whole) * 1.5}px` } })])));
}

/** Return round times from 0 to at most so many seconds, four to ten of them. */
function roundTimes(seconds) {
  const decade = 10 ** Math.floor(Math.log10(seconds)), width = [0.1, 0.2, 0.25, 0.5, 1].map((part) => part * decade).find((each) => seconds / each <= 9);
  return Array.from({ length: Math.floor(seconds / width) + 1 }, (_, i) => Number((i * width).toPrecision(6)));
}

function stepParts(step) {
  const names = [...new Set(step.lanes.flatMap((lane) => lane.spans.map((span) => span[2])))].sort();
  const color = (name) => `hsl(${(names.indexOf(name) * 137.5) % 360} 60% 52%)`;
  const left = 150, width = 1100, height = 26, seconds = step.seconds || 1;
  const x = (time) => left + (width - left - 10) * time / seconds;
  const picture = makeSvg("svg", { class: "lanes", viewBox: `0 0 ${width} ${step.lanes.length * height + 26}`, role: "img",
    "aria-label": `calls of each process in step ${step.step}` },
  ...step.lanes.flatMap((lane, row) => [
    makeSvg("text", { x: 4, y: row * height + 17 }, oneLine(lane.name, 22)),
    ...lane.spans.map(([start, end, name, kind]) => makeSvg("rect", { x: x(start), y: row * height + 4, width: Math.max(0.6, x(end) - x(start)),
      height: height - 8, fill: kind === "recovery" ? "#b3261e" : color(name), opacity: kind === "call" ? 0.95 : 0.55 },
    makeSvg("title", {}, `${name}: ${formatNumber(end - start)} s, from ${formatNumber(start)} s`)))]),
  ...roundTimes(seconds).map((time) => makeSvg("text", { x: x(time), y: step.lanes.length * height + 20, "text-anchor": time > 0.95 * seconds ? "end" : "middle" },
    `${formatNumber(time)} s`)));
  return [
    make("p", {}, step.line),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "timeline" }, picture),
    make("div", { class: "legend" }, names.map((name) => make("span", {}, make("span", { class: "swatch", style: { background: color(name) } }), name))),
    step.waited.length ? make("h3", {}, "Who waited for whom") : null,
    step.waited.length ? table("who waited for whom", ["process", "computing (s)", "waiting (s)", "most of it for"], step.waited) : null,
  ].filter(Boolean);
}
