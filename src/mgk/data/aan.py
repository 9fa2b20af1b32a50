"""ACL Anthology Network pairs: Long Range Arena Retrieval, from its release's tsv files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mgk.data import byte_text
from mgk.data.documents import Pair, check_text, parse_label, write
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import columns, find, lines, read_bytes

FILES = {"train": "new_aan_pairs.train.tsv", "valid": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}
OPTIONS = {"longest": 4096}


def prepare(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Read the three files: ``label, id, id, text, text`` a line, no header, no quoting.

    The texts are taken as they stand, escapes and all, as the benchmark does; ``longest`` bytes of each are kept.
    """
    chosen = check_options("aan", options, OPTIONS)
    longest = chosen["longest"]
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ValueError(f"longest must be an integer of at least 1, got {longest!r}")
    files = [find(source, name) for name in FILES.values()]
    documents: dict[str, str] = {}
    splits: dict[str, list[Pair]] = {}
    for split, path in progress(list(zip(FILES, files, strict=True)), "pairs"):
        splits[split] = []
        for number, line in enumerate(lines(read_bytes(path), str(path)), start=1):
            where = f"{path}, line {number:,}"
            label, first, second, first_text, second_text = columns(line, 5, where)
            for identifier, text in ((first, first_text), (second, second_text)):
                cut = check_text(text, where).encode()[:longest].decode(errors="ignore")
                if documents.setdefault(identifier, cut) != cut:
                    raise DataError(f"{where} must give {identifier} the text it had before, got another")
            splits[split].append(Pair(parse_label(label, where), first, second))
        if not splits[split]:
            raise DataError(f"{path} must hold at least one pair, got none")
    write(folder, "aan", files, chosen, documents, splits)


CORPUS = CorpusKind(
    name="aan",
    title="ACL Anthology Network pairs as bytes (Long Range Arena Retrieval)",
    task="pairs",
    prepare=prepare,
    decode=byte_text.decode,
    options=OPTIONS,
    origin="lra_release/tsv_data/new_aan_pairs.{train,eval,test}.tsv of the Long Range Arena release",
)
