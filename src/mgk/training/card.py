"""The model card of a finished run, a README.md with its data, metrics, recipe, command and configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedModel

from mgk.data.registry import KINDS
from mgk.models import card

# Names of our tasks on the Hub.
TASKS = {
    "classification": "text-classification",
    "pairs": "text-classification",
    "language": "text-generation",
    "translation": "translation",
    "uptraining": "text-generation",
}


def write(folder: Path, model: PreTrainedModel, found: Mapping[str, Any], command: str | None) -> None:
    """Write a card into the folder of a run's best model, unless a person has written one.

    Args:
        folder: folder of the model.
        model: best model of the run.
        found: result of the run.
        command: command that made the run; ``None`` if no command did.
    """
    if found["config"].get("conversion") is not None:
        card.write(_of_converted(found, command), folder)
        return
    data = card.metadata(model)
    data.model_name = f"{found['recipe']} {found['row']}"
    data.eval_results = evaluations(found)
    data.pipeline_tag = TASKS[found["config"]["task"]]
    card.write(card.build(model, data, sections(found, command)), folder)


def _of_converted(found: Mapping[str, Any], command: str | None) -> ModelCard:
    """Build the card of a model that was converted and trained further, whose configuration is not ours."""
    source, attention = Path(found["config"]["conversion"]["model"]).name, found["config"]["model"]["attention"]
    data = ModelCardData(
        library_name="transformers", pipeline_tag=TASKS[found["config"]["task"]],
        tags=["mgk", f"attention-{attention}"], model_name=f"{source} {found['row']}", eval_results=evaluations(found),
    )  # fmt: skip
    parts = [
        f"# {data.model_name}",
        f"`{source}`, converted by the library mgk to the attention `{attention}` and trained further.",
        '## Loading\n\n```python\nimport mgk\n\nmodel = mgk.load_converted("path/of/this/folder")\n```',
        *(f"## {heading}\n\n{text}" for heading, text in sections(found, command)),
    ]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def evaluations(found: Mapping[str, Any]) -> list[EvalResult]:
    """Return every metric of a result, with the fingerprint of the data as its revision, and the seed of the run."""
    corpus = found["corpus"]
    return [
        EvalResult(
            task_type=TASKS[found["config"]["task"]], dataset_type=corpus["name"], dataset_name=_title(corpus["name"]),
            dataset_split=split, dataset_revision=corpus["fingerprint"], metric_type=name, metric_value=value,
            metric_name=f"{split} {name}", metric_args={"seed": found["seed"]},
        )
        for split, metrics in found["metrics"].items()
        for name, value in metrics.items()
        # The Hub reads JSON, which has neither NaN nor infinity.
        if name != "count" and math.isfinite(value)
    ]  # fmt: skip


def sections(found: Mapping[str, Any], command: str | None) -> list[tuple[str, str]]:
    """Return the sections of a card that describe the run, as headings and texts."""
    corpus, config = found["corpus"], found["config"]
    origin = KINDS[corpus["name"]].origin if corpus["name"] in KINDS else ""
    about = [
        ("task", config["task"]), ("corpus", f"`{corpus['name']}`: {_title(corpus['name'])}"), ("raw files", origin),
        ("fingerprint of the prepared data", f"`{corpus['fingerprint']}`"),
    ]  # fmt: skip
    metrics = [
        [split, name, f"{value:.6g}", f"{found['seed']}"]
        for split, values in found["metrics"].items()
        for name, value in values.items()
    ]
    metrics += [["test", f"without a transformer: {name}", f"{value:.6g}", ""] for name, value in _numbers(found)]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    run = [
        ("recipe", f"`{found['recipe']}`"), ("row", f"`{found['row']}`"), ("seed", f"{found['seed']}"),
        ("best step", f"{found['best_step']:,} of {found['steps']:,}"), ("tokens read", f"{found['tokens']:,}"),
        ("device", f"{found['ranks']} x {found['device']}, {found['precision']}"), ("versions", versions),
    ]  # fmt: skip
    made = f"```bash\n{command}\n```" if command else "It was trained from Python, with `mgk.training.fit`."
    settings = yaml.safe_dump(dict(config), sort_keys=False).rstrip()
    return [
        ("Data", _table(["", ""], [[name, value] for name, value in about if value])),
        ("Results", _table(["split", "metric", "value", "seed"], metrics)),
        ("Training", f"{_table(['', ''], [list(row) for row in run])}\n\n{made}"),
        ("Configuration", f"```yaml\n{settings}\n```"),
        ("Licence", f"{card.licence()} The data has a licence of its own."),
    ]


def _numbers(found: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in found["baselines"].items() if isinstance(value, (int, float))]


def _title(corpus: str) -> str:
    return KINDS[corpus].title if corpus in KINDS else corpus


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
