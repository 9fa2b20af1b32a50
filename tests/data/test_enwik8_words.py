"""The corpus of enwik8's articles: which pages, which lines, which split, which words."""

import html
import importlib.util
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mgk.cli import app
from mgk.data import DataError, enwik8_words, load, prepare, verify
from mgk.data.enwik8_words import SHARES, Page, clean, read_dump, split_of
from mgk.data.registry import find_kind
from mgk.data.wikitext import vocabulary

MEASURED = Path(__file__).parents[2] / "results" / "bench" / "enwik8-words.json"
"""What the whole corpus is like. Another cleaning makes another one, and its results do not compare with old ones."""
SENTENCE = "This sentence of twelve words stands here so that there is text.\n\n"
TEXT = SENTENCE * 10


def page(title, text):
    """As a dump has it."""
    return f"""  <page>
    <title>{html.escape(title)}</title>
    <id>7</id>
    <revision>
      <comment>the &lt;text&gt;</comment>
      <text xml:space="preserve">{html.escape(text)}</text>
    </revision>
  </page>
"""


def dump(pages):
    spaces = "".join(f'<namespace key="{key}">{name}</namespace>' for key, name in ((0, ""), (4, "Wikipedia")))
    return "\n".join([f"<mediawiki><siteinfo>{spaces}</siteinfo>", *(page(*each) for each in pages)])


def titles(split, count):
    """Names of articles that are in a split."""
    return [title for title in (f"Bird {number}" for number in range(count * 200)) if split_of(title) == split][:count]


@pytest.fixture
def source(tmp_path):
    """A folder with forty articles, two of them not for training, and pages that are none."""
    folder = tmp_path / "source"
    folder.mkdir()
    rare = [
        f"Only w{number}x has this word, w{number}x is its name, and w{number}x it remains.\n\n" for number in range(38)
    ]
    pages = [(title, TEXT + line) for title, line in zip(titles("train", 38), rare, strict=True)]
    pages += [
        (titles("valid", 1)[0], TEXT + "Only valid has v0x and R&B here."),
        (titles("test", 1)[0], TEXT + "Also w3x."),
    ]
    pages += [
        ("Old bird", "#REDIRECT [[Bird 1]]"), ("Wikipedia:Birds", TEXT), ("Bird (disambiguation)", "See [[Bird 1]]."),
        ("List of birds", TEXT + "* [[Bird 1]] is one of the birds in this list\n" * 40),
    ]  # fmt: skip
    (folder / "enwik8").write_text(dump(pages) + "<page>\n<title>Cut off</title>\n<text>" + TEXT)
    return folder


def size(source):
    return (source / "enwik8").stat().st_size


def words(corpus, split):
    known = vocabulary(corpus)
    return [known[token] for token in corpus.splits[split].sequences["text"].tokens]


def test_pages():
    pages = [("A & B", "one &amp; &amp;nbsp; [[x]]"), ("Wikipedia:C", "two"), ("D: e", " #redirect[[A]]"), ("F: g", "")]
    found = read_dump(dump(pages).encode(), "here")
    assert found.pages == [Page("A & B", "one &amp; &amp;nbsp; [[x]]"), Page("F: g", "")]
    assert (found.redirects, found.others) == (1, 1)
    with pytest.raises(DataError, match="here must have a title for every page, got none at offset 4"):
        read_dump(b"   \n<page><text>x</text></page>", "here")


def test_an_article_in_lines():
    source = (
        "{{Infobox|x}}'''Birds''' have [[feather]]s.\n" + TEXT + "==Size==\n===In cm===\n* up to 1,234.5 cm\n* [[a]]\n"
        "==Lists==\n* [[b]]\n* [[c|d]]\n==See also==\n* [[e]]\n===More===\nText.\n==Flight==\nThey fly.\n* [[f]]\n"
        "== External links and references ==\nText."
    )
    article = clean(Page("Bird (animal)", source))
    assert article is not None
    lines = article.text.split("\n")
    assert lines[:3] == ["", "= Bird ( animal ) =", ""]
    assert lines[3] == "Birds have feathers . This sentence of twelve words stands here so that there is text ."
    assert lines[13:] == [
        "", "= = Size = =", "", "", "= = = In cm = = =", "", "up to 1 @,@ 234 @.@ 5 cm", "", "= = Flight = =", "",
        "They fly .", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "is_kept"),
    [
        (SENTENCE * 8, True),
        (SENTENCE * 7, False),
        ("Telephones: 22,000 of them, as of the year nineteen ninety-five (est)\n\n" * 20, False),
        (TEXT + "* a list item that goes on for ten words, and more\n" * 5, True),
        (TEXT + "* a list item that goes on for ten words, and more\n" * 20, False),
    ],
)
def test_lists_and_stubs_are_no_articles(text, is_kept):
    assert (clean(Page("Bird", text)) is not None) is is_kept


def test_splits(source, tmp_path):
    corpus = prepare("enwik8-words", source, tmp_path / "to", size=size(source))
    verify(corpus)
    counts = {split: len(content.sequences["text"]) for split, content in corpus.splits.items()}
    assert counts == {"train": 38, "valid": 1, "test": 1}
    facts = corpus.manifest["facts"]
    assert (facts["pages that are redirects"], facts["pages of other namespaces"]) == (1, 1)
    assert facts["pages left out: lists, stubs, pointers"] == 2
    text = find_kind("enwik8-words").decode(corpus, "text", corpus.splits["valid"].sequences["text"][0])
    assert text.startswith("\n = Bird <unk> =\n\n This sentence of twelve words stands")


def test_words_are_those_of_the_training_articles(source, tmp_path):
    """Three times there, not fewer and not elsewhere; the most frequent first."""
    corpus = prepare("enwik8-words", source, tmp_path / "to", size=size(source))
    known = vocabulary(corpus)
    assert known[0] == "<eos>"
    assert {"w3x", "w37x", "Bird", "<unk>"} <= set(known)
    assert not {"v0x", "R", *(title.split()[1] for title in titles("train", 38))} & set(known)
    counts = np.bincount(corpus.splits["train"].sequences["text"].tokens, minlength=len(known))
    assert (np.diff(counts[1:]) <= 0).all()
    assert counts.min() >= 3
    assert counts[known.index("<unk>")] == 38
    assert "Only <unk> has <unk> and <unk> <unk> <unk> here . <eos>" in " ".join(words(corpus, "valid"))
    assert words(corpus, "test")[-3:] == ["w3x", ".", "<eos>"]
    facts = corpus.manifest["facts"]
    for split in ("train", "valid", "test"):
        found = [word for word in words(corpus, split) if word != "<eos>"]
        assert facts[f"{split}: words, without the ends of lines"] == len(found)
        assert facts[f"{split}: share of <unk> among them"] == round(found.count("<unk>") / len(found), 5)


def test_more_processes_make_the_same(source, tmp_path, monkeypatch):
    """Threads in their place here, which start at once; the real ones make the whole corpus, below."""
    one = prepare("enwik8-words", source, tmp_path / "one", size=size(source))
    monkeypatch.setattr(enwik8_words, "CHUNK", 3)
    monkeypatch.setattr(enwik8_words, "ProcessPoolExecutor", lambda count, mp_context: ThreadPoolExecutor(count))
    two = prepare("enwik8-words", source, tmp_path / "two", size=size(source), processes=2)
    assert one.fingerprint == two.fingerprint
    with pytest.raises(ValueError, match="processes must be an integer of at least 1, got 0"):
        prepare("enwik8-words", source, tmp_path / "three", size=size(source), processes=0)


def test_what_is_measured_of_a_corpus(source, tmp_path):
    """By the script that writes the numbers of docs/data.md."""
    path = Path(__file__).parents[2] / "benchmarks" / "word_corpus.py"
    spec = importlib.util.spec_from_file_location("word_corpus", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    corpus = prepare("enwik8-words", source, tmp_path / "to", size=size(source))
    found = script.describe(corpus, Counter(["this", "text", "text", "owl"]), Counter(["text", "owl"]))
    assert found["fingerprint"] == corpus.fingerprint
    assert found["splits"]["test"] == {
        "articles": 1, "tokens": len(words(corpus, "test")), "words": len(words(corpus, "test")) - 14,
        "tokens of an article": len(words(corpus, "test")), "share of <unk>": round(2 / (4 + 13 * 10 + 3), 4),
    }  # fmt: skip
    assert found["lines that the training text has, too"]["valid"] == {"lines": 0, "the same": 0}
    assert set(found["words with markup"].values()) == {0}
    assert found["of these among our most frequent"] == 2
    assert "| articles | 38 | 1 | 1 |" in script.table(found)


def test_from_the_command_line(source, tmp_path):
    arguments = ["data", "prepare", "enwik8-words", f"size={size(source)}", "processes=1", "--from", str(source)]
    said = CliRunner().invoke(app, [*arguments, "--to", str(tmp_path / "to")])
    assert said.exit_code == 0, said.output
    assert "enwik8-words" in said.output
    assert (
        load(tmp_path / "to").fingerprint
        == prepare("enwik8-words", source, tmp_path / "o", size=size(source)).fingerprint
    )


def test_titles_are_dealt_evenly_and_always_alike():
    names = [f"Article {number}" for number in range(20_000)]
    splits = [split_of(name) for name in names]
    assert splits[:200] == [split_of(name) for name in names[:200]]
    for split in ("valid", "test"):
        assert splits.count(split) == pytest.approx(20_000 / SHARES, abs=4 * (20_000 / SHARES) ** 0.5)
    # Nobody may deal them anew without saying so.
    assert [split_of(title) for title in ("Azerbaijan", "Anarchism")] == ["test", "train"]


def test_what_is_refused(source, tmp_path):
    with pytest.raises(DataError, match=r"must be enwik8, 100,000,000 bytes with md5 a1fa.*, got .* other bytes"):
        prepare("enwik8-words", source, tmp_path / "to")
    (source / "enwik8").write_text(dump([(title, TEXT) for title in titles("train", 3)]))
    with pytest.raises(DataError, match=r"must hold articles of every split, got none of valid in .* bytes"):
        prepare("enwik8-words", source, tmp_path / "to", size=size(source))


@pytest.mark.slow
def test_the_real_one_is_what_it_was(real, tmp_path):
    """Whoever changes the cleaning changes this, too, and the results that were made on the corpus of before."""
    corpus = prepare("enwik8-words", real, tmp_path / "to", processes=2)
    assert corpus.fingerprint == json.loads(MEASURED.read_text())["fingerprint"]
    known = vocabulary(corpus)
    tokens = np.concatenate([content.sequences["text"].tokens for content in corpus.splits.values()])
    counts = np.bincount(tokens, minlength=len(known))
    marks = [
        place for place, word in enumerate(known) if any(mark in word for mark in ("{{", "}}", "[[", "]]", "http://"))
    ]
    assert counts[marks].sum() == 0
    # Marks in formulas, and in programs that an article talks about.
    some = [place for place, word in enumerate(known) if word in ("<", ">", "{", "}", "&")]
    assert counts[some].sum() < 1e-3 * len(tokens)
