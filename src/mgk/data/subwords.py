"""Text through the tokenizer of a model that exists, for that model to be trained further."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import decode as decode_bytes
from mgk.data.sources import find, read_bytes, read_members
from mgk.data.store import Corpus, Writer, checksum

ENWIK8_ENDS = {"train": 90_000_000, "valid": 95_000_000, "test": 100_000_000}
WIKI_OPTIONS: dict[str, Any] = {"tokenizer": None, "enwik8_bytes": ENWIK8_ENDS["train"]}
FILE_OPTIONS: dict[str, Any] = {"tokenizer": None}
# Characters that are tokenised at a time: a tokenizer that is given a whole corpus takes many times its size in memory.
PIECE = 2**20


def wikitext103(source: Path, split: str) -> str:
    """WikiText-103's ``valid`` or ``test`` as it was published: with spaces between words, and ``<unk>``."""
    return _wikitext(source, "wikitext103", split)[1]


def sentences(source: Path) -> list[str]:
    """1,000 English sentences that describe pictures: the test of 2017 of Multi30k."""
    name = "multi30k.test_2017_flickr.en"
    path = find(source, "multi30k_deen.tar.xz", name)
    content = read_members(path, name)[name] if path.suffix == ".xz" else read_bytes(path)
    return [line for line in decode_bytes(content, str(path)).split("\n") if line.strip()]


def prepare_wiki(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Train on WikiText-2 and the front of enwik8's training bytes; ``valid`` and ``test`` are WikiText-103's.

    ``enwik8`` is a split of its own: the last 5 million bytes, which is the test of that benchmark. With
    ``enwik8_bytes=0`` nothing of it is needed, and nothing is there.
    """
    chosen = check_options("subword-wiki", options, WIKI_OPTIONS)
    count = chosen["enwik8_bytes"]
    if not isinstance(count, int) or not 0 <= count <= ENWIK8_ENDS["train"]:
        raise ValueError(f"enwik8_bytes must be an integer in [0, {ENWIK8_ENDS['train']:,}], got {count!r}")
    texts, paths = {}, []
    for split, name in (("train", "wikitext2"), ("valid", "wikitext103"), ("test", "wikitext103")):
        path, texts[split] = _wikitext(source, name, split)
        paths.append(path)
    if count > 0:
        raw = find(source, "enwik8.xz", "enwik8", "enwik8.gz")
        content = read_bytes(raw)
        if len(content) < ENWIK8_ENDS["test"]:
            raise DataError(f"{raw} must hold {ENWIK8_ENDS['test']:,} bytes, got {len(content):,}")
        paths.append(raw)
        # A cut may fall into a character.
        texts["train"] += content[:count].decode(errors="ignore")
        texts["enwik8"] = content[ENWIK8_ENDS["valid"] :].decode(errors="ignore")
    _write("subword-wiki", folder, texts, list(dict.fromkeys(paths)), chosen, progress)


def prepare_files(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """``train.txt``, ``valid.txt`` and ``test.txt`` of a folder."""
    chosen = check_options("subword-files", options, FILE_OPTIONS)
    paths = [find(source, f"{split}.txt") for split in ("train", "valid", "test")]
    texts = {path.stem: decode_bytes(path.read_bytes(), str(path)) for path in paths}
    _write("subword-files", folder, texts, paths, chosen, progress)


def _write(
    name: str, folder: Path, texts: dict[str, str], paths: list[Path], chosen: dict[str, Any], progress: Progress
) -> None:
    tokenizer, files = _load_tokenizer(chosen["tokenizer"])
    vocabulary = len(tokenizer)
    with Writer(folder, name, {path.name: checksum(path) for path in [*paths, *files]}, chosen) as writer:
        for split, text in texts.items():
            pieces = list(_pieces(text))
            ids = [
                np.asarray(tokenizer(piece, add_special_tokens=False)["input_ids"], dtype=np.int32)
                for piece in progress(pieces, f"tokens of {split}", len(pieces))
            ]
            tokens = np.concatenate(ids) if ids else np.empty(0, dtype=np.int32)
            if len(tokens) < 2:
                raise DataError(f"{split} must hold at least 2 tokens, got {len(tokens)}")
            writer.sequences(split, "text", tokens, [len(tokens)])
            writer.fact(f"{split}: bytes", len(text.encode()))
            writer.fact(f"{split}: tokens", len(tokens))
        writer.fact("vocabulary", vocabulary)


def _pieces(text: str) -> Iterator[str]:
    """Cut behind the ends of lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _wikitext(source: Path, name: str, split: str) -> tuple[Path, str]:
    plain = source / ("wikitext-2" if name == "wikitext2" else "wikitext-103") / f"wiki.{split}.tokens"
    if plain.is_file():
        return plain, decode_bytes(plain.read_bytes(), str(plain))
    archive, member = find(source, "wikitext.tar.xz"), f"{name}.wiki.{split}.tokens"
    return archive, decode_bytes(read_members(archive, member)[member], f"{archive}, {member}")


def _load_tokenizer(name: Any) -> tuple[Any, list[Path]]:
    """A tokenizer, and the files that decide what it does."""
    from transformers import AutoTokenizer

    from mgk.conversion import find_weights

    if not isinstance(name, str) or not name:
        raise ValueError(f"tokenizer must be the folder of a model, or its name on the Hub, got {name!r}")
    place = find_weights(name)
    return AutoTokenizer.from_pretrained(place), sorted(Path(place).glob("tokenizer.json"))


@functools.lru_cache(maxsize=2)
def _tokenizer_of(name: str) -> Any:
    return _load_tokenizer(name)[0]


def decode(corpus: Corpus, field: str, tokens: NDArray[Any]) -> str:
    """Back to text, with the tokenizer that the corpus was made with."""
    text: str = _tokenizer_of(corpus.manifest["options"]["tokenizer"]).decode(tokens.tolist())
    return text


CORPORA = (
    CorpusKind(
        name="subword-wiki",
        title="WikiText and enwik8 through the tokenizer of a model",
        task="uptraining",
        prepare=prepare_wiki,
        decode=decode,
        options=WIKI_OPTIONS,
        origin="wikitext.tar.xz, or wikitext-2 and wikitext-103 as folders of wiki.{train,valid,test}.tokens; enwik8",
    ),
    CorpusKind(
        name="subword-files",
        title="Text files of your own through the tokenizer of a model",
        task="uptraining",
        prepare=prepare_files,
        decode=decode,
        options=FILE_OPTIONS,
        origin="train.txt, valid.txt and test.txt in UTF-8",
    ),
)
