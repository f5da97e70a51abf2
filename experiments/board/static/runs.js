// One run: how it stands, its facts, models and report; and the configurations of several, side by side.

import { ask, check, chosen, code, day, duration, get, h, link, note, number, reading, replace, share, slotOf, stateOf, swatch, choose, startOf } from "./base.js";
import { currentRun } from "./page.js";

let box, store, tags = {}, answer = null, of = "";

function draw() {
  const id = currentRun(), known = store.runs.get(id);
  if (!id) return replace(box, note("No run is chosen", ["Pick one in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), "."]));
  if (!known) return replace(box, store.version ? note("This run is not here", id, ["It was deleted, or the board shows another folder: ", code(store.results)]) : note("Reading…"));
  const facts = [
    ["state", stateOf(known.state)],
    ["last sign of life", known.beat == null ? "" : `${duration(Math.max(0, Date.now() / 1000 - known.beat))} ago`],
    ["stage", known.rounds && known.state !== "done" ? `${known.stage}, round ${known.round} of ${known.rounds}` : ""],
    ["message", known.message], ["problem", known.problem],
    ["preset", known.preset], ["method", known.method], ["data", known.dataset], ["started", day(startOf(known))],
    ["accuracy", share(known.accuracy)], ["validation", share(known.validation)], ["tags", known.tags.join(", ")],
    ["ablation", known.ablation ? h("a", { href: link({ view: "ablations", ablation: known.ablation }) }, known.ablation) : null],
  ].filter(([, value]) => value);
  const tick = h("input", { type: "checkbox", onchange: () => choose([id], tick.checked) });
  tick.checked = slotOf(id) >= 0;
  const open = [...box.querySelectorAll("details")].filter((each) => each.open).map((each) => each.dataset.name);
  const details = (name, ...children) => h("details", { "data-name": name, open: open.includes(name) }, h("summary", {}, name), children);
  const report = answer?.report
    ? h("a.button", { href: `report/${encodeURIComponent(id)}`, target: "_blank", rel: "noopener" }, "report")
    : h("span.soft", {}, "no report yet: ", code(`fedloom report ${id}`));
  const advice = { dead: "Its process is gone.", interrupted: "It was stopped.", failed: "It failed.", stalled: "It has not given a sign of life for a minute." }[known.state];
  const more = answer && answer.id === id ? answer : null;
  replace(box, h("h1", {}, known.name ?? id), known.name ? h("p.soft", {}, id) : null,
    h("div.tools", {}, h("label.check", {}, tick, "selected"), ...[["curves", "curves"], ["clients", "clients"], ["fronts", "fronts"]].map(([view, text]) => h("a.button", { href: link({ view, run: id, runs: slotOf(id) >= 0 ? get("runs") : [get("runs"), id].filter((part) => part).join(",") }) }, text)), report),
    advice ? h("p.advice", {}, advice, known.state === "stalled" ? "" : [" ", code(`fedloom resume ${id}`), " goes on from its last checkpoint."]) : null,
    h("dl", {}, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    more?.problem ? note("Its tables cannot be read", more.problem) : null,
    more && Object.keys(more.rows).length ? h("p.soft", {}, Object.entries(more.rows).map(([table, rows]) => `${rows} ${table}`).join(" · ")) : null,
    more?.models?.length ? [h("h2", {}, "Models"), h("table", {}, h("thead", {}, h("tr", {}, ["tier", "architecture", "MACs", "parameters", "file"].map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, more.models.map((model) => h("tr", {}, h("td", {}, model.tier), h("td.arch", {}, model.architecture), h("td.number", {}, number(model.macs)), h("td.number", {}, number(model.parameters)), h("td.soft", {}, model.file)))))] : null,
    more?.facts?.length ? details("recorded", h("dl", {}, more.facts.flatMap((fact) => [h("dt", { title: fact.meaning }, fact.name), h("dd", {}, fact.value)]))) : null,
    more?.config?.length ? details("configuration", h("dl.config", {}, more.config.flatMap(([key, value]) => [h("dt", {}, key), h("dd", {}, value)]))) : null);
}

export const run = {
  title: "Run",
  enter(main, theStore) {
    box = h("div.run");
    store = theStore;
    main.append(box);
    tags = {};
    answer = null;
    draw();
  },
  update: () => draw(),
  change: () => draw(),
  async refresh() {
    const id = currentRun();
    if (id !== of) {
      of = id;
      tags = {};
      answer = null;
    }
    if (!id || !store.runs.has(id)) return;
    const view = await ask("api/run", { run: id }, tags);
    if (view) {
      answer = { ...view, id };
      draw();
    }
  },
};

let table, differing = null, differTags = {};

function drawDifferences() {
  const ids = chosen();
  if (ids.length < 2) return replace(table, note("Fewer than two runs are selected", ["Tick two or more in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), ": their configurations are shown here side by side."]));
  if (!differing) return replace(table, reading());
  const isAll = get("all") === "1", words = get("key").toLowerCase();
  const rows = differing.rows.filter((row) => (isAll || row.differs) && row.key.toLowerCase().includes(words));
  const problems = Object.entries(differing.problems).map(([id, problem]) => h("p.advice", {}, `${id}: ${problem}`));
  const filter = table.querySelector("input[type=search]") ?? h("input", { type: "search", placeholder: "Search keys", "aria-label": "Search keys", value: get("key"), oninput: (event) => { history.replaceState(null, "", link({ key: event.target.value })); dispatchEvent(new HashChangeEvent("hashchange")); } });
  const isFocused = document.activeElement === filter, at = filter.selectionStart;
  const heads = differing.runs.map((id) => h("th", { scope: "col", title: id }, swatch(id), h("a", { href: link({ view: "run", run: id }) }, store.runs.get(id)?.name ?? id)));
  replace(table, h("div.tools", {}, filter, check("also show equal keys", "all"), h("span.soft", {}, `${differing.rows.filter((row) => row.differs).length} of ${differing.rows.length} keys differ`)), problems,
    rows.length ? h("div.scroll", {}, h("table.differences", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), heads)), h("tbody", {}, rows.map((row) => h("tr", { class: row.differs ? "differs" : null }, h("th", { scope: "row" }, row.key), row.values.map((value, i) => h("td", { class: value === row.values[0] && i ? "same" : null }, value))))))) : note("Nothing differs", "These runs have the same configuration" + (words ? " in the keys that were searched for." : ".")));
  if (isFocused) { filter.focus(); filter.setSelectionRange(at, at); }
  return undefined;
}

export const differences = {
  title: "Differences",
  enter(main, theStore) {
    store = theStore;
    table = h("div");
    main.append(table);
    differTags = {};
    differing = null;
    drawDifferences();
  },
  update: drawDifferences,
  change: drawDifferences,
  async refresh() {
    const runs = chosen().filter((id) => store.runs.has(id));
    if (runs.length < 2) return;
    const view = await ask("api/differences", { run: runs }, differTags);
    if (view) {
      differing = view;
      drawDifferences();
    }
  },
};
