"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const NUM_COLOURS = 6;

const colourOf = (row) => `run-${row % NUM_COLOURS}`;
const isDashed = (row) => row >= NUM_COLOURS;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const range = (count) => [...Array(count).keys()];

/** A new element with text, never with markup. */
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

function swatch(parent, row) {
  html(parent, "span", `swatch ${colourOf(row)}${isDashed(row) ? " dashed" : ""}`);
}

