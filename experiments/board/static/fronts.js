// The candidates of a run's searches: accuracy over cost per tier, the fronts, and the architecture under the mouse.

import { ask, code, get, h, hideTip, link, note, number, OfOneRun, reading, replace, segments, series, set, share, showTip } from "./base.js";
import { Plot } from "./plot.js";
import { currentRun } from "./page.js";

let root, store, controls, box, plot = null, plotKind = "", names = new Map(), lines = [];
const of = new OfOneRun();

const cost = () => (get("cost") === "parameters" ? "parameters" : "macs");
const hiddenTiers = () => get("without").split(",").filter((tier) => tier);

function linesOf(view) {
  const made = [];
  view.tiers.forEach((tier, i) => {
    if (hiddenTiers().includes(tier.tier)) return;
    const colour = () => series(i), value = tier[cost()];
    const known = value.map((_, k) => k).filter((k) => value[k] != null);
    const pick = (ids) => ({ tier, ids, x: ids.map((k) => value[k]), y: ids.map((k) => tier.metric[k]) });
    const front = known.filter((k) => tier.on_front[k]).sort((a, b) => value[a] - value[b]);
    made.push({ ...pick(known), colour, points: "dot", size: 2.5, alpha: 0.45, isQuiet: false });
    if (front.length > 1) made.push({ ...pick(front), colour, width: 1.5, isQuiet: true });
    if (front.length) made.push({ ...pick(front), colour, points: "ring", size: 4.5, isQuiet: true });
    const winner = known.filter((k) => tier.winner[k]);
    if (winner.length) made.push({ ...pick(winner.slice(-1)), colour, points: "star", size: 9, isQuiet: true });
  });
  return made;
}

function draw() {
  const run = currentRun();
  if (!run) {
    close();
    replace(controls);
    return replace(box, note("No run is selected", ["Tick a run of a method that searches, such as fedoras or superfednas, in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), "."]));
  }
  if (!of.answer) { close(); return replace(box, reading()); }
  if (!of.answer.tiers.length) {
    close();
    replace(controls);
    replace(box, note("This run has scored no candidates", "Its method does not search, or its search has not begun: candidates appear here while it searches.", ["A method that searches: ", code("fedloom run experiment=fedoras_digits")]));
    return;
  }
  replace(controls, segments("cost", "cost", [["macs", "MACs"], ["parameters", "parameters"]], cost()),
    h("div.field", { role: "group", "aria-label": "tiers" }, h("span.soft", {}, "tiers"), of.answer.tiers.map((tier, i) => {
      const isShown = !hiddenTiers().includes(tier.tier);
      return h("button.chip", { type: "button", "aria-pressed": String(isShown), onclick: () => set({ without: (isShown ? [...hiddenTiers(), tier.tier] : hiddenTiers().filter((other) => other !== tier.tier)).join(",") }) },
        h("span.dot", { style: { background: series(i) } }), `${tier.tier} · ${tier.metric.length}`);
    })), h("span.soft.hint", {}, "dots: candidates · rings: on the front · star: the winner"));
  const kind = `${cost()} ${of.answer.tiers.length}`;
  if (plotKind !== kind || !plot) {
    close();
    plotKind = kind;
    plot = new Plot({ x: cost() === "macs" ? "MACs of a forward pass" : "parameters", y: "accuracy on validation data", height: 460, isScatter: true, onHover: hover });
    replace(box, plot.box, h("div.scroll.values"));
  }
  lines = linesOf(of.answer);
  plot.set(lines);
  table();
}

function table() {
  const rows = of.answer.tiers.filter((tier) => !hiddenTiers().includes(tier.tier)).flatMap((tier) => tier.metric.map((_, k) => k).filter((k) => tier.on_front[k] || tier.winner[k])
    .sort((a, b) => tier.macs[a] - tier.macs[b]).map((k) => h("tr", {}, h("td", {}, tier.tier), h("td", {}, tier.winner[k] ? "winner" : "front"), h("td.number", {}, number(tier.macs[k])), h("td.number", {}, number(tier.parameters[k])), h("td.number", {}, share(tier.metric[k])), h("td.arch", {}, names.get(tier.architecture[k]) ?? tier.architecture[k]))));
  replace(box.querySelector(".values"), rows.length ? h("details", {}, h("summary", {}, "fronts as a table"), h("table", {}, h("thead", {}, h("tr", {}, ["tier", "", "MACs", "parameters", "accuracy", "architecture"].map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, rows))) : null);
}

let at = "";
async function hover(point) {
  if (!point) { at = ""; hideTip(); return; }
  const { tier, ids } = lines[point.at], k = ids[point.i], text = tier.architecture[k] ?? "";
  at = text;
  const tell = () => showTip(point.x, point.y, h("b", {}, `${tier.tier}${tier.winner[k] ? ", winner" : tier.on_front[k] ? ", on the front" : ""}`),
    h("table", {}, [["accuracy", share(tier.metric[k])], ["loss", number(tier.loss[k])], ["MACs", number(tier.macs[k])], ["parameters", number(tier.parameters[k])], ["generation", number(tier.generation[k] == null ? null : tier.generation[k] + 1)]].map(([name, value]) => h("tr", {}, h("td.soft", {}, name), h("td.number", {}, value)))),
    h("div.arch", {}, names.get(text) ?? `${text} …`));
  tell();
  if (!names.has(text)) {
    if (names.size > 5000) names = new Map();
    const { run } = of;
    const named = await ask("api/architecture", { run, architecture: text }).catch(() => null);
    if (named && run === of.run) names.set(text, named.text);
    if (at === text && run === of.run) tell();
  }
}

function close() {
  plot?.destroy();
  plot = null;
}

export const fronts = {
  title: "Fronts",
  enter(main, theStore) {
    root = main;
    store = theStore;
    controls = h("div.tools");
    box = h("div.fronts");
    root.append(controls, box);
    of.forget();
    draw();
  },
  change() {
    at = "";
    draw();
  },
  async refresh() {
    if (currentRun() !== of.run) names = new Map();
    await of.refresh(currentRun(), store, "api/fronts", {}, draw);
  },
  leave: close,
};
