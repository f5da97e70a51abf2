"use strict";
// Tables are sorted by their heads and filtered by a search field; figures say the values under the mouse.
const FACTORS = {k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, E: 1e18, min: 60, h: 3600};
const NUMBER = /^[<~]?\s*([+\-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?)\s*(min|h|[kMGTPE])?/;

function value(cell) {
  const text = cell.textContent.trim().replaceAll("\u00a0", " ");
  if (text === "" || text === "–") return null;
  if (cell.classList.contains("text") && !/^[+\-−]?[\d.]+$/.test(text)) return text;
  const match = NUMBER.exec(text);
  return match ? Number(match[1].replace("−", "-").replaceAll(",", "")) * (FACTORS[match[2]] ?? 1) : text;
}

function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);  // what is not known comes last
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return sign * a.localeCompare(b, "en", {numeric: true});
}

function sort(table, column, descending) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map(row => [value(row.cells[column]), row]);
  rows.sort((a, b) => compare(a[0], b[0], descending ? -1 : 1));
  body.append(...rows.map(row => row[1]));
  [...table.tHead.rows[0].cells].forEach((head, i) =>
    i === column ? head.setAttribute("aria-sort", descending ? "descending" : "ascending")
                 : head.removeAttribute("aria-sort"));
}

function filter(table, text, count) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    const cells = row.textContent.toLowerCase().replaceAll("\u00a0", " ");
    row.hidden = !words.every(word => cells.includes(word));
  }
  count.textContent = words.length ? `${rows.filter(row => !row.hidden).length} of ${rows.length} rows` : "";
}

// What was chosen survives the reloads of a page about a run that is at work.
const KEY = "fedloom:" + location.pathname;
let chosen = {};
try { chosen = JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { /* no storage, nothing to remember */ }
function remember(title, changes) {
  chosen[title] = {...chosen[title], ...changes};
  try { sessionStorage.setItem(KEY, JSON.stringify(chosen)); } catch { /* as above */ }
}

for (const table of document.querySelectorAll("table.data")) {
  const title = table.dataset.title;
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (table.tBodies[0].rows.length < 2) return;
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Sort by this column";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      sort(table, column, descending);
      remember(title, {column, descending});
    });
  });
  const begun = chosen[title] ?? {};
  if (begun.column < table.tHead.rows[0].cells.length) sort(table, begun.column, begun.descending);
  if (table.tBodies[0].rows.length < 8) continue;
  const field = document.createElement("input"), count = document.createElement("output");
  field.type = "search";
  field.placeholder = "Filter rows";
  field.setAttribute("aria-label", `Filter rows: ${title}`);
  field.value = begun.text ?? "";
  field.addEventListener("input", () => {
    filter(table, field.value, count);
    remember(title, {text: field.value});
  });
  const line = document.createElement("div");
  line.className = "filter";
  line.append(field, count);
  table.parentElement.before(line);
  filter(table, field.value, count);
}

const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);
const NEAR_PX = 16;

for (const image of document.querySelectorAll("img[data-spots]")) {
  const spots = JSON.parse(image.dataset.spots);
  const show = event => {
    const style = getComputedStyle(image), box = image.getBoundingClientRect();
    const pad = parseFloat(style.paddingLeft), width = box.width - 2 * pad, height = box.height - 2 * pad;
    let best = null, least = NEAR_PX ** 2;
    for (const [x, y, text] of spots) {
      const dx = box.left + pad + x * width - event.clientX, dy = box.top + pad + y * height - event.clientY;
      if (dx * dx + dy * dy < least) [best, least] = [text, dx * dx + dy * dy];
    }
    tip.hidden = best === null;
    if (best === null) return;
    tip.textContent = best;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    const below = event.clientY + 14;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 10 : below}px`;
  };
  image.addEventListener("pointermove", show);
  image.addEventListener("pointerdown", show);
  image.addEventListener("pointerleave", () => { tip.hidden = true; });
}
