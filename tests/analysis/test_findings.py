"""All analyses of one model together, as numbers and as pictures."""

import ast
import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from model_cases import make_inputs, make_model

import mgk
from mgk.analysis import (
    analyze,
    draw_all,
    figures,
    head_redundancy,
    learning_curves,
    pooled_maps,
    record_attention,
    to_mapping,
    write_numbers,
)

ALWAYS = {"attention-maps", "rank", "redundancy", "mixture", "keys", "key-projections", "theorem"}


def find(kind="classifier", preset="smgk", tmp_path=None, **changes):
    curves = None
    if tmp_path is not None:
        (tmp_path / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": step, "kind": "train", "loss": 3.0 / step}) + "\n" for step in range(1, 9))
        )
        curves = learning_curves(tmp_path)
    inputs = make_inputs(kind, padding_side="right", tokens=24)
    return analyze(record_attention(make_model(kind, preset, **changes), **inputs), curves=curves)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return find(tmp_path=tmp_path_factory.mktemp("run"))


def test_everything_is_there(found):
    assert found.left_out == {}
    mapping = json.loads(json.dumps(to_mapping(found), allow_nan=False))
    assert [len(mapping[name]) for name in ("rank", "redundancy", "mixture", "density", "responsibilities")] == [2] * 5
    assert np.shape(mapping["rank"][0]["rank"]) == (3, 4)
    assert np.shape(mapping["redundancy"][0]["cka"]) == (4, 4)
    assert np.shape(mapping["mixture"][0]["shift"]) == (4, 2, 8)
    assert np.shape(mapping["density"][0]["components"]) == (2, 4)
    assert mapping["rank"][0]["queries"] == [24, 22, 20]
    assert mapping["curves"]["points"]["training loss"][0] == [1, 3.0]
    assert mapping["theorem"]["largest_error_free_variance"][0] > mapping["theorem"]["largest_error_free_variance"][-1]


@pytest.mark.parametrize(
    ("preset", "missing"),
    [
        ("mlk", {"density", "responsibilities"}),
        ("softmax", {"density", "responsibilities"}),
        ("gaussian", {"responsibilities"}),
        ("mgk", set()),
    ],
)
def test_what_makes_no_sense_is_left_out_and_said(preset, missing, tmp_path):
    findings = find(preset=preset)
    assert set(findings.left_out) == missing | {"curves"}
    mapping = to_mapping(findings)
    assert all(mapping[name] is None for name in missing)
    drawn = figures.drawings(findings)
    assert set(drawn) == ALWAYS | {name for name in ("density", "responsibilities") if name not in missing}
    assert figures.save(drawn["mixture"], tmp_path / "mixture.png").stat().st_size > 10_000


def test_a_model_that_has_diverged_is_refused_by_layer():
    model = make_model("classifier", "smgk")
    torch.nn.init.constant_(model.model.layers[1].self_attn.k_proj.weight, torch.nan)
    with pytest.raises(ValueError, match="the attention weights of layer 2 must hold finite numbers, got nan"):
        analyze(record_attention(model, **make_inputs("classifier")))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_without_tokens_is_named(side):
    inputs = make_inputs("classifier", padding_side=side)
    inputs["attention_mask"][1] = 0
    record = record_attention(make_model("classifier", "smgk"), **inputs)
    for analysis in (analyze, head_redundancy, lambda given: pooled_maps(given, sample=1)):
        with pytest.raises(ValueError, match="every sequence must have a token, got sequence 1 of layer 1 with none"):
            analysis(record)
    assert len(pooled_maps(record, sample=2)) == 2


def test_numbers_of_one_head_are_valid_json(tmp_path):
    """One head has no other to be compared with, and JSON has no NaN."""
    write_numbers(tmp_path / "deep" / "analysis.json", find(num_attention_heads=1), {"model": "tiny"})
    content = json.loads((tmp_path / "deep" / "analysis.json").read_text())
    assert content["model"] == "tiny"
    assert content["redundancy"][0]["mean_cka"] is None
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["analysis.json"]


DRAWINGS = (*sorted(ALWAYS), "shifts", "density", "responsibilities", "curves")


@pytest.fixture(scope="module")
def translation():
    """Layers with long names."""
    return find("translation", num_hidden_layers=3)


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *(("found", name) for name in DRAWINGS),
        ("translation", "rank"),
        *(pytest.param("translation", name, marks=pytest.mark.slow) for name in ("redundancy", "mixture")),
    ],
)
def test_words_neither_overlap_nor_leave_the_picture(which, name, request):
    """Titles, which every panel has, labels and ticks, where they end up on the canvas."""
    import matplotlib

    with matplotlib.rc_context(figures.STYLE):
        figure = figures.drawings(request.getfixturevalue(which))[name]()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in words(figure) if text.get_text().strip()]
    assert len(boxes) > 5
    for axes in figure.axes:
        if axes.get_visible() and axes.get_label() != "<colorbar>":
            assert axes.get_title() or axes.get_title(loc="left")
    width, height = canvas.get_width_height()
    for text, box in boxes:
        assert box.x0 > -2, text
        assert box.y0 > -2, text
        assert box.x1 < width + 2, text
        assert box.y1 < height + 2, text
    for number, (text, box) in enumerate(boxes):
        for other, other_box in boxes[:number]:
            across = min(box.x1, other_box.x1) - max(box.x0, other_box.x0)
            down = min(box.y1, other_box.y1) - max(box.y0, other_box.y0)
            assert across < 1 or down < 1, f"{text!r} lies on {other!r}"


def words(figure):
    """All text that is on the canvas; a tick beyond the limits is kept by matplotlib, but not drawn."""
    found = [figure._suptitle] if figure._suptitle is not None else []
    legends = list(figure.legends)
    for axes in figure.axes:
        if axes.get_visible():
            found += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
            found += [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
            found += [tick.label2 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
            legends += [axes.get_legend()] if axes.get_legend() is not None else []
    found += [text for legend in legends for text in legend.get_texts()]
    return [text for text in found if text.get_visible()]


@pytest.mark.slow
def test_a_deep_model_fits_on_the_page(tmp_path):
    """16 layers of 8 heads: pictures stay of a size that can be opened, and say what they leave out."""
    inputs = make_inputs("modern", tokens=16, batch=1)
    model = make_model("modern", "smgk", num_hidden_layers=16, num_attention_heads=8, head_dim=4)
    for path in draw_all(analyze(record_attention(model, **inputs)), tmp_path):
        height, width = matplotlib.image.imread(path).shape[:2]
        assert height < 6000, path.name
        assert width < 5000, path.name


def test_matplotlib_is_imported_when_something_is_drawn():
    """An import of the library, and numbers, do without it: no module of ours asks for it at its top."""
    folder = Path(mgk.__file__).parent
    for path in folder.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
            names += [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
            assert not any(name.startswith("matplotlib") for name in names), path
