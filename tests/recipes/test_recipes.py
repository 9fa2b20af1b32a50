"""Every recipe gives valid runs, every row a valid model; and what is refused, with which words."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mgk
from mgk.data.kind import check_options
from mgk.data.registry import KINDS
from mgk.models import architecture
from mgk.nn import PRESETS
from mgk.recipes import Recipe, load, names, paper, parse_row, row_name
from mgk.reproduction import shift
from mgk.reproduction.fidelity import variants
from mgk.reproduction.recipe import home
from mgk.reproduction.stand_ins import STAND_INS
from mgk.training.configuration import differences, to_mapping
from mgk.training.resolved_model import conversion_options

ROOT = Path(__file__).parents[2]
CONVERSIONS = ["smollm2", "smollm2-distilled"]
PRECISIONS = {
    "lra/listops-fp16": "fp16", "lra/listops-fp32": "fp32", "lra/listops-unpacked": "bf16",
}  # fmt: skip
ABLATIONS = ["iwslt14-variances", "multi30k-variances", "lra/listops-shifts", "enwik8-shifts", "enwik8-equal-cache"]
LINEAR = [name for name in names() if name.endswith("-linear")]

# Heads of the baseline, of whose half the paper's claim is, and what all rows of the comparison share.
COMPARISONS = {
    "lra/listops": (8, ""), "lra/text": (8, ""), "lra/retrieval": (8, ""), "peerread": (8, ""), "enwik8": (8, ""),
    "demo": (8, ""), "enwik8-small": (8, ""), "lra/listops-learnable": (8, ""),
    "wikitext103/small": (8, ""), "wikitext103/medium": (8, ""), "wikitext2": (8, ""), "enwik8-words": (8, ""),
    "enwik8-words-multi-query": (8, "+num_key_value_heads=1"),
    "wikitext103/multi-query": (8, "+num_key_value_heads=1"),
    "iwslt14": (4, ""), "multi30k": (4, ""), "tatoeba": (4, ""), "wmt14": (16, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_every_recipe_cites_sources_and_fits_its_corpus(name):
    recipe = load(name)
    assert recipe.name == name
    assert recipe.source
    assert all(sentence.endswith(".") for sentence in recipe.source)
    assert recipe.rows
    config = recipe.config()
    assert config.name == name
    assert config.seed == 0
    assert config.training.precision == PRECISIONS.get(name, "auto")
    kind = KINDS[config.data.corpus]
    assert kind.task == config.task
    check_options(kind.name, config.data.options, kind.options)
    if config.conversion is None:
        positions = architecture(config.model.architecture, **config.model.changes).max_position_embeddings
        assert config.data.longest <= positions


def test_every_recipe_with_a_base_has_its_own_sources_and_those_of_the_base():
    base, derived = load("wikitext103/small"), load("wikitext2")
    assert derived.source[: len(base.source)] == base.source
    assert len(derived.source) > len(base.source)


@pytest.mark.parametrize("name", [name for name in names() if name in CONVERSIONS])
def test_every_row_of_a_conversion_gives_a_run(name):
    """Its model is built where the weights are: tests/recipes/test_two_steps.py."""
    recipe = load(name)
    for row in recipe.rows:
        config = recipe.config(row)
        described = conversion_options(config)
        assert f"{described['attention']}-{described['num_attention_heads']}" == row.partition("+")[0]
        assert described["num_key_value_heads"] == 1
        assert row_name(to_mapping(config)["model"], recipe.values["model"]) == row


@pytest.mark.parametrize("name", [name for name in names() if name not in CONVERSIONS])
def test_every_row_gives_a_run_and_a_model(name):
    recipe = load(name)
    plain = architecture(recipe.config().model.architecture, **recipe.config().model.changes)
    for row in recipe.rows:
        config = recipe.config(row)
        model = architecture(config.model.architecture, **config.model.changes)
        assert f"{model.attention}-{model.num_attention_heads}" == row.partition("+")[0]
        # The paper halves heads, not their width.
        assert model.head_dim == plain.head_dim
        assert row_name(to_mapping(config)["model"], recipe.values["model"]) == row


def test_which_recipes_are_comparisons():
    assert COMPARISONS.keys() == set(names()) - {*LINEAR, *variants(), *CONVERSIONS, *ABLATIONS}


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_adds_rows_and_changes_nothing_else(name):
    """Rows that both have are the same runs, so they are not trained twice."""
    recipe = load(name)
    (base,) = [load(other) for other in {home(name, row) for row in recipe.rows} - {name}]
    assert recipe.values == base.values
    shared = set(recipe.rows) & set(base.rows)
    assert shared
    for row in recipe.rows:
        assert home(name, row) == (base.name if row in shared else name)
        assert home(base.name, row) == base.name


def test_every_size_of_the_shifts_has_a_row():
    for name, sizes in {"lra/listops-shifts": shift.SIZES, "enwik8-shifts": (0.0, 0.3, 1.0)}.items():
        assert {shift.sized(size, 4) for size in sizes} <= set(load(name).rows)
    assert {shift.sized(size, 2) for size in shift.SIZES} <= set(load("lra/listops-shifts").rows)


@pytest.mark.parametrize("name", variants())
def test_a_variant_differs_in_what_it_says_and_has_rows_to_compare(name):
    """From the recipe on the same corpus: in one of its points, with rows that this one has, too."""
    recipe, base = load(name), load(name.partition("-")[0])
    assert set(recipe.rows) <= set(base.rows)
    found = differences(base.values, recipe.values)
    assert found
    groups = {tuple(path.partition(".")[::2]) for path in found}
    points = (
        {"pooling"}, {"pooling", "activation_dropout"}, {"dropout", "attention_dropout", "activation_dropout"},
        {"pooling", "dropout", "attention_dropout", "activation_dropout"},
        {"shift_init_std"}, {"shift_init", "shift_init_std"}, {"pack", "precision"}, {"precision"},
    )  # fmt: skip
    assert {key for _, key in groups} in points
    assert {group for group, _ in groups} <= {"model", "data", "training"}
    assert any(sentence.startswith("Published: ") and "Ours" in sentence for sentence in recipe.source)


@pytest.mark.parametrize("name", COMPARISONS)
def test_every_comparison_has_the_baselines_that_may_explain_the_gain(name):
    heads, shared = COMPARISONS[name]
    for number in (heads, heads // 2):
        for row in ("softmax-{}", "softmax-{}+qk_norm", "gaussian-{}", "smgk-{}", "mgk-{}"):
            assert row_name(parse_row(row.format(number) + shared), {}) in load(name).rows


def test_published_values_that_are_easily_mixed_up():
    listops, text, retrieval = (load(f"lra/{name}").config() for name in ("listops", "text", "retrieval"))
    assert [c.training.steps for c in (listops, text, retrieval)] == [5_000, 20_000, 30_000]
    assert [c.schedule.warmup for c in (listops, text, retrieval)] == [1_000, 8_000, 800]
    assert [c.validation.every for c in (listops, text, retrieval)] == [50, 500, 300]
    assert {c.optimizer.eps for c in (listops, text, retrieval)} == {1e-6}
    for config in (listops, text, retrieval, load("peerread").config()):
        model = architecture(config.model.architecture, **config.model.changes)
        assert model.dropout == model.attention_dropout == model.activation_dropout == 0.1
        assert (model.pooling, model.shift_init, model.shift_init_std) == ("mean-over-length", "normal", 1.0)
        assert config.data.pack is None
    assert text.data.options == {"protocol": "published"}
    small, medium = (load(f"wikitext103/{size}").config() for size in ("small", "medium"))
    assert (small.data.longest, small.training.batch_size, small.training.steps) == (256, 96, 500_000)
    assert (medium.data.longest, medium.training.batch_size, medium.training.steps) == (384, 56, 400_000)
    assert medium.training.clip_norm == small.training.clip_norm == 0.25
    assert medium.model.architecture == "wikitext103-medium"
    iwslt, wmt = load("iwslt14").config(), load("wmt14").config()
    assert (iwslt.optimizer.weight_decay, wmt.optimizer.weight_decay) == (1e-4, 0.0)
    assert wmt.training.max_tokens == 8 * 3584
    assert wmt.training.label_smoothing == iwslt.training.label_smoothing == 0.1


def test_the_cutoffs_of_wikitext2_suit_its_words():
    model = load("wikitext2").config("smgk-4").model
    assert architecture(model.architecture, **model.changes, vocab_size=33_278).adaptive_cutoffs == [10_000, 20_000]


def test_the_articles_of_enwik8_have_the_papers_model():
    """But for the cutoff that lies beyond their words, and for how long it is trained."""
    own, base = load("enwik8-words"), load("wikitext103/small")
    found = set(differences(base.values, own.values))
    assert found == {
        "data.corpus", "model.adaptive_cutoffs", "schedule.warmup", "training.steps", "training.checkpoint_every",
        "validation.every",
    }  # fmt: skip
    model = own.config("smgk-4").model
    cutoffs = architecture(model.architecture, **model.changes, vocab_size=88_348).adaptive_cutoffs
    assert cutoffs == architecture(base.config().model.architecture).adaptive_cutoffs[:2]
    config = own.config()
    words = config.training.steps * config.training.batch_size * config.data.longest
    measured = json.loads((ROOT / "results" / "bench" / "enwik8-words.json").read_text())
    training = measured["splits"]["train"]["tokens"]
    first, second = (measured["cutoffs"][str(end)] for end in cutoffs)
    shares = [first["share of the training text before it"], second["share of the training text before it"]]
    said = " ".join(own.source)
    for number in (
        f"{words / 1e6:.0f} million words, {words / training:.1f} epochs of the {training / 1e6:.1f} million",
        f"the {measured['vocabulary']:,} words", f"first 20,000 are {100 * shares[0]:.1f} %",
        f"next 20,000 are {100 * (shares[1] - shares[0]):.1f} %", f"{100 * (1 - shares[1]):.1f} %.",
    ):  # fmt: skip
        assert number in said
    assert second["count of the word at it"] == 10


@pytest.mark.parametrize("name", ["wikitext103/small", "wikitext103/small-linear", "wikitext103/multi-query"])
def test_what_stands_in_has_the_rows_of_the_paper(name):
    other = load(STAND_INS[name])
    wanted = {row for table in paper()["tables"].values() for row in table["recipes"].get(name, {})}
    assert wanted
    assert wanted <= set(other.rows)
    changed = differences(load("enwik8-words").values, other.values)
    assert not changed


def test_changes_come_after_the_row():
    recipe = load("lra/text")
    config = recipe.config("smgk-4", ["model.num_attention_heads=2", "seed=3", "optimizer.lr=2e-4"])
    assert config.model.changes == {"attention": "smgk", "num_attention_heads": 2, "pooling": "mean-over-length"}
    assert config.seed == 3
    assert config.optimizer.lr == 2e-4
    assert recipe.config(seed=5).seed == 5
    assert recipe.config(changes=["data.options.protocol=held-out"]).data.options == {"protocol": "held-out"}
    # No run changes the recipe.
    assert recipe.config().data.options == {"protocol": "published"}
    assert recipe.config().optimizer.lr == 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["optimizer.lrr=1"], r"optimizer\.lrr is not a key \(did you mean 'lr'\?\)"),
        (["training.step=1"], r"training\.step is not a key \(did you mean 'steps'\?\)"),
        (["modle.attention=mgk"], r"modle is not a key \(did you mean 'model'\?\)"),
        (["seed=-1"], "seed must be at least 0, got -1"),
    ],
)
def test_wrong_changes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        load("lra/text").config("smgk-4", changes)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("smgk-4", {}),
        ("softmax-8+qk_norm", {"qk_norm": True}),
        ("softmax-8+qk_norm=false", {"qk_norm": False}),
        ("mgk-2+variance_scale=[1,3]", {"variance_scale": [1, 3]}),
        ("mgk-2+variance_scale=[1, 3]", {"variance_scale": [1, 3]}),
        ("mgk-2+variance_scale=1,3", {"variance_scale": [1, 3]}),
        ("gaussian-2+variance_scale=2,", {"variance_scale": [2]}),
        ("mgk-2+variance_scale=0.5", {"variance_scale": 0.5}),
        ("mgk-4+num_key_value_heads=1", {"num_key_value_heads": 1}),
        ("mgk-4+num_key_value_heads=1+qk_norm", {"num_key_value_heads": 1, "qk_norm": True}),
        ("mgk-2+learn_variance", {"learn_variance": True}),
        ("smgk-hard-1", {}),
        ("softmax-mgk-1+dropout=1e-2", {"dropout": 0.01}),
        ("smlk-4", {}),
        ("mgk-2+adaptive_cutoffs=null", {"adaptive_cutoffs": None}),
        ("mgk-2+positions=rotary", {"positions": "rotary"}),
        ("mgk-2+rope_parameters.rope_theta=1e6", {"rope_parameters": {"rope_theta": 1e6}}),
        ("mgk-2+architecture=modern", {"architecture": "modern"}),
    ],
)  # fmt: skip
def test_rows(text, fields):
    attention, _, heads = text.partition("+")[0].rpartition("-")
    parsed = parse_row(text)
    assert parsed == {"attention": attention, "num_attention_heads": int(heads), **fields}
    name = row_name(parsed, {})
    assert parse_row(name) == parsed
    assert row_name(parse_row(name), {}) == name
    assert not re.search(r"[\s/\\]", name)


def test_row_names_are_canonical():
    base = {"architecture": "lra-text", "dropout": 0.2}
    assert row_name({}, base) == "softmax-8"
    assert row_name({"attention": "mgk"}, base) == "mgk-8"
    assert row_name({"architecture": "lra-text", "attention": "mgk"}, base) == "mgk-8"
    assert row_name({"dropout": 0.2, "attention": "mgk"}, {**base, "num_attention_heads": 2}) == "mgk-2"
    assert row_name(parse_row("mgk-2+qk_norm+dropout=0.1"), base) == "mgk-2+dropout=0.1+qk_norm"
    assert row_name(parse_row("mgk-2+qk_norm=false"), {**base, "qk_norm": True}) == "mgk-2+qk_norm=false"
    assert row_name({"variance_scale": (1.0, 3.0)}, base) == "softmax-8+variance_scale=1,3"
    assert row_name({"variance_scale": (1.0, 3.0)}, {**base, "variance_scale": [1, 3]}) == "softmax-8"
    rope = {"rope_type": "default"}
    changes = {"rope_parameters": {**rope, "rope_theta": 5}}
    assert row_name(changes, {**base, "rope_parameters": rope}) == "softmax-8+rope_parameters.rope_theta=5"


values = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["rotary", "gelu_new", "silu"])
)
fields = st.dictionaries(
    st.sampled_from(
        ["variance_scale", "dropout", "norm_eps", "hidden_size", "qk_norm", "positions", "adaptive_cutoffs"]
    ),
    values | st.lists(values),
)


@given(st.sampled_from(list(PRESETS)), st.integers(1, 10**6), fields)
def test_any_row_comes_back(attention, heads, options):
    row = {"attention": attention, "num_attention_heads": heads, **options}
    name = row_name(row, {})
    assert parse_row(name) == row
    assert not re.search(r"[\s/\\]", name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must start with a preset and its number of heads, such as smgk-4, got ''"),
        ("smgk", "must start with a preset and its number of heads, such as smgk-4, got 'smgk'"),
        ("smgk-0", "must start with a preset and its number of heads"),
        ("smgk-04", "must start with a preset and its number of heads"),
        ("smgk-4 ", "must start with a preset and its number of heads"),
        ("smkg-4", r"must start with one of softmax, gaussian, .*, got 'smkg-4' \(did you mean 'smgk'\?\)"),
        ("smgk-4+qk_nrom", r"must be a field of MGKConfig, got 'qk_nrom' in .* \(did you mean 'qk_norm'\?\)"),
        ("smgk-4+variance_scales=3", r"got 'variance_scales' in .* \(did you mean 'variance_scale'\?\)"),
        ("smgk-4+num_kv_heads=1", r"got 'num_kv_heads' in .* \(did you mean 'num_key_value_heads'\?\)"),
        ("smgk-4+frobnicate", "must be a field of MGKConfig, got 'frobnicate' in 'smgk-4\\+frobnicate'$"),
        ("smgk-4+", "must be a field of MGKConfig, got ''"),
        ("smgk-4+attention=mgk", "attention must be the first part of a row"),
        ("smgk-4+num_attention_heads=2", "num_attention_heads must be the first part of a row"),
        ("smgk-4+qk_norm+qk_norm", "qk_norm must stand in a row once"),
        ("smgk-4+dropout=", "must have a value after its =, got 'smgk-4\\+dropout='"),
        ("smgk-4+variance_scale=1,,3", "must have a value after its ="),
        ("smgk-4+variance_scale=[1", "must be YAML"),
        ("smgk-4+rope_parameters=1+rope_parameters.rope_theta=2", "must be a value or a mapping, got both"),
    ],
)  # fmt: skip
def test_bad_rows_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_row(text)


def test_rows_that_have_no_name_are_refused():
    with pytest.raises(TypeError, match="a row must be text such as smgk-4, got 8"):
        parse_row(8)
    with pytest.raises(ValueError, match="must have attention and num_attention_heads, or an architecture"):
        row_name({"attention": "mgk"}, {})
    for value in ("a/b", "a b", "true", "1", float("nan"), [[1]], object()):
        with pytest.raises(ValueError, match="hidden_act must be a plain word, a finite number or a list of them"):
            row_name({"hidden_act": value}, {"architecture": "lra-text"})


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_recipe_of_ones_own(tmp_path):
    path = write(
        tmp_path / "mine.yaml",
        "base: lra/text\ntitle: Mine\nmodel: {dropout: 0.0}\nrows: ['mgk-2+variance_scale=[1, 3]', mgk-2+dropout=0]\n",
    )
    recipe = load(path)
    assert recipe == load(str(path))
    assert isinstance(recipe, Recipe)
    assert (recipe.name, recipe.title) == ("mine", "Mine")
    # What the recipe says anyway is no part of a row's name.
    assert recipe.rows == ("mgk-2+variance_scale=1,3", "mgk-2")
    assert recipe.source == load("lra/text").source
    assert recipe.config().training.steps == 20_000
    assert recipe.config("mgk-2").model.changes["dropout"] == 0.0
    above = write(tmp_path / "above.yaml", "base: mine.yaml\ntraining: {steps: 9000}\n")
    assert load(above).config().training.steps == 9000
    assert load(above).rows == recipe.rows


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ("titel: x", ValueError, r"one of title, source, .*, got 'titel' \(did you mean 'title'\?\) in .*mine.yaml"),
        ("seed: 3", ValueError, "got 'seed'"),
        ("name: x", ValueError, "got 'name'"),
        ("base: lra/txt", ValueError, r"got 'lra/txt' \(did you mean 'lra/text'\?\)"),
        ("base: 3", TypeError, "must be given by its name or by a path, got 3"),
        ("base: mine.yaml", ValueError, "base must not lead back to where it started, got mine -> mine"),
        ("base: missing.yaml", ValueError, "missing.yaml must be a readable text file"),
        ("base: lra/text\ntitle: ''", ValueError, "title must be one line of text, got ''"),
        ("base: lra/text\nrows: smgk-4", TypeError, "rows must be a list of text, got 'smgk-4'"),
        ("base: lra/text\nrows: [8]", TypeError, r"rows must be a list of text, got \[8\]"),
        ("base: lra/text\nrows: [smkg-4]", ValueError, "did you mean 'smgk'"),
        ("base: lra/text\nrows: [smgk-4+qk_nrom]", ValueError, "did you mean 'qk_norm'"),
        ("base: lra/text\nrows: [smgk-4, smgk-4]", ValueError, "must be different from each other, got smgk-4 twice"),
        ("base: lra/text\nsource: none", TypeError, "source must be a list of text, got 'none'"),
        ("base: lra/text\nmodel: smgk", TypeError, "model must be a mapping, got 'smgk'"),
        ("- lra/text", ValueError, "must hold a mapping, got list"),
        ("base: [", ValueError, "must be YAML"),
    ],
)  # fmt: skip
def test_bad_recipes_are_refused(tmp_path, content, kind, message):
    with pytest.raises(kind, match=message):
        load(write(tmp_path / "mine.yaml", content))


def test_longer_circles_are_refused(tmp_path):
    first = write(tmp_path / "a.yaml", "base: b.yaml")
    write(tmp_path / "b.yaml", "base: c.yaml")
    write(tmp_path / "c.yaml", "base: a.yaml")
    with pytest.raises(ValueError, match="got a -> b -> c -> a"):
        load(first)


def test_what_is_missing_is_named(tmp_path):
    recipe = load(write(tmp_path / "mine.yaml", "title: Mine\ntask: language\ndata: {corpus: enwik8}\n"))
    with pytest.raises(ValueError, match="model must be given, got nothing"):
        recipe.config()


def test_names_are_kept_apart(tmp_path):
    with pytest.raises(ValueError, match=r"a recipe of your own must have a name of its own, got .*enwik8 is bundled"):
        load(write(tmp_path / "enwik8.yaml", "base: enwik8"))
    with pytest.raises(ValueError, match=r"must have letters, digits, .* only, got 'my recipe'"):
        load(write(tmp_path / "my recipe.yaml", "base: enwik8"))
    bundled = Path(mgk.__file__).parent / "recipes" / "lra" / "text.yaml"
    assert load(bundled) == load("lra/text")


@pytest.mark.parametrize(
    ("name", "nearest"), [("lra/listop", "lra/listops"), ("enwik", "enwik8"), ("text", "lra/text"), ("paper", None)]
)
def test_unknown_names_are_refused_with_the_nearest(name, nearest):
    hint = f" (did you mean {nearest!r}?)" if nearest else ""
    with pytest.raises(ValueError, match=re.escape(f"or a path that ends in .yaml, got {name!r}{hint}") + "$"):
        load(name)


def test_names_are_sorted_and_without_the_paper():
    assert names() == sorted(names())
    assert "paper" not in names()
    assert {"lra/text", "wikitext103/small", "iwslt14"} <= set(names())


def test_recipes_are_found_wherever_the_package_lies(tmp_path):
    package = Path(mgk.__file__).parent
    shutil.copytree(package, tmp_path / "mgk", ignore=shutil.ignore_patterns("__pycache__"))
    code = "import mgk.recipes; print(mgk.recipes.__file__, *mgk.recipes.names())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.stdout.split() == [str(tmp_path / "mgk" / "recipes" / "__init__.py"), *names()]
