"use strict";
// What is not drawn: advice, the configuration and its differences, starts, failures and recoveries.

function showOverview(main) {
  for (const run of runs) {
    const { steps, values } = run.curves, last = steps.length - 1;
    const figure = (name) => (Object.hasOwn(values, name) ? values[name].findLast((value) => value !== null) ?? "–" : "–");
    addAll(main, make("h2", {}, make("span", { class: "swatch", style: { background: run.color } }), run.name),
      table(`figures of ${run.name}`, ["state", "step", "of", "score", "accuracy of validation", "response length", "seconds a step", "responses", "kept"], [[
        run.state, last >= 0 ? steps[last] : 0, run.total_steps || "–", figure("critic/score/mean"), figure("val/accuracy"), figure("response_length/mean"),
        figure("timing_s/step"), run.rollouts.step.length, run.samples.length]]),
      run.timeline.length ? make("p", {}, run.timeline.at(-1).line) : null,
      run.advice.length ? null : make("div", { class: "advice fine" }, "No finding: nothing in the metrics crosses a threshold"),
      ...run.advice.map((each) => make("section", { class: each.is_note ? "advice soft" : "advice" }, make("h3", {}, each.title), make("p", {}, each.seen), make("p", {}, each.why),
        make("p", {}, each.change))));
  }
}

function showConfiguration(main) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const isOne = runs.length === 1;
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const search = make("input", { type: "search", placeholder: "such as rollout", input: delayed(() => draw(), 80) });
  const only = make("select", { change: () => draw() }, make("option", { value: "" }, "all keys"), make("option", { value: "d", selected: !isOne }, "that differ"));
  const box = make("div", {});
  addAll(main, make("div", { class: "tools" }, labelled("keys with", search), isOne ? null : labelled("show", only)), box);
  function draw() {
    const rows = keys.filter((key) => key.includes(search.value.trim())).map((key) => {
      const values = runs.map((run) => text(run.config[key]));
      return { differs: !isOne && new Set(values).size > 1, cells: [key, ...values.map((value) => make("span", { title: visible(value) }, oneLine(value, 120)))] };
    }).filter((row) => !only.value || row.differs);
    box.replaceChildren(note(`${rows.length} keys`), table("configuration", ["key", ...runs.map((run) => run.name)], rows));
  }
  draw();
  for (const run of runs) {
    main.append(make("h2", {}, `Starts of ${run.name}`));
    for (const start of run.starts) {
      main.append(make("details", {}, make("summary", {}, `${start.started_at ?? ""}, after step ${start.after_step ?? 0}`),
        textBlock(JSON.stringify(start, null, 1), "start")));
    }
  }
}

function showEvents(main) {
  for (const run of runs) {
    main.append(make("h2", {}, run.name));
    const names = [...new Set(run.recoveries.flatMap((row) => Object.keys(row)))];
    main.append(run.recoveries.length ? table(`recoveries of ${run.name}`, names, run.recoveries.map((row) => names.map((name) => {
      const value = row[name];
      return typeof value === "number" ? value : make("span", {}, oneLine(typeof value === "string" ? value : JSON.stringify(value ?? ""), 300));
    })), names.map(() => "wide")) : note("No worker failed, and nothing was recovered from."));
    const { failed: codes, texts } = run.rollouts, count = codes.filter((code) => texts.failed[code] !== "").length;
    const failed = run.samples.flatMap((sample, place) => (sample.failed ? [place] : [])), shown = failed.slice(-100);
    main.append(make("h3", {}, `Responses whose reward failed: ${count} of ${codes.length}`));
    if (count) main.append(note(`${failed.length} of them are kept; the last ${shown.length} are here. The log of the run has the messages.`));
    if (failed.length) {
      main.append(
        table("responses whose reward failed", ["step", "row", "failure", "response"], shown.map((place) => {
          const sample = run.samples[place];
          return [sample.step, sample.row, sample.failed, make("button", { type: "button", class: "link", click: () => {
            chosen.run = runs.indexOf(run);
            openSample(place);
          } }, oneLine(sample.response || "", 80) || "(empty)")];
        })));
    }
  }
}
