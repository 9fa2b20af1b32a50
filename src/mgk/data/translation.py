"""German-English sentence pairs with one byte-level vocabulary for both languages.

The training pairs are cleaned as fairseq cleans IWSLT'14: a pair goes where one side has more than ``clean_ratio``
times the words of the other, or more than ``longest`` words. Validation and test pairs are never touched.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import find, lines, read_members
from mgk.data.store import Corpus, Writer, checksum

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)
FIELDS = {"source": "de", "target": "en"}
BATCH = 4096
"""Lines tokenised at once: enough to keep every core busy, few enough that their encodings take little memory."""

_SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)
_LARGEST_VOCABULARY = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the raw files of a corpus are called."""

    name: str
    title: str
    origin: str
    archive: str | None = None
    """A tar with ``{member}.de`` and ``{member}.en``."""
    members: Mapping[str, str] = field(default_factory=dict)
    """The member of each split."""
    is_plain: bool = False
    """Whether ``train.de``, ``train.en``, ``valid.de`` and so on are read where they are there."""
    partial: str | None = None
    """What of the training set the archive holds, where that is not all."""
    lowercase: bool = False
    """Whether the corpus is lower-cased by custom, which is what ``lowercase=None`` means."""
    vocabulary: int = 10_000
    """How many tokens its vocabulary has by custom."""
    clean_ratio: float = 1.5
    """How it is cleaned by custom."""

    @property
    def options(self) -> dict[str, Any]:
        """What :func:`prepare` takes for this corpus, with its defaults."""
        return {
            "vocabulary": self.vocabulary,
            "lowercase": self.lowercase,
            "clean_ratio": self.clean_ratio,
            "longest": 175,
        }


@dataclass(frozen=True)
class Side:
    """One language of a split."""

    lines: list[str]
    where: str


def prepare(
    layout: Layout, source: Path | str, folder: Path | str, progress: Progress = no_progress, **options: Any
) -> None:
    """Clean the training pairs, learn a joint vocabulary on them, and write every split as tokens that ``<eos>`` ends.

    ``vocabulary`` counts the special tokens and the 256 bytes; ``lowercase`` changes the text before all of this.
    """
    chosen = _checked_options(layout, options)
    files, splits, partial = _read(layout, Path(source))
    pairs = {split: _paired(split, *sides) for split, sides in splits.items()}
    pairs["train"], dropped = _clean(pairs["train"], chosen["clean_ratio"], chosen["longest"])
    if not pairs["train"]:
        raise DataError(f"{splits['train'][0].where} must hold pairs that pass the cleaning, got none: {dropped}")
    texts = {split: dict(zip(FIELDS, zip(*found, strict=True), strict=True)) for split, found in pairs.items()}
    if chosen["lowercase"]:
        texts = {
            split: {field: tuple(line.lower() for line in text) for field, text in fields.items()}
            for split, fields in texts.items()
        }
    tokenizer = _learn([texts["train"][field] for field in FIELDS], chosen["vocabulary"], progress)
    with Writer(Path(folder), layout.name, {path.name: checksum(path) for path in files}, chosen) as writer:
        for split, fields in texts.items():
            for field, text in fields.items():
                writer.sequences(split, field, *_tokenise(tokenizer, text, f"{split} {FIELDS[field]}", progress))
        writer.file(TOKENIZER_FILE, tokenizer.to_str())
        writer.fact("vocabulary", tokenizer.get_vocab_size())
        writer.fact("training pairs before cleaning", len(splits["train"][0].lines))
        writer.fact("training pairs dropped", dropped)
        if partial is not None:
            writer.fact("partial training set", partial)


def _checked_options(layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = check_options(layout.name, options, layout.options)
    if chosen["lowercase"] is None:
        chosen["lowercase"] = layout.lowercase
    if not isinstance(chosen["lowercase"], bool):
        raise ValueError(f"lowercase must be True, False or None, got {chosen['lowercase']!r}")
    for name, least in (("vocabulary", _SMALLEST_VOCABULARY), ("longest", 1)):
        if not isinstance(chosen[name], int) or isinstance(chosen[name], bool) or chosen[name] < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {chosen[name]!r}")
    if chosen["vocabulary"] > _LARGEST_VOCABULARY:
        raise ValueError(
            f"vocabulary must be at most {_LARGEST_VOCABULARY}, the largest token on disk, got {chosen['vocabulary']}"
        )
    ratio = chosen["clean_ratio"]
    if not isinstance(ratio, int | float) or isinstance(ratio, bool) or not 1 <= ratio <= sys.float_info.max:
        raise ValueError(f"clean_ratio must be a finite number of at least 1, got {ratio!r}")
    # 2 and 2.0 are the same option, and the manifest is compared as text.
    chosen["clean_ratio"] = float(ratio)
    return chosen


def _read(layout: Layout, source: Path) -> tuple[list[Path], dict[str, tuple[Side, Side]], str | None]:
    """The files that were read, both sides of each split, and what part of the training set this is (``None``: all)."""
    if layout.is_plain:
        folder = source / layout.name if (source / layout.name).is_dir() else source
        if layout.archive is None or (folder / "train.de").is_file():
            splits, files = {}, []
            for split in ("train", "valid", "test"):
                paths = [find(folder, f"{split}.{language}") for language in FIELDS.values()]
                german, english = (Side(lines(path.read_bytes(), str(path)), str(path)) for path in paths)
                splits[split] = (german, english)
                files += paths
            return files, splits, None
    assert layout.archive is not None
    archive = find(source, layout.archive, *(["train.de"] if layout.is_plain else []))
    names = {split: [f"{stem}.{language}" for language in FIELDS.values()] for split, stem in layout.members.items()}
    contents = read_members(archive, *(name for pair in names.values() for name in pair))
    splits = {}
    for split, pair in names.items():
        german, english = (Side(lines(contents.pop(name), f"{archive}, {name}"), f"{archive}, {name}") for name in pair)
        splits[split] = (german, english)
    return [archive], splits, layout.partial


def _paired(split: str, german: Side, english: Side) -> list[tuple[str, str]]:
    if len(german.lines) != len(english.lines):
        raise DataError(
            f"{german.where} and {english.where} must have the same number of lines, "
            f"got {len(german.lines):,} and {len(english.lines):,}"
        )
    if not german.lines:
        raise DataError(f"{german.where} must hold at least one line, got none")
    if split != "train":
        # A pair left out here would change the score that the corpus is known by.
        for side in (german, english):
            for number, line in enumerate(side.lines, start=1):
                if not line.strip():
                    raise DataError(f"{side.where}, line {number:,} must hold text, got an empty line")
    return list(zip(german.lines, english.lines, strict=True))


def _clean(
    pairs: Sequence[tuple[str, str]], ratio: float, longest: int
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The pairs worth learning from, and how many went for which reason."""
    kept = []
    dropped = {"empty": 0, "too long": 0, "ratio": 0}
    for pair in pairs:
        shorter, longer = sorted(len(line.split()) for line in pair)
        if shorter == 0:
            dropped["empty"] += 1
        elif longer > longest:
            dropped["too long"] += 1
        elif longer / shorter > ratio:
            dropped["ratio"] += 1
        else:
            kept.append(pair)
    return kept, dropped


def _learn(texts: Sequence[Sequence[str]], vocabulary: int, progress: Progress) -> Any:
    """A byte-level BPE tokenizer that loses nothing: no normaliser, no space put in front, every byte has a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        # A pair of tokens seen once teaches a model nothing: subword-nmt, which fairseq uses, stops there too.
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    batches = [batch for text in texts for batch in _batches(text)]
    tokenizer.train_from_iterator(iter(progress(batches, "vocabulary", len(batches))), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {SPECIAL_TOKENS[EOS]}", special_tokens=[(SPECIAL_TOKENS[EOS], EOS)]
    )
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [PAD, BOS, EOS]
    # A line that spells out "<eos>" is text. The file does not keep this setting: load_tokenizer makes it anew.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _tokenise(
    tokenizer: Any, text: Sequence[str], description: str, progress: Progress
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All tokens in one flat array, and the length of each line."""
    kind = token_type(tokenizer.get_vocab_size())
    parts: list[NDArray[Any]] = []
    lengths = np.empty(len(text), dtype=np.int64)
    place = 0
    for batch in progress(_batches(text), description, math.ceil(len(text) / BATCH)):
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(batch)]
        lengths[place : place + len(ids)] = [len(line) for line in ids]
        place += len(ids)
        parts.append(np.fromiter((token for line in ids for token in line), dtype=kind))
    return np.concatenate(parts), lengths


def _batches(text: Sequence[str]) -> Iterator[list[str]]:
    return (list(text[start : start + BATCH]) for start in range(0, len(text), BATCH))


def token_type(vocabulary: int) -> type[np.uint16] | type[np.int32]:
    """The smallest type that is kept on disk for tokens of a vocabulary of this size."""
    return np.uint16 if vocabulary <= 65_535 else np.int32


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path, expected: str) -> Any:
    """The tokenizer in a file. The checksum is part of the key: a folder may be prepared anew with other options."""
    from tokenizers import Tokenizer

    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path} must be there, got no such file: prepare it again") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(f"{path} must have SHA-256 {expected[:12]}..., got {found[:12]}...: prepare it again")
    return Tokenizer.from_str(content.decode())


def _tokenizer_of(corpus: Corpus) -> Any:
    expected = corpus.manifest["arrays"].get(TOKENIZER_FILE)
    if expected is None:
        raise DataError(f"{corpus.folder} must be a translation corpus with a {TOKENIZER_FILE}, got {corpus.name}")
    return _tokenizer(corpus.folder / TOKENIZER_FILE, expected)


def decode(corpus: Corpus, field: str, tokens: NDArray[Any] | Iterable[int]) -> str:
    """The line that these tokens were made from, to the byte. Special tokens, such as padding, are left out."""
    if field not in FIELDS:
        raise ValueError(f"field must be one of {', '.join(FIELDS)}, got {field!r}")
    tokenizer = _tokenizer_of(corpus)
    size = tokenizer.get_vocab_size()
    ids = [int(token) for token in tokens]
    for token in ids:
        # The tokenizer would skip a token that it does not have.
        if not 0 <= token < size:
            raise ValueError(f"tokens must lie in [0, {size}), got {token}")
    return str(tokenizer.decode([token for token in ids if token > EOS], skip_special_tokens=False))


def load_tokenizer(corpus: Corpus) -> Any:
    """A ``transformers.PreTrainedTokenizerFast`` that gives a line the tokens it has in the corpus.

    Where the corpus is lower-cased, so must the line be.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    pad, bos, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        # A copy: what the caller sets on it must not reach ``decode``.
        tokenizer_object=Tokenizer.from_str(_tokenizer_of(corpus).to_str()),
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


_PLAIN = "{train,valid,test}.{de,en}, one sentence a line, in the folder or in its subfolder"

LAYOUTS = (
    Layout(
        name="iwslt14",
        title="IWSLT'14 German-English",
        origin=f"fairseq's prepare-iwslt14.sh before its BPE: {_PLAIN} iwslt14; or a part, iwslt14_partial.tar.xz",
        archive="iwslt14_partial.tar.xz",
        members={"train": "iwslt14.train10k", "valid": "iwslt14.valid", "test": "iwslt14.test"},
        is_plain=True,
        partial="train10k",
        lowercase=True,
    ),
    Layout(
        name="multi30k",
        title="Multi30k German-English, captions",
        origin="Elliott et al. 2016: multi30k_deen.tar.xz with "
        "multi30k.{train,val,test_2016_flickr,test_2017_flickr,test_2017_mscoco,test_2018_flickr}.{de,en}",
        archive="multi30k_deen.tar.xz",
        members={
            "train": "multi30k.train",
            "valid": "multi30k.val",
            "test": "multi30k.test_2016_flickr",
            "test_2017_flickr": "multi30k.test_2017_flickr",
            "test_2017_mscoco": "multi30k.test_2017_mscoco",
            "test_2018_flickr": "multi30k.test_2018_flickr",
        },
        # Results are published for all 29,000 captions.
        clean_ratio=100.0,
    ),
    Layout(
        name="tatoeba",
        title="Tatoeba German-English, short sentences",
        origin="tatoeba.org: tatoeba_deen.tar.xz with tatoeba_deen.{train,valid,test}.{de,en}",
        archive="tatoeba_deen.tar.xz",
        members={split: f"tatoeba_deen.{split}" for split in ("train", "valid", "test")},
    ),
    Layout(
        name="wmt14",
        title="WMT'14 German-English",
        origin=f"fairseq's prepare-wmt14en2de.sh before its BPE: {_PLAIN} wmt14",
        is_plain=True,
        vocabulary=32_000,
    ),
)

CORPORA: tuple[CorpusKind, ...] = tuple(
    CorpusKind(
        name=layout.name,
        title=layout.title,
        task="translation",
        prepare=functools.partial(prepare, layout),
        decode=decode,
        options=layout.options,
        origin=layout.origin,
    )
    for layout in LAYOUTS
)
