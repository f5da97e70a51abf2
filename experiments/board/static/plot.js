// Curves and points with uPlot, each with an x of its own (its mode 2), and what is under the mouse.

import uPlot from "./uplot.js";
import { css, h, number, onTheme } from "./base.js";

const plots = new Set();
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((by) => by * 10 ** power));
const watcher = new ResizeObserver((entries) => {
  for (const entry of entries) {
    const plot = [...plots].find((each) => each.box === entry.target);
    if (plot && entry.contentRect.width) plot.fit();
  }
});
onTheme(() => { for (const plot of plots) plot.draw(); });

function axis(label, unit, extra = {}) {
  return {
    label, labelSize: 20, size: 54, font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
    stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { stroke: () => css("--grid"), width: 1, size: 4 },
    values: (_, marks) => marks.map((mark) => (mark == null ? "" : number(mark, unit))), ...extra,
  };
}

// `lines` are {x, y, colour, dash, width, points} in the order in which they are drawn; colours are functions of the theme.
export class Plot {
  constructor({ x, y, xUnit = "", yUnit = "", isLog = false, isWhole = false, isScatter = false, height = 320, onHover, label }) {
    this.box = h("div.plot", { role: "img", "aria-label": label ?? `${y} over ${x}` });
    this.lines = [];
    this.faint = null;
    this.options = { x, y, xUnit, yUnit, isLog, isWhole, isScatter, height };
    this.onHover = onHover;
    plots.add(this);
    watcher.observe(this.box);
  }

  set(lines) {
    const isNew = lines.length !== this.lines.length;
    this.lines = lines;
    if (!this.box.clientWidth) return;
    if (isNew || !this.u) this.make();
    else this.u.setData(this.data(), !this.isZoomed());
  }

  data() { return [null, ...this.lines.map((line) => [line.x, line.y])]; }

  isZoomed() { return Boolean(this.zoomed); }

  make() {
    this.u?.destroy();
    this.zoomed = false;
    const { x, y, xUnit, yUnit, isLog, isWhole, isScatter, height } = this.options;
    const facets = [{ scale: "x", auto: true }, { scale: "y", auto: true }];
    const hidden = () => null;
    this.u = new uPlot({
      mode: 2, width: this.box.clientWidth, height, legend: { show: false }, padding: [8, 22, 0, 0],
      cursor: { points: { show: false }, focus: { prox: -1 }, dataIdx: hidden, drag: { x: true, y: true, uni: 20 } },
      scales: { x: { time: false, range: (_, least, most) => padded(least, most, isScatter ? 0.03 : 0) }, y: { distr: isLog ? 3 : 1, range: (_, least, most) => (isLog ? [(least ?? 0.1) / 1.1, (most ?? 1) * 1.1] : padded(least, most, 0.04)) } },
      axes: [axis(x, xUnit, { size: 34, ...(isWhole ? { incrs: WHOLE } : {}) }), axis(y, yUnit)],
      series: [null, ...this.lines.map((_, i) => ({ facets, paths: (u, at) => this.paint(u, at - 1), label: String(i) }))],
      hooks: {
        setCursor: [(u) => this.hover(u)],
        setSelect: [(u) => { if (u.select.width > 2 || u.select.height > 2) this.zoomed = true; }],
      },
    }, this.data(), this.box);
    this.u.over.addEventListener("dblclick", () => { this.zoomed = false; });
    this.u.over.addEventListener("mouseleave", () => this.onHover?.(null));
  }

  fit() {
    if (this.lines.length && !this.u) this.make();
    else this.u?.setSize({ width: this.box.clientWidth, height: this.options.height });
  }

  draw() { this.u?.redraw(false); }

  // Others than this line are drawn faintly; null: none.
  emphasise(at) {
    if (at === this.faint) return;
    this.faint = at;
    this.draw();
  }

  paint(u, at) {
    const line = this.lines[at], { ctx, bbox } = u, ratio = devicePixelRatio;
    if (!line?.x.length) return null;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    const isAbove = this.faint === at;
    ctx.globalAlpha = this.faint === null || isAbove ? line.alpha ?? 1 : 0.15;
    ctx.strokeStyle = ctx.fillStyle = line.colour();
    ctx.lineWidth = (line.width ?? 1.75) * ratio * (isAbove ? 1.6 : 1);
    ctx.lineJoin = "round";
    ctx.setLineDash((line.dash ?? []).map((length) => length * ratio));
    const X = scaled(u, "x"), Y = scaled(u, "y");
    if (line.points) {
      for (let i = 0; i < line.x.length; i++) mark(ctx, line.points, X(line.x[i]), Y(line.y[i]), (line.size ?? 3) * ratio);
    } else {
      ctx.beginPath();
      for (let i = 0; i < line.x.length; i++) ctx.lineTo(X(line.x[i]), Y(line.y[i]));
      ctx.stroke();
      if (line.x.length === 1) mark(ctx, "dot", X(line.x[0]), Y(line.y[0]), 3 * ratio);
    }
    ctx.restore();
    return null;
  }

  // The point nearest to the mouse: `onHover` gets the line's and the point's number, where the mouse is, and its y.
  hover(u) {
    const { left, top } = u.cursor;
    if (!(left >= 0) || !this.onHover) return;
    let best = null, least = this.options.isScatter ? 40 * 40 : Infinity;
    this.lines.forEach((line, at) => {
      if (line.isQuiet) return;
      const from = line.points ? 0 : nearest(line.x, u.posToVal(left, "x"));
      const to = line.points ? line.x.length - 1 : from;
      for (let i = from; i <= to; i++) {
        const across = u.valToPos(line.x[i], "x") - left, up = u.valToPos(line.y[i], "y") - top;
        const distance = line.points ? across * across + up * up : up * up + Math.max(0, Math.abs(across) - 30) ** 2;
        if (distance < least) { least = distance; best = { at, i }; }
      }
    });
    const place = u.over.getBoundingClientRect();
    this.onHover(best && { ...best, x: place.left + left, y: place.top + top, value: u.posToVal(top, "y") });
  }

  destroy() {
    plots.delete(this);
    watcher.unobserve(this.box);
    this.u?.destroy();
    this.u = null;
  }
}

function padded(least, most, by) {
  if (least == null) return [0, 1];
  const room = most > least ? (most - least) * by : by ? Math.abs(most) * 0.1 || 1 : most > least ? 0 : 0.5;
  return [least - room, most + room];
}

// uPlot's valToPos looks the scale up for every point: this is straight for straight scales.
function scaled(u, name) {
  const scale = u.scales[name], isX = name === "x", { left, top, width, height } = u.bbox;
  if (scale.distr === 3) return (value) => u.valToPos(value, name, true);
  const span = scale.max - scale.min || 1;
  return isX ? (value) => left + ((value - scale.min) / span) * width : (value) => top + height - ((value - scale.min) / span) * height;
}

function mark(ctx, kind, x, y, size) {
  ctx.beginPath();
  if (kind === "star") {
    for (let i = 0; i < 10; i++) {
      const angle = (Math.PI * i) / 5 - Math.PI / 2, reach = i % 2 ? size * 0.45 : size;
      ctx.lineTo(x + reach * Math.cos(angle), y + reach * Math.sin(angle));
    }
    ctx.closePath();
    ctx.fill();
  } else {
    ctx.arc(x, y, size, 0, 2 * Math.PI);
    kind === "ring" ? ctx.stroke() : ctx.fill();
  }
}

export function nearest(values, value) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - values[low - 1] < values[low] - value ? low - 1 : low;
}
