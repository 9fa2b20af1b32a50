"""PeerRead citations: does the first paper cite the second? Our stand-in for Long Range Arena Retrieval.

That corpus (AAN) is gone from the web. This one has 7,834 papers, cut to 4,096 bytes, and balanced pairs whose citing
papers are disjoint across splits. It is another task with another difficulty, and carries its own name in every table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mgk.data import byte_text
from mgk.data.documents import Pair, check_text, parse_label, write
from mgk.data.errors import DataError
from mgk.data.kind import CorpusKind, Progress, check_options, no_progress
from mgk.data.sources import columns, find, json_records, lines, read_members

SPLITS = ("train", "valid", "test")


def prepare(source: Path, folder: Path, progress: Progress = no_progress, **options: Any) -> None:
    """Read the papers and the pairs, and write both."""
    chosen = check_options("peerread", options, {})
    papers = find(source, "peerread_docs_4k.jsonl.xz", "peerread_docs_4k.jsonl")
    archive = find(source, "peerread_pairs.tar.xz", "peerread_pairs.tar")
    documents: dict[str, str] = {}
    for number, record in enumerate(json_records(papers, {"id": str, "text": str}), start=1):
        where = f"{papers}, record {number:,}"
        if record["id"] in documents:
            raise DataError(f"{where} must be another paper, got {record['id']} again")
        documents[record["id"]] = check_text(record["text"], where)
    members = read_members(archive, *(f"peerread_pairs.{split}.tsv" for split in SPLITS))
    splits: dict[str, list[Pair]] = {}
    for split in progress(SPLITS, "pairs"):
        name = f"peerread_pairs.{split}.tsv"
        splits[split] = []
        for number, line in enumerate(lines(members[name], f"{archive}, {name}"), start=1):
            where = f"{archive}, {name}, line {number:,}"
            label, first, second = columns(line, 3, where)
            for identifier in (first, second):
                if identifier not in documents:
                    raise DataError(f"{where} must name papers of {papers.name}, got {identifier!r}")
            splits[split].append(Pair(parse_label(label, where), first, second))
        if not splits[split]:
            raise DataError(f"{archive}, {name} must hold at least one pair, got none")
    write(folder, "peerread", [papers, archive], chosen, documents, splits)


CORPUS = CorpusKind(
    name="peerread",
    title="PeerRead citations as bytes (our stand-in for Long Range Arena Retrieval)",
    task="pairs",
    prepare=prepare,
    decode=byte_text.decode,
    origin="peerread_docs_4k.jsonl.xz (id, text) and peerread_pairs.tar.xz (label, citing, cited)",
)
