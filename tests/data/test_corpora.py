"""Every corpus of bytes and words: small fixtures always, the real files where they are."""

import hashlib
import json
import lzma
import shutil
import tarfile

import numpy as np
import pytest

from mgk.data import DataError, prepare, verify
from mgk.data.byte_text import decode as decode_bytes
from mgk.data.registry import KINDS, find_kind
from mgk.data.wikitext import vocabulary


def labels(corpus, split):
    return np.asarray(corpus.splits[split].numbers["labels"])


def test_imdb_from_every_form(fixtures, tmp_path):
    forms = {"jsonl": "imdb", "csv": "imdb_csv", "folders": ""}
    for form, name in forms.items():
        corpus = prepare("imdb", fixtures / name, tmp_path / form)
        verify(corpus)
        assert set(labels(corpus, "test")) == {0, 1}
        text = corpus.splits["test"].sequences["text"]
        assert decode_bytes(corpus, "text", text[0]).startswith("The plot forgets itself")
        assert text.tokens.min() >= 1
    assert list(corpus.manifest["source"]) == ["aclImdb"]


def test_imdb_holds_out_a_share_of_both_classes(fixtures, tmp_path):
    corpus = prepare("imdb", fixtures / "imdb", tmp_path / "a")
    assert {split: len(labels(corpus, split)) for split in corpus.splits} == {"train": 38, "valid": 2, "test": 40}
    assert sorted(labels(corpus, "valid")) == [0, 1]
    published = prepare("imdb", fixtures / "imdb", tmp_path / "b", protocol="published")
    assert len(labels(published, "train")) == 40
    test, valid = (published.splits[split].sequences["text"].tokens for split in ("test", "valid"))
    assert (test == valid).all()
    with pytest.raises(ValueError, match="protocol must be one of held-out, published, got 'none'"):
        prepare("imdb", fixtures / "imdb", tmp_path / "c", protocol="none")


def test_pairs_of_documents(fixtures, peerread_source, tmp_path):
    peerread = prepare("peerread", peerread_source, tmp_path / "peerread")
    aan = prepare("aan", fixtures / "aan", tmp_path / "aan")
    for corpus in (peerread, aan):
        verify(corpus)
        assert labels(corpus, "train").tolist() == [1, 0, 1, 0]
        texts = corpus.splits["documents"].sequences["text"]
        assert len(texts) == 4
        first = corpus.splits["test"].numbers["first"]
        assert "Soil and water" in decode_bytes(corpus, "text", texts[int(first[0])])
    # The benchmark feeds the escapes of its files as they stand.
    assert "\\n" in decode_bytes(aan, "text", aan.splits["documents"].sequences["text"][0])


def test_enwik8_piece(fixtures, tmp_path):
    corpus = prepare("enwik8", fixtures / "enwik8", tmp_path / "x", size=1000)
    raw = (fixtures / "enwik8" / "enwik8").read_bytes()[:1000]
    parts = [corpus.splits[split].sequences["text"].tokens for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [900, 50, 50]
    assert np.concatenate(parts).tobytes() == raw
    with pytest.raises(DataError, match=r"must be enwik8, 100,000,000 bytes with md5 a1fa.*, got 2,080 other bytes"):
        prepare("enwik8", fixtures / "enwik8", tmp_path / "y")


def test_wikitext_words(fixtures, tmp_path):
    corpus = prepare("wikitext2", fixtures, tmp_path / "x")
    words = vocabulary(corpus)
    assert words[0] == "<eos>"
    assert len(words) == len(set(words))
    train = corpus.splits["train"].sequences["text"].tokens
    counts = np.bincount(train, minlength=len(words))
    assert (np.diff(counts[1:]) <= 0).all()
    # Every line ends, blank ones too; a word that training does not have is <unk>.
    assert counts[0] == 5
    test = [words[token] for token in corpus.splits["test"].sequences["text"].tokens]
    assert " ".join(test) == "<eos> = The <unk> = <eos> A bean grows in the <unk> bed . <eos>"
    assert corpus.manifest["facts"]["test: words that the training text does not have"] == 2
    text = find_kind("wikitext2").decode(corpus, "text", np.asarray(train))
    assert text.split() == (fixtures / "wikitext-2" / "wiki.train.tokens").read_text().split()


def break_jsonl(folder, line):
    path = folder / "imdb_train.jsonl"
    rows = path.read_bytes().split(b"\n")
    rows[2] = line
    path.write_bytes(b"\n".join(rows))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"label": 2, "text": "x"}', "record 3 must have label 0 or 1, got 2"),
        (b'{"label": "1", "text": "x"}', "record 3 must have int in 'label', got '1'"),
        (b'{"label": 1}', "record 3 must have the field 'text', got label"),
        (b'{"label": 1, "text": "  "}', "record 3 must hold text, got an empty review"),
        (b'{"label": 1, "text": "x"', "record 3 must be JSON"),
        (b"[1, 2]", "record 3 must be an object, got list"),
        (b'{"label": ' + b"1" * 5_000 + b', "text": "x"}', "record 3 must be JSON, got Exceeds the limit"),
        (b'{"text": ' + b"[" * 100_000, "record 3 must be JSON, got maximum recursion depth exceeded"),
        (rb'{"label": 1, "text": "x\ud800"}', "record 3 must have whole characters in 'text', got half of a surrogate"),
        (b'{"label": 1, "text": "\xff"}', "record 3 must be UTF-8, got byte 0xff at offset 22"),
    ],
)
def test_bad_records_are_named(fixtures, tmp_path, line, message):
    """33-35, 38: the file and the record, and nothing half-written."""
    folder = tmp_path / "source"
    shutil.copytree(fixtures / "imdb", folder)
    break_jsonl(folder, line)
    (tmp_path / "to").mkdir()
    with pytest.raises(DataError, match=f"imdb_train.jsonl, {message}"):
        prepare("imdb", folder, tmp_path / "to" / "imdb")
    assert list((tmp_path / "to").iterdir()) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("1\tp1\tp2\n", "line 1 must have 5 columns between tabs, got 3"),
        ("2.0\tp1\tp2\ta\tb\n", "line 1 must have label 0 or 1, got '2.0'"),
        ("1.0\tp1\tp2\ta\t \n", "line 1 must hold text, got an empty document"),
        ("1.0\tp1\tp1\ta\tb\n", "line 1 must give p1 the text it had before, got another"),
        ("\ufeff1.0\tp1\tp2\ta\tb\n", "must not start with a byte order mark"),
        ("", r"new_aan_pairs\.train\.tsv must hold at least one pair, got none"),
    ],
)
def test_bad_columns_are_named(fixtures, tmp_path, row, message):
    """40"""
    shutil.copytree(fixtures / "aan", tmp_path / "source")
    (tmp_path / "source" / "new_aan_pairs.train.tsv").write_text(row)
    with pytest.raises(DataError, match=message):
        prepare("aan", tmp_path / "source", tmp_path / "to")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,maybe\n", "record 1 must have a label of 0, neg, .*, got 'maybe'"),
        ("text,label\na\n", "record 1 must have 2 columns, got 1"),
        ('text,label\na,1\n"b,0\nc,1\n', "record 2 must be csv, got unexpected end of data"),
        ("\ufefftext,label\na,1\n", "must not start with a byte order mark"),
        ("text,text,label\na,b,1\n", "must have one column text or review, got the header text, text, label"),
        ("text,label\n", "must hold at least one review, got none"),
    ],
)
def test_bad_csv(fixtures, tmp_path, content, message):
    shutil.copytree(fixtures / "imdb_csv", tmp_path / "source")
    (tmp_path / "source" / "imdb_train.csv").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare("imdb", tmp_path / "source", tmp_path / "to")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imdb", {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ("imdb", {"seed": True}, "seed must be an integer of at least 0, got True"),
        ("aan", {"longest": True}, "longest must be an integer of at least 1, got True"),
    ],
)
def test_bad_options_are_named(fixtures, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(name, fixtures / name, tmp_path / "to", **options)


def test_line_separators_inside_text_are_text(fixtures, tmp_path):
    """U+2028, NUL and carriage returns stay where they are."""
    odd = "one\u2028two\x00three\x85four"
    shutil.copytree(fixtures / "aan", tmp_path / "source")
    (tmp_path / "source" / "new_aan_pairs.train.tsv").write_text(f"1.0\tx\ty\t{odd}\tplain\r\n", newline="")
    corpus = prepare("aan", tmp_path / "source", tmp_path / "to")
    assert decode_bytes(corpus, "text", corpus.splits["documents"].sequences["text"][0]) == odd


def test_damaged_archives(peerread_source, tmp_path):
    """34, 41: truncated, foreign, incomplete, and one that reaches outside."""
    archive = peerread_source / "peerread_pairs.tar.xz"
    whole = archive.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:-1], b"<html>404 Not Found</html>"):
        archive.write_bytes(broken)
        with pytest.raises(DataError, match="must be a whole archive, got damage"):
            prepare("peerread", peerread_source, tmp_path / "to")
    with tarfile.open(archive, "w:xz") as made:
        made.add(peerread_source / "peerread_docs_4k.jsonl", "../../outside.txt")
    with pytest.raises(DataError, match=r"must not reach outside itself, got the member '../../outside.txt'"):
        prepare("peerread", peerread_source, tmp_path / "to")
    with tarfile.open(archive, "w:xz") as made:
        made.add(peerread_source / "peerread_docs_4k.jsonl", "readme.txt")
    with pytest.raises(DataError, match=r"must hold peerread_pairs\.train\.tsv, .*, got an archive without"):
        prepare("peerread", peerread_source, tmp_path / "to")
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with tarfile.open(archive, "w:xz") as made:
        for split in ("train", "valid", "test"):
            made.add(empty, f"peerread_pairs.{split}.tsv")
    with pytest.raises(DataError, match=r"peerread_pairs\.train\.tsv must hold at least one pair, got none"):
        prepare("peerread", peerread_source, tmp_path / "to")
    archive.write_bytes(whole)
    papers = peerread_source / "peerread_docs_4k.jsonl"
    papers.write_text(papers.read_text().splitlines()[0] + "\n")
    with pytest.raises(DataError, match=r"line 1 must name papers of peerread_docs_4k\.jsonl, got 'p2'"):
        prepare("peerread", peerread_source, tmp_path / "to")
    packed = peerread_source / "peerread_docs_4k.jsonl.xz"
    packed.write_bytes(lzma.compress(papers.read_bytes())[:-20])
    with pytest.raises(DataError, match=r"docs_4k\.jsonl\.xz must be a whole file, got damage"):
        prepare("peerread", peerread_source, tmp_path / "to")


@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
def test_pickles_are_refused_with_a_way_out(fixtures, tmp_path, suffix):
    """43"""
    path = tmp_path / f"imdb_train{suffix}"
    path.write_bytes(b"\x80\x04.")
    with pytest.raises(
        DataError, match=r"must not be a pickle, which can run code when read.*: write its records as jsonl"
    ):
        prepare("imdb", tmp_path, tmp_path / "to")


def test_long_texts_are_counted(fixtures, tmp_path):
    """36: kept whole on disk, cut by the batches."""
    shutil.copytree(fixtures / "imdb", tmp_path / "source")
    with (tmp_path / "source" / "imdb_test.jsonl").open("a") as file:
        file.write(json.dumps({"label": 1, "text": "x" * 5_000}) + "\n")
    corpus = prepare("imdb", tmp_path / "source", tmp_path / "to")
    assert corpus.manifest["facts"]["test: longer than 4,096 bytes"] == 1
    assert corpus.splits["test"].sequences["text"].lengths.max() == 5_000


def test_missing_sources_say_what_they_need(tmp_path, monkeypatch):
    monkeypatch.delenv("MGK_DATA", raising=False)
    with pytest.raises(DataError, match=r"imdb needs a folder of raw files, .*MGK_DATA, got neither: Maas"):
        prepare("imdb", None, tmp_path / "x")
    with pytest.raises(DataError, match=r"must hold imdb_train\.jsonl\.xz or .*, got none of them"):
        prepare("imdb", tmp_path, tmp_path / "x")
    with pytest.raises(DataError, match=r"must be one of listops, .* got 'imbd' \(did you mean 'imdb'\?\)"):
        prepare("imbd", tmp_path, tmp_path / "x")
    with pytest.raises(ValueError, match="imdb has the options protocol, seed, got 'sed'"):
        prepare("imdb", tmp_path, tmp_path / "x", sed=1)
    assert len(KINDS) >= 8


@pytest.mark.slow
def test_real_checksums(real, tmp_path):
    """Every manifest holds the checksums of the files it was made from, as the publisher of the folder lists them."""
    listed = dict(line.split()[::-1] for line in (real / "SHA256SUMS").read_text().splitlines())
    seen = set()
    for name, options in {
        "imdb": {}, "peerread": {}, "enwik8": {"size": 1000}, "wikitext2": {}, "multi30k": {"vocabulary": 300},
        "iwslt14": {"vocabulary": 300},
    }.items():  # fmt: skip
        source = prepare(name, real, tmp_path / name, **options).manifest["source"]
        assert source == {file: listed[file] for file in source}
        seen |= set(source)
    assert seen == set(listed) - {"tatoeba_deen.tar.xz"}


def test_real_imdb(real, tmp_path):
    corpus = prepare("imdb", real, tmp_path / "imdb")
    assert {split: len(labels(corpus, split)) for split in corpus.splits} == {
        "train": 23_750, "valid": 1_250, "test": 25_000,
    }  # fmt: skip
    assert all(labels(corpus, split).mean() == 0.5 for split in corpus.splits)
    text = corpus.splits["test"].sequences["text"]
    with lzma.open(real / "imdb_test.jsonl.xz", "rt", encoding="utf-8") as file:
        for number, line in zip(range(2_000), file, strict=False):
            assert (text[number] - 1).astype(np.uint8).tobytes() == json.loads(line)["text"].encode()
    assert int(text.lengths.max()) <= 13_800
    assert corpus.manifest["source"]["imdb_test.jsonl.xz"].startswith("a0570775")


def test_real_peerread(real, tmp_path):
    corpus = prepare("peerread", real, tmp_path / "peerread")
    counts = {split: len(labels(corpus, split)) for split in ("train", "valid", "test")}
    assert counts == {"train": 47_084, "valid": 5_538, "test": 5_490}
    assert all(abs(labels(corpus, split).mean() - 0.5) < 0.005 for split in counts)
    texts = corpus.splits["documents"].sequences["text"]
    assert len(texts) == 7_834
    assert texts.lengths.max() <= 4_096
    citing = [set(np.asarray(corpus.splits[split].numbers["first"])) for split in counts]
    assert not citing[0] & citing[1]
    assert not citing[0] & citing[2]


def test_real_wikitext(real, tmp_path):
    corpus = prepare("wikitext2", real, tmp_path / "wikitext2")
    tokens = {split: len(corpus.splits[split].sequences["text"].tokens) for split in corpus.splits}
    assert tokens == {"train": 2_088_628, "valid": 217_646, "test": 245_569}
    assert len(vocabulary(corpus)) == 33_278
    with tarfile.open(real / "wikitext.tar.xz") as archive:
        raw = archive.extractfile("wikitext2.wiki.valid.tokens").read().decode()
    text = find_kind("wikitext2").decode(corpus, "text", np.asarray(corpus.splits["valid"].sequences["text"].tokens))
    assert text.split() == raw.split()


def test_real_wikitext103_reader(real, tmp_path):
    """Its training text cannot be had here: the real validation text takes its place, the other two are themselves."""
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    with tarfile.open(real / "wikitext.tar.xz") as archive:
        for split, member in (("train", "valid"), ("valid", "valid"), ("test", "test")):
            content = archive.extractfile(f"wikitext103.wiki.{member}.tokens").read()
            (folder / f"wiki.{split}.tokens").write_bytes(content)
    corpus = prepare("wikitext103", tmp_path, tmp_path / "to")
    tokens = {split: len(corpus.splits[split].sequences["text"].tokens) for split in corpus.splits}
    assert tokens == {"train": 217_646, "valid": 217_646, "test": 245_569}
    assert corpus.manifest["facts"]["valid: words that the training text does not have"] == 0
    assert corpus.manifest["facts"]["test: words that the training text does not have"] > 0


def test_real_enwik8(real, tmp_path):
    corpus = prepare("enwik8", real, tmp_path / "enwik8")
    parts = [corpus.splits[split].sequences["text"].tokens for split in ("train", "valid", "test")]
    assert [len(part) for part in parts] == [90_000_000, 5_000_000, 5_000_000]
    digest = hashlib.md5()
    for part in parts:
        digest.update(part.tobytes())
    assert digest.hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
