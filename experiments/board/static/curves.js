// The curves of the selected runs: a panel per metric, over rounds, megabytes or simulated hours.

import { ask, check, chosen, code, colourOf, dash, get, h, hideTip, link, note, number, replace, segments, select, set, share, showTip, slotOf, series, swatch } from "./base.js";
import { nearest, Plot } from "./plot.js";

const AXES = [["rounds", "rounds", ""], ["megabytes", "megabytes sent and received", ""], ["hours", "simulated hours", ""]];
const USUAL = "loss,metric";
const WORDS = { metric: "accuracy of the clients in training", loss: "loss of the clients in training" };
const MOST_IN_TIP = 8;

export const words = (key) => {
  if (WORDS[key]) return WORDS[key];
  const [where, split, name] = key.split("/");
  return name ? `${split === "none" ? "" : `${split} `}${name}, ${where === "server" ? "on the server's data" : "mean over clients"}` : key.replaceAll("_", " ");
};

let root, store, panels = new Map(), controls, grid, known = { stages: [], metrics: [] }, knownTags = {}, shown = "";

const metrics = () => get("metrics", USUAL).split(",").filter((key) => key);

class Panel {
  constructor(key) {
    this.key = key;
    this.tags = {};
    this.answer = null;
    this.message = h("p.soft");
    this.table = h("div.values");
    this.plotBox = h("div");
    const isLast = () => metrics().length < 2;
    this.box = h("section.panel", { "data-metric": key }, h("h2", {}, words(key), isLast() ? null : h("button.plain", { type: "button", "aria-label": `Remove ${words(key)}`, onclick: () => set({ metrics: metrics().filter((other) => other !== key).join(",") }) }, "×")), this.message, this.plotBox,
      h("details", {}, h("summary", {}, "values"), this.table));
  }

  async refresh() {
    const runs = chosen().filter((id) => store.runs.has(id));
    if (!runs.length) return;
    const answer = await ask("api/curves", { run: runs, stage: get("stage"), metric: this.key, axis: get("axis", "rounds") }, this.tags);
    if (answer) {
      this.answer = answer;
      this.draw();
    }
  }

  draw() {
    if (!this.answer) return;
    const weight = Number(get("smooth", "0")), isLog = get("log") === "1";
    const lines = [];
    this.problems = [];
    for (const id of chosen()) {
      const curve = this.answer.curves[id];
      if (!curve) continue;
      if (curve.problem) this.problems.push(`${store.labels[id] ?? id}: ${curve.problem}`);
      const keep = isLog ? curve.y.map((value) => value > 0) : null;
      const x = keep ? curve.x.filter((_, i) => keep[i]) : curve.x, raw = keep ? curve.y.filter((_, i) => keep[i]) : curve.y;
      if (!x.length) continue;
      const style = { id, x, colour: () => colourOf(id), dash: dash(slotOf(id)) };
      if (weight > 0) lines.push({ ...style, y: raw, alpha: 0.22, width: 1, isQuiet: true });
      lines.push({ ...style, y: weight > 0 ? smoothed(raw, weight) : raw, raw });
    }
    lines.sort((one, other) => (other.isQuiet ?? false) - (one.isQuiet ?? false));
    const axis = AXES.find(([key]) => key === get("axis", "rounds")) ?? AXES[0];
    const kind = `${axis[0]} ${isLog}`;
    if (!lines.length) {
      this.close();
      const why = this.problems.length ? this.problems : ["None of the selected runs has values of this metric in this stage yet."];
      this.message.textContent = why.join(" · ");
      replace(this.table);
      return;
    }
    if (this.kind !== kind) {
      this.close();
      this.kind = kind;
      this.plot = new Plot({ x: axis[1], y: words(this.key), isLog, isWhole: axis[0] === "rounds", height: metrics().length > 1 ? 320 : 440, onHover: (at) => this.hover(at) });
      replace(this.plotBox, this.plot.box);
    }
    this.lines = lines;
    this.plot.set(lines);
    this.message.textContent = this.problems.join(" · ");
    this.list();
    this.box.dataset.drawn = lines.length;
  }

  hover(at) {
    this.plot.emphasise(at ? at.at : null);
    for (const item of document.querySelectorAll("#chosen li")) item.classList.toggle("hovered", Boolean(at) && item.dataset.run === this.lines[at.at].id);
    if (!at) return hideTip();
    const line = this.lines[at.at];
    const others = this.lines.filter((other) => !other.isQuiet).map((other) => [other, nearest(other.x, line.x[at.i])])
      .sort(([a, i], [b, j]) => (b === line) - (a === line) || Math.abs(a.y[i] - at.value) - Math.abs(b.y[j] - at.value)).slice(0, MOST_IN_TIP)
      .sort(([a, i], [b, j]) => b.y[j] - a.y[i]);
    const rows = others.map(([other, i]) => h(other === line ? "tr.now" : "tr", {}, h("td", {}, swatch(other.id)), h("td.number", {}, number(other.y[i])), h("td", {}, store.labels[other.id] ?? other.id)));
    const left = this.lines.filter((other) => !other.isQuiet).length - others.length;
    showTip(at.x, at.y, h("div", {}, `${get("axis", "rounds")} ${number(line.x[at.i])}`), h("table", {}, rows), left > 0 ? h("div.soft", {}, `and ${left} more`) : null);
  }

  focus(id) {
    const at = this.lines?.findIndex((line) => line.id === id && !line.isQuiet) ?? -1;
    this.plot?.emphasise(at < 0 ? null : at);
  }

  list() {
    const rows = this.lines.filter((line) => line.raw).map((line) => {
      let least = Infinity, most = -Infinity;
      for (const value of line.raw) { least = Math.min(least, value); most = Math.max(most, value); }
      return h("tr", {}, h("td", {}, swatch(line.id)), h("td", {}, store.labels[line.id] ?? line.id), ...[line.raw.at(-1), least, most].map((value) => h("td.number", {}, number(value))), h("td.number", {}, number(line.x.at(-1))));
    });
    replace(this.table, h("table", {}, h("thead", {}, h("tr", {}, h("th"), h("th", { scope: "col" }, "run"), ...["last", "least", "greatest", `at ${get("axis", "rounds")}`].map((text) => h("th.number", { scope: "col" }, text)))), h("tbody", {}, rows)));
  }

  close() {
    this.plot?.destroy();
    this.plot = null;
    this.kind = null;
    this.plotBox.replaceChildren();
  }
}

function smoothed(values, weight) {
  let sum = 0, scale = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return sum / scale;
  });
}

function drawControls() {
  const axis = get("axis", "rounds"), stages = known.stages.map((name) => [name, name]);
  const rest = known.metrics.filter((key) => !metrics().includes(key));
  const now = JSON.stringify([known, axis, get("stage"), metrics(), get("log"), get("smooth")]);
  if (now === shown) return;
  shown = now;
  const slider = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: get("smooth", "0"), "aria-label": "smoothing", oninput: () => set({ smooth: slider.value === "0" ? "" : slider.value }) });
  if (document.activeElement?.type === "range" && controls.contains(document.activeElement)) return;
  replace(controls,
    segments("over", "axis", AXES.map(([key]) => [key, key]), axis),
    select("stage", "stage", [["", "first stage"], ...stages], get("stage")),
    select("add a metric", "add", [["", "…"], ...rest.map((key) => [key, words(key)])], "", (key) => key && set({ metrics: [...metrics(), key].join(",") })),
    check("log scale", "log"),
    h("label.field", {}, h("span.soft", {}, "smoothing"), slider),
    h("span.soft.hint", {}, "drag to zoom, double-click to zoom out"));
}

function draw() {
  const ids = chosen();
  controls.hidden = !ids.length;
  if (!ids.length) {
    for (const panel of panels.values()) panel.close();
    panels.clear();
    replace(grid, note("No runs are selected", ["Tick runs in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), ", as many as you like: their curves are drawn here and updated while they run."]));
    return;
  }
  for (const [key, panel] of panels) {
    if (!metrics().includes(key)) {
      panel.close();
      panels.delete(key);
    }
  }
  const isNew = metrics().some((key) => !panels.has(key)) || grid.children.length !== metrics().length;
  for (const key of metrics()) if (!panels.has(key)) panels.set(key, new Panel(key));
  if (isNew) replace(grid, ...metrics().map((key) => panels.get(key).box));
  grid.dataset.panels = metrics().length;
  for (const panel of panels.values()) panel.draw();
  drawControls();
}

export const curves = {
  title: "Curves",
  enter(main, theStore) {
    root = main;
    store = theStore;
    shown = "";
    knownTags = {};
    controls = h("div.tools");
    grid = h("div.panels");
    root.append(controls, grid);
    draw();
  },
  change: draw,
  update: draw,
  async refresh() {
    const runs = chosen().filter((id) => store.runs.has(id));
    if (!runs.length) return;
    await Promise.all([...panels.values()].map((panel) => panel.refresh())); // the curves come first
    const metricsKnown = await ask("api/metrics", { run: runs }, knownTags);
    if (metricsKnown) {
      known = metricsKnown;
      drawControls();
    }
  },
  focus(id) { for (const panel of panels.values()) panel.focus(id); },
  leave() {
    for (const panel of panels.values()) panel.close();
    panels.clear();
  },
};
