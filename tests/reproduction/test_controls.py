"""Runs of the published code, and how the page about fidelity shows them."""

import pytest
from reproduction_cases import write_control, write_escape, write_run, write_same_start

from mgk.reproduction import same_start
from mgk.reproduction.controls import SCRIPT, read_controls
from mgk.reproduction.fidelity import fidelity_page
from mgk.reproduction.published_code import NOT_RUN, fidelity, runs, sentences
from mgk.reproduction.results import read_results
from mgk.training import result


def shown(folder):
    page = fidelity_page(read_results(folder), 5)
    (grid,) = [grid for grid in page.grids if grid.title == fidelity()["control"]["title"]]
    return page, {line[:3]: line[3:] for line in grid.lines}


def test_without_any_each_is_still_to_be_run(tmp_path):
    page, lines = shown(tmp_path)
    assert [line for line in lines if line[0] == "published"] == [
        ("published", "2", "0.1"), ("published", "2", "0"), ("published", "8", "0.1"), ("published", "8", "0"),
    ]  # fmt: skip
    assert {line[1] for line in lines.values()} == {NOT_RUN}
    assert page.missing[-1].what.startswith(f"{SCRIPT}: 2 heads with dropout 0.1, 2 heads with dropout 0, 8 heads")
    assert page.numbers == 0


def test_they_stand_beside_our_runs_of_the_same(tmp_path):
    write_control(tmp_path, 8, 0.1, 0, accuracy=0.36, escape=4250)
    write_control(tmp_path, 8, 0.1, 1, accuracy=0.18)
    write_run(tmp_path, "lra/listops", "softmax-8", 0, accuracy=0.17)
    write_escape(tmp_path, "lra/listops", "softmax-8", 0, None)
    write_run(tmp_path, "lra/listops-dropout-0", "softmax-8", 0, accuracy=0.37)
    page, lines = shown(tmp_path)
    assert lines["published", "8", "0.1"] == ("0, 1", "27.00 ± 9.00 (2 seeds)", "1 of 2", "4,250")
    assert lines["lra/listops, softmax-8", "8", "0.1"] == ("0", "17.00 (1 seed)", "0 of 1", "")
    assert lines["published", "8", "0"] == ("", NOT_RUN, "", "")
    assert lines["lra/listops-dropout-0, softmax-8", "8", "0"] == ("0", "37.00 (1 seed)", "no curves", "")
    assert not any("controls/" in note for note in page.notes)
    (missing,) = [each.what for each in page.missing if each.what.startswith(SCRIPT)]
    assert "8 heads with dropout 0.1" not in missing
    # They are nobody's recipe.
    assert len(read_results(tmp_path).runs) == 2


def test_one_that_was_stopped_has_no_accuracy_and_says_so(tmp_path):
    path = write_control(tmp_path, 2, 0, 0, accuracy=0.36, escape=2000, steps=3050, complete=False)
    page, lines = shown(tmp_path)
    assert lines["published", "2", "0"] == ("0 (stopped at 3,050)", "", "1 of 1", "2,000")
    assert any(note.startswith(f"controls/{path.name} was stopped at step 3,050") for note in page.notes)
    # It is still wanted whole.
    assert "2 heads with dropout 0," in page.missing[-1].what


def test_one_that_was_stopped_on_the_plateau_does_not_count_as_staying_there(tmp_path):
    write_control(tmp_path, 2, 0, 0, accuracy=0.17, steps=1700, complete=False)
    assert shown(tmp_path)[1]["published", "2", "0"] == ("0 (stopped at 1,700)", "", "", "")
    write_control(tmp_path, 2, 0, 1, accuracy=0.36, escape=4250)
    assert shown(tmp_path)[1]["published", "2", "0"][2:] == ("1 of 1", "4,250")


def test_another_corpus_is_noted(tmp_path):
    write_control(tmp_path, 2, 0.1, 0, accuracy=0.36, corpus="1" * 64)
    assert not any("another corpus" in note for note in shown(tmp_path)[0].notes)
    write_run(tmp_path, "lra/listops", "softmax-2", 0, accuracy=0.37)
    assert any("another corpus" in note for note in shown(tmp_path)[0].notes)


@pytest.mark.parametrize("field", ["control", "heads", "curve", "corpus", "metrics"])
def test_a_damaged_one_is_named(tmp_path, field):
    path = write_control(tmp_path, 2, 0.1, 0, accuracy=0.36)
    content = result.read_object(path)
    del content[field]
    result.write(path, content)
    with pytest.raises(ValueError, match=r"seed-0\.json must be a result of benchmarks/published_control\.py"):
        read_controls(tmp_path)


def write_both(folder, theirs, ours):
    """Runs with 2 and with 8 heads, of the published code and ours, that leave at these steps."""
    for heads in (2, 8):
        for seed, step in enumerate(theirs):
            write_control(folder, heads, 0.1, seed, accuracy=0.36, escape=step)
        for seed, step in enumerate(ours):
            write_run(folder, "lra/listops", f"softmax-{heads}", seed, accuracy=0.37)
            write_escape(folder, "lra/listops", f"softmax-{heads}", seed, step)


EARLY, LATE = (1000, 1100, 1200, 1300, 1400), (2000, 2100, 2200, 3000, None)


@pytest.mark.parametrize(
    ("theirs", "ours", "start", "p"),
    [
        # Sorted, which happens by chance in one of C(10, 5) = 252 ways, and as often mirrored.
        (EARLY, LATE, "**The published code leaves the plateau earlier than ours with ", "0.008"),
        (LATE, EARLY, "**Our training with the published pooling leaves the plateau earlier", "0.008"),
        # Two seeds of five are chosen in ten ways.
        (
            (1000, 1500),
            (4000, 4000, 4000),
            "There are too few seeds to say ",
            "0.100, the smallest that so few seeds allow",
        ),
        ((1000, 4000), (2000, 3000, 3500), "There are too few seeds to say ", None),
        ((1000, 2000, 3000, 4000), (1500, 2500, 3500, 2000), "The runs do not show whether ", None),
    ],
    ids=["published", "ours", "few-seeds", "few-seeds-in-any-order", "neither"],
)
def test_whether_the_published_code_leaves_earlier(tmp_path, theirs, ours, start, p):
    assert sentences([], read_results(tmp_path)) == ()
    write_both(tmp_path, theirs, ours)
    results = read_results(tmp_path)
    (said,) = sentences(runs(results), results)
    assert said.startswith(start)
    # Runs with 2 and with 8 heads share their seeds, so they are not twice as many draws.
    counted = f"{2 * len(theirs)} runs of the published code from {len(theirs)} seeds and {2 * len(ours)} runs of ours"
    assert counted in said
    assert p is None or f"exact p {p})" in said
    assert p is not None or "smallest" not in said
    assert said in fidelity_page(results, 5).text


class TestSameStart:
    def shown(self, folder):
        page = fidelity_page(read_results(folder), 5)
        grids = [grid for grid in page.grids if grid.title == fidelity()["control"]["same_start"]["title"]]
        return page, (grids[0].lines if grids else None)

    def test_without_any_they_are_missing(self, tmp_path):
        write_control(tmp_path, 8, 0, 0, accuracy=0.36, escape=2000)
        page, lines = self.shown(tmp_path)
        assert lines is None
        assert page.missing[-1].what == f"{same_start.SCRIPT}: 8 heads with dropout 0, seed 0"
        assert not any("same_start.py" in text for text in page.text)

    def test_it_stands_beside_its_control(self, tmp_path):
        write_control(tmp_path, 8, 0, 0, accuracy=0.36, escape=2000)
        write_control(tmp_path, 8, 0, 1, accuracy=0.36, escape=2000)
        write_same_start(tmp_path, 8, 0, 0, escape=2050, apart=0.0004)
        page, lines = self.shown(tmp_path)
        assert lines == (
            ("8", "0", "0", "CPU, 2 threads, float32", "0.0004 in 500 steps", "2,000", "2,050"),
        )  # fmt: skip
        assert any("does what the published code does:** over the first 500 steps" in text for text in page.text)
        ends = "The published code leaves the plateau of ListOps at step 2,000, and ours at step 2,050."
        assert any(text.endswith(f"(1 run without dropout). {ends}") for text in page.text)
        assert page.missing[-1].what == f"{same_start.SCRIPT}: 8 heads with dropout 0, seed 1"
        # Ours is no run of the published code.
        assert [each.seed for each in runs(read_results(tmp_path))] == [0, 1]
        assert page.numbers == 3

    def test_several_are_put_together(self, tmp_path):
        for heads, escape in ((2, 2200), (8, 2050)):
            write_control(tmp_path, heads, 0, 0, accuracy=0.36, escape=2000)
            write_same_start(tmp_path, heads, 0, 0, escape=escape, apart=0.0001 * heads)
        page, lines = self.shown(tmp_path)
        assert len(lines) == 2
        (said,) = [text for text in page.text if "over the first" in text]
        assert "at most 0.0008 (2 runs without dropout)." in said
        assert said.endswith("The steps at which they leave the plateau of ListOps are at most 200 apart.")

    def test_a_difference_is_said(self, tmp_path):
        write_control(tmp_path, 8, 0, 0, accuracy=0.36, escape=2000)
        write_same_start(tmp_path, 8, 0, 0, steps=100, apart=0.01, complete=False)
        page, (line,) = self.shown(tmp_path)
        assert line[4:] == ("0.0100 in 100 steps", "2,000", "not by 100")
        assert any("differs from the published code:** over the first 100 steps" in text for text in page.text)

    def test_with_dropout_losses_decide_nothing(self, tmp_path):
        write_control(tmp_path, 8, 0.1, 0, accuracy=0.36, escape=2000)
        write_same_start(tmp_path, 8, 0.1, 0, apart=0.01)
        page, (line,) = self.shown(tmp_path)
        assert line[4:] == ("0.0100 in 500 steps", "2,000", "never")
        assert not any("over the first" in text for text in page.text)

    def test_without_its_control_it_is_not_shown(self, tmp_path):
        write_same_start(tmp_path, 8, 0, 3)
        assert self.shown(tmp_path)[1] is None


class TestStarts:
    """What runs of ours begin with: only they can tell weights from batches."""

    def shown(self, folder):
        page = fidelity_page(read_results(folder), 5)
        grids = [grid for grid in page.grids if grid.title == fidelity()["control"]["same_start"]["starts"]]
        said = [text for text in page.text if "initial weights" in text]
        return (grids[0].lines if grids else None), said

    def write_ours(self, folder, steps):
        for seed, step in enumerate(steps):
            write_run(folder, "lra/listops", "softmax-8", seed, accuracy=0.37)
            write_escape(folder, "lra/listops", "softmax-8", seed, step)

    def test_without_a_part_there_is_nothing_to_tell(self, tmp_path):
        write_same_start(tmp_path, 8, 0.1, 0, escape=2000)
        self.write_ours(tmp_path, [3000])
        assert self.shown(tmp_path) == (None, [])

    def test_runs_stand_by_what_they_take(self, tmp_path):
        write_same_start(tmp_path, 8, 0.1, 0, escape=2000)
        write_same_start(tmp_path, 8, 0.1, 1, only="weights")
        write_same_start(tmp_path, 8, 0.1, 0, only="weights", escape=2500)
        write_same_start(tmp_path, 8, 0.1, 0, only="batches", escape=4000)
        # It has not run all its steps.
        write_same_start(tmp_path, 8, 0.1, 1, only="batches", complete=False)
        # There is none of ours with as many heads that takes a part.
        write_run(tmp_path, "lra/listops", "softmax-2", 0, accuracy=0.37)
        write_escape(tmp_path, "lra/listops", "softmax-2", 0, 2000)
        self.write_ours(tmp_path, [3000, None, 3500])
        lines, (said,) = self.shown(tmp_path)
        assert lines == (
            ("8", "0.1", "published", "published", "0", "1 of 1", "2,000"),
            ("8", "0.1", "published", "ours", "0, 1", "1 of 2", "2,500"),
            ("8", "0.1", "ours", "published", "0", "1 of 1", "4,000"),
            ("8", "0.1", "ours", "ours", "0, 1, 2", "2 of 3", "3,000, 3,500"),
        )
        assert "There are too few seeds to say whether the initial weights of the published code" in said

    @pytest.mark.parametrize(
        ("theirs", "own", "expected"),
        [
            (
                range(2000, 2250, 50),
                [None] * 5,
                "**Our training leaves the plateau earlier with initial weights like those",
            ),
            (
                [None] * 5,
                range(2000, 2250, 50),
                "**Our training leaves the plateau earlier with initial weights like our own",
            ),
            (range(2000, 2500, 100), range(2050, 2550, 100), "The runs do not show whether the initial weights"),
        ],
    )
    def test_the_test_decides(self, theirs, own, expected, tmp_path):
        for seed, step in enumerate(theirs):
            write_same_start(tmp_path, 8, 0.1, seed, only="weights", escape=step)
        self.write_ours(tmp_path, own)
        _, (said,) = self.shown(tmp_path)
        assert expected in said

    def test_only_runs_in_the_same_kind_of_batches_are_compared(self, tmp_path):
        write_same_start(tmp_path, 8, 0.1, 0, escape=2000)
        write_same_start(tmp_path, 2, 0.1, 0, only="weights", escape=2000)
        self.write_ours(tmp_path, [3000])
        lines, said = self.shown(tmp_path)
        assert len(lines) == 3
        assert said == []
