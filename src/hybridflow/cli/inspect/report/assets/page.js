"use strict";
// The tabs of the page, its keys, and in a live page the request for newer data.

const TABS = [["overview", "Overview", showOverview], ["curves", "Curves", showCurves], ["rollouts", "Rollouts", showRollouts],
  ["timeline", "Timeline", showTimeline], ["configuration", "Configuration", showConfiguration], ["events", "Failures", showEvents]];

const SHARE = 10;  // times as long as an answer took, until a live page asks again: large runs are asked for less often

let shownTab = "";

function show() {
  const main = document.getElementById("main");
  const opened = shownTab === chosen.tab ? [...main.querySelectorAll("details[open] > summary")].map((summary) => summary.textContent) : [];
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
  for (const summary of main.querySelectorAll("summary")) if (opened.includes(summary.textContent)) summary.parentNode.open = true;
  shownTab = chosen.tab;
  window.scrollTo(0, top);
  if (location.hash !== whereabouts()) history.pushState(null, "", whereabouts());
}

/** Return the fragment of the address of what is shown: "#curves", or "#rollouts/RUN/STEP/ROW" with the number of the run on the page. */
function whereabouts() {
  const sample = chosen.tab === "rollouts" && chosen.sample !== null ? theRun().samples[chosen.sample] : null;
  return `#${chosen.tab}${sample ? `/${chosen.run}/${sample.step}/${sample.row}` : ""}`;
}

/** Choose what a fragment of an address names; nothing for one that names nothing. */
function goTo(fragment) {
  const [tab, ...numbers] = fragment.slice(1).split("/"), [run, step, row] = numbers.map(Number);
  if (!TABS.some(([key]) => key === tab)) return;
  Object.assign(chosen, { tab, sample: null });
  if (tab === "rollouts" && runs[run]) Object.assign(chosen, { run, sample: placeOf(runs[run], step, row) });
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
    if (event.key === "Escape") document.activeElement?.closest(".meaning button")?.blur();
    if (event.key === "Escape" && chosen.tab === "rollouts" && chosen.sample !== null) closeSample();
    const isAtTop = document.activeElement === document.body || document.activeElement?.id === "back";
    if (/^Arrow(Left|Right)$/.test(event.key) && chosen.sample !== null && isAtTop) focusTokens();
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      choose("rollouts");
      document.getElementById("search").focus();
    }
  });
  window.addEventListener("resize", delayed(() => { if (["overview", "curves"].includes(chosen.tab)) show(); }, 200));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show());
  window.addEventListener("popstate", () => { goTo(location.hash); show(); });
  goTo(location.hash);
  history.replaceState(null, "", whereabouts());
  show();
  if (document.documentElement.dataset.live === "true") follow(null);
}

/** Ask for newer data every two seconds; what the reader types or reads is kept, and is not disturbed meanwhile. */
async function follow(version) {
  const state = document.getElementById("state"), asked = performance.now();
  let next = version, data = null;
  try {
    const answer = await fetch("data.json", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      next = answer.headers.get("ETag");
      data = await answer.json();
    } else if (answer.status !== 304) state.textContent = `the run cannot be read: ${await answer.text()}`;
    if (data || answer.status === 304) state.textContent = "";
  } catch {
    state.textContent = "the server of this page has stopped; run hybridflow watch again";
  }
  setTimeout(() => follow(next), Math.max(2000, SHARE * (performance.now() - asked)));  // before drawing, which may fail
  if (data) {
    useData(data);  // also the first time: files may have changed since the page was made
    if (chosen.sample === null && !document.getElementById("main").contains(document.activeElement?.closest("input, select, .meaning"))) show();
  }
  if (!state.textContent) state.textContent = `live: ${runs.map((run) => `step ${run.curves.steps.at(-1) ?? 0}, ${run.state}`).join("; ")}`;
}

start();
