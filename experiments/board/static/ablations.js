// Ablations: the list of them, and one as parallel coordinates of axes and outcomes, whose axes can be brushed.

import { ask, choose, chosen, code, colourOf, css, get, h, hideTip, link, Lost, note, number, onTheme, reading, replace, s, select, set, shade, share, showTip, slotOf, stateOf } from "./base.js";

const TOP = 46, BOTTOM = 26, HEIGHT = 380, SIDE = 70;
const USUAL = ["accuracy", "total_bytes", "simulated_s"];

let root, store, tags = {}, answer = null, wanted = "", box, listBox, brushes = new Map(), fit = null, wide = 0, weights = null, weightTags = {};

const current = () => get("ablation") || store.ablations.at(-1)?.id || "";
const outcomeText = (outcome, value) => (/accuracy|worst_client/.test(outcome.name) ? share(value) : number(value, outcome.unit));

function drawList() {
  if (!store.ablations.length) {
    replace(listBox, note("No ablations yet", ["An ablation runs an experiment over the values of its axes and over seeds:"], code("fedloom ablate ablation=alpha experiment=fedoras_digits")));
    replace(box);
    return;
  }
  const items = [...store.ablations].reverse().map((ablation) => [ablation.id, `${ablation.id} · ${ablation.state}${ablation.planned ? ` ${ablation.ended}/${ablation.planned}` : ""}`]);
  if (!items.some(([id]) => id === current())) items.unshift([current(), `${current()} (not here)`]);
  const text = JSON.stringify(items) + current();
  if (listBox.dataset.shown === text) return;
  listBox.dataset.shown = text;
  const known = store.ablations.find((ablation) => ablation.id === current());
  replace(listBox, select("ablation", "ablation", items, current()), known ? stateOf(known.state) : null, known?.message ? h("span.soft", {}, known.message) : null,
    h("a.button", { href: link({ view: "runs", ablation: current(), runs: get("runs") }) }, "its runs"));
}

// -- the columns of the parallel coordinates: axes in their order, then outcomes ----------------------------------------

function columnsOf(view) {
  const axes = view.axes.map((axis) => {
    const isNumeric = axis.values.length > 2 && axis.values.every((value) => typeof value === "number");
    const values = isNumeric ? [...axis.values].sort((a, b) => a - b) : axis.values;
    return { name: axis.name, kind: "axis", isText: axis.values.some((value) => typeof value !== "number"), values, of: (trial) => values.indexOf(trial.setting[axis.name]), text: (at) => String(values[at]), least: -0.25, most: values.length - 0.75 };
  });
  const wantedOutcomes = get("outcomes", USUAL.join(",")).split(",");
  const outcomes = view.outcomes.filter((outcome) => wantedOutcomes.includes(outcome.name)).map((outcome) => {
    const values = view.trials.map((trial) => trial.outcomes[outcome.name]).filter((value) => value != null);
    const least = Math.min(...values), most = Math.max(...values), room = (most - least) * 0.04 || Math.abs(most) * 0.05 || 1;
    return { name: outcome.name, kind: "outcome", of: (trial) => trial.outcomes[outcome.name] ?? null, text: (value) => outcomeText(outcome, value), least: values.length ? least - room : 0, most: values.length ? most + room : 1, isEmpty: !values.length };
  });
  return [...axes, ...outcomes];
}

// The outcome that the lines are coloured by, or accuracy where that is an axis.
const measure = () => (answer && !answer.outcomes.some((outcome) => outcome.name === get("colour", "accuracy")) ? "accuracy" : get("colour", "accuracy"));

const passes = (trial, columns) => columns.every((column) => {
  const brush = brushes.get(column.name);
  if (!brush) return true;
  const value = column.of(trial);
  return value != null && value >= brush[0] && value <= brush[1];
});

function draw() {
  drawList();
  if (!answer) return replace(box, store.ablations.length ? reading() : null);
  const view = answer, columns = columnsOf(view);
  const width = Math.max(2 * SIDE + 95 * (columns.length - 1), box.clientWidth || 900), gap = (width - 2 * SIDE) / Math.max(1, columns.length - 1);
  const X = (i) => SIDE + i * gap, Y = (column, value) => TOP + (1 - (value - column.least) / (column.most - column.least)) * (HEIGHT - TOP - BOTTOM);
  const by = columns.find((column) => column.name === get("colour", "accuracy")) ?? columns.at(-1);
  const svg = s("svg", { class: "parallel", width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "group", "aria-label": `parallel coordinates of ${view.id}` });
  const passing = view.trials.filter((trial) => passes(trial, columns));
  const isIn = new Set(passing);
  const ordered = [...view.trials].sort((a, b) => isIn.has(a) - isIn.has(b) || (slotOf(a.id) >= 0) - (slotOf(b.id) >= 0));
  for (const trial of ordered) {
    const points = columns.map((column, i) => [X(i), column.of(trial), column]).filter(([, value]) => value != null && value !== -1);
    if (points.length < 2) continue;
    // Trials of one setting would lie upon each other: seeds are a little apart.
    const path = points.map(([x, value, column]) => [x, Y(column, value) + (column.kind === "axis" ? ((trial.index % 7) - 3) * 1.5 : 0)]);
    const value = by.of(trial), colour = slotOf(trial.id) >= 0 ? colourOf(trial.id) : value == null ? css("--soft") : `rgb(${shade(by.isEmpty ? 0.5 : (value - by.least) / (by.most - by.least))})`;
    const line = s("path", { d: curved(path), fill: "none", stroke: colour, class: `trial${isIn.has(trial) ? "" : " out"}${slotOf(trial.id) >= 0 ? " chosen" : ""}`, "data-run": trial.id });
    line.addEventListener("mousemove", (event) => tell(event, trial, view));
    line.addEventListener("mouseleave", hideTip);
    line.addEventListener("click", () => choose([trial.id], slotOf(trial.id) < 0));
    svg.append(line);
  }
  columns.forEach((column, i) => svg.append(axisOf(column, i, X(i), Y, gap)));
  const count = h("p", { role: "status" }, `${passing.length} of ${view.trials.length} trials`, brushes.size ? " in the brushed ranges " : "",
    brushes.size ? h("button", { type: "button", onclick: () => { brushes.clear(); remember(); } }, "clear brushes") : null, " ",
    h("button", { type: "button", disabled: !passing.length, onclick: () => choose(passing.map((trial) => trial.id), true) }, passing.length === view.trials.length ? "select all" : "select these"), " ",
    chosen().length ? h("a.button", { href: link({ view: "curves" }) }, `curves of ${chosen().length} selected`) : null,
    view.report ? h("a.button", { href: `report/${encodeURIComponent(view.id)}`, target: "_blank", rel: "noopener" }, "report") : null);
  const focused = document.activeElement?.closest?.("g.axis")?.dataset?.axis;
  const open = box.querySelector("details")?.open ?? false;
  replace(box, h("h2", {}, view.title || view.id), h("div.tools", {},
    select("colour by", "colour", columns.filter((column) => !column.isEmpty).map((column) => [column.name, column.kind === "axis" ? column.name : column.name.replaceAll("_", " ")]), by.name),
    outcomePicker(view), h("span.soft.hint", {}, "drag along an axis to brush it, or focus it and use the arrow keys (Shift: resize, Esc: clear)")),
    count, h("div.scroll", {}, svg), importances(), table(view, columns, passing, open));
  if (focused) box.querySelector(`g.axis[data-axis="${CSS.escape(focused)}"]`)?.focus();
}

function outcomePicker(view) {
  const now = get("outcomes", USUAL.join(",")).split(",");
  const boxes = view.outcomes.filter((outcome) => view.trials.some((trial) => trial.outcomes[outcome.name] != null)).map((outcome) => {
    const tick = h("input", { type: "checkbox", checked: now.includes(outcome.name), onchange: () => set({ outcomes: (tick.checked ? [...now, outcome.name] : now.filter((name) => name !== outcome.name)).join(",") }) });
    return h("label.check", {}, tick, outcome.name.replaceAll("_", " "));
  });
  const open = root.querySelector("details.picker")?.open ?? false;
  return h("details.picker", { open }, h("summary", {}, "outcomes"), h("div.menu", {}, boxes));
}

function curved(points) {
  return points.map(([x, y], i) => {
    if (!i) return `M${x.toFixed(1)},${y.toFixed(1)}`;
    const [before, last] = points[i - 1], middle = ((before + x) / 2).toFixed(1);
    return `C${middle},${last.toFixed(1)} ${middle},${y.toFixed(1)} ${x.toFixed(1)},${y.toFixed(1)}`;
  }).join("");
}

function axisOf(column, i, x, Y, gap) {
  const span = HEIGHT - TOP - BOTTOM, at = (y) => column.least + (1 - (y - TOP) / span) * (column.most - column.least);
  const group = s("g", { class: "axis", "data-axis": column.name, transform: `translate(${x.toFixed(1)},0)`, tabindex: 0, role: "slider", "aria-label": `${column.name}, ${brushes.has(column.name) ? "brushed" : "not brushed"}`,
    "aria-valuemin": column.least, "aria-valuemax": column.most, "aria-valuenow": brushes.get(column.name)?.[0] ?? column.least, "aria-valuetext": brushes.has(column.name) ? brushes.get(column.name).map((value) => number(value)).join(" to ") : "all" });
  group.append(s("line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "rule" }));
  const name = s("text", { y: 16, "text-anchor": "middle", class: `title ${column.kind}` }, cut(column.kind === "axis" ? column.name : column.name.replaceAll("_", " "), gap / 7));
  name.append(s("title", {}, column.name));
  group.append(name);
  const marks = column.kind === "axis" ? column.values.map((_, at_) => at_) : column.isEmpty ? [] : [0, 0.25, 0.5, 0.75, 1].map((part) => column.least + part * (column.most - column.least));
  for (const value of marks.length > 24 ? marks.filter((_, k) => k % Math.ceil(marks.length / 12) === 0) : marks) {
    const text = s("text", { x: 6, y: Y(column, value) + 4, class: "mark" }, cut(column.text(value), gap / 8));
    text.append(s("title", {}, column.text(value)));
    group.append(text);
  }
  if (column.isEmpty) group.append(s("text", { x: 6, y: TOP + span / 2, class: "mark" }, "no values"));
  const brush = brushes.get(column.name);
  const band = s("rect", { x: -9, width: 18, class: "brush", y: brush ? Y(column, brush[1]) : 0, height: brush ? Math.max(2, Y(column, brush[0]) - Y(column, brush[1])) : 0 });
  const grip = s("rect", { x: -14, y: TOP - 4, width: 28, height: span + 8, class: "grip" });
  group.append(band, grip);
  let from = null;
  const inside = (event) => Math.max(TOP, Math.min(HEIGHT - BOTTOM, event.clientY - group.ownerSVGElement.getBoundingClientRect().top));
  grip.addEventListener("pointerdown", (event) => { from = inside(event); grip.setPointerCapture(event.pointerId); event.preventDefault(); });
  grip.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = inside(event);
    band.setAttribute("y", Math.min(from, to));
    band.setAttribute("height", Math.abs(to - from));
  });
  grip.addEventListener("pointerup", (event) => {
    const to = inside(event), begun = from;
    from = null;
    if (begun === null) return;
    if (Math.abs(to - begun) < 4) brushes.delete(column.name);
    else brushes.set(column.name, [at(Math.max(begun, to)), at(Math.min(begun, to))]);
    remember();
  });
  group.addEventListener("keydown", (event) => {
    if (event.key === "Escape") brushes.delete(column.name);
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
      const step = ((event.key === "ArrowUp" ? 1 : -1) * (column.most - column.least)) / (column.kind === "axis" ? column.values.length : 20);
      const [low, high] = brushes.get(column.name) ?? [column.least, column.least + (column.most - column.least) / (column.kind === "axis" ? column.values.length : 4)];
      brushes.set(column.name, event.shiftKey ? [low, Math.max(low + Math.abs(step) / 2, high + step)] : brushes.has(column.name) ? [low + step, high + step] : [low, high]);
    } else return;
    event.preventDefault();
    remember();
  });
  return group;
}

const cut = (text, most) => (text.length <= Math.max(4, most) ? text : `${text.slice(0, Math.max(3, most - 1))}…`);

function remember() {
  set({ brush: [...brushes].map(([name, range]) => `${encodeURIComponent(name)}:${range.map((value) => Number(value.toPrecision(6))).join(":")}`).join(" ") });
}

function recall() {
  brushes = new Map(get("brush").split(" ").filter((text) => text).map((text) => {
    const [name, low, high] = text.split(":");
    return [decodeURIComponent(name), [Number(low), Number(high)]];
  }));
}

function tell(event, trial, view) {
  const rows = [...Object.entries(trial.setting).map(([name, value]) => [name, String(value)]), ["seed", String(trial.seed)],
    ...view.outcomes.filter((outcome) => trial.outcomes[outcome.name] != null).map((outcome) => [outcome.name.replaceAll("_", " "), outcomeText(outcome, trial.outcomes[outcome.name])])];
  showTip(event.clientX, event.clientY, h("div", {}, `trial ${trial.index} `, stateOf(trial.state)), h("table", {}, rows.map(([name, value]) => h("tr", {}, h("td.soft", {}, name), h("td.number", {}, value)))));
}

const METHODS = {
  variance: "the share of the variance between the trials that is due to an axis by itself or to the interaction of two axes, corrected for the noise of the seeds",
  "one seed": "the share of the variance between the trials that is due to an axis by itself or to the interaction of two axes; only one seed has a value of every setting, so the noise of seeds is not known and in these shares, above all in those of interactions",
  forest: "the share of the variance that is due to an axis with all its interactions, estimated with a random forest: random searches and grids with missing trials have no exact shares",
};

function importances() {
  if (!weights?.importances.length) return null;
  const rows = weights.importances;
  return h("section.importances", {}, h("h3", {}, `What determines ${weights.measure.replaceAll("_", " ")}`), h("table", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, row.axes), h("td", {}, h("span.bar.long", { "aria-hidden": "true" }, h("span", { style: { width: `${100 * row.importance}%` } }))), h("td.number", {}, share(row.importance))))),
    h("p.soft.small", {}, METHODS[rows[0].method]));
}

function table(view, columns, passing, open) {
  const heads = ["trial", "state", ...columns.map((column) => column.name), "seed", "message"];
  const rows = passing.map((trial) => h("tr", {}, h("td", {}, h("a", { href: link({ view: "run", run: trial.id }) }, trial.index)), h("td", {}, stateOf(trial.state)),
    columns.map((column) => { const value = column.of(trial); return h(column.isText ? "td" : "td.number", {}, value == null || value === -1 ? "" : column.text(value)); }), h("td.number", {}, trial.seed), h("td.message", {}, trial.message)));
  return h("details", { open }, h("summary", {}, "trials as a table"), h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))));
}

export const ablations = {
  title: "Ablations",
  enter(main, theStore) {
    root = main;
    store = theStore;
    listBox = h("div.tools");
    box = h("div.ablation");
    root.append(listBox, box);
    tags = {};
    weightTags = {};
    answer = weights = null;
    recall();
    drawList();
    fit = new ResizeObserver(() => { if (answer && Math.abs((box.querySelector("svg.parallel")?.clientWidth ?? 0)  - box.clientWidth) > 2 && box.clientWidth !== wide) { wide = box.clientWidth; draw(); } });
    fit.observe(box);
  },
  update: drawList,
  change() {
    recall();
    draw();
  },
  async refresh() {
    const id = current();
    if (!id) return;
    if (id !== wanted) {
      wanted = id;
      answer = weights = null;
      tags = {};
      weightTags = {};
      draw();
    }
    const view = await ask("api/ablation", { ablation: id }, tags).catch((error) => {
      if (error instanceof Lost || answer) throw error;
      replace(box, note("This ablation cannot be shown", error.message));
    });
    if (view === undefined) return;
    if (view && id === wanted) {
      answer = view;
      if (!document.querySelector(".grip:active")) draw();
    }
    const other = await ask("api/importances", { ablation: id, measure: measure() }, weightTags);
    if (other && id === wanted) {
      weights = other;
      if (!document.querySelector(".grip:active")) draw();
    }
  },
  leave() { fit?.disconnect(); },
};

onTheme(() => { if (answer && box?.isConnected) draw(); });
