"""The results in the README: short, and nothing that the runs do not say."""

import re

import pytest
from reproduction_cases import write_control, write_escape, write_evaluation, write_run, write_same_start

from mgk.recipes import load
from mgk.reproduction import pages
from mgk.reproduction.readme import BEGIN, END, fill, results_text
from mgk.reproduction.results import read_results


def text_of(folder, names=("T1",)):
    results = read_results(folder)
    return results_text([pages.build(name, results, folder / "pages", 3) for name in names], results)


def write_row(folder, recipe, row, *values, key="accuracy"):
    for seed, value in enumerate(values):
        write_run(folder, recipe, row, seed, count=2000.0, **{key: value})


def table_of(text):
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]


def test_nothing(tmp_path):
    text = text_of(tmp_path)
    assert "There are no results yet." in text
    assert "Nothing that was tested has been refuted." in text
    assert not table_of(text)


def test_rows_that_have_results_only(tmp_path):
    write_row(tmp_path, "lra/text", "softmax-2", 0.65)
    text = text_of(tmp_path)
    assert table_of(text) == [
        ["experiment", "test", "all heads"], ["---"] * 3,
        [f"{load('lra/text').title} (`lra/text`)", "accuracy, %", "softmax-2: 65.00 (1 seed; paper 64.90)"],
    ]  # fmt: skip
    assert "Not the paper's number" not in text


def test_a_variant_stands_in_while_its_recipe_has_no_runs(tmp_path):
    """The one that differs least. Once the recipe has runs, its variants are on the page fidelity alone."""
    for recipe in ("lra/listops-no-activation-dropout", "lra/listops-mean-over-tokens-dropout-0"):
        write_row(tmp_path, recipe, "softmax-2", 0.37)
    write_row(tmp_path, "lra/listops-mean-over-tokens", "softmax-2", 0.36)
    write_row(tmp_path, "lra/text", "softmax-2", 0.65)
    (_, _, listops, text) = table_of(text_of(tmp_path))
    assert (listops[0].split("`")[1], text[0].split("`")[1]) == ("lra/listops-mean-over-tokens", "lra/text")
    write_row(tmp_path, "lra/listops", "softmax-2", 0.35)
    (_, _, listops, text) = table_of(text_of(tmp_path))
    assert (listops[0].split("`")[1], text[0].split("`")[1]) == ("lra/listops", "lra/text")


def test_the_number_of_heads_that_compares_most(tmp_path):
    """12 heads have more, but nothing to compare them with."""
    write_row(tmp_path, "lra/text", "softmax-12", 0.65, 0.651)
    for row in ("softmax-8", "smgk-4", "mgk-4", "softmax-8+qk_norm", "softmax-2", "smgk-1"):
        write_row(tmp_path, "lra/text", row, 0.65, 0.652)
    write_row(tmp_path, "lra/text-linear", "linear-8", 0.65)
    write_evaluation(tmp_path, "multi30k", "softmax-4", 0, stride=None, tokenised_lowercase_bleu=30.0)
    header, _, linear_free, linear, translation = table_of(text_of(tmp_path))
    assert header == [
        "experiment", "test", "all heads", "all heads, q and k normalised", "half the heads, shifted keys",
        "half the heads, projected keys",
    ]  # fmt: skip
    assert [cell.partition(":")[0] for cell in linear_free] == [
        f"{load('lra/text').title} (`lra/text`)", "accuracy, %", "softmax-8", "softmax-8+qk_norm", "smgk-4", "mgk-4",
    ]  # fmt: skip
    assert linear_free[2] == "softmax-8: 65.10 ± 0.10 (2 seeds; paper 65.71)"
    assert linear_free[3] == "softmax-8+qk_norm: 65.10 ± 0.10 (2 seeds)"
    assert linear[2].startswith("linear-8: 65.00 (1 seed; paper 65.85")
    assert translation[0].endswith("(`multi30k`)")
    assert translation[1:3] == ["BLEU", "softmax-4: 30.00 (1 seed)"]


def test_what_does_not_hold(tmp_path):
    """smgk-1 surely below softmax-2 on Text, and far from the paper's number."""
    write_row(tmp_path, "lra/text", "softmax-2", 0.650, 0.651, 0.649)
    write_row(tmp_path, "lra/text", "smgk-1", 0.550, 0.551, 0.549)
    text = text_of(tmp_path, ("T1", "F3"))
    (said,) = [line for line in text.splitlines() if line.startswith("**What does not hold:**")]
    assert "“Half the heads are better than all the heads of softmax, on every task” ([T1](docs/results/T1.md))" in said
    assert "“the saving in FLOPs grows with N: layers” ([F3](docs/results/F3.md))" in said
    (missed,) = [line for line in text.splitlines() if line.startswith("**Not the paper's number**")]
    assert "lra/text smgk-1 55.00 (65.04)." in missed
    assert re.search(r"\d+ wait for runs", text)


def test_the_plateau(tmp_path):
    for row, step in (("smgk-1", 1000), ("softmax-1", 3000)):
        for seed in range(4):
            write_run(tmp_path, "lra/listops", row, seed, accuracy=0.37)
            write_escape(tmp_path, "lra/listops", row, seed, step + 50 * seed)
    text = text_of(tmp_path)
    assert "**lra/listops**: 8 of 8 runs left the plateau. The tests do not decide whether smgk leaves earlier" in text


def test_between_the_marks(tmp_path):
    path = tmp_path / "README.md"
    assert not fill(path, "anything")
    path.write_text("# Name\n\nNo room.\n")
    assert not fill(path, "anything")
    path.write_text(f"# Name\n\n{BEGIN}\nold\n{END}\n\nAfter.\n")
    assert fill(path, "new")
    assert fill(path, "new")
    assert path.read_text() == f"# Name\n\n{BEGIN}\n\nnew\n\n{END}\n\nAfter.\n"
    path.write_text(f"# Name\n\n{BEGIN}\nold\n")
    with pytest.raises(ValueError, match=r"README\.md must say where its results end"):
        fill(path, "new")


def test_our_training_beside_the_published_code(tmp_path):
    write_control(tmp_path, 8, 0, 0, accuracy=0.36, escape=2000)
    assert "published code" not in text_of(tmp_path)
    write_same_start(tmp_path, 8, 0, 0, escape=2050)
    assert "From the same weights and in the same batches, our training does what" in text_of(tmp_path)
