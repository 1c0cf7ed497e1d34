"use strict";
// The timeline: for each step its critical path in a line, and the calls of each process drawn over time.

function showTimeline(main) {
  const run = theRun();
  addAll(main, make("div", { class: "tools" }, runChoice()), ...stagesOf(run));
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

/** Return the mean time of each stage in some steps as one bar, with its legend. Its shares add up to 100.0%. */
function splitBar(steps, which) {
  const seconds = new Map(), add = (stage, value) => seconds.set(stage, (seconds.get(stage) ?? 0) + value);
  for (const step of steps) for (const [stage, share] of Object.entries(step.shares)) add(stage, share * step.seconds / steps.length);
  const whole = [...seconds.values()].reduce((sum, value) => sum + value, 0) || 1;
  for (const [stage, value] of [...seconds]) if (value < 0.01 * whole && seconds.delete(stage)) add("other", value);
  let sum = 0, before = 0;
  const parts = [...seconds].sort((a, b) => b[1] - a[1]).map(([stage, value]) => {
    sum += value;
    const until = Math.round(1000 * sum / whole), share = ((until - before) / 10).toFixed(1);
    before = until;
    return { stage, value, share, text: `${stage} ${share}%` };
  });
  return make("div", { class: "split" }, note(`${formatNumber(whole)} s/step, ${which}`),
    make("div", { class: "bar", role: "img", "aria-label": parts.map((part) => part.text).join(", ") },
      parts.map((part) => make("span", { title: part.text, style: { flexGrow: part.share, background: stageColor(part.stage) } }))),
    make("ul", { class: "legend" }, parts.map((part) => make("li", {}, make("span", { class: "swatch", style: { background: stageColor(part.stage) } }), part.text,
      make("span", { class: "note" }, ` ${formatNumber(part.value)} s`)))));
}

const hues = new Map();

/** Return the color of a stage, the same one in bars and lanes. */
function stageColor(stage) {
  if (stage === "controller" || stage === "other") return stage === "other" ? "#bcc3cd" : "#7c8694";
  if (!hues.has(stage)) hues.set(stage, (210 + 137.5 * hues.size) % 360);
  return `hsl(${hues.get(stage)} 55% 52%)`;
}

/** Return round times from 0 to at most so many seconds, four to ten of them. */
function roundTimes(seconds) {
  const decade = 10 ** Math.floor(Math.log10(seconds)), width = [0.1, 0.2, 0.25, 0.5, 1].map((part) => part * decade).find((each) => seconds / each <= 9);
  return Array.from({ length: Math.floor(seconds / width) + 1 }, (_, i) => Number((i * width).toPrecision(6)));
}

function stepParts(step) {
  const names = [...new Set(step.lanes.flatMap((lane) => lane.spans.map((span) => span[2])))].sort();
  const left = 150, width = 1100, height = 26, seconds = step.seconds || 1;
  const x = (time) => left + (width - left - 10) * time / seconds;
  const picture = makeSvg("svg", { class: "lanes", viewBox: `0 0 ${width} ${step.lanes.length * height + 26}`, role: "img",
    "aria-label": `calls of each process in step ${step.step}` },
  ...step.lanes.flatMap((lane, row) => [
    makeSvg("text", { x: 4, y: row * height + 17 }, oneLine(lane.name, 22)),
    ...lane.spans.map(([start, end, name, kind]) => makeSvg("rect", { x: x(start), y: row * height + 4, width: Math.max(0.6, x(end) - x(start)),
      height: height - 8, fill: kind === "recovery" ? "#b3261e" : stageColor(name), opacity: kind === "call" ? 0.95 : 0.55 },
    makeSvg("title", {}, `${name}: ${formatNumber(end - start)} s, from ${formatNumber(start)} s`)))]),
  ...roundTimes(seconds).map((time) => makeSvg("text", { x: x(time), y: step.lanes.length * height + 20, "text-anchor": time > 0.95 * seconds ? "end" : "middle" },
    `${formatNumber(time)} s`)));
  return [
    splitBar([step], `step ${step.step}`),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "timeline" }, picture),
    make("div", { class: "legend" }, names.map((name) => make("span", {}, make("span", { class: "swatch", style: { background: stageColor(name) } }), name))),
    step.waited.length ? make("h3", {}, "Who waited for whom") : null,
    step.waited.length ? table("who waited for whom", ["process", "computing (s)", "waiting (s)", "most of it for"], step.waited) : null,
  ].filter(Boolean);
}
