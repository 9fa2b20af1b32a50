const INVISIBLE = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅" };
/** Spaces and breaks as something to see; that before a word, which many tokenizers make a part of it, as a dot. */
const visible = (token) => Object.hasOwn(INVISIBLE, token) ? INVISIBLE[token]
  : token.replace(/[\n\t\r]/g, (c) => INVISIBLE[c]).replace(/^ /, "·");
const NUM_COMPONENT_COLOURS = 6;
const LARGEST_KEYS = 8;
// Of more components the bars tell enough.
const MOST_SHARES = 3;
// Up to so many tokens a thumbnail shows cells; more would be unevenly wide.
const SHARP = 20;
// As much of a component's colour behind a token as leaves its text legible.
const TINT = 0.52;

const componentClass = (r) => `component-${r % NUM_COMPONENT_COLOURS}`;
const mix = (a, b, t) => a.map((c, i) => c + t * (b[i] - c));
const css = (colour) => `rgb(${colour.map(Math.round).join(" ")})`;

function bytes(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Three digits: the levels that weights are stored in carry no more. */
function rounded(weight) {
  if (weight === 0) return "0";
  return weight < 0.0001 ? weight.toExponential(1) : weight.toLocaleString("en", { maximumSignificantDigits: 3 });
}

function percent(share) {
  const digits = share > 0 && share < 0.1 ? 1 : 0;
  return `${(100 * share).toFixed(digits)}\u00a0%`;
}

function rgb(variable, node) {
  const value = getComputedStyle(node).getPropertyValue(variable).trim();
  return [1, 3, 5].map((i) => parseInt(value.slice(i, i + 2), 16));
}

/** Weights of one example, decoded when they are first looked at. */
class Maps {
  constructor({ title, tokens, layers, heads, components, levels, largest, shares }) {
    Object.assign(this, { title, tokens: tokens.map(visible), layers, heads, components, length: tokens.length });
    this.levels = bytes(levels);
    this.largest = new Float32Array(bytes(largest).buffer);
    this.shares = shares ? bytes(shares) : null;
  }

  /** What each component gives to each weight, M arrays [N * N], of one head, or their mean over heads for head -1. */
  parts(layer, head) {
    const size = this.length;
    const area = size * size;
    const parts = range(this.components).map(() => new Float32Array(area));
    const heads = head < 0 ? range(this.heads) : [head];
    for (const h of heads) {
      const map = layer * this.heads + h;
      for (let i = 0; i < size; i++) {
        const scale = this.largest[map * size + i] / heads.length / 65025;
        for (let j = 0; j < size; j++) {
          const level = this.levels[map * area + i * size + j];
          const weight = level * level * scale;
          let rest = 1;
          for (let r = 0; r + 1 < this.components; r++) {
            const stored = this.shares[(map * (this.components - 1) + r) * area + i * size + j] / 255;
            const share = Math.min(stored, rest);
            rest -= share;
            parts[r][i * size + j] += weight * share;
          }
          parts[this.components - 1][i * size + j] += weight * rest;
        }
      }
    }
    return parts;
  }
}

class Explorer {
  constructor(root) {
    this.root = root;
    for (const name of ["heads", "tokens", "key", "sentence", "attended", "example", "map"]) {
      this[name] = root.querySelector(`.${name}`);
    }
    this.canvas = this.map.querySelector("canvas");
    this.cache = new Map();
    this.head = 0;
    this.query = null;
    this.pointed = null;
    this.select = {};
    for (const name of ["run", "example", "layer", "component", "shade"]) {
      this.select[name] = root.querySelector(`select[name=${name}]`);
      this.select[name].addEventListener("change", () => this.choose());
    }
    data.runs.forEach(({ name, maps }, run) => {
      if (maps.length > 0) this.select.run.append(new Option(name, run));
    });
    this.hide("run", this.select.run.options.length === 1);
    const ask = (event) => {
      const token = event.target.closest("button");
      if (token) this.ask(Number(token.dataset.position), null);
    };
    this.tokens.addEventListener("pointerover", (event) => event.pointerType === "mouse" && ask(event));
    this.tokens.addEventListener("focusin", ask);
    this.tokens.addEventListener("click", ask);
    this.tokens.addEventListener("keydown", (event) => this.walkTokens(event));
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.pointAt(event));
    this.canvas.addEventListener("keydown", (event) => this.walkMap(event));
    this.choose();
  }

  hide(name, isHidden) {
    this.select[name].closest("label").hidden = isHidden;
  }

  /** Read the choices, offer only what this run has, and draw. */
  choose() {
    const run = Number(this.select.run.value);
    const { maps, sharesAre } = data.runs[run];
    this.offer("example", range(maps.length).map((i) => [i, i + 1]));
    this.hide("example", maps.length === 1);
    const example = Number(this.select.example.value);
    const key = `${run} ${example}`;
    if (!this.cache.has(key)) this.cache.set(key, new Maps(maps[example]));
    const before = this.maps;
    this.maps = this.cache.get(key);
    const { layers, heads, components, length } = this.maps;
    this.offer("layer", range(layers).map((i) => [i, i + 1]));
    this.offer("component", [[-1, "all"], ...range(components).map((r) => [r, r + 1])]);
    this.hide("component", components === 1);
    // A single head has no mean of its own.
    this.head = heads === 1 ? 0 : Math.min(this.head, heads - 1);
    // The last token has something to say in a causal model, too.
    this.query = this.query === null ? length - 1 : Math.min(this.query, length - 1);
    this.pointed = null;
    this.example.textContent = this.maps.title;
    for (const node of this.root.querySelectorAll(".of-components")) node.hidden = components === 1;
    this.root.querySelector(".shares-are").textContent = sharesAre;
    if (this.maps !== before) this.layTokens();
    this.explain(components);
    this.draw();
  }

  offer(name, options) {
    const select = this.select[name];
    const chosen = select.value;
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    select.value = options.some(([value]) => String(value) === chosen) ? chosen : options[0][0];
  }

  explain(components) {
    this.key.replaceChildren();
    this.key.hidden = components === 1;
    for (const r of range(components)) {
      const item = html(this.key, "li");
      html(item, "span", `dot ${componentClass(r)}`);
      item.append(`component ${r + 1}`);
    }
    this.attended.tHead.replaceChildren();
    const row = html(this.attended.tHead, "tr");
    const cell = (text, className = "") => {
      const head = html(row, "th", className, text);
      head.scope = "col";
      return head;
    };
    cell("attends to");
    cell("weight", "number");
    cell("");
    if (components < 2 || components > MOST_SHARES) return;
    for (const r of range(components)) {
      const head = cell("", "share");
      head.setAttribute("aria-label", `share of component ${r + 1}`);
      html(head, "span", `dot ${componentClass(r)}`);
      head.append(r + 1);
    }
  }

  layTokens() {
    const { tokens } = this.maps;
    this.tokens.replaceChildren();
    this.tokens.classList.toggle("dense", tokens.every((token) => [...token].length < 3));
    tokens.forEach((token, position) => {
      const button = html(this.tokens, "button", "", token);
      button.type = "button";
      button.dataset.position = position;
    });
  }

  draw() {
    const layer = Number(this.select.layer.value);
    const hadFocus = this.heads.contains(document.activeElement);
    this.colours = range(this.maps.components).map((r) => rgb(`--component-${r % NUM_COMPONENT_COLOURS}`, this.root));
    this.surface = rgb("--surface", this.root);
    this.ink = rgb("--ink", this.root);
    this.heads.replaceChildren();
    const heads = range(this.maps.heads);
    for (const head of this.maps.heads > 1 ? [...heads, -1] : heads) {
      const button = html(this.heads, "button");
      button.type = "button";
      button.dataset.head = head;
      button.setAttribute("aria-pressed", String(head === this.head));
      const parts = this.maps.parts(layer, head);
      const picture = this.image(parts);
      if (this.maps.length <= SHARP) picture.style.imageRendering = "pixelated";
      button.append(picture);
      html(button, "span", "", head < 0 ? "mean" : `head ${head + 1}`);
      button.addEventListener("click", () => {
        this.head = head;
        this.draw();
      });
      if (head !== this.head) continue;
      this.parts = parts;
      this.picture = picture;
      if (hadFocus) button.focus();
    }
    this.layout();
    this.ask(this.query, this.pointed);
  }

  get component() {
    return Number(this.select.component.value);
  }

  /** What is shown of the weight of a pair, and the colour of who gave it. */
  shown(parts, at) {
    const r = this.component;
    if (r >= 0) return [parts[r][at], this.colours[r]];
    let total = 0;
    for (const part of parts) total += part[at];
    if (parts.length === 1 || total === 0) return [total, this.colours[0]];
    const colour = [0, 0, 0];
    parts.forEach((part, each) => {
      for (let c = 0; c < 3; c++) colour[c] += (part[at] / total) * this.colours[each][c];
    });
    return [total, colour];
  }

  /** The largest weight that a row is shaded by. */
  largest(parts, i) {
    if (this.select.shade.value === "absolute") return 1;
    let largest = 0;
    for (let j = 0; j < this.maps.length; j++) {
      largest = Math.max(largest, parts.reduce((sum, part) => sum + part[i * this.maps.length + j], 0));
    }
    return largest || 1;
  }

  /** One pixel for each weight, from the page's background through the component's colour towards the ink's. */
  image(parts) {
    const size = this.maps.length;
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = size;
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(size, size);
    for (let i = 0; i < size; i++) {
      const largest = this.largest(parts, i);
      for (let j = 0; j < size; j++) {
        const [weight, colour] = this.shown(parts, i * size + j);
        const t = Math.sqrt(Math.min(weight / largest, 1));
        const end = mix(colour, this.ink, 0.15);
        const shade = t < 0.7 ? mix(this.surface, colour, t / 0.7) : mix(colour, end, (t - 0.7) / 0.3);
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
    this.margin = Math.ceil(clamp(longest, 12, 72)) + 10;
    const room = this.map.clientWidth - this.margin - 1;
    this.side = Math.max(1, Math.min(room, 30 * size));
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
    context.strokeStyle = style.getPropertyValue("--ink");
    context.strokeRect(this.margin - 0.5, this.margin + this.query * this.pitch - 0.5, this.side + 1, this.pitch + 1);
    if (this.pointed !== null) {
      context.strokeRect(this.margin + this.pointed * this.pitch - 0.5, this.margin - 0.5, this.pitch + 1, this.side + 1);
    }
    this.labels(context, style);
  }

  labels(context, style) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const every = Math.ceil(12 / this.pitch);
    [this.query, this.pointed].forEach((chosen, axis) => {
      this.maps.tokens.forEach((token, i) => {
        // A chosen token pushes aside those that would touch it.
        const near = chosen !== null && Math.abs(i - chosen) * this.pitch < 12;
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
    });
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
    if (cell.some((index) => index >= size) || cell.every((index) => index < 0)) return;
    // Beside the map stand the queries, above it the keys.
    this.ask(cell[0] < 0 ? this.query : cell[0], cell[1] < 0 ? null : cell[1]);
  }

  walkMap(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const last = this.maps.length - 1;
    const key = this.pointed === null ? 0 : clamp(this.pointed + move[1], 0, last);
    this.ask(clamp(this.query + move[0], 0, last), key);
  }

  walkTokens(event) {
    const last = this.maps.length - 1;
    const to = {
      ArrowLeft: this.query - 1, ArrowUp: this.query - 1, ArrowRight: this.query + 1, ArrowDown: this.query + 1,
      Home: 0, End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.tokens.children[clamp(to, 0, last)].focus();
  }

  /** Show where a query attends; a key that is pointed at is told of in any case. */
  ask(query, pointed) {
    this.query = query;
    this.pointed = pointed;
    const size = this.maps.length;
    const keys = range(size).map((j) => {
      const at = query * size + j;
      const parts = this.parts.map((part) => part[at]);
      const weight = parts.reduce((sum, part) => sum + part, 0);
      const [shown, colour] = this.shown(this.parts, at);
      return { j, weight, shown, colour, shares: parts.map((part) => (weight > 0 ? part / weight : 0)) };
    });
    this.tint(keys);
    this.tell(keys);
    this.list(keys);
    this.paint();
  }

  tint(keys) {
    const largest = this.largest(this.parts, this.query);
    keys.forEach(({ j, weight, shown, colour, shares }) => {
      const token = this.tokens.children[j];
      const isQuery = j === this.query;
      token.style.backgroundColor = css(mix(this.surface, colour, TINT * Math.sqrt(Math.min(shown / largest, 1))));
      token.dataset.weight = weight.toPrecision(5);
      token.dataset.shares = shares.map((share) => share.toFixed(4)).join(" ");
      token.tabIndex = isQuery ? 0 : -1;
      token.setAttribute("aria-pressed", String(isQuery));
      token.setAttribute("aria-label", `${this.maps.tokens[j]}, position ${j}, weight ${rounded(weight)}`);
    });
  }

  tell(keys) {
    const total = keys.reduce((sum, { weight }) => sum + weight, 0);
    this.sentence.replaceChildren();
    html(this.sentence, "span", "token", this.maps.tokens[this.query]);
    this.sentence.append(` at position ${this.query} `);
    if (total === 0) {
      this.sentence.append("attends to nothing.");
      return;
    }
    const spread = Math.exp(-keys.reduce((sum, { weight: w }) => sum + (w > 0 ? (w / total) * Math.log(w / total) : 0), 0));
    this.sentence.append("spreads its attention as if evenly over ");
    html(this.sentence, "strong", "", spread.toFixed(1));
    this.sentence.append(spread < 1.05 ? " token." : " tokens.");
    if (this.maps.components === 1) return;
    this.sentence.append(" Of it, ");
    range(this.maps.components).forEach((r) => {
      const share = keys.reduce((sum, { weight, shares }) => sum + weight * shares[r], 0) / total;
      if (r > 0) this.sentence.append(r + 1 === this.maps.components ? " and " : ", ");
      this.sentence.append(`component ${r + 1} answers `);
      html(this.sentence, "strong", "", percent(share));
    });
    this.sentence.append(".");
  }

  list(keys) {
    const largest = Math.max(...keys.map(({ weight }) => weight)) || 1;
    const sorted = [...keys].sort((a, b) => b.shown - a.shown);
    let chosen = sorted.slice(0, LARGEST_KEYS).filter(({ j, weight }) => weight > 0 || j === this.pointed);
    if (this.pointed !== null && !chosen.some(({ j }) => j === this.pointed)) {
      chosen = [...chosen.slice(0, LARGEST_KEYS - 1), keys[this.pointed]];
    }
    const body = this.attended.tBodies[0];
    body.replaceChildren();
    for (const { j, weight, shares } of chosen) {
      const row = html(body, "tr", j === this.pointed ? "pointed" : "");
      row.dataset.position = j;
      const head = html(row, "th");
      head.scope = "row";
      html(head, "span", "token", this.maps.tokens[j]);
      html(head, "span", "at", j);
      html(row, "td", "number", rounded(weight));
      const bar = html(html(row, "td"), "div", "bar");
      shares.forEach((share, r) => {
        const part = html(bar, "span", componentClass(r));
        part.style.width = `${(100 * weight * share) / largest}%`;
      });
      if (shares.length > 1 && shares.length <= MOST_SHARES) for (const share of shares) html(row, "td", "share", percent(share));
    }
  }
}

