// Clients as a heat map: who took part in which round and how it ended, or a measure of it; on a canvas, for thousands.

import { ask, css, get, h, hideTip, link, note, number, OfOneRun, onTheme, reading, replace, select, set, shade, share, showTip } from "./base.js";
import { currentRun } from "./page.js";

const COLOURS = { ok: "#56B4E9", over_selected: "#009E73", stale: "#CC79A7", timed_out: "#E69F00", dropped: "#8C564B", failed: "#D55E00" };
const MEANINGS = { ok: "its work was used", failed: "its work failed", dropped: "the device dropped out", timed_out: "it answered after the deadline", over_selected: "others were faster", stale: "its answer was too old" };
const MEASURES = [["", "how it ended"], ["metric", "accuracy in training"], ["loss", "loss in training"], ["simulated_s", "simulated seconds"], ["bytes_up", "bytes sent"], ["bytes_down", "bytes received"], ["samples", "samples"], ["staleness", "staleness"], ["wall_s", "real seconds"]];
const ORDERS = [["id", "number"], ["tier", "tier"], ["accuracy", "final accuracy"], ["trouble", "most trouble first"], ["tasks", "most tasks first"]];
const LEFT = 64, TOP = 8, BOTTOM = 30, STRIP = 46, STRIP_GAP = 14, MOST_HIGH = 1500;

let root, store, controls, box, layout = null, cursor = null, fit = null;
const of = new OfOneRun();

const inOrder = (states) => [...states].sort((a, b) => Object.keys(COLOURS).indexOf(a) - Object.keys(COLOURS).indexOf(b));
const colourOfState = (state) => COLOURS[state] ?? css("--soft");

// The clients in order, the rounds' range, and the row that each cell shows.
function arranged(view) {
  const perClient = new Map();
  view.client.forEach((client, i) => {
    if (!perClient.has(client)) perClient.set(client, { client, tasks: 0, trouble: 0, tier: view.tiers[client] ?? "", accuracy: view.accuracy[client] ?? null });
    const known = perClient.get(client);
    known.tasks++;
    if (view.states[view.state[i]] !== "ok") known.trouble++;
  });
  for (const client of Object.keys(view.accuracy).map(Number)) {
    if (!perClient.has(client)) perClient.set(client, { client, tasks: 0, trouble: 0, tier: "", accuracy: view.accuracy[client] });
  }
  const order = get("order", "id"), byNumber = (a, b) => a.client - b.client;
  const orders = { id: byNumber, tier: (a, b) => a.tier.localeCompare(b.tier, undefined, { numeric: true }) || byNumber(a, b), accuracy: (a, b) => (b.accuracy ?? -1) - (a.accuracy ?? -1) || byNumber(a, b), trouble: (a, b) => b.trouble - a.trouble || byNumber(a, b), tasks: (a, b) => b.tasks - a.tasks || byNumber(a, b) };
  const clients_ = [...perClient.values()].sort(orders[order] ?? byNumber);
  const rowOf = new Map(clients_.map((known, i) => [known.client, i]));
  let first = Infinity, last = -Infinity;
  for (const round of view.round) { first = Math.min(first, round); last = Math.max(last, round); }
  return { clients: clients_, rowOf, first, last: Math.max(first, last), cells: new Map() };
}

function draw() {
  const run = currentRun();
  if (!run) {
    replace(controls);
    return replace(box, note("No run is selected", ["Tick a run in the list of ", h("a", { href: link({ view: "runs" }) }, "runs"), " to see its clients."]));
  }
  if (!of.answer) return replace(box, reading());
  const view = of.answer;
  replace(controls, select("stage", "clientstage", view.stages.map((name) => [name, name]), view.stage), select("colour", "measure", MEASURES, get("measure")), select("order", "order", ORDERS, get("order", "id")));
  if (!view.client.length) {
    replace(box, note("No client has worked yet", "A row appears here for every client that a round selected, when the run writes its tables (every few seconds)."));
    return;
  }
  const plan = arranged(view), numClients = plan.clients.length, numRounds = plan.last - plan.first + 1;
  const hasStrip = plan.clients.some((known) => known.accuracy !== null), strip = hasStrip ? STRIP + STRIP_GAP : 0;
  const width = Math.max(300, (box.clientWidth || 900) - 2), plotWidth = width - LEFT - strip - 8;
  const cellHigh = Math.max(1, Math.min(18, Math.floor(560 / numClients) || 1)), plotHeight = Math.min(MOST_HIGH, Math.max(60, cellHigh * numClients));
  const cellWide = Math.min(24, plotWidth / numRounds), high = plotHeight / numClients, ratio = devicePixelRatio;
  const canvas = h("canvas", { tabindex: 0, role: "img", "aria-label": `${numClients} clients in ${numRounds} rounds; arrow keys move over the cells`, "aria-describedby": "cell" });
  canvas.width = width * ratio;
  canvas.height = (TOP + plotHeight + BOTTOM) * ratio;
  Object.assign(canvas.style, { width: `${width}px`, height: `${TOP + plotHeight + BOTTOM}px` });
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.fillStyle = css("--card");
  ctx.fillRect(LEFT, TOP, cellWide * numRounds, plotHeight);
  const isMeasure = view.value.length > 0;
  let least = Infinity, most = -Infinity;
  if (isMeasure) for (const value of view.value) if (value !== null) { least = Math.min(least, value); most = Math.max(most, value); }
  const fills = view.states.map(colourOfState);
  const counts = new Array(view.states.length).fill(0);
  // Trouble is drawn last, so that it is seen where cells are smaller than a pixel.
  const rows = view.client.map((_, i) => i);
  const isOk = view.states.map((state) => state === "ok");
  for (const pass of [true, false]) for (const i of rows) {
    if (isOk[view.state[i]] !== pass) continue;
    counts[view.state[i]]++;
    const x = LEFT + (view.round[i] - plan.first) * cellWide, row = plan.rowOf.get(view.client[i]), y = TOP + row * high;
    plan.cells.set(row * numRounds + (view.round[i] - plan.first), i);
    if (isMeasure) {
      const value = view.value[i];
      if (value === null) continue;
      ctx.fillStyle = `rgb(${shade(most > least ? (value - least) / (most - least) : 0.5)})`;
    } else ctx.fillStyle = fills[view.state[i]];
    const gapX = cellWide >= 4 ? 1 : 0, gapY = high >= 4 ? 1 : 0;
    ctx.fillRect(x, y, Math.max(1, cellWide - gapX), Math.max(1, high - gapY));
  }
  ctx.fillStyle = css("--soft");
  ctx.font = "12px system-ui, sans-serif";
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  const every = nice(15 / high);
  for (let i = 0; i < numClients; i += every) ctx.fillText(`${plan.clients[i].client}`, LEFT - 6, TOP + (i + 0.5) * high);
  ctx.textAlign = "center";
  ctx.textBaseline = "top";
  const step = nice(numRounds / Math.max(1, Math.floor((cellWide * numRounds) / 60)));
  for (let i = 0; i < numRounds; i++) if (i === 0 || (plan.first + i + 1) % step === 0) ctx.fillText(`${plan.first + i + 1}`, LEFT + (i + 0.5) * cellWide, TOP + plotHeight + 4);
  ctx.textAlign = "left";
  ctx.fillText("round", LEFT, TOP + plotHeight + 17);
  if (hasStrip) {
    const x = LEFT + cellWide * numRounds + STRIP_GAP;
    plan.clients.forEach((known, i) => {
      ctx.fillStyle = css("--card");
      ctx.fillRect(x, TOP + i * high, STRIP, Math.max(1, high - (high >= 4 ? 1 : 0)));
      if (known.accuracy === null) return;
      ctx.fillStyle = css("--accent");
      ctx.fillRect(x, TOP + i * high, STRIP * known.accuracy, Math.max(1, high - (high >= 4 ? 1 : 0)));
    });
    ctx.fillStyle = css("--soft");
    ctx.fillText("accuracy", x, TOP + plotHeight + 4);
  }
  layout = { plan, cellWide, high, numRounds, numClients, plotHeight, canvas, view, strip: hasStrip ? LEFT + cellWide * numRounds + STRIP_GAP : Infinity };
  canvas.addEventListener("mousemove", (event) => { const place = canvas.getBoundingClientRect(); pick(event.clientX - place.left, event.clientY - place.top, event.clientX, event.clientY); });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("keydown", move);
  canvas.addEventListener("blur", hideTip);
  const hadFocus = document.activeElement?.tagName === "CANVAS";
  replace(box, legend(view, counts, isMeasure, least, most, plan), h("div.scroll", {}, canvas), h("p.soft", { id: "cell", role: "status" }));
  if (hadFocus) canvas.focus({ preventScroll: true });
  box.dataset.drawn = `${numClients}x${numRounds}`;
}

function nice(step) {
  const size = 10 ** Math.floor(Math.log10(Math.max(1, step)));
  return [1, 2, 5, 10].map((by) => by * size).find((by) => by >= step) ?? 1;
}

function legend(view, counts, isMeasure, least, most, plan) {
  const left = view.dropped ? ` · only rounds from ${view.dropped + 1} on are shown` : "";
  const sum = h("span", {}, `${plan.clients.length} clients, ${view.client.length} tasks${left}`);
  if (isMeasure) {
    const bar = h("canvas", { width: 120, height: 10, "aria-hidden": "true" }), ctx = bar.getContext("2d");
    for (let i = 0; i < 120; i++) { ctx.fillStyle = `rgb(${shade(i / 119)})`; ctx.fillRect(i, 0, 1, 10); }
    return h("div.legend", {}, sum, h("span", {}, number(least), " ", bar, " ", number(most)));
  }
  return h("div.legend", {}, sum, inOrder(view.states).map((state) => [state, view.states.indexOf(state)]).map(([state, i]) => h("span", { title: MEANINGS[state] ?? "" }, h("span.dot", { style: { background: colourOfState(state) } }), `${state.replaceAll("_", " ")} ${counts[i]}`)));
}

function pick(x, y, pageX, pageY) {
  const { plan, cellWide, high, numRounds, numClients } = layout;
  const row = Math.floor((y - TOP) / high), column = Math.floor((x - LEFT) / cellWide);
  if (row < 0 || row >= numClients || (column < 0 || column >= numRounds) && x < layout.strip) return hideTip();
  tell(row, column < numRounds ? column : -1, pageX, pageY);
  return cursor = [row, Math.max(0, Math.min(column, numRounds - 1))];
}

function tell(row, column, pageX, pageY) {
  const { plan, numRounds, view } = layout, known = plan.clients[row], i = column < 0 ? undefined : plan.cells.get(row * numRounds + column);
  const facts = [["client", `${known.client}${known.tier ? ` · ${known.tier}` : ""}`], ["tasks", `${known.tasks}, ${known.trouble} not used`]];
  if (known.accuracy !== null) facts.push(["final accuracy", share(known.accuracy)]);
  if (column >= 0) facts.push(["round", String(plan.first + column + 1)], ["here", i === undefined ? "not selected" : view.states[view.state[i]].replaceAll("_", " ")]);
  if (i !== undefined && view.value.length) facts.push([MEASURES.find(([key]) => key === get("measure"))?.[1] ?? "", number(view.value[i])]);
  showTip(pageX, pageY, h("table", {}, facts.map(([name, value]) => h("tr", {}, h("td.soft", {}, name), h("td", {}, value)))));
  return facts;
}

function move(event) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const { numClients, numRounds, cellWide, high, canvas } = layout;
  cursor = cursor ? [Math.max(0, Math.min(numClients - 1, cursor[0] + step[0])), Math.max(0, Math.min(numRounds - 1, cursor[1] + step[1]))] : [0, 0];
  const place = canvas.getBoundingClientRect();
  const facts = tell(...cursor, place.left + LEFT + (cursor[1] + 0.5) * cellWide, place.top + TOP + (cursor[0] + 0.5) * high);
  document.getElementById("cell").textContent = facts.map((fact) => fact.join(" ")).join(", ");
}

export const clients = {
  title: "Clients",
  enter(main, theStore) {
    root = main;
    store = theStore;
    controls = h("div.tools");
    box = h("div.clients");
    root.append(controls, box);
    of.forget();
    draw();
    let wide = 0;
    fit = new ResizeObserver(() => { if (Math.abs(box.clientWidth - wide) > 2) { wide = box.clientWidth; if (of.answer) draw(); } });
    fit.observe(box);
  },
  change: () => draw(),
  async refresh() {
    await of.refresh(currentRun(), store, "api/clients", { stage: get("clientstage"), measure: get("measure") }, draw);
  },
  leave() { fit?.disconnect(); },
};

onTheme(() => { if (box?.isConnected && of.answer) draw(); });
