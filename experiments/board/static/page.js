// The page: it asks for changes every two seconds while it is seen, and shows one view at a time.

import { ask, choose, chosen, duration, get, h, hideTip, link, Lost, replace, set, short, stateOf, swatch, watch, onTheme } from "./base.js";
import { list } from "./list.js";
import { curves } from "./curves.js";
import { ablations } from "./ablations.js";
import { fronts } from "./fronts.js";
import { clients } from "./clients.js";
import { differences, run } from "./runs.js";

const EVERY_MS = 2000;
const VIEWS = { runs: list, curves, ablations, fronts, clients, differences, run };

export const store = { runs: new Map(), ablations: [], version: "", results: "", waiting: 0, labels: {} };

let shown = null, isPolling = false, answeredAt = 0;
const main = document.getElementById("main");

function show() {
  const name = Object.hasOwn(VIEWS, get("view")) ? get("view") : "runs";
  if (shown !== VIEWS[name]) {
    shown?.leave?.();
    hideTip();
    shown = VIEWS[name];
    document.body.dataset.view = name;
    document.title = `fedloom board: ${shown.title}`;
    main.replaceChildren();
    shown.enter(main, store);
  }
  for (const item of document.querySelectorAll("#views a")) {
    item.setAttribute("aria-current", item.dataset.view === name ? "page" : "false");
    item.href = link({ view: item.dataset.view });
  }
  showChosen();
}

function showChosen() {
  const ids = chosen(), isBeside = !["runs", "ablations"].includes(document.body.dataset.view);
  const box = document.getElementById("chosen");
  box.hidden = !isBeside;
  if (!isBeside) return;
  const isSingle = ["fronts", "clients", "run"].includes(document.body.dataset.view);
  const current = currentRun();
  const head = h("div.head", {}, h("b", {}, `${ids.length} selected`),
    ids.length ? h("button.plain", { type: "button", onclick: () => choose(ids, false) }, "clear") : null);
  const items = ids.map((id) => {
    const known = store.runs.get(id), label = store.labels[id] ?? short(id);
    const name = known?.name ? `${known.name} · ${label}` : label;
    const text = h("a.name", { href: link(isSingle ? { run: id } : { view: "run", run: id }), title: id }, name);
    return h("li", { "data-run": id, "aria-current": String(isSingle && id === current),
      onmouseenter: () => shown.focus?.(id), onmouseleave: () => shown.focus?.(null) },
      swatch(id), h("div.grow", {}, text, known ? h("div.soft.small", {}, stateOf(known.state), " ", progress(known)) : h("div.soft.small", {}, "not in these results")),
      h("button.plain", { type: "button", "aria-label": `Remove ${name}`, onclick: () => choose([id], false) }, "×"));
  });
  replace(box, head, h("ul.runs", {}, items), ids.length ? null : h("p.soft", {}, "Tick runs in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), " to compare them here."));
}

const progress = (known) => (known.rounds && known.state !== "done" ? `${known.stage} ${known.round}/${known.rounds}` : "");

export const currentRun = () => {
  const ids = chosen();
  return get("run") || ids[0] || "";
};

async function poll() {
  if (isPolling || document.hidden) return;
  isPolling = true;
  try {
    const answer = await ask("api/runs", { since: store.version });
    const isNew = answer.version !== store.version || store.waiting !== answer.waiting;
    if (answer.whole) store.runs.clear();
    for (const values of answer.runs) store.runs.set(values.id, values);
    for (const id of answer.gone) store.runs.delete(id);
    const before = JSON.stringify(store.ablations);
    Object.assign(store, { version: answer.version, ablations: answer.ablations, results: answer.results, waiting: answer.waiting });
    if (isNew || before !== JSON.stringify(answer.ablations)) {
      Object.assign(document.getElementById("where"), { textContent: answer.results, title: answer.results });
      shown.update?.();
      showChosen();
    }
    answeredAt = Date.now();
    if (document.getElementById("link").dataset.state !== "live") say("live", "live");
    await Promise.all([nameRuns(), shown.refresh?.()]);
    say("live", store.waiting ? `live · reading ${store.waiting} runs` : "live");
  } catch (error) {
    const since = answeredAt ? `, last seen ${duration((Date.now() - answeredAt) / 1000)} ago` : "";
    if (error instanceof Lost) say("lost", `not connected${since}`);
    else say("wrong", error.message);
  } finally {
    isPolling = false;
  }
}

function say(state, text) {
  const box = document.getElementById("link");
  if (box.textContent === text) return;
  box.dataset.state = state;
  box.textContent = text;
}

let named = "";
async function nameRuns() {
  const ids = chosen().filter((id) => store.runs.has(id));
  if (ids.join() === named) return;
  named = ids.join();
  store.labels = ids.length ? await ask("api/labels", { run: ids }) : {};
  showChosen();
  shown.update?.();
}

watch(() => {
  const before = shown;
  hideTip();
  show();
  if (shown === before) shown.change?.();
  void settle();
});

// What was chosen is asked for at once, not at the next turn.
async function settle() {
  try {
    await Promise.all([nameRuns(), shown.refresh?.()]);
  } catch (error) {
    if (!(error instanceof Lost)) say("wrong", error.message);
  }
}

document.getElementById("views").append(...Object.entries(VIEWS).map(([name, view]) =>
  h("a", { href: link({ view: name }), "data-view": name }, view.title)));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part behind # is the state
  main.focus();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") hideTip();
  if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) {
    event.preventDefault();
    if (document.body.dataset.view !== "runs") set({ view: "runs" }, true);
    document.getElementById("search")?.focus();
  }
});
document.addEventListener("visibilitychange", poll);
onTheme(() => { showChosen(); shown.change?.(); });
show();
void poll();
setInterval(poll, EVERY_MS);
