const TOP = 8;
const hiddenRows = new Set();

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
    data.rows.forEach((name, row) => {
      if (!this.chart.points.some((points, run) => points.length > 0 && data.runs[run].row === row)) return;
      const button = html(html(list, "li"), "button");
      button.type = "button";
      button.title = "show or hide this in all charts";
      swatch(button, row);
      button.append(name);
      button.addEventListener("click", () => {
        if (!hiddenRows.delete(row)) hiddenRows.add(row);
        charts.forEach((chart) => chart.draw());
      });
      this.buttons.push([row, button]);
    });
  }

  draw() {
    const { chart } = this;
    for (const [row, button] of this.buttons) button.setAttribute("aria-pressed", String(!hiddenRows.has(row)));
    this.curves = chart.points
      .map((points, run) => ({ points, row: data.runs[run].row }))
      .filter(({ points, row }) => points.length > 0 && !hiddenRows.has(row));
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
    for (const { points, row } of this.curves) {
      const path = points.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join("L");
      const isAlone = this.curves.filter((other) => other.row === row).length === 1;
      const look = `${isDashed(row) ? " dashed" : ""}${isAlone ? "" : " one-of-many"}`;
      svg(this.svg, "path", { class: `curve ${colourOf(row)}${look}`, d: `M${path}` });
      if (points.length > 12) continue;
      for (const [x, y] of points) {
        svg(this.svg, "circle", { class: `point ${colourOf(row)}`, cx: this.x(x), cy: this.y(y), r: isAlone ? 3 : 2 });
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
    const found = this.curves.map(({ points, row }) => ({ row, point: nearest(points, step) }));
    const distance = ({ point }) => Math.abs(point[0] - step);
    const x = found.reduce((best, other) => (distance(other) < distance(best) ? other : best)).point[0];
    this.shown = x;
    svg(this.cursor, "line", { class: "cursor", x1: this.x(x), x2: this.x(x), y1: TOP, y2: this.bottom });
    this.tooltip.replaceChildren();
    html(this.tooltip, "b", "", `step ${show(x)}`);
    for (const { row, point } of found) {
      svg(this.cursor, "circle", { class: `point ${colourOf(row)}`, cx: this.x(point[0]), cy: this.y(point[1]), r: 4.5 });
    }
    const lines = [...new Set(found.map(({ row }) => row))].map((row) => {
      const points = found.filter((other) => other.row === row).map(({ point }) => point);
      const mean = points.reduce((sum, point) => sum + point[1], 0) / points.length;
      return { row, mean, count: points.length, at: points[0][0] };
    });
    for (const { row, mean, count, at } of lines.sort((a, b) => b.mean - a.mean)) {
      const line = html(this.tooltip, "div");
      swatch(line, row);
      const detail = [count > 1 ? `mean of ${count}` : "", at === x ? "" : `step ${show(at)}`].filter(Boolean).join(", ");
      html(line, "span", "of", data.rows[row] + (detail ? ` (${detail})` : ""));
      html(line, "span", "value", show(mean));
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

