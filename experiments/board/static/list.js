// All runs as a table: only the rows that are seen are elements, so that thousands of runs cost as little as fifty.

import { choose, chosen, code, colourOf, day, duration, get, h, link, MOST_CHOSEN, note, number, replace, select, set, share, short, slotOf, startOf, stateOf, swatch } from "./base.js";

const ROW = 30, BEYOND = 8;
const ORDER = ["running", "stalled", "dead", "failed", "interrupted", "unknown", "done"];

const COLUMNS = [
  { key: "state", text: "state", value: (run) => ORDER.indexOf(run.state), cell: (run) => stateOf(run.state) },
  { key: "name", text: "run", value: (run) => run.name ?? run.id, cell: nameCell },
  { key: "method", text: "method", value: (run) => run.method ?? "" , cell: (run) => run.method ?? "" },
  { key: "preset", text: "preset", value: (run) => run.preset, cell: (run) => run.preset },
  { key: "dataset", text: "data", value: (run) => run.dataset ?? "", cell: (run) => run.dataset ?? "" },
  { key: "started", text: "started", isNumber: true, value: startOf, cell: (run) => day(startOf(run)) },
  { key: "took", text: "took", isNumber: true, value: took, cell: (run) => duration(took(run)) },
  { key: "round", text: "round", isNumber: true, value: (run) => (run.rounds && run.state !== "done" ? run.round / run.rounds : null), cell: roundCell, title: "of the stage in progress" },
  { key: "accuracy", text: "accuracy", isNumber: true, title: "of the final models on test data", value: (run) => run.accuracy, cell: (run) => share(run.accuracy) },
  { key: "validation", text: "validation", isNumber: true, title: "latest accuracy on validation data in training", value: (run) => run.validation, cell: (run) => share(run.validation) },
  { key: "message", text: "message", value: (run) => run.problem ?? run.message, cell: messageCell },
];

function took(run) {
  const until = run.ended ?? run.beat;
  return run.started != null && until != null ? Math.max(0, until - run.started) : null;
}

function nameCell(run) {
  const tags = run.tags.map((tag) => h("button.tag", { type: "button", title: `runs with the tag ${tag}`, onclick: () => set({ tag }) }, tag));
  return [h("a.name", { href: link({ view: "run", run: run.id }), title: run.id }, run.name ?? short(run.id)), tags];
}

function roundCell(run) {
  if (!run.rounds || run.state === "done") return "";
  const bar = h("span.bar", { "aria-hidden": "true" }, h("span", { style: { width: `${(100 * run.round) / run.rounds}%` } }));
  return [bar, `${run.round}/${run.rounds}`];
}

function messageCell(run) {
  const text = run.problem ?? run.message;
  return text ? h("span.message", { title: text }, text) : "";
}

let root, store, body, scroller, count, stateBox, picks, heads, empty, rows = [], lines = [], drawn = "", last = null;

const FILTERS = [["method", "method"], ["preset", "preset"], ["tag", "tag"], ["ablation", "ablation"]];

function valuesOf(run, name) {
  if (name === "tag") return run.tags;
  const value = run[name];
  return value == null ? [] : [value];
}

function matching() {
  const words = get("q").toLowerCase().split(/\s+/).filter((word) => word);
  const states = get("state").split(",").filter((state) => state);
  const chosenValues = FILTERS.map(([name]) => [name, get(name)]).filter(([, value]) => value);
  const shown = [];
  for (const run of store.runs.values()) {
    if (states.length && !states.includes(run.state)) continue;
    if (!chosenValues.every(([name, value]) => valuesOf(run, name).includes(value))) continue;
    if (words.length) {
      const text = [run.id, run.name, run.method, run.preset, run.dataset, run.message, run.problem, ...run.tags].join(" ").toLowerCase();
      if (!words.every((word) => text.includes(word))) continue;
    }
    shown.push(run);
  }
  const [key, way] = get("sort", "started-down").split("-");
  const column = COLUMNS.find((each) => each.key === key) ?? COLUMNS[5], sign = way === "up" ? 1 : -1;
  const sorted = shown.map((run) => [column.value(run), run]);
  sorted.sort(([a, one], [b, other]) => {
    if (a == null || b == null) return (a == null) - (b == null) || (one.id < other.id ? 1 : -1); // unknown ones last
    return (a < b ? -1 : a > b ? 1 : 0) * sign || (one.id < other.id ? 1 : -1);
  });
  return sorted.map(([, run]) => run);
}

function draw() {
  rows = matching();
  const total = store.runs.size;
  count.textContent = rows.length === total ? `${total} runs` : `${rows.length} of ${total} runs`;
  drawStates();
  drawPicks();
  drawHeads();
  drawChosen();
  drawRows();
  const nothing = !total && store.version;
  const none = total && !rows.length;
  empty.hidden = !(nothing || none);
  scroller.hidden = Boolean(nothing);
  if (nothing) {
    replace(empty, note("No runs yet", ["There are none under ", code(store.results), ". Start one, and it appears here while it runs:"], code("fedloom run experiment=fedoras_digits"), "Another folder: fedloom board --results FOLDER"));
  } else if (none) {
    replace(empty, note("No run matches", "Loosen the search or the filters, or ", h("button", { type: "button", onclick: reset }, "show all runs")));
  }
}

const reset = () => set({ q: "", state: "", method: "", preset: "", tag: "", ablation: "" });

function drawStates() {
  const counts = new Map();
  for (const run of store.runs.values()) counts.set(run.state, (counts.get(run.state) ?? 0) + 1);
  const picked = get("state").split(",").filter((state) => state);
  const known = [...new Set([...ORDER.filter((state) => counts.has(state)), ...picked])];
  keep(stateBox, known.map((state) => [state, counts.get(state) ?? 0, picked.includes(state)]), (buttons) => buttons.map(([state, number_, isPicked]) =>
    h("button.chip", { type: "button", "aria-pressed": String(isPicked), "data-state": state, onclick: () => {
      const now = get("state").split(",").filter((each) => each);
      set({ state: (now.includes(state) ? now.filter((each) => each !== state) : [...now, state]).join(",") });
    } }, stateOf(state), ` ${number_}`)));
}

function drawPicks() {
  const options = FILTERS.map(([name]) => {
    const known = new Set();
    for (const run of store.runs.values()) for (const value of valuesOf(run, name)) known.add(value);
    if (get(name)) known.add(get(name));
    return [name, [...known].sort()];
  });
  keep(picks, [options, FILTERS.map(([name]) => get(name))], () => options.filter(([, values]) => values.length).map(([name, values]) =>
    select(name, name, [["", "all"], ...values.map((value) => [value, value])], get(name))));
}

// Elements stay while what they show stays, so that an open menu or a focus is not lost at every turn.
function keep(box, values, make) {
  const text = JSON.stringify(values);
  if (box.dataset.shown === text) return;
  box.dataset.shown = text;
  replace(box, ...make(values));
}

function drawHeads() {
  const [key, way] = get("sort", "started-down").split("-");
  keep(heads, [key, way], () => [
    h("th", { scope: "col" }, h("span.hidden", {}, "selected")),
    ...COLUMNS.map((column) => {
      const isSorted = column.key === key;
      const next = isSorted && way === "down" ? "up" : "down";
      return h(`th.of-${column.key}${column.isNumber ? ".number" : ""}`, { scope: "col", "aria-sort": isSorted ? (way === "up" ? "ascending" : "descending") : "none" },
        h("button.plain", { type: "button", title: column.title ?? `sort by ${column.text}`, onclick: () => set({ sort: `${column.key}-${next}` }) },
          column.text, h("span.arrow", { "aria-hidden": "true" }, isSorted ? (way === "up" ? " ↑" : " ↓") : "")));
    }),
  ]);
}

let selection;
function drawChosen() {
  const ids = chosen();
  keep(selection, [ids, rows.length > 0], () => [
    h("span", {}, ids.length ? `${ids.length} selected` : "Tick runs to compare them"),
    ids.length ? h("a.button", { href: link({ view: "curves" }) }, "curves") : null,
    ids.length > 1 ? h("a.button", { href: link({ view: "differences" }) }, "differences") : null,
    ids.length ? h("button", { type: "button", onclick: () => choose(ids, false) }, "clear") : null,
    rows.length ? h("button", { type: "button", title: `at most ${MOST_CHOSEN}`, onclick: () => choose(rows.slice(0, 50).map((run) => run.id), true) }, "select the first 50") : null,
  ]);
}

function drawRows() {
  const first = Math.max(0, Math.floor(scroller.scrollTop / ROW) - BEYOND);
  const end = Math.min(rows.length, first + Math.ceil((scroller.clientHeight || 600) / ROW) + 2 * BEYOND);
  const visible = rows.slice(first, end);
  const now = JSON.stringify([first, rows.length, visible.map((run) => run.id)]);
  if (now === drawn) { // the rows stay, so that a click or a key that is being pressed is not lost
    visible.forEach((run, i) => fillRow(lines[i], run));
    return;
  }
  drawn = now;
  const focused = document.activeElement?.dataset?.tick;
  body.parentElement.setAttribute("aria-rowcount", rows.length + 1);
  lines = visible.map((run, i) => rowOf(run, first + i));
  replace(body, spacer(first), ...lines.map((line) => line.element), spacer(rows.length - end));
  if (focused) body.querySelector(`[data-tick="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
}

const spacer = (number_) => (number_ > 0 ? h("tr.spacer", { "aria-hidden": "true", style: { height: `${number_ * ROW}px` } }) : null);

function rowOf(run, at) {
  const tick = h("input", { type: "checkbox", "data-tick": run.id });
  tick.addEventListener("click", (event) => {
    const from = event.shiftKey && last !== null ? rows.findIndex((other) => other.id === last) : -1;
    const range = from < 0 ? [run] : rows.slice(Math.min(from, at), Math.max(from, at) + 1);
    last = run.id;
    choose(range.map((each) => each.id), tick.checked);
  });
  const box = h("td.tick", {}, tick);
  const line = { tick, box, text: "", element: h("tr", { "aria-rowindex": at + 2, "data-run": run.id }, box) };
  fillRow(line, run);
  return line;
}

function fillRow(line, run) {
  const { tick, box, element } = line, slot = slotOf(run.id), text = JSON.stringify([run, slot, location.hash, colourOf(run.id)]);
  if (text === line.text) return;
  line.text = text;
  tick.checked = slot >= 0;
  tick.setAttribute("aria-label", `select ${run.name ?? run.id}`);
  while (box.children.length > 1) box.lastChild.remove();
  if (slot >= 0) box.append(swatch(run.id));
  element.className = slot >= 0 ? "chosen" : "";
  while (element.children.length > 1) element.lastChild.remove();
  element.append(...COLUMNS.map((column) => h(`td.of-${column.key}${column.isNumber ? ".number" : ""}`, {}, column.cell(run))));
}

function onKey(event) {
  const id = document.activeElement?.dataset?.tick;
  const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -Infinity, End: Infinity }[event.key];
  if (!id || !step) return;
  event.preventDefault();
  const at = Math.max(0, Math.min(rows.length - 1, rows.findIndex((run) => run.id === id) + step));
  const head = heads.offsetHeight, top = at * ROW;
  if (top < scroller.scrollTop) scroller.scrollTop = top;
  else if (top + ROW + head > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW + head - scroller.clientHeight;
  drawRows();
  body.querySelector(`[data-tick="${CSS.escape(rows[at].id)}"]`)?.focus({ preventScroll: true });
}

let search;

export const list = {
  title: "Runs",
  enter(main, theStore) {
    root = main;
    store = theStore;
    search = h("input", { id: "search", type: "search", placeholder: "Search runs  ( / )", "aria-label": "Search runs", value: get("q"), oninput: () => set({ q: search.value }) });
    count = h("span.count", { role: "status" });
    stateBox = h("div.chips", { role: "group", "aria-label": "States" });
    picks = h("div.picks");
    selection = h("div.selection");
    heads = h("tr", { "aria-rowindex": 1 });
    body = h("tbody");
    scroller = h("div.scroll", { onscroll: drawRows, onkeydown: onKey }, h("table.list", {}, h("thead", {}, heads), body));
    empty = h("div");
    drawn = "";
    root.append(h("div.tools", {}, search, count, stateBox, picks), selection, empty, scroller);
    draw();
  },
  update: draw,
  change() {
    if (document.activeElement !== search) search.value = get("q");
    draw();
  },
};

addEventListener("resize", () => { if (scroller?.isConnected) drawRows(); });
