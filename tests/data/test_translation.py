"""German-English corpora: what is read, what is refused, and that no byte is lost on the way."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mgk.data import store
from mgk.data.errors import DataError
from mgk.data.translation import BOS, CORPORA, EOS, PAD, TOKENIZER_FILE, decode, load_tokenizer, token_type

KINDS = {kind.name: kind for kind in CORPORA}
REAL = Path(__file__).parents[3] / "shared" / "data"
SMALL = {"vocabulary": 300}

GERMAN = [
    "Der Hund läuft über die Straße.",
    "Zwei  Leerzeichen\tund ein Tabulator",
    " vorn und hinten ",
    "Ä\u2028ö ü ß",
]
ENGLISH = [
    "The dog runs across the street.",
    "Two  spaces\tand a tabulator",
    " front and back ",
    "A\u2028\x85 \u00a0o u",
]


def tatoeba(
    folder: Path, changed: Mapping[str, bytes | None] | None = None, extra: Mapping[str, bytes] | None = None
) -> Path:
    """A small archive; ``changed`` replaces or leaves out members of it, by ``split.language``."""
    members = {
        f"{split}.{language}": "".join(f"{line}\n" for line in text).encode()
        for split in ("train", "valid", "test")
        for language, text in (("de", GERMAN), ("en", ENGLISH))
    }
    named = {f"tatoeba_deen.{name}": content for name, content in {**members, **(changed or {})}.items()}
    folder.mkdir(exist_ok=True)
    path = folder / "tatoeba_deen.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for name, content in {**named, **(extra or {})}.items():
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return path


def texts(corpus: store.Corpus, split: str, field: str) -> list[str]:
    found = corpus.splits[split].sequences[field]
    return [decode(corpus, field, found[index]) for index in range(len(found))]


def real(name: str) -> Path:
    if not (REAL / name).is_file():
        pytest.skip(f"needs {REAL / name}, which is not there")
    return REAL


def refuse(tmp_path: Path, match: str, changed: Mapping[str, bytes | None], **options: object) -> None:
    """The corpus is refused, and nothing of it is left behind."""
    tatoeba(tmp_path / "raw", changed)
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=match):
        KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out" / "tatoeba", **{**SMALL, **options})
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("lowercase", [None, False, True])
def test_round_trip(tmp_path: Path, lowercase: bool | None) -> None:
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", lowercase=lowercase, clean_ratio=9, **SMALL)
    corpus = store.load(tmp_path / "out")
    store.verify(corpus)
    for split in ("train", "valid", "test"):
        for field, expected in (("source", GERMAN), ("target", ENGLISH)):
            assert texts(corpus, split, field) == [line.lower() if lowercase else line for line in expected]
            assert all(sequence[-1] == EOS and (sequence[:-1] > EOS).all() for sequence in _all(corpus, split, field))
    assert corpus.splits["train"].sequences["source"].tokens.dtype == np.uint16
    assert corpus.manifest["options"]["lowercase"] is bool(lowercase)


def _all(corpus: store.Corpus, split: str, field: str) -> list[np.ndarray]:
    found = corpus.splits[split].sequences[field]
    return [found[index] for index in range(len(found))]


def test_text_that_the_training_set_never_saw(tmp_path: Path) -> None:
    """Every byte has a token, and a line that spells out a special token is text."""
    odd = ["<eos> <pad> <bos>", "日本語 🙂 \x00\x7f", "a\rb", "e\u0301 ≠ é", "\ufeff<eos>", "İSTANBUL"]
    content = "\n".join(["first", *odd]).encode()
    tatoeba(tmp_path / "raw", {"valid.de": content, "valid.en": content})
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    corpus = store.load(tmp_path / "out")
    assert texts(corpus, "valid", "source") == ["first", *odd]
    tokenizer = load_tokenizer(corpus)
    for line, sequence in zip(["first", *odd], _all(corpus, "valid", "target"), strict=True):
        assert tokenizer(line).input_ids == sequence.tolist()
        assert tokenizer.decode(sequence.tolist()[:-1]) == line


def test_decode_leaves_out_special_tokens_and_refuses_unknown_ones(tmp_path: Path) -> None:
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    corpus = store.load(tmp_path / "out")
    sequence = corpus.splits["test"].sequences["source"][0]
    assert decode(corpus, "source", np.array([BOS, *sequence, PAD, PAD])) == GERMAN[0]
    assert decode(corpus, "source", np.array([], dtype=np.uint16)) == ""
    with pytest.raises(ValueError, match=r"tokens must lie in \[0, \d+\), got 4000"):
        decode(corpus, "source", np.array([4000]))
    with pytest.raises(ValueError, match="field must be one of source, target, got 'text'"):
        decode(corpus, "text", sequence)


def test_tokenizer(tmp_path: Path) -> None:
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    corpus = store.load(tmp_path / "out")
    tokenizer = load_tokenizer(corpus)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, BOS, EOS)
    assert len(tokenizer) == corpus.manifest["facts"]["vocabulary"] <= SMALL["vocabulary"]
    batch = tokenizer(GERMAN, padding=True).input_ids
    assert [decode(corpus, "source", line) for line in batch] == GERMAN
    assert tokenizer.batch_decode(batch, skip_special_tokens=True) == GERMAN


def test_a_changed_tokenizer_is_refused(tmp_path: Path) -> None:
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    corpus = store.load(tmp_path / "out")
    path = tmp_path / "out" / TOKENIZER_FILE
    path.write_text(path.read_text() + " ")
    with pytest.raises(DataError, match=r"tokenizer\.json must have SHA-256"):
        decode(corpus, "source", np.array([5]))
    path.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json must be there"):
        load_tokenizer(corpus)


def test_the_same_source_gives_the_same_corpus(tmp_path: Path) -> None:
    """Also in another process, where hashes are seeded anew."""
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "here", **SMALL)
    code = (
        "import sys; from mgk.data.translation import CORPORA; "
        "next(k for k in CORPORA if k.name == 'tatoeba').prepare(sys.argv[1], sys.argv[2], vocabulary=300)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "raw"), str(tmp_path / "there")], check=True)
    here, there = store.load(tmp_path / "here"), store.load(tmp_path / "there")
    assert here.manifest == there.manifest
    assert here.fingerprint == there.fingerprint
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "other", vocabulary=301)
    assert store.load(tmp_path / "other").fingerprint != here.fingerprint


def test_cleaning_is_counted_and_leaves_the_tests_alone(tmp_path: Path) -> None:
    german = b"a b\na b c\na b c d\n\n  \t\na\na b c d e f\n"
    english = b"a b\na b\na b\na\na\n\na b c d e f\n"
    kept = {f"{split}.{language}": b"a b c d e f g h\n" for split in ("valid", "test") for language in ("de", "en")}
    tatoeba(tmp_path / "raw", {"train.de": german, "train.en": english, **kept, "test.en": b"a\n"})
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", longest=5, **SMALL)
    corpus = store.load(tmp_path / "out")
    # Three words against two are exactly 1.5, which stays.
    assert texts(corpus, "train", "source") == ["a b", "a b c"]
    assert texts(corpus, "train", "target") == ["a b", "a b"]
    assert texts(corpus, "test", "source") == ["a b c d e f g h"]
    facts = corpus.manifest["facts"]
    assert facts["training pairs before cleaning"] == 7
    assert facts["training pairs dropped"] == {"empty": 3, "too long": 1, "ratio": 1}
    assert "partial training set" not in facts


def test_nothing_left_after_cleaning(tmp_path: Path) -> None:
    refuse(tmp_path, "train.de must hold pairs that pass the cleaning, got none", {}, longest=1)


def test_line_counts_must_agree(tmp_path: Path) -> None:
    match = r"tatoeba_deen\.test\.de and .*tatoeba_deen\.test\.en must have the same number of lines, got 4 and 1$"
    refuse(tmp_path, match, {"test.en": b"one\n"})


@pytest.mark.parametrize("name", ["valid.de", "test.en"])
def test_an_empty_line_outside_the_training_set(tmp_path: Path, name: str) -> None:
    match = rf"tatoeba_deen\.{name}, line 3 must hold text, got an empty line"
    refuse(tmp_path, match, {name: b"one\ntwo\n \nfour\n"})


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_file(tmp_path: Path, split: str) -> None:
    match = rf"tatoeba_deen\.{split}\.de must hold at least one line, got none"
    refuse(tmp_path, match, {f"{split}.de": b"", f"{split}.en": b""})


def test_invalid_utf8(tmp_path: Path) -> None:
    refuse(
        tmp_path, r"tatoeba_deen\.train\.en must be UTF-8, got byte 0xe4 at offset 5$", {"train.en": b"one\nM\xe4r\n"}
    )


def test_a_missing_member(tmp_path: Path) -> None:
    refuse(
        tmp_path, r"tatoeba_deen\.tar\.xz must hold tatoeba_deen\.valid\.en, got an archive without", {"valid.en": None}
    )


def test_a_truncated_archive(tmp_path: Path) -> None:
    path = tatoeba(tmp_path / "raw")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"tatoeba_deen\.tar\.xz must be a whole archive, got damage"):
        KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize("name", ["../tatoeba_deen.train.de", "/tmp/tatoeba_deen.train.de", "a/../../b"])
def test_a_member_that_reaches_outside(tmp_path: Path, name: str) -> None:
    tatoeba(tmp_path / "raw", extra={name: b"text\n"})
    with pytest.raises(DataError, match="must not reach outside itself"):
        KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


def test_an_error_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails_late(steps: object, description: str, total: int | None = None) -> object:
        if description == "test en":
            raise RuntimeError("interrupted")
        return steps

    tatoeba(tmp_path / "raw")
    with pytest.raises(RuntimeError, match="interrupted"):
        KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", fails_late, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab": 300}, "tatoeba has the options vocabulary, lowercase, clean_ratio, longest, got 'vocab'"),
        ({"vocabulary": 258}, "vocabulary must be a whole number of at least 259, got 258"),
        ({"vocabulary": 300.0}, "vocabulary must be a whole number of at least 259, got 300.0"),
        ({"vocabulary": 2**31}, "vocabulary must be at most 2147483647, the largest token on disk, got 2147483648"),
        ({"lowercase": "yes"}, "lowercase must be True, False or None, got 'yes'"),
        ({"clean_ratio": 0.9}, "clean_ratio must be a finite number of at least 1, got 0.9"),
        ({"clean_ratio": float("nan")}, "clean_ratio must be a finite number of at least 1, got nan"),
        ({"clean_ratio": 10**400}, "clean_ratio must be a finite number of at least 1, got 1000"),
        ({"longest": 0}, "longest must be a whole number of at least 1, got 0"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], match: str) -> None:
    tatoeba(tmp_path / "raw")
    with pytest.raises(ValueError, match=match):
        KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", **options)


def test_the_smallest_vocabulary_is_bytes(tmp_path: Path) -> None:
    tatoeba(tmp_path / "raw")
    KINDS["tatoeba"].prepare(tmp_path / "raw", tmp_path / "out", vocabulary=259)
    corpus = store.load(tmp_path / "out")
    assert corpus.manifest["facts"]["vocabulary"] == 259
    lengths = corpus.splits["test"].sequences["source"].lengths
    assert lengths.tolist() == [len(line.encode()) + 1 for line in GERMAN]


def test_token_type() -> None:
    assert token_type(65_535) is np.uint16
    assert token_type(65_536) is np.int32


@pytest.mark.parametrize("name", ["iwslt14", "wmt14"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_plain_files(tmp_path: Path, name: str, is_nested: bool) -> None:
    folder = tmp_path / "raw" / name if is_nested else tmp_path / "raw"
    folder.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (folder / f"{split}.de").write_text("Ein Hund\r\nEine Katze\r\n", encoding="utf-8", newline="")
        (folder / f"{split}.en").write_text("A dog\nA cat", encoding="utf-8")
    KINDS[name].prepare(tmp_path / "raw", tmp_path / "out", **SMALL)
    corpus = store.load(tmp_path / "out")
    # IWSLT'14 is lower-cased by custom.
    expected = ["ein hund", "eine katze"] if name == "iwslt14" else ["Ein Hund", "Eine Katze"]
    assert texts(corpus, "train", "source") == expected
    assert sorted(corpus.manifest["source"]) == ["test.de", "test.en", "train.de", "train.en", "valid.de", "valid.en"]
    assert "partial training set" not in corpus.manifest["facts"]
    (folder / "valid.en").unlink()
    with pytest.raises(DataError, match=r"must hold valid\.en, got none of them"):
        KINDS[name].prepare(tmp_path / "raw", tmp_path / "again", **SMALL)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("tatoeba", r"must hold tatoeba_deen\.tar\.xz, got none"),
        ("iwslt14", r"must hold iwslt14_partial\.tar\.xz or train\.de, got none"),
        ("wmt14", r"must hold train\.de, got none"),
    ],
)
def test_missing_files(tmp_path: Path, name: str, match: str) -> None:
    with pytest.raises(DataError, match=match):
        KINDS[name].prepare(tmp_path, tmp_path / "out")
    with pytest.raises(DataError, match="got no folder"):
        KINDS[name].prepare(tmp_path / "absent", tmp_path / "out")


def test_kinds() -> None:
    assert list(KINDS) == ["iwslt14", "multi30k", "tatoeba", "wmt14"]
    for kind in CORPORA:
        assert kind.task == "translation"
        assert kind.origin
        assert list(kind.options) == ["vocabulary", "lowercase", "clean_ratio", "longest"]


def raw_lines(archive: Path, name: str) -> list[str]:
    with tarfile.open(archive) as file:
        member = file.extractfile(name)
        assert member is not None
        return member.read().decode().removesuffix("\n").split("\n")


def test_real_multi30k(tmp_path: Path) -> None:
    """Captions with umlauts, double spaces, a tab and spaces at the end, all of them byte for byte."""
    source = real("multi30k_deen.tar.xz")
    KINDS["multi30k"].prepare(source, tmp_path / "out", clean_ratio=1000)
    corpus = store.load(tmp_path / "out")
    assert {split: len(found.sequences["source"]) for split, found in corpus.splits.items()} == {
        "train": 29_000, "valid": 1_014, "test": 1_000, "test_2017_flickr": 1_000, "test_2017_mscoco": 461,
        "test_2018_flickr": 1_071,
    }  # fmt: skip
    assert corpus.manifest["facts"]["vocabulary"] == 10_000
    archive = source / "multi30k_deen.tar.xz"
    for split, member in (("train", "train"), ("valid", "val"), ("test", "test_2016_flickr")):
        for field, language in (("source", "de"), ("target", "en")):
            assert texts(corpus, split, field) == raw_lines(archive, f"multi30k.{member}.{language}")
    for split in ("test_2017_flickr", "test_2017_mscoco", "test_2018_flickr"):
        assert texts(corpus, split, "target") == raw_lines(archive, f"multi30k.{split}.en")


def test_real_iwslt14(tmp_path: Path) -> None:
    source = real("iwslt14_partial.tar.xz")
    KINDS["iwslt14"].prepare(source, tmp_path / "out", vocabulary=2_000)
    corpus = store.load(tmp_path / "out")
    assert len(corpus.splits["valid"].sequences["source"]) == 7_283
    assert len(corpus.splits["test"].sequences["target"]) == 6_750
    facts = corpus.manifest["facts"]
    assert facts["partial training set"] == "train10k"
    assert facts["training pairs before cleaning"] == 9_513
    assert len(corpus.splits["train"].sequences["source"]) == 9_513 - sum(facts["training pairs dropped"].values())
    assert texts(corpus, "test", "source") == raw_lines(source / "iwslt14_partial.tar.xz", "iwslt14.test.de")


@pytest.mark.slow
def test_tatoeba_takes_less_than_a_minute_and_a_gigabyte(tmp_path: Path) -> None:
    source = real("tatoeba_deen.tar.xz")
    # Its peak by the system's own count: ru_maxrss begins with that of the process which started it.
    code = (
        "import re, sys, time; from mgk.data.translation import CORPORA; start = time.perf_counter(); "
        "next(k for k in CORPORA if k.name == 'tatoeba').prepare(sys.argv[1], sys.argv[2]); "
        "print(time.perf_counter() - start, re.search('VmHWM:(.*)kB', open('/proc/self/status').read())[1])"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    seconds, kilobytes = map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    corpus = store.load(tmp_path / "out")
    assert corpus.manifest["facts"]["training pairs before cleaning"] == 161_159
    assert [len(corpus.splits[split].sequences["source"]) for split in ("valid", "test")] == [4_293, 4_361]
    assert seconds < 60
    assert kilobytes < 1_000_000
