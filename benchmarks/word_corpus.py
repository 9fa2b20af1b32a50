"""What enwik8-words is like, beside WikiText: writes results/bench/enwik8-words.json, and the table in docs/data.md.

    python benchmarks/word_corpus.py path/to/raw/files [--prepared FOLDER]

The checksum in the file is that of the corpus that results were made on. Without raw files it writes the table alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data import Corpus, load, prepare
from mgk.data.enwik8_words import NAME, UNKNOWN
from mgk.data.sources import read_members
from mgk.data.wikitext import END, SPLITS, vocabulary

ROOT = Path(__file__).parent.parent
OUTPUT = ROOT / "results" / "bench" / "enwik8-words.json"
PAGE = ROOT / "docs" / "data.md"
BEGIN, FINISH = "<!-- written by benchmarks/word_corpus.py -->", "<!-- end -->"

LEFT_OVER = ("{{", "}}", "[[", "]]", "http://")
"""Markup that no word should have in it."""
SINGLE = ("<", ">", "{", "}", "&")
"""Marks that a text may be about."""
CUTOFFS = (10_000, 20_000, 40_000)
FREQUENT = 100
LONG = 20
"""Words of a line that two articles have in common by chance only if they are shorter."""


def describe(corpus: Corpus, validation: Counter[str], training: Counter[str]) -> dict[str, Any]:
    """The numbers.

    Args:
        corpus: the prepared one.
        validation: words of WikiText-103's validation text.
        training: words of WikiText-2's training text.
    """
    known = vocabulary(corpus)
    streams = {split: np.asarray(corpus.splits[split].sequences["text"].tokens) for split in SPLITS}
    counts = {split: np.bincount(stream, minlength=len(known)) for split, stream in streams.items()}
    every = sum(counts.values())
    assert isinstance(every, np.ndarray)
    train = dict(zip(known, counts["train"].tolist(), strict=True))
    own = Counter({word: count for word, count in train.items() if word != END})
    frequent = [word for word, _ in validation.most_common(FREQUENT)]
    share = {
        "WikiText-103, valid": _share(validation, frequent), "WikiText-2, train": _share(training, frequent),
        "enwik8-words, train": _share(own, frequent),
    }  # fmt: skip
    known_lines = set(_lines(streams["train"]))
    return {
        "corpus": NAME, "fingerprint": corpus.fingerprint, "source": dict(corpus.manifest["source"]),
        "facts": dict(corpus.manifest["facts"]), "vocabulary": len(known),
        "splits": {split: _describe(corpus, split, counts[split], known) for split in SPLITS},
        "cutoffs": {str(end): _cutoff(counts["train"], end) for end in CUTOFFS if end < len(known)},
        "words with markup": {mark: _with(mark, known, every) for mark in LEFT_OVER},
        "single marks": {mark: int(every[known.index(mark)]) if mark in known else 0 for mark in SINGLE},
        f"share of the {FREQUENT} most frequent words of WikiText-103, valid": share,
        "of these among our most frequent": len({*frequent} & {word for word, _ in own.most_common(FREQUENT)}),
        "lines that the training text has, too": {
            split: {
                "lines": len(_lines(streams[split])),
                "the same": sum(line in known_lines for line in _lines(streams[split])),
            }
            for split in ("valid", "test")
        },
    }  # fmt: skip


def _describe(corpus: Corpus, split: str, counts: NDArray[np.int64], known: list[str]) -> dict[str, Any]:
    articles = corpus.splits[split].sequences["text"]
    words = int(counts.sum() - counts[known.index(END)])
    return {
        "articles": len(articles), "tokens": len(articles.tokens), "words": words,
        "tokens of an article": round(float(articles.lengths.mean())),
        "share of <unk>": round(float(counts[known.index(UNKNOWN)] / words), 4),
    }  # fmt: skip


def _share(counts: Counter[str], words: list[str]) -> float:
    return round(sum(counts[word] for word in words) / counts.total(), 4)


def _with(mark: str, known: list[str], counts: NDArray[np.int64]) -> int:
    return int(sum(count for word, count in zip(known, counts.tolist(), strict=True) if mark in word))


def _lines(stream: NDArray[Any]) -> list[bytes]:
    """The long lines, each as its bytes; the end of a line is word 0."""
    ends = np.flatnonzero(stream == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    return [stream[a:b].tobytes() for a, b in zip(starts.tolist(), ends.tolist(), strict=True) if b - a >= LONG]


def table(content: dict[str, Any]) -> str:
    """For the page."""
    lines = ["| | train | valid | test |", "|---|---|---|---|"]
    formats = {
        "articles": "articles", "words": "words", "tokens": "with the ends of lines",
        "tokens of an article": "of an article, mean",
    }  # fmt: skip
    splits = [content["splits"][split] for split in SPLITS]
    for key, title in formats.items():
        lines.append(f"| {title} | {' | '.join(f'{each[key]:,}' for each in splits)} |")
    lines.append(f"| `<unk>` | {' | '.join(_percent(each['share of <unk>'], 2) for each in splits)} |")
    shares = next(value for key, value in content.items() if key.startswith("share of the"))
    theirs, small, ours = (_percent(shares[key]) for key in shares)
    same = content["lines that the training text has, too"]
    valid, test = (f"{same[key]['the same']} of {same[key]['lines']:,}" for key in ("valid", "test"))
    left, single = (sum(content[key].values()) for key in ("words with markup", "single marks"))
    said = [
        f"- The vocabulary has {content['vocabulary']:,} words.",
        f"- Words with `{'`, `'.join(LEFT_OVER)}` in them: {left:,}.",
        f"- The words `{'`, `'.join(SINGLE)}`, in formulas, programs and names: {single:,}.",
        f"- The {FREQUENT} most frequent words of WikiText-103's validation text are {theirs} of it, {small} of the"
        f" training text of WikiText-2 and {ours} of ours, whose {FREQUENT} most frequent have"
        f" {content['of these among our most frequent']} of them.",
        f"- Of the lines of at least {LONG} words the training text has {valid} of validation and {test} of the test.",
    ]
    return "\n".join([*lines, "", *said])


def _cutoff(counts: NDArray[np.int64], end: int) -> dict[str, float]:
    share = float(counts[:end].sum() / counts.sum())
    return {"share of the training text before it": round(share, 4), "count of the word at it": int(counts[end])}


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def measure(source: Path, prepared: Path | None) -> dict[str, Any]:
    names = {"valid": "wikitext103.wiki.valid.tokens", "train": "wikitext2.wiki.train.tokens"}
    texts = read_members(source / "wikitext.tar.xz", *names.values())
    words = {split: Counter(texts[name].decode().split()) for split, name in names.items()}
    if prepared is not None:
        return describe(load(prepared), words["valid"], words["train"])
    with tempfile.TemporaryDirectory() as folder:
        return describe(prepare(NAME, source, Path(folder) / NAME), words["valid"], words["train"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="?", help="folder with enwik8 and wikitext.tar.xz")
    parser.add_argument("--prepared", type=Path, help="where the corpus is prepared already")
    arguments = parser.parse_args()
    if arguments.source is not None:
        OUTPUT.write_text(json.dumps(measure(arguments.source, arguments.prepared), indent=1) + "\n")
        print(f"wrote {OUTPUT.name}")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(FINISH)
    PAGE.write_text(f"{before}{BEGIN}\n{table(json.loads(OUTPUT.read_text()))}\n{FINISH}{after}")
    print(f"wrote the table of {PAGE.name}")


if __name__ == "__main__":
    main()
