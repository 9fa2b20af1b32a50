"""Prepared corpora on disk: whole or not there."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import tempfile

import numpy as np
import pytest

from mgk.data import DataError, load, store, verify
from mgk.data.store import Sequences, Writer


def write(folder, seed=0, options=None):
    random = np.random.default_rng(seed)
    with Writer(folder, "toy", {"raw.txt": "abc"}, options or {"seed": seed}) as writer:
        for split, count in (("train", 5), ("test", 2)):
            lengths = random.integers(0, 9, count)
            writer.sequences(split, "text", random.integers(0, 99, lengths.sum()).astype(np.uint8), lengths)
            writer.numbers(split, "labels", random.integers(0, 2, count))
        writer.file("vocabulary.txt", "a\nb")
        writer.fact("dropped", 3)


def test_what_is_written_comes_back(tmp_path):
    write(tmp_path / "toy")
    corpus = load(tmp_path / "toy")
    verify(corpus)
    text = corpus.splits["train"].sequences["text"]
    assert len(text) == 5
    assert sum(len(text[i]) for i in range(5)) == len(text.tokens)
    assert (text.lengths == [len(text[i]) for i in range(5)]).all()
    assert isinstance(text.tokens, np.memmap)
    assert corpus.manifest["facts"] == {"dropped": 3}
    assert corpus.manifest["source"] == {"raw.txt": "abc"}
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]
    with pytest.raises(IndexError, match=r"must lie in \[0, 5\), got 5"):
        text[5]


def test_the_fingerprint_follows_the_content(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write(tmp_path / name, seed)
    a, b, c = (load(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


def test_an_error_leaves_nothing_behind(tmp_path):
    def interrupted():
        with Writer(tmp_path / "toy", "toy", {}, {}) as writer:
            writer.numbers("train", "labels", np.arange(3))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "toy").mkdir()
    write(tmp_path / "toy")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years of work")
    for manifest in (None, "{}", "[]", (tmp_path / "toy" / "manifest.json").read_text()):
        if manifest is not None:
            (tmp_path / "other" / "manifest.json").write_text(manifest)
        with pytest.raises(DataError, match="other must be a prepared toy or not there, got something else"):
            write(tmp_path / "other")
        assert (tmp_path / "other" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file must be a prepared toy or not there"):
        write(tmp_path / "file")


def test_empty_arrays(tmp_path):
    with Writer(tmp_path / "toy", "toy", {}, {}) as writer:
        writer.sequences("train", "text", np.zeros(0, dtype=np.uint8), [])
        writer.numbers("train", "labels", np.zeros(0, dtype=np.int64))
    corpus = load(tmp_path / "toy")
    verify(corpus)
    assert len(corpus.splits["train"].sequences["text"]) == 0


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    """As the system reports it, and as numpy does: here files may really not grow beyond 1,000 bytes."""

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with (
            pytest.raises(DataError, match="must have room for the prepared corpus, got a full disk"),
            Writer(tmp_path / "toy", "toy", {}, {}) as writer,
        ):
            writer.numbers("train", "labels", np.arange(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(np, "save", full)
    with pytest.raises(DataError, match="must have room for the prepared corpus, got a full disk"):
        write(tmp_path / "toy")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file must be a folder that can be written to, got "):
        write(tmp_path / "file" / "toy")

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Who tests as root may write everywhere.
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(DataError, match=r"must be a folder that can be written to, got .*Permission denied"):
        write(tmp_path / "toy")


def test_prepared_again_it_stays_and_with_other_options_it_is_replaced(tmp_path):
    write(tmp_path / "toy", 0)
    before = (tmp_path / "toy").stat().st_ino
    write(tmp_path / "toy", 0)
    assert (tmp_path / "toy").stat().st_ino == before
    write(tmp_path / "toy", 1)
    assert load(tmp_path / "toy").manifest["options"] == {"seed": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_damaged_corpus_is_replaced(tmp_path):
    write(tmp_path / "toy")
    path = tmp_path / "toy" / "train.text.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path / "toy")
    verify(load(tmp_path / "toy"))


def test_a_missing_file_is_made_again(tmp_path):
    write(tmp_path / "toy")
    (tmp_path / "toy" / "vocabulary.txt").unlink()
    with pytest.raises(DataError, match=r"vocabulary\.txt must be there"):
        verify(load(tmp_path / "toy"))
    write(tmp_path / "toy")
    verify(load(tmp_path / "toy"))


@pytest.mark.parametrize("seeds", [(0, 0, 0, 0), (0, 1, 2, 3)])
def test_several_at_once(tmp_path, seeds):
    """The same corpus, or with other options each: what is there in the end is whole."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=write, args=(tmp_path / "toy", seed)) for seed in seeds]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    verify(load(tmp_path / "toy"))
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_damage_is_found(tmp_path):
    with pytest.raises(DataError, match="must hold a prepared corpus, got no manifest"):
        load(tmp_path / "nothing")
    write(tmp_path / "toy")
    path = tmp_path / "toy" / "train.text.tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train\.text\.tokens\.npy must have SHA-256"):
        verify(load(tmp_path / "toy"))
    path.write_bytes(whole[:40])
    with pytest.raises(DataError, match="must be a whole array"):
        load(tmp_path / "toy")
    path.write_bytes(whole)
    manifest = tmp_path / "toy" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 0}))
    with pytest.raises(DataError, match="must have format 1, got 0: prepare it again"):
        load(tmp_path / "toy")
    manifest.write_text("{")
    with pytest.raises(DataError, match="must be JSON"):
        load(tmp_path / "toy")


@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")
@pytest.mark.parametrize(("name", "step"), [("manifest.json", 5), ("train.labels.npy", 1)])
def test_a_flipped_bit_is_found_or_harmless(tmp_path, name, step):
    """What is read as before may have another version in its manifest; nothing else goes unnoticed."""
    write(tmp_path / "toy")
    before = load(tmp_path / "toy")
    path = tmp_path / "toy" / name
    whole = path.read_bytes()
    for place in range(0, len(whole), step):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                corpus = load(tmp_path / "toy")
                verify(corpus)
            except DataError:
                continue
            for split in before.splits:
                found, expected = corpus.splits[split], before.splits[split]
                assert found.numbers["labels"].tolist() == expected.numbers["labels"].tolist()
                assert found.sequences["text"].offsets.tolist() == expected.sequences["text"].offsets.tolist()
                assert found.sequences["text"].tokens.tolist() == expected.sequences["text"].tokens.tolist()


@pytest.mark.parametrize("content", ["[]", "7", "{}", '{"format": 1}', "[" * 100_000, '{"format": 1, "splits": 3}'])
def test_a_manifest_that_is_none(tmp_path, content):
    write(tmp_path / "toy")
    (tmp_path / "toy" / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"toy.* must "):
        load(tmp_path / "toy")


def test_numbers_and_sequences_are_as_many_as_the_manifest_says(tmp_path):
    write(tmp_path / "toy")
    np.save(tmp_path / "toy" / "test.labels.npy", np.arange(3))
    with pytest.raises(DataError, match=r"test\.labels\.npy must hold 2 numbers, got 3"):
        load(tmp_path / "toy")


def test_a_corpus_that_is_replaced_meanwhile_is_not_mixed(tmp_path, monkeypatch):
    """Its manifest must not be that of one corpus, and its arrays those of the next."""
    write(tmp_path / "toy", 0, {"which": 0})
    real, calls = store._map, []

    def replaced_meanwhile(path):
        calls.append(path)
        if len(calls) == 3:
            write(tmp_path / "toy", 1, {"which": 1})
        return real(path)

    monkeypatch.setattr(store, "_map", replaced_meanwhile)
    corpus = load(tmp_path / "toy")
    monkeypatch.undo()
    assert corpus.manifest["options"] == {"which": 1}
    verify(corpus)


def test_lengths_must_add_up(tmp_path):
    with (
        pytest.raises(ValueError, match="lengths must add up to 3, got 2"),
        Writer(tmp_path / "x", "x", {}, {}) as writer,
    ):
        writer.sequences("train", "text", np.arange(3), [2])


def test_negative_indices():
    sequences = Sequences(np.arange(5), np.array([0, 2, 5]))
    assert sequences[-1].tolist() == [2, 3, 4]
