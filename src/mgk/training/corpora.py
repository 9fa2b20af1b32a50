"""The corpus of a run: the one that is prepared, or prepared now."""

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
    """Map the corpus that a run asks for; prepare it where it is not there with these options.

    Args:
        data: which corpus, with which options.
        source: folder of the raw files; ``None``: ``$MGK_DATA``.
        folder: where the prepared corpus is; ``None``: the usual place, with another name for other options.
        progress: shows how far it is.
    """
    kind = registry.find_kind(data.corpus)
    wanted = check_options(data.corpus, data.options, kind.options)
    place = default_folder(data) if folder is None else Path(folder)
    try:
        corpus = registry.open_corpus(data.corpus, place)
    except DataError:
        return registry.prepare(data.corpus, source, place, progress, **data.options)
    found = corpus.manifest["options"]
    # Options that the manifest does not name do not change the data.
    if any(found[key] != json.loads(json.dumps(wanted[key])) for key in found if key in wanted):
        return registry.prepare(data.corpus, source, place, progress, **data.options)
    return corpus


def default_folder(data: DataConfig) -> Path:
    """Where the corpus of these options is kept unless told."""
    usual = registry.default_folder(data.corpus)
    defaults = registry.find_kind(data.corpus).options
    others = {key: value for key, value in data.options.items() if key not in defaults or value != defaults[key]}
    if not others:
        return usual
    digest = hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:8]
    return usual.with_name(f"{usual.name}-{digest}")
