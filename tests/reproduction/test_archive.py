"""Results as one file that travels: what it holds, what it refuses, and what it does not write over."""

import io
import json
import os
import tarfile
from pathlib import PurePosixPath

import pytest
from reproduction_cases import write_analysis, write_curve, write_evaluation, write_run

from mgk.reproduction import archive
from mgk.reproduction.collection import collect, files_of

RECIPE = "wikitext103/small"


def make_run(folder, row, seed, perplexity=30.0):
    """A finished run as training leaves it."""
    place = folder / "runs" / RECIPE / row / f"seed-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    scratch = folder / "scratch"
    write_run(scratch, RECIPE, row, seed, perplexity=perplexity).rename(place / "result.json")
    write_evaluation(scratch, RECIPE, row, seed, "valid", sliding_perplexity=33.0).rename(
        place / "evaluation-valid.json"
    )
    write_curve(scratch, RECIPE, row, seed).rename(place / "metrics.jsonl")
    if not (place / "analysis").exists():
        write_analysis(scratch, RECIPE, row, seed).parent.rename(place / "analysis")
    return place


def pack(path, *runs):
    archive.pack(path, {name: source for run in runs for name, source in files_of(run).items()})
    return path


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("end", [".tar.xz", ".tar.gz", ".tgz", ".tar"])
def test_there_and_back(tmp_path, end):
    runs = [make_run(tmp_path, "mgk-4", 0), make_run(tmp_path, "mgk-4+variance_scale=1,3", 2)]
    path = pack(tmp_path / "new" / f"all{end}", *runs)
    assert list(path.parent.iterdir()) == [path]
    magic = {".tar.xz": b"\xfd7zXZ", ".tar.gz": b"\x1f\x8b", ".tgz": b"\x1f\x8b", ".tar": b"results/"}[end]
    assert path.read_bytes().startswith(magic)
    written = collect(path, tmp_path / "packed")
    assert len(written) == 2 * 7
    collect(tmp_path / "runs", tmp_path / "plain")
    assert contents(tmp_path / "packed") == contents(tmp_path / "plain")
    with tarfile.open(path) as file:
        assert {(each.uid, each.uname, each.mode) for each in file.getmembers()} == {(0, "", 0o644)}


def test_what_was_in_it_stays(tmp_path):
    """A second slice of time on a machine that has only its own runs."""
    path = pack(tmp_path / "all.tar.xz", make_run(tmp_path, "mgk-4", 0))
    pack(path, make_run(tmp_path, "mgk-4", 1, perplexity=31.0))
    collect(path, tmp_path / "results")
    assert sorted(each.name for each in (tmp_path / "results" / RECIPE).iterdir()) == [
        "mgk-4-seed-0.json",
        "mgk-4-seed-1.json",
    ]


def test_no_other_result_is_overwritten(tmp_path):
    results = tmp_path / "results"
    first = pack(tmp_path / "first.tar.xz", make_run(tmp_path, "mgk-4", 0))
    collect(first, results)
    second = pack(
        tmp_path / "second.tar.xz", make_run(tmp_path, "mgk-4", 1), make_run(tmp_path, "mgk-4", 0, perplexity=29.0)
    )
    before = contents(results)
    with pytest.raises(
        ValueError, match=r"must not replace the result of another run, got .* from .*mgk-4-seed-0\.json"
    ):
        collect(second, results)
    assert contents(results) == before
    # All of them at once, not one at every try.
    collect(pack(tmp_path / "third.tar.xz", make_run(tmp_path, "mgk-4", 2)), results)
    both = pack(tmp_path / "both.tar.xz", *(make_run(tmp_path, "mgk-4", seed, perplexity=9.0) for seed in (0, 2)))
    with pytest.raises(ValueError, match=r"mgk-4-seed-0\.json, .*mgk-4-seed-2\.json: remove those first"):
        collect(both, results)
    (results / RECIPE / "mgk-4-seed-0.json").unlink()
    collect(second, results)
    assert json.loads((results / RECIPE / "mgk-4-seed-0.json").read_text())["metrics"]["test"]["perplexity"] == 29.0


def test_an_archive_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    path = pack(tmp_path / "all.tar.xz", make_run(tmp_path, "mgk-4", 0))
    before = path.read_bytes()

    def fail(*arguments, **options):
        raise OSError("the disk is full")

    monkeypatch.setattr(tarfile.TarFile, "add", fail)
    with pytest.raises(OSError, match="the disk is full"):
        pack(path, tmp_path / "runs" / RECIPE / "mgk-4" / "seed-0")
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.glob("*.tar.xz*")] == ["all.tar.xz"]
    assert not list(tmp_path.glob(".all*"))


def evil(path, *members):
    with tarfile.open(path, "w:gz") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
            else:
                member.type, member.linkname = tarfile.SYMTYPE, content
                file.addfile(member)
    return path


RUN = json.dumps({"recipe": "a", "row": "b", "seed": 0, "metrics": {}}).encode()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("../outside/x.json", b"{}")], "must hold plain files below results/ only, got '../outside/x.json'"),
        ([("results/../../x.json", b"{}")], "plain files below results/ only"),
        ([("/results/a/x.json", b"{}")], "plain files below results/ only"),
        ([("results/a/link.json", "/etc/passwd")], "plain files below results/ only, got 'results/a/link.json'"),
        ([("results/x.json", b"{}")], "plain files below results/ only, got 'results/x.json'"),
        ([("results/a/.x.json", b"{}")], "plain files below results/ only, got 'results/a/.x.json'"),
        ([("results/a/x.py", b"{}")], "JSON and pictures only, got 'results/a/x.py'"),
        ([("results/a/x.json", b"{")], r"x\.json must be the JSON of a result"),
        ([("results/a/c-seed-0.json", RUN)], r"each result under its own name, got that of a/b-seed-0\.json as a/c"),
        ([("results/a/b-seed-0.json", RUN), ("results/curves/a-b-seed-1.jsonl", b"")], "got curves/a-b-seed-1.jsonl"),
        ([("results/analysis/a-b-seed-1/analysis.json", b"{}")], "of every run that it has files of"),
    ],
)
def test_what_is_refused(tmp_path, members, message):
    with pytest.raises(ValueError, match=message):
        collect(evil(tmp_path / "evil.tar.gz", *members), tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert {each.name for each in tmp_path.iterdir()} == {"evil.tar.gz"}


def test_files_that_are_none(tmp_path):
    damaged = pack(tmp_path / "all.tar.xz", make_run(tmp_path, "mgk-4", 0))
    content = damaged.read_bytes()
    for cut in (0, 10, len(content) // 2):
        damaged.write_bytes(content[:cut])
        for use in (archive.check, lambda path: collect(path, tmp_path / "results")):
            with pytest.raises(
                ValueError, match=r"all\.tar\.xz must be an archive of mgk sweep --archive, got "
            ) as error:
                use(damaged)
            assert "\n" not in str(error.value)
    archive.check(tmp_path / "new.tar.xz")
    archive.check(pack(tmp_path / "whole.tar.xz", make_run(tmp_path, "mgk-4", 1)))
    with pytest.raises(ValueError, match=r"--archive must end in \.tar\.xz, \.tar\.gz, \.tgz, \.tar, got .*all\.zip"):
        archive.check_name(tmp_path / "all.zip")
    (tmp_path / "folder.tar").mkdir()
    with pytest.raises(ValueError, match="--archive must be a file, got the folder"):
        archive.check_name(tmp_path / "folder.tar")
    (tmp_path / "note.txt").write_text("no archive")
    with pytest.raises(ValueError, match=r"--collect must be a folder .* got .*note\.txt, where a file of another"):
        collect(tmp_path / "note.txt", tmp_path / "results")


def test_half_written_files_stay_at_home(tmp_path):
    run = make_run(tmp_path, "mgk-4", 0)
    (run / "analysis" / ".analysis.json").write_text("{")
    os.symlink(run / "metrics.jsonl", run / "other.jsonl")
    assert {str(name) for name in files_of(run)} == {
        f"{RECIPE}/mgk-4-seed-0.json", "curves/wikitext103-small-mgk-4-seed-0.jsonl",
        "evaluations/wikitext103-small-mgk-4-seed-0-valid.json",
        *(f"analysis/wikitext103-small-mgk-4-seed-0/{each.name}" for each in (run / "analysis").glob("[!.]*")),
    }  # fmt: skip
    assert all(isinstance(name, PurePosixPath) for name in files_of(run))
