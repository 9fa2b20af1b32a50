"""The page: what it holds, what it must not load, and what it refuses."""

import base64
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources

import numpy as np
import pytest
import torch

from mgk.analysis import AttentionMaps, Report, RunReport, write_report

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
    assert not [attributes for _, attributes in page.elements if {"src", "href"} & attributes.keys()]
    policy = [found["content"] for tag, found in page.elements if found.get("http-equiv") == "Content-Security-Policy"]
    assert policy
    assert policy[0].startswith("default-src 'none'")


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
        *("run", "accuracy", "parameters", "time"),
        *("smgk-4", "37.9 %", "165,528", "\N{EN DASH}"),
        *("softmax-8", "36.1 %", "\N{EN DASH}", "7 ms"),
    ]
    assert page.captions == ["training loss", "validation accuracy"]
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
    assert page.count("h2") == page.count("svg") == page.count("canvas") == page.count("details") == 0
    full = make_run(maps=[make_maps()], configuration={"seed": 0})
    page = Page(write(tmp_path, full, notes=["n"], command="c"))
    headings = [text for text in page.text if text in ("Curves", "Attention", "Configuration", "Notes", "Reproduce")]
    assert len(headings) == page.count("h2") == 5
    assert page.count("svg") == 2


def test_settings_that_differ_are_marked(tmp_path):
    shared = {"seed": 0, "heads": 4}
    page = Page(
        write(tmp_path, make_run("a", configuration=shared), make_run("b", configuration={**shared, "heads": 8}))
    )
    assert page.count("tr", **{"class": "differs"}) == 1
    assert page.cells[-6:] == ["seed", "0", "0", "heads", "4", "8"]


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
    assert "@media (prefers-color-scheme: dark)" in source
    assert re.search(r'<div class="scroll"[^>]*>\s*<table class="summary">', source)
    assert re.search(r"\.scroll \{ overflow-x: auto; \}", source)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_script_is_valid():
    script = (resources.files("mgk.analysis") / "report.js").read_text(encoding="utf-8")
    finished = subprocess.run(["node", "--check", "-"], input=script, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
