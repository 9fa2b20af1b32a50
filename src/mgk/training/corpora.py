"""Opening the corpus of a run, which is prepared first if necessary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mgk.data import registry
from mgk.data.errors import DataError
from mgk.data.kind import Progress, check_options, no_progress
from mgk.data.store import Corpus
from mgk.training.configuration import DataConfig


def open_or_prepare(
    data: DataConfig,
    *,
    source: str | Path | None = None,
    folder: str | Path | None = None,
    progress: Progress = no_progress,
) -> Corpus:
    """Map the corpus of a run into memory, after preparing it if it does not exist with these options.

    Args:
        data: the corpus and its options.
        source: folder of the raw files; ``None`` is ``$MGK_DATA``.
        folder: folder of the prepared corpus; ``None`` is the default folder for these options.
        progress: shows the progress of preparing.
    """
    kind = registry.find_kind(data.corpus)
    wanted = check_options(data.corpus, data.options, kind.options)
    place = default_folder(data) if folder is None else Path(folder)
    try:
        corpus = registry.open_corpus(data.corpus, place)
    except DataError:
        return registry.prepare(data.corpus, source, place, progress, **data.options)
    found = corpus.manifest["options"]
    # Options that are not in the manifest do not change the data.
    if any(found[key] != json.loads(json.dumps(wanted[key])) for key in found if key in wanted):
        return registry.prepare(data.corpus, source, place, progress, **data.options)
    return corpus


def default_folder(data: DataConfig) -> Path:
    """Default folder of the corpus with these options."""
    usual = registry.default_folder(data.corpus)
    defaults = registry.find_kind(data.corpus).options
    others = {key: value for key, value in data.options.items() if key not in defaults or value != defaults[key]}
    if not others:
        return usual
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:8]
    return usual.with_name(f"{usual.name}-{digest}")
