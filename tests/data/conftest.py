"""Where the data is: small files of our own, and the real corpora where they are at hand."""

import tarfile
from pathlib import Path

import pytest

FIXTURES = Path(__file__).parent / "fixtures"
REAL = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def fixtures():
    return FIXTURES


@pytest.fixture
def real():
    """The real corpora, which a user's clone does not have."""
    if not REAL.is_dir():
        pytest.skip("the real corpora are not in ../shared/data")
    return REAL


@pytest.fixture
def peerread_source(tmp_path):
    """The papers, and their pairs in an archive as the real ones are."""
    folder = tmp_path / "peerread_source"
    folder.mkdir()
    (folder / "peerread_docs_4k.jsonl").write_bytes((FIXTURES / "peerread" / "peerread_docs_4k.jsonl").read_bytes())
    with tarfile.open(folder / "peerread_pairs.tar.xz", "w:xz") as archive:
        for path in sorted((FIXTURES / "peerread").glob("*.tsv")):
            archive.add(path, path.name)
    return folder
