"""The commands that make what is missing: whole, and understood by the command line."""

import shlex
import subprocess

import pytest
import typer.main
from reproduction_cases import load, write_analysis, write_benchmark, write_evaluation, write_run

from mgk.cli import app
from mgk.reproduction import pages
from mgk.reproduction.metrics import metric
from mgk.reproduction.missing import Need, find_missing, seed_range
from mgk.reproduction.results import read_results

ACCURACY = metric("test_accuracy")


def commands(results, needs, page="T1"):
    return [command for missing in find_missing(results, needs, page) for command in missing.commands]


def need(row, seeds=5, recipe="lra/text", name="test_accuracy"):
    return Need(recipe=recipe, row=row, metric=metric(name), seeds=seeds)


def test_seed_range():
    assert seed_range([0, 1, 2, 3, 4]) == "0-4"
    assert seed_range([3]) == "3"
    assert seed_range([4, 0, 2, 1]) == "0-2,4"


def test_rows_that_lack_the_same_seeds_are_one_sweep(tmp_path):
    write_run(tmp_path, "lra/text", "mgk-1", 1, accuracy=0.6)
    found = commands(read_results(tmp_path), [need("softmax-2"), need("smgk-1"), need("mgk-1")])
    assert found == [
        f"mgk sweep lra/text --rows 'softmax-2 smgk-1' --seeds 0-4 --results {tmp_path}",
        f"mgk sweep lra/text --rows mgk-1 --seeds 0,2-4 --results {tmp_path}",
    ]


def test_a_single_run_is_a_training(tmp_path):
    found = commands(read_results(tmp_path), [need("mgk-1", seeds=1)])
    assert found == [f"mgk train lra/text --row mgk-1 seed=0 --results {tmp_path}"]


def test_other_seeds_count_as_well(tmp_path):
    for seed in (7, 8, 9):
        write_run(tmp_path, "lra/text", "mgk-1", seed, accuracy=0.6)
    results = read_results(tmp_path)
    assert commands(results, [need("mgk-1", seeds=3)]) == []
    assert commands(results, [need("mgk-1", seeds=4)])[0].endswith(f"--row mgk-1 seed=0 --results {tmp_path}")


def test_what_is_measured_on_a_run(tmp_path):
    """Of two seeds one is trained, and one of its two evaluations is there."""
    row = ("wikitext103/small", "mgk-4")
    write_run(tmp_path, *row, 0)
    write_evaluation(tmp_path, *row, 0, "test", sliding_perplexity=34.0)
    needs = [need(row[1], 2, row[0], name) for name in ("valid_perplexity", "test_perplexity")]
    assert commands(read_results(tmp_path), needs, "T3") == [
        f"mgk train wikitext103/small --row mgk-4 seed=1 --results {tmp_path}",
        "for seed in 0 1; do mgk evaluate runs/wikitext103/small/mgk-4/seed-$seed --split test; done",
        "for seed in 0 1; do mgk evaluate runs/wikitext103/small/mgk-4/seed-$seed --split valid; done",
        f"mgk reproduce T3 --collect runs --results {tmp_path}",
    ]


def test_pictures_of_a_run_that_is_there(tmp_path):
    row = ("lra/retrieval", "mgk-1")
    write_run(tmp_path, *row, 4, accuracy=0.8)
    wanted = [Need(recipe=row[0], row=row[1], picture="keys.png")]
    assert commands(read_results(tmp_path), wanted, "F14") == [
        f"mgk analyze runs/lra/retrieval/mgk-1/seed-4 --samples 32 --to {tmp_path}/analysis/lra-retrieval-mgk-1-seed-4"
    ]
    write_analysis(tmp_path, *row, 4)
    assert commands(read_results(tmp_path), wanted, "F14") == []


def test_times_are_measured_together(tmp_path):
    """One command for all of Table 7, since its file is written whole."""
    write_benchmark(tmp_path, {"softmax-8": (10.0, 2e9), "smgk-4": (5.0, 1e9)})
    wanted = [
        Need(recipe=recipe, row=row, metric=metric(name))
        for recipe, row in (("lra/retrieval", "smgk-4"), ("lra/retrieval", "mgk-4"), ("lra/retrieval-linear", "mlk-4"))
        for name in ("memory", "seconds_per_iteration")
    ]
    found = find_missing(read_results(tmp_path), wanted, "T7")
    assert [missing.what for missing in found] == [
        "lra/retrieval: time and memory of mgk-4", "lra/retrieval-linear: time and memory of mlk-4",
    ]  # fmt: skip
    command = "mgk bench retrieval --preset smgk --preset mgk --preset smlk --preset mlk"
    assert {missing.commands for missing in found} == {(command,)}


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    """Every command that an empty tree asks for, as a shell would start it."""
    folder = tmp_path_factory.mktemp("missing")
    results = read_results(folder / "results")
    lines = []
    for name in pages.names():
        if name not in pages.cost_pages.PAGES:
            page = pages.build(name, results, folder, 5)
            lines += [command for missing in page.missing for command in missing.commands]
    script = 'mgk() { printf "%s\\0" "$@"; printf "\\n"; }\n' + "\n".join(dict.fromkeys(lines))
    said = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True).stdout
    return [line.split("\0")[:-1] for line in said.splitlines()]


def test_every_command_is_understood(typed):
    assert {words[0] for words in typed} == {"train", "sweep", "evaluate", "analyze", "bench", "reproduce"}
    group = typer.main.get_command(app)
    for words in typed:
        command, arguments = group, words
        while hasattr(command, "commands"):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        context = command.make_context(command.name, list(arguments))
        if words[0] in ("train", "sweep"):
            recipe, changes = load(context.params["recipe"]), context.params["changes"] or []
            for row in (context.params.get("rows") or context.params["row"]).split():
                assert recipe.config(row, changes).row == row


def test_commands_survive_a_shell(typed):
    """Rows with commas, signs and several words arrive as one word each."""
    rows = next(words for words in typed if words[:2] == ["sweep", "multi30k-variances"])
    listed = rows[rows.index("--rows") + 1].split()
    assert "mgk-2+variance_scale=1,0.5" in listed
    assert all(shlex.quote(row) == row for row in listed)
