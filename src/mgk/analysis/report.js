"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const NUM_COLOURS = 6;
const TOP = 8;
const hiddenRuns = new Set();

const colourOf = (run) => `run-${run % NUM_COLOURS}`;
const isDashed = (run) => run >= NUM_COLOURS;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function html(parent, tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  parent.append(node);
  return node;
}

function svg(parent, tag, attributes, text = "") {
  const node = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function swatch(parent, run) {
  html(parent, "span", `swatch ${colourOf(run)}${isDashed(run) ? " dashed" : ""}`);
}

/** Round numbers inside [low, high], about `count` of them, and the distance between two. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const away = (factor) => Math.abs(Math.log(factor * power / rough));
  const step = power * [1, 2, 5, 10].reduce((best, factor) => (away(factor) < away(best) ? factor : best));
  const values = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) values.push(i * step || 0);
  return { values, step };
}

function tickLabel(value, step) {
  const size = Math.max(Math.abs(value), step);
  if (size >= 1e6 || size < 1e-4) return value === 0 ? "0" : String(Number(value.toPrecision(4)).toExponential());
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

function show(value) {
  if (value !== 0 && (Math.abs(value) >= 1e7 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1e4 ? 7 : 4 });
}

/** Smallest and largest, with a little room where they are equal. */
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return [0, 1];
  const room = Math.abs(low) * 0.05 || 0.5;
  return low === high ? [low - room, high + room] : [low, high];
}

/** Of points that are sorted by step, the one nearest to a step. */
function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle;
    else high = middle;
  }
  return step - points[low][0] <= points[high][0] - step ? points[low] : points[high];
}

class Chart {
  constructor(figure) {
    this.chart = data.charts[Number(figure.dataset.chart)];
    this.svg = figure.querySelector("svg");
    this.plot = figure.querySelector(".plot");
    this.tooltip = html(this.plot, "div", "tooltip");
    this.tooltip.hidden = true;
    this.buildLegend(figure.querySelector(".legend"));
    this.svg.addEventListener("pointermove", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerdown", (event) => this.pointAt(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.walk(event));
  }

  buildLegend(list) {
    this.buttons = [];
    this.chart.points.forEach((points, run) => {
      if (points.length === 0) return;
      const button = html(html(list, "li"), "button");
      button.type = "button";
      button.title = "show or hide this run in all charts";
      swatch(button, run);
      button.append(data.runs[run].name);
      button.addEventListener("click", () => {
        if (!hiddenRuns.delete(run)) hiddenRuns.add(run);
        charts.forEach((chart) => chart.draw());
      });
      this.buttons.push([run, button]);
    });
  }

  draw() {
    const { chart } = this;
    for (const [run, button] of this.buttons) button.setAttribute("aria-pressed", String(!hiddenRuns.has(run)));
    this.curves = chart.points
      .map((points, run) => ({ points, run }))
      .filter(({ points, run }) => points.length > 0 && !hiddenRuns.has(run));
    const baselines = chart.hasBaselines ? data.baselines : [];
    const all = this.curves.flatMap(({ points }) => points);
    const width = this.plot.clientWidth;
    const height = Math.round(clamp(width * 0.56, 210, 320));
    let [yLow, yHigh] = extent([...all.map(([, y]) => y), ...baselines.map(({ value }) => value)]);
    const room = (yHigh - yLow) * 0.05;
    yLow = yLow >= 0 && yLow < room ? 0 : yLow - room;
    yHigh += room;
    const [xLow, xHigh] = extent(all.map(([x]) => x));
    const yTicks = ticks(yLow, yHigh, Math.max(3, height / 50));
    const yLabels = yTicks.values.map((value) => tickLabel(value, yTicks.step));
    const left = 10 + 7 * Math.max(...yLabels.map((label) => label.length));
    const [right, bottom] = [10, 40];
    this.bottom = height - bottom;
    this.x = (value) => left + ((value - xLow) / (xHigh - xLow)) * (width - left - right);
    this.y = (value) => height - bottom - ((value - yLow) / (yHigh - yLow)) * (height - TOP - bottom);
    this.step = (pixel) => xLow + ((pixel - left) / (width - left - right)) * (xHigh - xLow);

    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    yTicks.values.forEach((value, i) => {
      const y = this.y(value);
      svg(this.svg, "line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y });
      svg(this.svg, "text", { x: left - 8, y: y + 4, "text-anchor": "end" }, yLabels[i]);
    });
    const xTicks = ticks(xLow, xHigh, Math.max(2, (width - left) / 95));
    for (const value of xTicks.values) {
      const label = tickLabel(value, xTicks.step);
      const overhang = this.x(value) + 3.5 * label.length > width;
      const [x, anchor] = overhang ? [width, "end"] : [this.x(value), "middle"];
      svg(this.svg, "text", { x, y: height - bottom + 18, "text-anchor": anchor }, label);
    }
    svg(this.svg, "text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "step");

    for (const { value } of baselines) {
      const y = this.y(value);
      svg(this.svg, "line", { class: "baseline", x1: left, x2: width - right, y1: y, y2: y });
    }
    for (const { points, run } of this.curves) {
      const path = points.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("L");
      const dashed = isDashed(run) ? " dashed" : "";
      svg(this.svg, "path", { class: `curve ${colourOf(run)}${dashed}`, d: `M${path}` });
      if (points.length > 12) continue;
      for (const [x, y] of points) {
        svg(this.svg, "circle", { class: `point ${colourOf(run)}`, cx: this.x(x), cy: this.y(y), r: 3 });
      }
    }
    this.nameBaselines(baselines, left + 4, width - right);
    this.cursor = svg(this.svg, "g", {});
    this.point(null);
  }

  /** Names above their lines, at the end where fewer curves pass; a higher name keeps clear of the one below. */
  nameBaselines(baselines, left, right) {
    let below = Infinity;
    for (const { name, value } of [...baselines].sort((a, b) => a.value - b.value)) {
      const text = `${name} ${show(value)}`;
      const y = Math.min(this.y(value) - 5, below - 15);
      below = y;
      const passing = (from, to) => this.curves.flatMap(({ points }) => points)
        .filter((point) => this.x(point[0]) >= from && this.x(point[0]) <= to)
        .filter((point) => Math.abs(this.y(point[1]) - y + 4) < 14).length;
      const width = 7 * text.length;
      const atLeft = passing(left, left + width) < passing(right - width, right);
      const [x, anchor] = atLeft ? [left, "start"] : [right, "end"];
      svg(this.svg, "text", { class: "name", x, y, "text-anchor": anchor }, text);
    }
  }

  pointAt(event) {
    const box = this.svg.getBoundingClientRect();
    this.point(this.step(event.clientX - box.left), event.clientY - box.top);
  }

  /** Arrow keys go from point to point. */
  walk(event) {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!direction) return;
    event.preventDefault();
    const steps = [...new Set(this.curves.flatMap(({ points }) => points.map(([x]) => x)))].sort((a, b) => a - b);
    const at = this.shown === null ? -1 : steps.indexOf(this.shown);
    this.point(steps[at < 0 ? (direction > 0 ? 0 : steps.length - 1) : clamp(at + direction, 0, steps.length - 1)]);
  }

  point(step, height = 0) {
    this.cursor.replaceChildren();
    this.tooltip.hidden = true;
    this.shown = null;
    if (step === null || step === undefined || this.curves.length === 0) return;
    const found = this.curves.map(({ points, run }) => ({ run, point: nearest(points, step) }));
    const distance = ({ point }) => Math.abs(point[0] - step);
    const x = found.reduce((best, other) => (distance(other) < distance(best) ? other : best)).point[0];
    this.shown = x;
    svg(this.cursor, "line", { class: "cursor", x1: this.x(x), x2: this.x(x), y1: TOP, y2: this.bottom });
    this.tooltip.replaceChildren();
    html(this.tooltip, "b", "", `step ${show(x)}`);
    found.sort((a, b) => b.point[1] - a.point[1]);
    for (const { run, point } of found) {
      svg(this.cursor, "circle", { class: `point ${colourOf(run)}`, cx: this.x(point[0]), cy: this.y(point[1]), r: 4.5 });
      const row = html(this.tooltip, "div");
      swatch(row, run);
      html(row, "span", "of", data.runs[run].name + (point[0] === x ? "" : ` (step ${show(point[0])})`));
      html(row, "span", "value", show(point[1]));
    }
    this.tooltip.hidden = false;
    // Measured at the left edge: further right the text would be wrapped.
    this.tooltip.style.left = "0";
    const width = this.plot.clientWidth;
    const space = this.tooltip.offsetWidth;
    const beside = this.x(x) > width / 2 ? this.x(x) - space - 12 : this.x(x) + 12;
    const left = clamp(beside, 0, Math.max(width - space, 0));
    // Where there is no room beside the cursor, as on a phone, it goes below, over the legend that it repeats.
    const top = left === beside ? clamp(height - this.tooltip.offsetHeight - 12, 0, this.bottom) : this.bottom + 24;
    this.tooltip.style.left = `${left}px`;
    this.tooltip.style.top = `${top}px`;
  }
}

const INVISIBLE = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅" };
const visible = (token) => token in INVISIBLE ? INVISIBLE[token] : token.replace(/[\n\t\r]/g, (c) => INVISIBLE[c]);

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Weights of one example, decoded when they are first looked at. */
class Maps {
  constructor({ tokens, layers, heads, levels, largest }) {
    Object.assign(this, { tokens: tokens.map(visible), layers, heads, length: tokens.length });
    this.levels = bytes(levels);
    this.largest = new Float32Array(bytes(largest).buffer);
  }

  /** [N * N] of one head, or the mean over heads for head -1. */
  weights(layer, head) {
    const size = this.length;
    const out = new Float32Array(size * size);
    const heads = head < 0 ? [...Array(this.heads).keys()] : [head];
    for (const h of heads) {
      const map = (layer * this.heads + h) * size;
      for (let i = 0; i < size; i++) {
        const scale = this.largest[map + i] / heads.length / 65025;
        for (let j = 0; j < size; j++) {
          const level = this.levels[(map + i) * size + j];
          out[i * size + j] += level * level * scale;
        }
      }
    }
    return out;
  }
}

/** Two digits: the levels that weights are stored in carry no more. */
function rounded(weight) {
  return weight.toLocaleString("en", { maximumSignificantDigits: 2 });
}

function rgb(variable, node) {
  const value = getComputedStyle(node).getPropertyValue(variable).trim();
  return [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
}

class Explorer {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector(".map canvas");
    this.readout = root.querySelector(".readout");
    this.heads = root.querySelector(".heads");
    this.cache = new Map();
    this.head = 0;
    this.cell = null;
    this.select = {};
    for (const name of ["run", "example", "layer", "shade"]) {
      this.select[name] = root.querySelector(`select[name=${name}]`);
      this.select[name].addEventListener("change", () => this.choose());
    }
    data.runs.forEach(({ name, maps }, run) => {
      if (maps.length > 0) this.select.run.append(new Option(name, run));
    });
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.pointAt(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
    this.choose();
  }

  /** Read the choices, offer only what this run has, and draw. */
  choose() {
    this.run = Number(this.select.run.value);
    const { maps } = data.runs[this.run];
    this.offer("example", maps.length);
    const example = Number(this.select.example.value);
    const key = `${this.run} ${example}`;
    if (!this.cache.has(key)) this.cache.set(key, new Maps(maps[example]));
    this.maps = this.cache.get(key);
    this.offer("layer", this.maps.layers);
    // A single head has no mean of its own.
    this.head = this.maps.heads === 1 ? 0 : Math.min(this.head, this.maps.heads - 1);
    this.root.className = `explorer ${colourOf(this.run)}`;
    this.draw();
  }

  offer(name, count) {
    const select = this.select[name];
    const chosen = Math.min(Number(select.value || 0), count - 1);
    select.replaceChildren(...[...Array(count).keys()].map((i) => new Option(i + 1, i)));
    select.value = chosen;
    select.closest("label").hidden = name === "example" && count === 1;
  }

  draw() {
    const layer = Number(this.select.layer.value);
    this.heads.replaceChildren();
    const heads = [...Array(this.maps.heads).keys()];
    for (const head of this.maps.heads > 1 ? [...heads, -1] : heads) {
      const button = html(this.heads, "button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(head === this.head));
      const weights = this.maps.weights(layer, head);
      button.append(this.image(weights));
      html(button, "span", "", head < 0 ? "mean" : `head ${head + 1}`);
      button.addEventListener("click", () => {
        this.head = head;
        this.draw();
      });
      if (head === this.head) this.weights = weights;
    }
    this.picture = this.image(this.weights);
    this.layout();
    this.point(null);
  }

  /** One pixel for each weight, from the page's background through the run's colour to nearly the ink's. */
  image(weights) {
    const size = this.maps.length;
    const surface = rgb("--surface", this.root), colour = rgb("--run", this.root), ink = rgb("--ink", this.root);
    const end = colour.map((c, i) => 0.65 * c + 0.35 * ink[i]);
    const mix = (a, b, t) => a.map((c, i) => c + t * (b[i] - c));
    const shades = [...Array(256).keys()].map((i) =>
      i < 160 ? mix(surface, colour, i / 160) : mix(colour, end, (i - 160) / 95));
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(size, size);
    for (let i = 0; i < size; i++) {
      const row = weights.subarray(i * size, (i + 1) * size);
      const largest = this.select.shade.value === "row" ? row.reduce((a, b) => Math.max(a, b), 0) || 1 : 1;
      for (let j = 0; j < size; j++) {
        const shade = shades[Math.round(255 * Math.sqrt(Math.min(row[j] / largest, 1)))];
        pixels.data.set([...shade, 255], 4 * (i * size + j));
      }
    }
    context.putImageData(pixels, 0, 0);
    return canvas;
  }

  layout() {
    const context = this.canvas.getContext("2d");
    const size = this.maps.length;
    // Bold, as the token is that one points at.
    context.font = "bold 11px system-ui, sans-serif";
    const longest = Math.max(...this.maps.tokens.map((token) => context.measureText(token).width));
    this.margin = Math.ceil(clamp(longest, 12, 84)) + 10;
    const room = this.root.clientWidth - this.margin - 1;
    const most = Math.max(320, Math.min(room, 0.85 * window.innerHeight));
    this.side = Math.max(1, Math.min(room, most, 30 * size));
    // Whole pixels of the screen where there are enough of them, so that all cells have one size.
    const ratio = window.devicePixelRatio || 1;
    if (this.side * ratio > size) this.side = (Math.floor((this.side * ratio) / size) / ratio) * size;
    this.pitch = this.side / size;
  }

  paint() {
    const ratio = window.devicePixelRatio || 1;
    const total = this.margin + this.side + 1;
    const context = this.canvas.getContext("2d");
    this.canvas.width = this.canvas.height = Math.round(total * ratio);
    this.canvas.style.width = this.canvas.style.height = `${total}px`;
    context.scale(ratio, ratio);
    context.imageSmoothingEnabled = this.pitch * ratio < 1;
    context.drawImage(this.picture, this.margin, this.margin, this.side, this.side);
    const style = getComputedStyle(this.root);
    context.strokeStyle = style.getPropertyValue("--line");
    context.strokeRect(this.margin - 0.5, this.margin - 0.5, this.side + 1, this.side + 1);
    if (this.cell) {
      const [i, j] = this.cell;
      context.strokeStyle = style.getPropertyValue("--ink");
      context.lineWidth = 1;
      context.strokeRect(this.margin - 0.5, this.margin + i * this.pitch - 0.5, this.side + 1, this.pitch + 1);
      context.strokeRect(this.margin + j * this.pitch - 0.5, this.margin - 0.5, this.pitch + 1, this.side + 1);
    }
    this.labels(context, style);
  }

  labels(context, style) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / this.pitch);
    for (const axis of [0, 1]) {
      const chosen = this.cell ? this.cell[axis] : -1;
      this.maps.tokens.forEach((token, i) => {
        // A chosen token pushes aside those that would touch it.
        const near = chosen >= 0 && Math.abs(i - chosen) * this.pitch < 12;
        if (i !== chosen && (i % every !== 0 || near)) return;
        context.save();
        context.fillStyle = style.getPropertyValue(i === chosen ? "--ink" : "--quiet");
        if (i === chosen) context.font = `bold ${context.font}`;
        const middle = this.margin + (i + 0.5) * this.pitch;
        if (axis === 0) context.translate(this.margin - 6, middle);
        else {
          context.translate(middle, this.margin - 6);
          context.rotate(-Math.PI / 2);
        }
        context.textAlign = axis === 0 ? "right" : "left";
        context.fillText(this.shorten(context, token), 0, 0);
        context.restore();
      });
    }
  }

  shorten(context, token) {
    const room = this.margin - 8;
    if (context.measureText(token).width <= room) return token;
    const letters = [...token];
    while (letters.length > 1 && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
    return `${letters.join("")}…`;
  }

  pointAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const cell = [event.clientY - box.top, event.clientX - box.left].map((p) => Math.floor((p - this.margin) / this.pitch));
    const size = this.maps.length;
    if (cell.some((index) => index >= size) || cell.every((index) => index < 0)) return this.point(null);
    this.point(cell.map((index) => Math.max(index, 0)));
  }

  walk(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const from = this.cell || [0, 0];
    this.point(from.map((index, axis) => clamp(index + move[axis], 0, this.maps.length - 1)));
  }

  point(cell) {
    this.cell = cell;
    this.paint();
    this.readout.replaceChildren();
    if (!cell) {
      this.readout.textContent = "Point at a cell to read its query, its key and its weight.";
      return;
    }
    const [i, j] = cell;
    const size = this.maps.length;
    const row = [...this.weights.subarray(i * size, (i + 1) * size)];
    const token = (index) => {
      html(this.readout, "code", "", this.maps.tokens[index]);
      this.readout.append(` at ${index}`);
    };
    this.readout.append("query ");
    token(i);
    this.readout.append(", key ");
    token(j);
    this.readout.append(": weight ");
    html(this.readout, "strong", "", rounded(row[j]));
    html(this.readout, "br");
    const strongest = row.map((weight, index) => [weight, index]).sort((a, b) => b[0] - a[0]);
    this.readout.append("strongest keys: ");
    strongest.slice(0, 3).forEach(([weight, index], rank) => {
      if (rank > 0) this.readout.append(", ");
      token(index);
      this.readout.append(` (${rounded(weight)})`);
    });
  }
}

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
const root = document.querySelector(".explorer");
const explorer = root ? new Explorer(root) : null;

let width = null;
function redraw() {
  width = window.innerWidth;
  charts.forEach((chart) => chart.draw());
  if (explorer) explorer.draw();
}
redraw();
// A phone's browser bar comes and goes with scrolling, which changes the height alone.
window.addEventListener("resize", () => window.innerWidth !== width && redraw());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
