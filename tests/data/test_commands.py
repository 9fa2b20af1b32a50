"""`mgk data`, as a user runs it."""

import pytest
from typer.testing import CliRunner

from mgk.cli import app


def run(*arguments, columns=200):
    result = CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MGK_CACHE", str(tmp_path / "cache"))


def test_list_names_every_corpus():
    out = run("list")
    for name in (
        "listops",
        "imdb",
        "aan",
        "peerread",
        "enwik8",
        "enwik8-words",
        "wikitext2",
        "wikitext103",
        "multi30k",
        "tatoeba",
    ):
        assert name in out


def test_nothing_is_cut_in_a_narrow_terminal():
    """Neither an option nor the name of a file."""
    out = run("list", columns=80)
    assert "…" not in out


def test_prepare_then_inspect(fixtures, tmp_path):
    out = run("prepare", "imdb", "--from", fixtures / "imdb", "protocol=published")
    assert "40" in out
    out = run("inspect", "imdb", "--baselines", "--plot", tmp_path / "lengths.png")
    assert "labels 0: 50.0%, 1: 50.0%" in out
    assert "The plot forgets itself" in out
    assert "majority class, accuracy: 0.5000" in out
    assert "█" in out
    assert (tmp_path / "lengths.png").read_bytes()[1:4] == b"PNG"
    assert "yes" in run("list")


def test_a_stream_has_no_histogram(fixtures):
    run("prepare", "enwik8", "size=1000", "--from", fixtures / "enwik8")
    out = run("inspect", "enwik8")
    assert "A '''bean''' is a [[seed]]" in out
    assert "█" not in out


def test_a_stream_has_no_plot_either(fixtures, tmp_path):
    run("prepare", "enwik8", "size=1000", "--from", fixtures / "enwik8")
    with pytest.raises(ValueError, match="--plot needs a corpus of several sequences, got enwik8"):
        run("inspect", "enwik8", "--plot", tmp_path / "lengths.png")
    assert not (tmp_path / "lengths.png").exists()


def test_a_generated_corpus_needs_no_files():
    run("prepare", "listops", "train=20", "valid=5", "test=5", "minimum=5", "maximum=40")
    assert "[M" in run("inspect", "listops") or "[SM" in run("inspect", "listops")


def test_wrong_options_are_refused(fixtures):
    with pytest.raises(ValueError, match="an option must look like key=value, got 'seed'"):
        run("prepare", "imdb", "seed", "--from", fixtures / "imdb")
    with pytest.raises(ValueError, match="must hold a prepared corpus, got no manifest"):
        run("inspect", "imdb")
