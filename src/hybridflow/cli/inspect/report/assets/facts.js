"use strict";
// What is not drawn: the configuration and its differences, starts, failures and recoveries.

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
    if (count) main.append(note(`${failed.length} of them have their text; the last ${shown.length} are here. The log of the run has the messages.`));
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
