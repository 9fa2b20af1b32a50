"""The page: what it holds, what it must not load, and what it refuses."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from mgk.analysis import AttentionMaps, Report, RunReport, Table, TableRow, write_report

NASTY = '</script><script>alert("x")</script> & <b>'


class Page(HTMLParser):
    """What a browser would find: elements with attributes, text outside scripts, and the scripts."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.elements, self.open, self.text, self.scripts, self.cells, self.captions = [], [], [], [], [], []
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" in self.open:
            self.scripts[-1] += data
        elif "style" not in self.open:
            self.text.append(data)
            if {"td", "th"} & set(self.open):
                self.cells[-1] += data
            if self.open and self.open[-1] == "figcaption":
                self.captions.append(data)

    def count(self, tag, **attributes):
        return sum(
            name == tag and all(found.get(key) == value for key, value in attributes.items())
            for name, found in self.elements
        )

    @property
    def data(self):
        return json.loads(self.scripts[0])


def write(tmp_path, *runs, **options):
    path = write_report(tmp_path / "new" / "report.html", Report(title="Heads", runs=runs, **options))
    assert path == tmp_path / "new" / "report.html"
    return path.read_text(encoding="utf-8")


def make_maps(layers=2, heads=3, length=5, seed=0):
    weights = np.random.default_rng(seed).dirichlet(np.full(length, 0.3), size=(layers, heads, length))
    return AttentionMaps(tokens=[f"t{i}" for i in range(length)], weights=weights)


def make_run(name="smgk-4", **options):
    defaults = {
        "columns": {"accuracy": "37.9 %", "parameters": "165,528"},
        "curves": {"training loss": [(0, 2.5), (100, 1.25)], "validation accuracy": [(100, 0.31)]},
    }
    return RunReport(name=name, **{**defaults, **options})


def decode(maps):
    size = len(maps["tokens"])
    levels = np.frombuffer(base64.b64decode(maps["levels"]), dtype=np.uint8)
    largest = np.frombuffer(base64.b64decode(maps["largest"]), dtype="<f4")
    shape = (maps["layers"], maps["heads"], size)
    return (levels.reshape(*shape, size) / 255.0) ** 2 * largest.reshape(*shape, 1)


def test_loads_nothing(tmp_path):
    source = write(tmp_path, make_run(maps=[make_maps()]), command="mgk train", notes=["a note"])
    page = Page(source)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|fetch\(|XMLHttpRequest|import\(", source)
    assert page.count("link") == page.count("img") == page.count("iframe") == 0
    assert not [attributes for _, attributes in page.elements if {"src", "style", "onclick"} & attributes.keys()]
    links = [found["href"] for _, found in page.elements if "href" in found]
    assert links == ["#results", "#curves", "#attention", "#reproduce", "#notes"]
    assert all(page.count("section", id=link[1:]) == 1 for link in links)
    (policy,) = (found["content"] for _, found in page.elements if found.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    # Only what stands here may run.
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy


def test_content_is_text_and_never_markup(tmp_path):
    maps = AttentionMaps(tokens=[NASTY, "b"], weights=np.full((1, 1, 2, 2), 0.5))
    run = make_run(
        NASTY,
        columns={NASTY: NASTY},
        curves={NASTY: [(1, 2), (2, float("nan"))]},
        maps=[maps],
        configuration={NASTY: {"key": NASTY}},
    )
    options = {"subtitle": NASTY, "notes": [NASTY], "command": NASTY, "baselines": {NASTY: 1.0}, "metric": NASTY}
    source = write_report(tmp_path / "a.html", Report(title=NASTY, runs=[run], **options)).read_text(encoding="utf-8")
    page = Page(source)
    assert page.count("script") == 2
    assert page.count("b") == 0
    assert "alert(" not in page.scripts[1]
    # Title, heading, subtitle, 2 cells and a name in the summary, caption, what was left out, 2 heads and a cell of the
    # configuration, note, command.
    assert sum(text.count(NASTY) for text in page.text) == 13
    assert page.data["runs"][0]["name"] == NASTY
    assert page.data["runs"][0]["maps"][0]["tokens"][0] == NASTY
    assert page.data["baselines"] == [{"name": NASTY, "value": 1.0}]


def test_numbers_are_found_again(tmp_path):
    maps = make_maps()
    other = make_run("softmax-8", columns={"accuracy": "36.1 %", "time": "7 ms"}, curves={"training loss": [(50, 3)]})
    page = Page(write(tmp_path, make_run(maps=[maps]), other, baselines={"majority class": 0.17}))
    loss, accuracy = page.data["charts"]
    assert (loss["name"], accuracy["name"]) == ("training loss", "validation accuracy")
    assert loss["points"] == [[[0, 2.5], [100, 1.25]], [[50, 3]]]
    assert accuracy["points"] == [[[100, 0.31]], []]
    assert page.data["baselines"] == [{"name": "majority class", "value": 0.17}]
    assert page.cells == [
        *("", "accuracy", "parameters", "time"),
        *("smgk-4", "37.9 %", "165,528", "\N{EN DASH}"),
        *("softmax-8", "36.1 %", "\N{EN DASH}", "7 ms"),
    ]
    assert page.captions[:2] == ["training loss", "validation accuracy"]
    got = decode(page.data["runs"][0]["maps"][0])
    bound = 0.004 * maps.weights.max(axis=-1, keepdims=True)
    assert got.shape == maps.weights.shape
    assert (np.abs(got - maps.weights) <= bound).all()
    assert page.data["runs"][1]["maps"] == []


@pytest.mark.parametrize(("metric", "expected"), [(None, [False, True, False]), ("perplexity", [False, False, True])])
def test_baselines_belong_to_the_metric(tmp_path, metric, expected):
    curves = {name: [(0, 1.0)] for name in ("training loss", "validation accuracy", "perplexity")}
    page = Page(write(tmp_path, make_run(curves=curves), metric=metric, baselines={"chance": 0.1}))
    assert [chart["hasBaselines"] for chart in page.data["charts"]] == expected


def test_points_that_are_not_finite_are_skipped_and_counted(tmp_path):
    nan, inf = float("nan"), float("inf")
    diverged = make_run("bad", curves={"training loss": [(3, 1.0), (1, nan), (2, inf), (0, 4.0)]})
    page = Page(write(tmp_path, diverged, make_run("good")))
    assert page.data["charts"][0]["points"][0] == [[0, 4.0], [3, 1.0]]
    assert "Not finite, so not drawn: bad: 2." in page.text
    lost = Page(write(tmp_path, make_run("bad", curves={"training loss": [(0, nan)], "never logged": []})))
    assert lost.captions == ["training loss"]
    assert lost.count("svg") == 0


def test_runs_may_differ_in_heads_and_layers(tmp_path):
    runs = [
        make_run("softmax-8", maps=[make_maps(heads=8), make_maps(length=2)]),
        make_run("smgk-4", maps=[make_maps(layers=3, heads=4)]),
        make_run("without"),
    ]
    page = Page(write(tmp_path, *runs))
    found = [[decode(maps).shape for maps in run["maps"]] for run in page.data["runs"]]
    assert found == [[(2, 8, 5, 5), (2, 3, 2, 2)], [(3, 4, 5, 5)], []]
    assert page.count("div", **{"class": "explorer"}) == 1


def test_what_is_absent_has_no_section(tmp_path):
    page = Page(write(tmp_path, RunReport(name="only", columns={"accuracy": "1"})))
    assert page.count("h2") == page.count("section", id="results") == 1
    assert page.count("svg") == page.count("canvas") == page.count("details") == 0
    page = Page(write(tmp_path, RunReport(name="only")))
    assert page.count("h2") == page.count("a") == 0
    full = make_run(maps=[make_maps()], configuration={"seed": 0})
    page = Page(write(tmp_path, full, notes=["n"], command="c"))
    titles = ("Results", "Curves", "Attention", "Configuration", "Notes", "Reproduce")
    # In the navigation and as a heading.
    assert all(page.text.count(title) == 2 for title in titles)
    assert page.count("h2") == page.count("a") == 6
    assert page.count("svg") == 2


def test_settings_that_differ_come_first(tmp_path):
    shared = {"seed": 0, "heads": 4, "compile": None, "pack": True}
    runs = make_run("a", configuration=shared), make_run("b", configuration={**shared, "heads": 8})
    page = Page(write(tmp_path, *runs))
    start = page.cells.index("setting")
    assert page.cells[start : start + 6] == ["setting", "a", "b", "heads", "4", "8"]
    rest = page.cells[start + 6 :]
    assert rest[:3] == ["setting", "a", "b"]
    assert rest[3:] == ["seed", "0", "0", "heads", "4", "8", "compile", "null", "null", "pack", "true", "true"]
    assert page.count("tr", **{"class": "differs"}) == 1
    assert page.count("details") == 1
    page = Page(write(tmp_path, make_run("a", configuration=shared), make_run("b", configuration=shared)))
    assert page.cells.count("setting") == 1
    assert "All runs have the same settings." in page.text


def test_tables_of_their_own(tmp_path):
    rows = [
        TableRow(name="smgk-4", cells=["60.69 ± 0.09 %"]),
        TableRow(name="majority class", cells=["13.68 %"], is_reference=True),
    ]
    table = Table(columns=["test accuracy"], rows=rows, notes=["± is an error."])
    costs = Table(columns=["parameters"], rows=[TableRow(name="smgk-4", cells=["1,234"])])
    runs = [make_run(f"smgk-4, seed {seed}", row="smgk-4", curves={}) for seed in (0, 1)]
    page = Page(write(tmp_path, *runs, results=table, costs=costs))
    assert page.cells == [
        *("", "test accuracy", "smgk-4", "60.69 ± 0.09 %", "majority class", "13.68 %"),
        *("", "parameters", "smgk-4", "1,234"),
    ]
    assert "± is an error." in page.text
    assert page.count("tr", **{"class": "reference"}) == 1
    assert page.count("span", **{"class": "swatch run-0"}) == 2


def test_runs_of_one_row_share_a_colour(tmp_path):
    runs = [make_run(f"{row}, seed {seed}", row=row, command="c") for row in ("a", "b") for seed in (0, 1)]
    page = Page(write(tmp_path, *runs))
    assert page.data["rows"] == ["a", "b"]
    assert [run["row"] for run in page.data["runs"]] == [0, 0, 1, 1]
    assert page.count("span", **{"class": "swatch run-1"}) == 2


def test_what_makes_a_run_again(tmp_path):
    run = make_run(command="mgk train demo seed=3 'a b'", facts={"data": "listops, SHA-256 64ea"})
    page = Page(write(tmp_path, run, make_run("other"), command="mgk report a b"))
    assert [text for text in page.text if text.startswith("mgk ")] == ["mgk train demo seed=3 'a b'", "mgk report a b"]
    labels = [found["aria-label"] for tag, found in page.elements if tag == "button"]
    assert labels == ["Copy the command of smgk-4", "Copy the command of this page"]
    assert (page.count("dt"), page.count("dd")) == (1, 1)
    assert "listops, SHA-256 64ea" in page.text


def test_what_the_explorer_lacks_is_said(tmp_path):
    page = Page(write(tmp_path, make_run(), missing=["smgk-4 has no checkpoint."]))
    assert page.count("section", id="attention") == 1
    assert page.count("canvas") == 0
    assert "smgk-4 has no checkpoint." in page.text


@pytest.mark.parametrize("components", [1, 2, 4])
def test_shares_are_found_again(tmp_path, components):
    generator = np.random.default_rng(1)
    shares = np.moveaxis(generator.dirichlet(np.full(components, 0.4), size=(2, 3, 5, 5)), -1, 2)
    maps = AttentionMaps(tokens="abcde", weights=make_maps().weights, shares=shares, title="a list")
    found = Page(write(tmp_path, make_run(maps=[maps], shares_are="part"))).data["runs"][0]
    assert found["sharesAre"] == "part"
    (encoded,) = found["maps"]
    assert (encoded["components"], encoded["title"]) == (components, "a list")
    stored = np.frombuffer(base64.b64decode(encoded["shares"]), dtype=np.uint8).reshape(2, 3, components - 1, 5, 5)
    assert np.abs(stored / 255 - shares[:, :, :-1]).max(initial=0) < 0.002


def test_weights_from_torch_and_rows_without_keys(tmp_path):
    weights = torch.zeros(1, 1, 3, 3)
    weights[0, 0, 1] = torch.tensor([0.25, 0.75, 0.0])
    page = Page(write(tmp_path, make_run(maps=[AttentionMaps(tokens="abc", weights=weights)])))
    np.testing.assert_allclose(decode(page.data["runs"][0]["maps"][0]), weights, atol=0.004)


def test_seventh_run_is_told_apart_by_its_line(tmp_path):
    page = Page(write(tmp_path, *(make_run(f"run {i}") for i in range(8))))
    swatches = [found["class"] for tag, found in page.elements if found.get("class", "").startswith("swatch")]
    assert len(set(swatches)) == 8
    assert swatches[6] == "swatch run-0 dashed"


def test_same_report_same_bytes(tmp_path):
    runs = make_run(maps=[make_maps()]), make_run("other")
    assert write(tmp_path / "a", *runs) == write(tmp_path / "b", *runs)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        ([], {}, "runs must hold at least one run, got none"),
        ([make_run("a"), make_run("a")], {}, "names of runs must differ, got 'a' 2 times"),
        ([make_run()], {"baselines": {"x": float("nan")}}, "baseline 'x' must be finite, got nan"),
        ([make_run()], {"metric": "bleu"}, "metric must be one of the curves training loss, .*, got 'bleu'"),
        ([make_run(curves={"loss": [(1, 2, 3)]})], {}, r"'loss' must hold pairs \(step, value\), got shape \[1, 3\]"),
        (
            [make_run(maps=[AttentionMaps(tokens="ab", weights=np.ones((1, 1, 2, 3)))])],
            {},
            r"weights of 'smgk-4' must have shape \[layers, heads, 2, 2\] for 2 tokens, got \[1, 1, 2, 3\]",
        ),
        (
            [make_run(maps=[AttentionMaps(tokens="ab", weights=np.full((1, 1, 2, 2), -0.1))])],
            {},
            "must be finite and not negative, got -0.1",
        ),
        (
            [make_run(maps=[AttentionMaps(tokens="ab", weights=np.ones((1, 1, 2, 2)), shares=np.ones((1, 1, 2, 2)))])],
            {},
            r"shares of 'smgk-4' must have shape \[1, 1, components, 2, 2\], got \[1, 1, 2, 2\]",
        ),
        (
            [
                make_run(
                    maps=[AttentionMaps(tokens="a", weights=np.ones((1, 1, 1, 1)), shares=np.ones((1, 1, 2, 1, 1)))]
                )
            ],
            {},
            "shares of 'smgk-4' must not be negative and sum to 1 over the components",
        ),
        (
            [make_run()],
            {"results": Table(columns=["a", "b"], rows=[TableRow(name="x", cells=["1"])])},
            "row 'x' must have 2 cells, got 1",
        ),
    ],
)
def test_refuses(tmp_path, runs, options, message):
    path = tmp_path / "report.html"
    with pytest.raises(ValueError, match=message):
        write_report(path, Report(title="t", runs=runs, **options))
    assert not path.exists()


def test_page_fits_a_phone_and_the_dark(tmp_path):
    source = write(tmp_path, make_run())
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in source
    assert "@media screen and (prefers-color-scheme: dark)" in source
    assert re.search(r'<div class="scroll"[^>]*>\s*<table class="results">', source)
    assert re.search(r"\.scroll \{\s*overflow-x: auto;", source)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_valid(tmp_path):
    script = Page(write(tmp_path, make_run())).scripts[1]
    finished = subprocess.run(["node", "--check", "-"], input=script, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
