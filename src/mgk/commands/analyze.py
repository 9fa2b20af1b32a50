"""``mgk analyze``: analyse the attention of a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mgk.commands.training import Device, Source

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from mgk.analysis import Findings, LearningCurves
    from mgk.data.store import Corpus
    from mgk.models import MGKConfig
    from mgk.training.configuration import RunConfig

RUN_CONFIG = "config.yaml"
DEFAULT_FOLDER = "analysis"
# Length of the batch for a model without a position table and without data that tells the length of its texts.
LONGEST = 1024


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to analyse, with a batch for it and their origin."""

    model: PreTrainedModel
    """The model, on the CPU."""
    inputs: Mapping[str, Tensor]
    """A batch for the model."""
    source: str
    """Origin of the batch, in words."""
    curves: LearningCurves | None = None
    """Learning curves of its training, if it comes from a run."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts to store with the numbers."""


def analyze(
    folder: Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="Folder of a run, or of a saved model.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Output folder for figures and numbers; default: analysis/ inside RUN_OR_MODEL."),
    ] = (None),
    text: Annotated[Path | None, typer.Option(help="Text file to analyse instead of the run's data.")] = None,
    split: Annotated[str, typer.Option(help="Split of the run's data: train, valid or test.")] = "test",
    samples: Annotated[int, typer.Option(min=1, help="Number of sequences in the batch.")] = 1,
    tokens: Annotated[int | None, typer.Option(min=2, help="Length in tokens to which sequences are cut.")] = None,
    queries: Annotated[
        int,
        typer.Option(
            min=0, help="Number of evenly spaced rows of each attention matrix to analyse; 0 is all, which is slow."
        ),
    ] = 1024,
    source: Source = None,
    device: Device = "auto",
) -> None:
    """Analyse the attention of a model on a batch of its data.

    Writes figures of attention maps, rank, head redundancy, query density, learned mixtures,
    responsibilities and learning curves, and one JSON file with all numbers.
    """
    from mgk.analysis.findings import NUMBERS

    target = folder / DEFAULT_FOLDER if to is None else to
    with Console(stderr=True).status("running the model") as status:
        found = analyze_folder(
            folder, target, text=text, split=split, samples=samples, tokens=tokens, queries=queries or None,
            source=source, device=device, progress=lambda name: status.update(name),
        )  # fmt: skip
    findings, pictures = found.findings, found.pictures
    Console().print(summary(findings, f"{folder.name or folder}: {found.source}"))
    for name, why in findings.left_out.items():
        typer.echo(f"left out: {name}: {why}")
    typer.echo(f"{len(pictures)} figures and {NUMBERS} in {target}")


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """The result of an analysis."""

    findings: Findings
    pictures: list[Path]
    """Paths of the figures."""
    source: str
    """Origin of the batch, in words."""


def analyze_folder(
    folder: Path,
    target: Path,
    *,
    text: Path | None = None,
    split: str = "test",
    samples: int = 1,
    tokens: int | None = None,
    queries: int | None = 1024,
    source: Path | None = None,
    device: str = "auto",
    progress: Callable[[str], None] = lambda name: None,
) -> Analysis:
    """Analyse the model in a folder, and write figures and numbers. The numbers are written last and atomically.

    Args:
        folder: folder of a run, or of a saved model.
        target: output folder for figures and numbers.
        text: text file to use instead of the data of the run.
        split: split of the run's data.
        samples: number of sequences in the batch.
        tokens: length to which they are cut.
        queries: number of rows of an attention matrix to analyse; ``None`` is all.
        source: folder of the raw files, needed if the data is not prepared yet.
        device: ``cpu``, ``cuda`` or ``auto``.
        progress: called with the name of each analysis before it starts.
    """
    import torch

    from mgk.analysis import analyze as run_analyses
    from mgk.analysis import draw_all, record_attention, write_numbers
    from mgk.analysis.findings import NUMBERS

    place = _device(device)
    subject = open_subject(folder, text=text, split=split, samples=samples, tokens=tokens, source=source)
    model = subject.model.to(place)
    inputs = {name: tensor.to(place) for name, tensor in subject.inputs.items()}
    record = record_attention(model, **inputs)
    findings = run_analyses(record, curves=subject.curves, num_queries=queries, progress=progress)
    progress("figures")
    pictures = draw_all(findings, target)
    facts = {"model": type(model).__name__, "batch": subject.source, "torch": torch.__version__, **subject.facts}
    write_numbers(target / NUMBERS, findings, facts)
    return Analysis(findings=findings, pictures=pictures, source=subject.source)


def summary(findings: Findings, title: str) -> Table:
    """Return a table with a row for each layer: means over heads and samples."""
    # The ten columns fit a terminal of 80 characters only if their names are broken here: rich would break words.
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    table.add_column("layer")
    for name in (
        "heads", "rank", "effective\nrank", "head\ndistance", "CKA of\nheads", "NLL\nmixture", "NLL one\nGaussian",
        "prior", "component\ndistance",
    ):  # fmt: skip
        table.add_column(name, justify="right", overflow="fold")
    for number, rank in enumerate(findings.rank):
        ranks = [matrix for heads in rank.matrices for matrix in heads]
        redundancy, mixture = findings.redundancy[number], findings.mixture[number]
        density = None if findings.density is None else findings.density[number]
        components = mixture.prior.shape[1]
        apart = [mixture.distance[:, r, s].mean() for r in range(components) for s in range(r)]
        table.add_row(
            rank.layer,
            f"{len(rank.matrices[0])}",
            f"{sum(each.rank for each in ranks) / len(ranks):.0f}/{max(rank.num_queries)}",
            f"{sum(each.effective_rank for each in ranks) / len(ranks):.1f}",
            _number(redundancy.mean_distance),
            _number(redundancy.mean_similarity),
            "-" if density is None else _number(float(density.mixture.mean())),
            "-" if density is None else _number(float(density.merged.mean())),
            "\n".join(f"{float(each):.3f}" for each in mixture.prior.mean(dim=0)),
            _number(float(sum(apart)) / len(apart)) if apart else "-",
        )
    return table


def open_subject(
    folder: Path,
    *,
    text: Path | None = None,
    split: str = "test",
    samples: int = 1,
    tokens: int | None = None,
    source: Path | None = None,
) -> Subject:
    """Load the model in a folder, with a batch from a text file, from its data, or else of random tokens.

    Args:
        folder: folder of a run, whose best model is loaded, or of a saved model.
        text: text file to read.
        split: split of the run's data.
        samples: number of sequences in the batch.
        tokens: length to which they are cut.
        source: folder of the raw files, needed if the data of a run is not prepared yet.
    """
    from mgk.analysis.saved_model import MODEL_CONFIG, load_model

    if not folder.is_dir():
        raise ValueError(f"{folder} must be the folder of a run or of a saved model, got no such folder")
    if (folder / RUN_CONFIG).is_file():
        return _open_run(folder, text, split, samples, tokens, source)
    if (folder / MODEL_CONFIG).is_file():
        model = load_model(folder)
        inputs, said = _text_or_random(model, folder, text, samples, tokens)
        return Subject(model=model, inputs=inputs, source=said)
    raise ValueError(
        f"{folder} must be the folder of a run ({RUN_CONFIG}) or of a saved model ({MODEL_CONFIG}), got neither there"
    )


def _open_run(
    folder: Path, text: Path | None, split: str, samples: int, tokens: int | None, source: Path | None
) -> Subject:
    from mgk.analysis import learning_curves
    from mgk.analysis.saved_model import load_model
    from mgk.training.configuration import RunConfig, from_mapping, read_yaml
    from mgk.training.evaluate import newest_best
    from mgk.training.tracking import METRICS

    config = from_mapping(RunConfig, read_yaml(folder / RUN_CONFIG))
    found = newest_best(folder)
    model = load_model(found.folder)
    name = f"{config.name} {config.row}, seed {config.seed}"
    curves = learning_curves(folder, name=name) if (folder / METRICS).is_file() else None
    facts = {"recipe": config.name, "row": config.row, "seed": config.seed, "step": found.step}
    corpus = None if text is not None else _corpus(config, source)
    if corpus is None:
        inputs, said = _text_or_random(model, folder, text, samples, tokens)
    else:
        inputs, said = corpus_batch(model.config, config, corpus, split, samples, tokens)
        facts |= {"corpus": corpus.name, "fingerprint": corpus.fingerprint, "split": split}
    return Subject(model=model, inputs=inputs, source=said, curves=curves, facts=facts)


def _corpus(config: RunConfig, source: Path | None) -> Corpus | None:
    """Return the data of a run if it is prepared, can be generated, or can be prepared from ``source``."""
    from mgk.data.errors import DataError
    from mgk.data.registry import find_kind, open_corpus
    from mgk.training.corpora import default_folder, open_or_prepare

    if source is not None or find_kind(config.data.corpus).is_generated:
        return open_or_prepare(config.data, source=source)
    try:
        return open_corpus(config.data.corpus, default_folder(config.data))
    except DataError:
        return None


def corpus_batch(
    model: MGKConfig, config: RunConfig, corpus: Corpus, split: str, samples: int, tokens: int | None
) -> tuple[dict[str, Tensor], str]:
    """Return the first samples of a split as a batch for the model, and a description of it."""
    import numpy as np
    import torch

    from mgk.data.batches import padded
    from mgk.models.seq2seq import one_later

    known = [name for name in corpus.splits if name != "documents"]
    if split not in known:
        raise ValueError(f"--split must be one of {', '.join(known)}, got {split!r}")
    content = corpus.splits[split]
    longest = min(config.data.longest, tokens or config.data.longest)
    said = f"{corpus.name} {split}, first {samples} of it"
    if config.task == "language":
        stream = content.sequences["text"].tokens
        if len(stream) < samples * longest:
            raise ValueError(f"--samples must fit into {len(stream):,} tokens of {split}, got {samples} x {longest}")
        windows = np.asarray(stream[: samples * longest], dtype=np.int64).reshape(samples, longest)
        return {"input_ids": torch.from_numpy(windows)}, said
    if config.task == "translation":
        source, target = content.sequences["source"], content.sequences["target"]
        rows = _first_rows(samples, len(source), split)
        ids, mask = padded(source, rows, longest)
        labels, label_mask = padded(target, rows, longest)
        assert model.decoder_start_token_id is not None
        assert model.pad_token_id is not None
        late = one_later(labels.masked_fill(label_mask == 0, -100), model.decoder_start_token_id, model.pad_token_id)
        return {
            "input_ids": ids, "attention_mask": mask, "decoder_input_ids": late, "decoder_attention_mask": label_mask,
        }, said  # fmt: skip
    rows = _first_rows(samples, len(content.numbers["labels"]), split)
    if config.task == "pairs":
        documents = corpus.splits["documents"].sequences["text"]
        ids, mask = padded(documents, content.numbers["first"][rows], longest)
        pair_ids, pair_mask = padded(documents, content.numbers["second"][rows], longest)
        return {
            "input_ids": ids, "attention_mask": mask, "pair_input_ids": pair_ids, "pair_attention_mask": pair_mask,
        }, said  # fmt: skip
    ids, mask = padded(content.sequences["text"], rows, longest)
    return {"input_ids": ids, "attention_mask": mask}, said


def count_samples(config: RunConfig, corpus: Corpus, split: str) -> int:
    """Number of samples in a split."""
    content = corpus.splits[split]
    if config.task == "language":
        return len(content.sequences["text"].tokens) // config.data.longest
    if config.task == "translation":
        return len(content.sequences["source"])
    return len(content.numbers["labels"])


def _first_rows(samples: int, count: int, split: str) -> Any:
    import numpy as np

    if samples > count:
        raise ValueError(f"--samples must be at most {count}, which is all of {split}, got {samples}")
    return np.arange(samples)


def _text_or_random(
    model: PreTrainedModel, folder: Path, text: Path | None, samples: int, tokens: int | None
) -> tuple[dict[str, Tensor], str]:
    """Return a batch from a text file or of random tokens, and a description of it."""
    import torch

    config: MGKConfig = model.config
    longest = tokens or LONGEST
    if config.positions == "learned":
        longest = min(longest if tokens else config.max_position_embeddings, config.max_position_embeddings)
    if text is None:
        first = 1 if config.pad_token_id == 0 else 0
        generator = torch.Generator().manual_seed(0)
        vocabulary = config.source_vocab_size or config.vocab_size
        ids = torch.randint(first, vocabulary, (samples, longest), generator=generator)
        said = f"{samples} x {longest} random tokens, since no data of it is at hand"
    else:
        stream = _read(text, folder, config)
        length = min(longest, len(stream) // samples)
        if length < 2:
            raise ValueError(f"{text} must hold at least two tokens for each of {samples} samples, got {len(stream)}")
        ids = torch.tensor(stream[: samples * length]).view(samples, length)
        said = f"{samples} x {length} tokens of {text.name}"
    inputs = {"input_ids": ids}
    if type(model).__name__ == "MGKForSequencePairClassification":
        # Only the first sequence of a pair is analysed, so the second may be short.
        inputs["pair_input_ids"] = ids[:, :2]
    if config.is_encoder_decoder:
        # There is no translation, so the decoder reads the source, clamped to its vocabulary.
        inputs["decoder_input_ids"] = ids.clamp(max=config.vocab_size - 1)
    return inputs, said


def _read(text: Path, folder: Path, config: MGKConfig) -> list[int]:
    """Tokenise a text file with the tokenizer beside the model, or as bytes if there is none."""
    try:
        content = text.read_bytes()
    except OSError as error:
        raise ValueError(f"--text must be a file that can be read, got {error}") from error
    side = folder / "source_tokenizer" if (folder / "source_tokenizer").is_dir() else folder
    if (side / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(side)
        return list(found(content.decode(errors="replace"))["input_ids"])
    # Bytes are numbered as in our byte corpora: from 1, since 0 is padding, unless the vocabulary has just 256 entries.
    vocabulary = config.source_vocab_size or config.vocab_size
    if vocabulary < 256:
        raise ValueError(f"--text needs a vocabulary of 256 or more to read bytes, or a tokenizer, got {vocabulary}")
    offset = 0 if vocabulary == 256 else 1
    return [byte + offset for byte in content]


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device must be one that is there, got {name}, and torch sees no GPU")
    return torch.device(name)


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.3f}"
