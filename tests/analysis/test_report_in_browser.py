"""The page in a real browser: what a reader sees is what the model computed.

Screenshots are kept in the folder that ``MGK_ARTEFACTS`` names, or in ``artefacts/``.
"""

import itertools
import os
from pathlib import Path

import browser
import numpy as np
import pytest
import torch
from model_cases import make_model

from mgk.analysis import AttentionMaps, Report, RunReport, Table, TableRow, write_report
from mgk.analysis.report.examples import Example, look
from mgk.data import listops

pytestmark = pytest.mark.skipif(
    browser.find_chromium() is None, reason="needs Chromium: apt-get install chromium (Debian's package)"
)

ARTEFACTS = Path(os.environ.get("MGK_ARTEFACTS", Path(__file__).parents[2] / "artefacts"))
NASTY = '</script><img src=x onerror="document.title=1">'
LIST = "[MAX 2 9 [MIN 4 7 ] 0 [SM 8 1 5 ] 3 [MED 6 6 2 ] 1 ]"


def explore(preset, heads, **changes):
    """Maps of a model with random weights, large enough that attention is not flat."""
    model = make_model(
        "classifier", preset, num_attention_heads=heads, initializer_range=0.5, dtype=torch.float32, **changes
    )
    ids = listops.encode(LIST).tolist()
    return look(model, Example(ids=ids, words=LIST.split(), title="listops, test, sequence 1"))


@pytest.fixture(scope="module")
def runs():
    softmax, smgk, three = explore("softmax", 8), explore("smgk", 4), explore("mgk", 2, num_components=3)
    words = [NASTY, " ", " a", "a\nb", "", "constructor", *smgk.tokens[6:]]
    nasty = AttentionMaps(tokens=words, weights=smgk.weights, shares=smgk.shares, title=NASTY)
    curve = {"validation accuracy": [(step, 1 - 0.9 ** (step / 10 + 1)) for step in range(0, 100, 10)]}
    return [
        RunReport(name="softmax-8", curves=curve, maps=[softmax, softmax], command="mgk train demo --row softmax-8"),
        RunReport(name="smgk-4", curves=curve, maps=[smgk, nasty], facts={"data": "64ea"}, configuration={"heads": 4}),
        RunReport(name="mgk-2", maps=[three], configuration={"heads": 2}),
    ]


@pytest.fixture(scope="module")
def page_path(runs, tmp_path_factory):
    columns = [f"a metric with a long name {number}" for number in range(6)]
    table = Table(columns=columns, rows=[TableRow(name=run.name, cells=["60.69 ± 0.09 %"] * 6) for run in runs])
    report = Report(title="Half the heads", subtitle="A test", runs=runs, results=table, notes=[NASTY])
    return write_report(tmp_path_factory.mktemp("page") / "report.html", report)


@pytest.fixture(scope="module")
def chromium():
    with browser.start() as connection:
        yield connection


def open_page(chromium, path, **options):
    page = chromium.open(path, **options)
    page.wait_for("document.querySelectorAll('.tokens button').length > 0")
    return page


def shown(page):
    """What the tokens say: the query, the weight of each key ``[N]``, and the shares ``[N, M]``."""
    found = page.evaluate(
        "[...document.querySelectorAll('.tokens button')].map((b) =>"
        "[b.getAttribute('aria-pressed'), b.dataset.weight, b.dataset.shares])"
    )
    (query,) = (position for position, (pressed, _, _) in enumerate(found) if pressed == "true")
    weights = np.array([float(weight) for _, weight, _ in found])
    return query, weights, np.array([[float(share) for share in shares.split()] for _, _, shares in found])


def listed(page):
    """The table: position, weight and shares as they are written."""
    rows = page.evaluate(
        "[...document.querySelectorAll('.attended tbody tr')].map((row) =>"
        "[row.dataset.position, row.querySelector('.number').textContent,"
        "[...row.querySelectorAll('.share')].map((cell) => cell.textContent)])"
    )
    return [
        (int(position), float(weight), [float(share.split()[0]) / 100 for share in shares])
        for position, weight, shares in rows
    ]


def check(page, maps, layer, head, query):
    """What is shown of one query is what the model has, within what 8 bits can hold."""
    weights = np.asarray(maps.weights)[layer, head, query]
    row = weights.max()
    got_query, got, got_shares = shown(page)
    assert got_query == query
    assert np.abs(got - weights).max() <= 0.004 * row
    assert got.max() > 0
    shares = np.ones((1, len(weights))) if maps.shares is None else np.asarray(maps.shares)[layer, head, :, query]
    assert got_shares.shape == shares.T.shape
    # A weight that 8 bits round to nothing has no shares.
    seen = got > 0
    assert np.abs(got_shares - shares.T)[seen].max() <= 0.002 * max(1, len(shares) - 1) + 1e-4
    table = listed(page)
    assert table[0][0] == weights.argmax()
    assert len(table) == 8
    for position, weight, parts in table:
        # Three digits are written.
        assert abs(weight - weights[position]) <= 0.004 * row + 0.005 * weight
        assert len(parts) == (0 if maps.shares is None else len(shares))
        for part, share in zip(parts, shares[:, position], strict=False):
            assert abs(part - share) <= 0.01
    return got


def test_layers_heads_and_tokens(chromium, page_path, runs):
    page = open_page(chromium, page_path)
    maps = runs[1].maps[0]
    page.choose("select[name=run]", 1)
    assert page.evaluate("document.querySelectorAll('.heads button').length") == 5
    seen = []
    for layer, head, query in ((0, 0, 3), (1, 0, 3), (1, 2, 3), (1, 2, 17), (0, 3, 0)):
        page.choose("select[name=layer]", layer)
        page.click(f".heads button[data-head='{head}']")
        page.hover(".tokens button", query)
        assert page.evaluate("document.querySelector('.heads [aria-pressed=true]').dataset.head") == str(head)
        seen.append(check(page, maps, layer, head, query))
    # None of the choices was without effect.
    assert all(np.abs(one - other).max() > 0.005 for one, other in itertools.pairwise(seen))

    # The sentence: how spread out, and who answers on the whole.
    weights, shares = np.asarray(maps.weights)[0, 3, 0], np.asarray(maps.shares)[0, 3, :, 0]
    spread = np.exp(-(weights * np.log(weights)).sum())
    sentence = page.evaluate("document.querySelector('.sentence').textContent")
    said = page.evaluate("[...document.querySelectorAll('.sentence strong')].map((node) => node.textContent)")
    assert sentence.startswith("[MAX at position 0 ")
    assert abs(float(said[0]) - spread) < 0.15
    assert [abs(float(text.split()[0]) / 100 - share) < 0.012 for text, share in
            zip(said[1:], (weights * shares).sum(1), strict=True)] == [True, True]  # fmt: skip
    page.screenshot(ARTEFACTS / "report-explorer.png")
    assert page.complaints == []
    assert page.requests == [page_path.as_uri()]


@pytest.mark.parametrize("size", [browser.DESKTOP, browser.PHONE], ids=["desktop", "phone"])
def test_the_longest_weight_does_not_reach_its_bar(chromium, page_path, size):
    page = open_page(chromium, page_path, size=size)
    page.choose("select[name=run]", 1)
    page.hover(".tokens button", 3)
    gaps = page.evaluate(
        "[...document.querySelectorAll('.attended tbody tr')].map((row) => {"
        "const cell = row.querySelector('.number'); cell.textContent = '0.000123';"
        "const text = document.createRange(); text.selectNodeContents(cell);"
        "return row.querySelector('.bar').getBoundingClientRect().left - text.getBoundingClientRect().right; })"
    )
    assert len(gaps) == 8
    assert min(gaps) > 0


def test_mean_over_heads_and_one_component(chromium, page_path, runs):
    page = open_page(chromium, page_path)
    page.choose("select[name=run]", 1)
    page.click(".heads button[data-head='-1']")
    page.hover(".tokens button", 5)
    weights, shares = (np.asarray(array)[0] for array in (runs[1].maps[0].weights, runs[1].maps[0].shares))
    joint = (weights[:, None] * shares).mean(0)[:, 5]
    _, got, got_shares = shown(page)
    bound = 0.004 * weights[:, 5].max(axis=-1).mean()
    assert np.abs(got - joint.sum(0)).max() <= bound
    assert np.abs(got_shares * got[:, None] - joint.T).max() <= 2 * bound
    # One component alone: sorted by what it gives.
    for component in (0, 1):
        page.choose("select[name=component]", component)
        assert listed(page)[0][0] == joint[component].argmax()
    before = page.evaluate("document.querySelector('.map canvas').toDataURL()")
    page.choose("select[name=component]", 0)
    assert page.evaluate("document.querySelector('.map canvas').toDataURL()") != before
    # A cell of the map names its query and its key.
    box = page.evaluate(
        "(() => { const c = document.querySelector('.map canvas'); c.scrollIntoView({block: 'center'});"
        "const b = c.getBoundingClientRect(); return [b.x, b.y, explorer.margin, explorer.pitch]; })()"
    )
    page.hover_at(box[0] + box[2] + 7.5 * box[3], box[1] + box[2] + 11.5 * box[3])
    assert shown(page)[0] == 11
    assert page.evaluate("document.querySelector('.attended .pointed').dataset.position") == "7"
    assert page.complaints == []


def test_what_is_not_there_is_not_offered(chromium, page_path, runs):
    page = open_page(chromium, page_path)
    is_offered = (
        "[...document.querySelectorAll('.choices label')].filter((label) => !label.hidden)"
        ".map((label) => label.textContent.split(' ')[0])"
    )
    assert page.evaluate(is_offered) == ["run", "example", "layer", "shade"]
    assert page.evaluate("document.querySelector('.key').hidden")
    page.hover(".tokens button", 4)
    check(page, runs[0].maps[0], 0, 0, 4)
    page.choose("select[name=run]", 2)
    assert page.evaluate(is_offered) == ["run", "layer", "component", "shade"]
    assert page.evaluate("document.querySelectorAll('.key li').length") == 3
    page.hover(".tokens button", 9)
    check(page, runs[2].maps[0], 0, 0, 9)


def test_keyboard(chromium, page_path, runs):
    page = open_page(chromium, page_path)
    page.choose("select[name=run]", 1)
    page.evaluate("document.querySelectorAll('.tokens button')[6].focus()")
    assert shown(page)[0] == 6
    page.press("ArrowRight")
    page.press("ArrowRight")
    check(page, runs[1].maps[0], 0, 0, 8)
    page.press("Home")
    assert shown(page)[0] == 0
    # One stop of the tabulator for all tokens.
    assert page.evaluate("[...document.querySelectorAll('.tokens button')].filter((b) => b.tabIndex === 0).length") == 1
    page.evaluate("document.querySelector('.map canvas').focus()")
    page.press("ArrowDown")
    page.press("ArrowRight")
    assert shown(page)[0] == 1
    assert page.evaluate("document.querySelector('.attended .pointed').dataset.position") == "1"
    page.evaluate("document.querySelector('figure.chart svg').focus()")
    page.press("ArrowRight")
    tooltip = page.evaluate("document.querySelector('.tooltip').textContent")
    assert tooltip.startswith("step 0")
    assert "0.1" in tooltip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone(chromium, page_path, runs, dark):
    page = open_page(chromium, page_path, size=browser.PHONE, touch=True, dark=dark)
    page.choose("select[name=run]", 1)
    page.tap(".tokens button", 9)
    check(page, runs[1].maps[0], 0, 0, 9)
    # Some browsers do not focus what is tapped.
    page.evaluate("document.activeElement.blur(); document.querySelectorAll('.tokens button')[3].click()")
    check(page, runs[1].maps[0], 0, 0, 3)
    # Nothing but tables in their boxes is wider than the phone.
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    surface, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color].map("
        "(text) => text.match(/\\d+/g).map(Number).reduce((a, b) => a + b))"
    )
    assert (surface < ink) == dark
    # Names beside the numbers stay readable.
    heights = page.evaluate("[...document.querySelectorAll('.scroll tbody th')].map((n) => n.offsetHeight)")
    assert 0 < max(heights) < 60
    # A finger needs room.
    sizes = page.evaluate(
        "[...document.querySelectorAll('.tokens button')].map((b) => b.getBoundingClientRect().height)"
    )
    assert min(sizes) >= 30
    page.screenshot(ARTEFACTS / f"report-phone-{'dark' if dark else 'light'}.png", whole=True)
    assert page.complaints == []


CONTRAST = """
(() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
  };
  const worst = {};
  const tags = "h1, h2, p, a, th, td, li, button, label, select, dt, dd, summary, code";
  for (const node of document.querySelectorAll(tags)) {
    if (!node.textContent.trim() || !node.checkVisibility()) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    worst[node.tagName] = Math.min(worst[node.tagName] ?? 99, ratio);
  }
  return worst;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_contrast(chromium, page_path, dark):
    page = open_page(chromium, page_path, dark=dark)
    page.choose("select[name=run]", 1)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    for query in range(0, 24, 4):
        page.hover(".tokens button", query)
        worst = page.evaluate(CONTRAST)
        assert {"H1", "P", "A", "TD", "BUTTON"} <= worst.keys()
        # WCAG AA for small text.
        assert min(worst.values()) >= 4.5, worst
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(ARTEFACTS / f"report-desktop-{'dark' if dark else 'light'}.png", whole=True)


def test_controls_have_names(chromium, page_path):
    page = open_page(chromium, page_path)
    nameless = page.evaluate(
        "[...document.querySelectorAll('button, select, canvas[tabindex], svg, [role], nav')].filter("
        "(n) => !(n.getAttribute('aria-label') || n.textContent.trim() || n.closest('label'))).map((n) => n.outerHTML)"
    )
    assert nameless == []


def test_a_token_cannot_break_out(chromium, page_path):
    page = open_page(chromium, page_path)
    page.choose("select[name=run]", 1)
    page.choose("select[name=example]", 1)
    page.hover(".tokens button", 0)
    assert page.evaluate("document.querySelector('.tokens button').textContent") == NASTY
    assert page.evaluate("document.querySelector('.sentence .token').textContent") == NASTY
    words = page.evaluate("[...document.querySelectorAll('.tokens button')].slice(1, 6).map((b) => b.textContent)")
    assert words == ["␣", "·a", "a⏎b", "∅", "constructor"]
    assert page.evaluate("document.querySelector('p.example').textContent") == NASTY
    assert page.evaluate("document.images.length") == 0
    assert page.evaluate("document.title") == "Half the heads"
    # Neither would a script that got in: the policy refuses it.
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'document.title = 2';"
        "document.body.append(s); })()"
    )
    assert page.evaluate("document.title") == "Half the heads"
    assert page.requests == [page_path.as_uri()]


def test_print_unfolds_and_is_light(chromium, page_path):
    page = open_page(chromium, page_path, dark=True)
    count = "document.querySelectorAll('details[open]').length"
    assert page.evaluate(count) == 0
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(count) == page.evaluate("document.querySelectorAll('details').length") == 3
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(count) == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert len(page.call("Page.printToPDF")["data"]) > 20_000
    assert page.complaints == []


def test_copy_button(chromium, page_path):
    page = open_page(chromium, page_path)
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click(".copy")
    page.wait_for("document.querySelector('.copy').textContent === 'copied'")
    assert page.evaluate("window.copied") == "mgk train demo --row softmax-8"
