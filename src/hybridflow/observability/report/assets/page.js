"use strict";
// The tabs of the page, its keys, and in a live page the request for newer data.

const TABS = [["overview", "Overview", showOverview], ["curves", "Curves", showCurves], ["rollouts", "Rollouts", showRollouts],
  ["timeline", "Timeline", showTimeline], ["configuration", "Configuration", showConfiguration], ["events", "Failures", showEvents]];

function show() {
  const main = document.getElementById("main");
  const top = window.scrollY, part = document.createDocumentFragment(), box = make("div", { role: "tabpanel", "aria-labelledby": `tab-${chosen.tab}` });
  part.append(box);
  main.replaceChildren(part);
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const isChosen = tab.id === `tab-${chosen.tab}`;
    tab.setAttribute("aria-selected", String(isChosen));
    tab.tabIndex = isChosen ? 0 : -1;
  }
  if (chosen.tab === "rollouts" && chosen.sample !== null) showSample(box, chosen.sample);
  else TABS.find(([key]) => key === chosen.tab)[2](box);
  window.scrollTo(0, top);
}

function choose(key) {
  Object.assign(chosen, { tab: key, sample: null });
  show();
}

function start() {
  useData(JSON.parse(document.getElementById("data").textContent));
  document.getElementById("title").textContent = runs.map((run) => run.name).join(" · ");
  document.getElementById("tabs").append(...TABS.map(([key, label]) => make("button", { type: "button", role: "tab", id: `tab-${key}`, click: () => choose(key) }, label)));
  document.getElementById("tabs").addEventListener("keydown", (event) => {
    const tabs = [...event.currentTarget.children], step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    choose(next.id.slice("tab-".length));
    next.focus();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement?.tagName ?? "");
    if (event.key === "Escape" && chosen.tab === "rollouts" && chosen.sample !== null) closeSample();
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      choose("rollouts");
      document.getElementById("search").focus();
    }
  });
  window.addEventListener("resize", delayed(() => { if (chosen.tab === "curves") show(); }, 200));
  show();
  if (document.documentElement.dataset.live === "true") follow(null);
}

/** Ask for newer data every two seconds; what the reader types or reads is kept, and is not disturbed meanwhile. */
async function follow(version) {
  const state = document.getElementById("state");
  let next = version;
  try {
    const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      next = answer.headers.get("ETag");
      const data = await answer.json();
      if (version !== null) {
        useData(data);
        if (chosen.sample === null && !document.getElementById("main").contains(document.activeElement?.closest("input, select"))) show();
      }
    }
    if (answer.status === 200 || answer.status === 304) state.textContent = `live, step ${runs.map((run) => run.curves.steps.at(-1) ?? 0).join(" and ")}`;
    else state.textContent = `the run cannot be read: ${await answer.text()}`;
  } catch {
    state.textContent = "the server of this page has stopped; run hybridflow watch again";
  }
  setTimeout(() => follow(next), 2000);
}

start();
