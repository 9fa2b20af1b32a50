const charts = [...document.querySelectorAll("figure.chart")].map((figure) => new Chart(figure));
const root = document.querySelector(".explorer");
const explorer = root ? new Explorer(root) : null;

let width = null;
function redraw() {
  width = window.innerWidth;
  charts.forEach((chart) => chart.draw());
  if (explorer) explorer.draw();
}
charts.forEach((chart) => chart.draw());
width = window.innerWidth;
// A phone's browser bar comes and goes with scrolling, which changes the height alone.
window.addEventListener("resize", () => window.innerWidth !== width && redraw());
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// Paper is white, and nothing on it unfolds.
const folded = new Set();
window.addEventListener("beforeprint", () => {
  document.documentElement.classList.add("printing");
  for (const details of document.querySelectorAll("details:not([open])")) {
    folded.add(details);
    details.open = true;
  }
  redraw();
});
window.addEventListener("afterprint", () => {
  document.documentElement.classList.remove("printing");
  for (const details of folded) details.open = false;
  folded.clear();
  redraw();
});

/** Older browsers, and pages that are not trusted, have no clipboard but the selection's. */
async function copy(code) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    return true;
  } catch {
    const selection = window.getSelection();
    selection.selectAllChildren(code);
    return document.execCommand("copy");
  }
}

for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const done = await copy(button.parentElement.querySelector("code"));
    button.textContent = done ? "copied" : "press Ctrl+C";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });
}
