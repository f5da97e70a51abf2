// What all views share: the state in the URL, requests, elements, colours, and how values are written.

// -- state: everything that is chosen is in the URL, so that it can be shared and bookmarked -------------------------

let params = new URLSearchParams(location.hash.slice(1));
const watchers = new Set();

export const get = (name, otherwise = "") => params.get(name) ?? otherwise;

export function set(changes, push = false) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value == null) params.delete(name);
    else params.set(name, value);
  }
  const hash = `#${params}`;
  if (hash !== location.hash) history[push ? "pushState" : "replaceState"](null, "", hash);
  for (const watcher of watchers) watcher(changes);
}

export const link = (changes) => {
  const other = new URLSearchParams(params);
  for (const [name, value] of Object.entries(changes)) value === "" ? other.delete(name) : other.set(name, value);
  return `#${other}`;
};

export const watch = (watcher) => watchers.add(watcher);

addEventListener("hashchange", () => {
  params = new URLSearchParams(location.hash.slice(1));
  for (const watcher of watchers) watcher(null);
});

// -- the selection: a run's place in it is its colour, in every view and for everybody who opens the URL --------------

export const MOST_CHOSEN = 100;

const slots = () => get("runs").split(",");

export const chosen = () => slots().filter((id) => id);

export const slotOf = (id) => slots().indexOf(id);

export function choose(ids, isChosen) {
  const places = slots();
  for (const id of ids) {
    const at = places.indexOf(id);
    if (isChosen && at < 0 && places.filter((other) => other).length < MOST_CHOSEN) {
      const free = places.indexOf("");
      places[free < 0 ? places.length : free] = id;
    } else if (!isChosen && at >= 0) {
      places[at] = "";
    }
  }
  while (places.length && !places.at(-1)) places.pop();
  set({ runs: places.join(",") });
}

// -- requests: an answer that has not changed is not sent again --------------------------------------------------------

export class Lost extends Error {}

export async function ask(path, query = {}, tags = null) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) for (const one of [value].flat()) words.append(name, one);
  const address = `${path}?${words}`;
  const headers = tags?.address === address ? { "If-None-Match": tags.tag } : {};
  let response;
  try {
    response = await fetch(address, { headers, cache: "no-store" });
  } catch {
    throw new Lost("The board does not answer: is fedloom board still running?");
  }
  if (response.status === 401) location.reload();
  if (response.status === 304) return null;
  if (!response.ok) throw new Error(await response.text());
  if (tags) Object.assign(tags, { address, tag: response.headers.get("ETag") });
  return response.json();
}

// -- elements: text is only ever set as text, so that no name or message becomes markup ---------------------------------

export function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name || "div");
  if (classes.length) element.className = classes.join(" ");
  return fill(element, attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

export const replace = (element, ...children) => element.replaceChildren(...children.flat().filter((child) => child));

export const note = (title, ...lines) => h("div.note", {}, h("b", {}, title), lines.map((line) => h("p", {}, line)));

export const reading = () => h("p.soft", { role: "status" }, "Reading…");

export const code = (text) => h("code", {}, text);

export function select(label, name, options, value, change = (picked) => set({ [name]: picked })) {
  const box = h("select", { "aria-label": label, "data-name": name, onchange: () => change(box.value) });
  box.append(...options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label.field", {}, h("span.soft", {}, label), box);
}

export function segments(label, name, options, value) {
  const buttons = options.map(([key, text]) =>
    h("button", { type: "button", "aria-pressed": String(key === value), onclick: () => set({ [name]: key }) }, text));
  return h("div.field", { role: "group", "aria-label": label }, h("span.soft", {}, label), h("span.segments", {}, buttons));
}

export function check(label, name, otherwise = "") {
  const box = h("input", { type: "checkbox", checked: get(name, otherwise) === "1",
    onchange: () => set({ [name]: box.checked ? "1" : otherwise ? "0" : "" }) });
  return h("label.field.check", {}, box, label);
}

const tip = () => document.getElementById("tip");

export function showTip(x, y, ...children) {
  const box = tip();
  replace(box, ...children);
  box.hidden = false;
  const width = box.offsetWidth, height = box.offsetHeight;
  box.style.left = `${Math.max(4, x + 16 + width > innerWidth ? x - 16 - width : x + 16)}px`;
  box.style.top = `${Math.max(4, Math.min(y + 12, innerHeight - height - 4))}px`;
}

export const hideTip = () => { tip().hidden = true; };

// -- colours: Okabe and Ito's, as in the reports; with the dashes 32 runs can be told apart -----------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const SERIES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222", "#8C564B"];
const IN_THE_DARK = { "#0072B2": "#4C9FD8", "#222222": "#E4E4E4", "#8C564B": "#B98074", "#D55E00": "#F07A26" };
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

export const series = (i) => {
  const colour = SERIES[i % SERIES.length];
  return dark.matches ? IN_THE_DARK[colour] ?? colour : colour;
};
export const dash = (i) => DASHES[Math.floor(i / SERIES.length) % DASHES.length];
export const colourOf = (id) => { const slot = slotOf(id); return slot < 0 ? css("--soft") : series(slot); };
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const onTheme = (redraw) => dark.addEventListener("change", redraw);

// cividis, which readers with any colour vision see grow brighter
const CIVIDIS = [[0, 32, 81], [17, 54, 108], [60, 77, 110], [98, 100, 111], [127, 124, 117], [154, 148, 120],
  [187, 175, 113], [226, 203, 92], [253, 234, 69]];

export function shade(share) {
  const least = dark.matches ? 0.3 : 0; // dark blue is not seen on black
  const at = (least + (1 - least) * Math.max(0, Math.min(1, share))) * (CIVIDIS.length - 1), i = Math.min(Math.floor(at), CIVIDIS.length - 2);
  return CIVIDIS[i].map((part, k) => Math.round(part + (CIVIDIS[i + 1][k] - part) * (at - i)));
}

export const swatch = (id) => {
  const slot = slotOf(id);
  const line = s("line", { x1: 0, y1: 5, x2: 22, y2: 5, stroke: colourOf(id), "stroke-width": 3 });
  if (slot >= 0) line.setAttribute("stroke-dasharray", dash(slot).join(" "));
  return s("svg", { width: 22, height: 10, "aria-hidden": "true", class: "swatch" }, line);
};

// -- values in words ---------------------------------------------------------------------------------------------------

const MARKS = { running: "▶", done: "✓", failed: "✕", dead: "✝", stalled: "◔", interrupted: "‖", unknown: "?",
  waiting: "…", stopped: "■", died: "✝", refused: "⊘", unsent: "⇡" };

export const stateOf = (state) => h("span.state", { "data-state": state },
  h("span.mark", { "aria-hidden": "true" }, MARKS[state] ?? "·"), h("span.word", {}, state));

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function number(value, unit = "") {
  if (value == null || !Number.isFinite(value)) return "";
  const size = Math.abs(value);
  if (unit === "s") return duration(value);
  if (unit === "bytes") unit = "B";
  const after = unit ? ` ${unit}` : "";
  if (size >= 1e4 || (unit && size >= 1e3)) {
    const rounded = Number(size.toPrecision(3)); // first, so that 999 999 is 1.00 M and not 1000 k
    const [by, prefix] = PREFIXES.find(([each]) => rounded >= each);
    return `${(value / by).toPrecision(3)}${unit ? " " : ""}${prefix}${unit}`;
  }
  if (Number.isInteger(value)) return `${value}${after}`;
  return (size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)))) + after;
}

export function duration(seconds) {
  if (seconds == null) return "";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  seconds = Math.round(seconds);
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const share = (value) => (value == null ? "" : `${(100 * value).toFixed(1)} %`);

const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", hour12: false });

export const day = (seconds) => (seconds == null ? "" : DAY.format(seconds * 1000));

// An id without the time with which it begins, where another column shows it.
export const short = (id) => id.replace(/^\d{8}-\d{6}-/, "");

// What the run's id says, for runs whose tables have not been read or do not tell.
export const startOf = (run) => {
  if (run.started != null) return run.started;
  const at = /^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)/.exec(run.id);
  return at ? Date.UTC(at[1], at[2] - 1, at[3], at[4], at[5], at[6]) / 1000 : null;
};

// What is known of the one run of a view: forgotten when another is chosen, asked for again as it changes.
export class OfOneRun {
  run = "";
  answer = null;
  #tags = {};

  forget() {
    this.#tags = {};
    this.answer = null;
  }

  async refresh(run, store, path, parameters, draw) {
    if (run !== this.run) {
      this.run = run;
      this.forget();
    }
    if (!run || !store.runs.has(run)) return;
    const view = await ask(path, { run, ...parameters }, this.#tags);
    if (view) {
      this.answer = view;
      draw();
    }
  }
}
