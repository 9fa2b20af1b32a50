"""Support of ``trust_remote_code=True``: a saved model names a module beside its weights, which imports ours."""

from __future__ import annotations

import os
from pathlib import Path

MODULE = "modeling_mgk"
CLASSES = (
    "MGKConfig",
    "MGKForCausalLM",
    "MGKForSeq2SeqLM",
    "MGKForSequenceClassification",
    "MGKForSequencePairClassification",
    "MGKModel",
    "MGKSeq2SeqModel",
)
SOURCE = '''"""The code of this model is in the library mgk: pip install 'mgk[models]'. transformers reads it here."""

from mgk.models import (  # noqa: F401
{names}
)
'''


def auto_map(is_encoder_decoder: bool, architectures: list[str] | None) -> dict[str, str]:
    """Map each ``Auto`` class of transformers to a class of ours, in the format of ``config.json``."""
    classes = {"AutoConfig": "MGKConfig"}
    if is_encoder_decoder:
        classes |= {"AutoModel": "MGKSeq2SeqModel", "AutoModelForSeq2SeqLM": "MGKForSeq2SeqLM"}
    else:
        pairs = "MGKForSequencePairClassification"
        labels = pairs if pairs in (architectures or ()) else "MGKForSequenceClassification"
        classes |= {
            "AutoModel": "MGKModel",
            "AutoModelForCausalLM": "MGKForCausalLM",
            "AutoModelForSequenceClassification": labels,
        }
    return {auto: f"{MODULE}.{name}" for auto, name in classes.items()}


def write_module(folder: str | os.PathLike[str]) -> None:
    """Write the module that :func:`auto_map` names into a folder."""
    names = "\n".join(f"    {name}," for name in CLASSES)
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{MODULE}.py").write_text(SOURCE.format(names=names), encoding="utf-8")
