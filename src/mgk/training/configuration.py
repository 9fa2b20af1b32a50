"""The configuration of a run: plain dataclasses, read from YAML, with every value checked."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from mgk.nn.presets import LINEAR_PRESETS

T = TypeVar("T")

UNBOUNDED = math.inf


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The corpus, and how its batches are made."""

    corpus: str
    """Name of the corpus: see ``mgk data list``."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``mgk data prepare`` for the corpus."""
    longest: int = 4096
    """Length in tokens to which sequences are cut, and length of a language model's window. Sentences are never cut."""
    by_length: bool = True
    """Group sequences of similar length into batches, which are padded to their longest sequence."""
    pad_to: int | None = None
    """Pad every sequence to this length instead, as the published code does. Results are the same, but slower."""
    pack: bool | None = None
    """Pack the sequences of a batch one after the other instead of padding them.

    A batch has the same loss and gradients, but is faster where the fused kernels support it and lengths differ much.
    ``None`` packs for classification and pairs on a GPU in half precision, except with linear attention or EM priors; a
    resumed run keeps its first choice. (Translation is packed only if this is true: its batches are cut by their padded
    width, so if widths are rounded up, packed batches hold other sentences.)
    """
    multiple_of: int | None = None
    """Round the padded length, or the tokens of a packed batch, up to a multiple of this.

    ``None`` is 1 on a CPU. On a GPU, where shapes are compiled and captured, it is 64 (8 for sentences), and for packed
    batches at most 1024 (256 for sentences).
    """
    workers: int = 1
    """Number of threads that make batches ahead; 0 makes each batch when it is needed."""
    timeout: float = 600.0
    """Seconds after which waiting for a batch is an error."""

    def __post_init__(self) -> None:
        _at_least("data.longest", self.longest, 1)
        _at_least("data.workers", self.workers, 0)
        if self.multiple_of is not None:
            _at_least("data.multiple_of", self.multiple_of, 1)
        _positive("data.timeout", self.timeout)
        if self.pad_to is not None and self.pack:
            raise ValueError(f"data.pad_to must be left out where data.pack is true, got {self.pad_to}")
        if self.pad_to is not None and self.pad_to < self.longest:
            raise ValueError(f"data.pad_to must be at least data.longest={self.longest}, got {self.pad_to}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model by name, with changes."""

    architecture: str
    """One of :data:`mgk.models.ARCHITECTURES`, or ``converted`` for the architecture of the model in ``conversion``."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`mgk.models.MGKConfig` to override. In YAML they are written beside ``architecture``."""

    @property
    def has_em_prior(self) -> bool:
        return str(self.changes.get("attention", "")).endswith("-em")

    @property
    def is_linear(self) -> bool:
        return self.changes.get("attention") in LINEAR_PRESETS


@dataclass(frozen=True, kw_only=True)
class ConversionConfig:
    """The model to convert, how the converted model starts, and what it learns from the original."""

    model: str
    """A folder, a name below ``$MGK_WEIGHTS``, or a name on the Hub."""
    start: Literal["auto", "exact", "near", "immediate"] = "auto"
    """See :func:`mgk.convert`."""
    fade_steps: int = 1000
    """Updates over which the bias of the start ``near`` fades out."""
    pooling: Literal["neighbours", "similar"] = "neighbours"
    """Which key/value heads are merged if there are to be fewer."""
    perturbation: float = 0.01
    """How far equal keys are moved apart."""
    distillation: float = 0.0
    """Weight in the loss of the divergence from the original model; the rest is cross-entropy."""
    temperature: float = 1.0
    """Divisor of both models' logits in that divergence."""

    def __post_init__(self) -> None:
        _at_least("conversion.fade_steps", self.fade_steps, 1)
        _positive("conversion.temperature", self.temperature)
        if not 0.0 <= self.perturbation < UNBOUNDED:
            raise ValueError(f"conversion.perturbation must be finite and not negative, got {self.perturbation}")
        if not 0.0 <= self.distillation <= 1.0:
            raise ValueError(f"conversion.distillation must lie in [0, 1], got {self.distillation}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Options of AdamW. Biases, gains and mixture parameters are never decayed."""

    lr: float
    """The highest learning rate of the schedule."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _positive("optimizer.lr", self.lr)
        _positive("optimizer.eps", self.eps)
        if not 0.0 <= self.weight_decay < UNBOUNDED:
            raise ValueError(f"optimizer.weight_decay must be finite and not negative, got {self.weight_decay}")
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"optimizer.betas must lie in [0, 1), got {beta}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The schedule of the learning rate: see :mod:`mgk.training.schedule`."""

    kind: Literal["onecycle", "cosine", "inverse_sqrt", "constant"]
    warmup: int = 0
    """Number of steps until the highest learning rate."""
    initial: float = 0.0
    """Learning rate of the first step (``onecycle`` ignores it and starts at a 25th of the highest)."""

    def __post_init__(self) -> None:
        _at_least("schedule.warmup", self.warmup, 0)
        if not 0.0 <= self.initial < UNBOUNDED:
            raise ValueError(f"schedule.initial must be finite and not negative, got {self.initial}")
        if self.kind == "inverse_sqrt" and self.warmup < 1:
            raise ValueError(f"schedule.warmup must be at least 1 for inverse_sqrt, got {self.warmup}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Options of the training loop."""

    steps: int
    """Number of optimiser updates."""
    batch_size: int | None = None
    """Samples (for a language model, windows) in one update, over all ranks and micro-batches."""
    max_tokens: int | None = None
    """For translation, tokens in one update instead, with padding, over all ranks and micro-batches."""
    accumulate: int = 1
    """Number of micro-batches in one update."""
    clip_norm: float | None = None
    """Norm to which gradients are clipped; ``None`` does not clip."""
    label_smoothing: float = 0.0
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """``auto`` is bf16 on a GPU that has it, fp32 elsewhere. Weights stay fp32; bf16 and fp16 are autocast."""
    compile: bool | None = None
    """Use ``torch.compile``; ``None`` does so on a GPU."""
    cuda_graphs: bool | None = None
    """Capture updates in CUDA graphs; ``None`` does so unless :func:`mgk.training.graphs.unsupported` has a reason."""
    log_every: int = 50
    """Steps between two lines of the log."""
    checkpoint_every: int = 1000
    """Steps between two checkpoints. A signal and the end of the run always write one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep."""
    max_skipped: int = 10
    """Updates in a row that may be skipped, because loss or gradient is not finite or the loss leaps, before the run
    stops."""
    max_loss_ratio: float = 100.0
    """Skip an update if the loss exceeds its running mean (at least 0.1) by this factor."""

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints"):
            _at_least(f"training.{name}", getattr(self, name), 1)
        _at_least("training.max_skipped", self.max_skipped, 0)
        for name in ("batch_size", "max_tokens"):
            if getattr(self, name) is not None:
                _at_least(f"training.{name}", getattr(self, name), 1)
        if self.clip_norm is not None:
            _positive("training.clip_norm", self.clip_norm)
        if not 0.0 <= self.label_smoothing < 1.0:
            raise ValueError(f"training.label_smoothing must lie in [0, 1), got {self.label_smoothing}")
        if not self.max_loss_ratio > 1.0:
            raise ValueError(f"training.max_loss_ratio must be above 1, got {self.max_loss_ratio}")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """When and on how much data the model is validated."""

    every: int
    """Steps between two validations. The last step always validates."""
    batch_size: int = 128
    """Samples (or windows) of one batch, on one rank."""
    metric: Literal["accuracy", "loss", "bleu"]
    """Metric that chooses the best checkpoint."""
    limit: int | None = None
    """Number of batches for accuracy or loss (BLEU always uses all); ``None`` is all, as for published results."""

    def __post_init__(self) -> None:
        _at_least("validation.every", self.every, 1)
        _at_least("validation.batch_size", self.batch_size, 1)
        if self.limit is not None:
            _at_least("validation.limit", self.limit, 1)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The configuration of one run: everything that decides its numbers."""

    name: str
    """Name of the recipe."""
    row: str = ""
    """Row of the recipe's comparison, such as ``smgk-4``."""
    task: Literal["classification", "pairs", "language", "translation", "uptraining"]
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    training: TrainingConfig
    validation: ValidationConfig
    seed: int = 0
    conversion: ConversionConfig | None = None
    """The conversion; only for uptraining."""

    def __post_init__(self) -> None:
        _at_least("seed", self.seed, 0)
        # Each rank adds its number to the seed, and torch takes 64 bits.
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if self.schedule.initial > self.optimizer.lr:
            raise ValueError(
                f"schedule.initial must be at most optimizer.lr={self.optimizer.lr}, got {self.schedule.initial}"
            )
        if self.schedule.warmup > self.training.steps:
            raise ValueError(
                f"schedule.warmup must be at most training.steps={self.training.steps}, got {self.schedule.warmup}"
            )
        unit, other = ("max_tokens", "batch_size") if self.task == "translation" else ("batch_size", "max_tokens")
        if getattr(self.training, unit) is None or getattr(self.training, other) is not None:
            raise ValueError(
                f"training.{unit} must be given for {self.task} and training.{other} not, "
                f"got {getattr(self.training, unit)} and {getattr(self.training, other)}"
            )
        possible = {"classification": ("accuracy", "loss"), "pairs": ("accuracy", "loss")}
        metrics = possible.get(self.task, ("loss", "bleu") if self.task == "translation" else ("loss",))
        if self.validation.metric not in metrics:
            raise ValueError(
                f"validation.metric must be {' or '.join(metrics)} for {self.task}, got {self.validation.metric!r}"
            )
        if self.data.pad_to is not None and self.task in ("language", "translation", "uptraining"):
            raise ValueError(f"data.pad_to must be left out for {self.task}, got {self.data.pad_to}")
        if self.data.pack and self.model.is_linear:
            raise ValueError("data.pack must be false or left out with linear attention, got true")
        if self.data.pack and self.model.has_em_prior and self.data.multiple_of not in (None, 1):
            raise ValueError(
                f"data.multiple_of must be left out where data.pack is true and EM counts every pair, "
                f"got {self.data.multiple_of}"
            )
        if self.data.pack and self.task in ("language", "uptraining"):
            raise ValueError(f"data.pack must be false or left out for {self.task}, whose rows are full, got true")
        is_converted = self.model.architecture == "converted"
        if (self.task == "uptraining", is_converted) != (self.conversion is not None,) * 2:
            raise ValueError(
                f"conversion must be given for uptraining, with model.architecture=converted, and for nothing else, "
                f"got {self.task} with {self.model.architecture} and {'none' if self.conversion is None else 'one'}"
            )
        if self.conversion is not None and self.conversion.fade_steps > self.training.steps:
            raise ValueError(
                f"conversion.fade_steps must be at most training.steps={self.training.steps}, which end the start, "
                f"got {self.conversion.fade_steps}"
            )
        if not self.data.by_length and self.task == "translation":
            raise ValueError("data.by_length must be true for translation, got false")
        if self.training.label_smoothing > 0 and self.task != "translation":
            raise ValueError(
                f"training.label_smoothing must be 0 for {self.task}, got {self.training.label_smoothing}: "
                f"it is part of translation only"
            )


def from_mapping(kind: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a dataclass from nested mappings, such as YAML has. Unknown keys and wrong types are errors."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{where or 'the configuration'} must be a mapping, got {values!r}")
    if kind is ModelConfig:
        # MGKConfig checks the fields of a model.
        values = {"architecture": values.get("architecture"), "changes": _without(values, "architecture")}
    hints = _type_hints(kind)  # type: ignore[arg-type]
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            hint = _nearest(str(key), known) or f": there are {', '.join(known)}"
            raise ValueError(f"{_path(where, key)} is not a key{hint}")
    for name, described in known.items():
        required = described.default is MISSING and described.default_factory is MISSING
        if required and values.get(name) is None:
            raise ValueError(f"{_path(where, name)} must be given, got nothing")
    return kind(**{key: _convert(hints[key], value, _path(where, key)) for key, value in values.items()})


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    # Cached, because evaluating annotations that are stored as text takes longer than all the rest.
    return typing.get_type_hints(kind)


def to_mapping(config: Any) -> dict[str, Any]:
    """The inverse of :func:`from_mapping`: nested dictionaries that JSON and YAML can represent."""
    result: dict[str, Any] = {}
    for described in dataclasses.fields(config):
        value = getattr(config, described.name)
        if value is None and described.name == "conversion":
            # Left out for runs without a conversion, so that they look like records from before there was one.
            continue
        if isinstance(value, ModelConfig):
            value = {"architecture": value.architecture, **value.changes}
        elif dataclasses.is_dataclass(value):
            value = to_mapping(value)
        elif isinstance(value, tuple):
            value = list(value)
        result[described.name] = value
    return result


def override(values: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Apply changes ``key.key=value``, whose values are YAML, to nested mappings. Keys are checked later."""
    result = merge({}, values)
    for change in changes:
        path, separator, text = change.partition("=")
        if not separator or not path:
            raise ValueError(f"a change must look like key=value, such as optimizer.lr=2e-4, got {change!r}")
        *parents, last = path.split(".")
        place = result
        for depth, parent in enumerate(parents):
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{'.'.join(parents[: depth + 1])} must be a group of keys, got {place!r} in {path}")
        place[last] = parse_yaml(text, path)
    return result


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested mappings; ``changes`` override ``base``."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        if isinstance(value, Mapping):
            result[key] = merge(before if isinstance(before, Mapping) else {}, value)
        else:
            result[key] = value
    return result


def differences(old: Mapping[str, Any], new: Mapping[str, Any], where: str = "") -> dict[str, tuple[Any, Any]]:
    """Return every key whose value differs, by its path, with the old and the new value."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= differences(before, after, _path(where, key))
        elif before != after:
            found[_path(where, key)] = (before, after)
    return found


class _Loader(yaml.SafeLoader):
    """A loader with the scalars of YAML 1.2, because YAML 1.1 reads 1e-4 as text, "on" as true and 010 as 8.

    It has no dates, sets and bytes, which JSON cannot represent.
    """

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 16 if "x" in text else 10)


_TAG = "tag:yaml.org,2002:"
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in found
        if tag not in (f"{_TAG}float", f"{_TAG}bool", f"{_TAG}int", f"{_TAG}timestamp")
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag not in (f"{_TAG}timestamp", f"{_TAG}set", f"{_TAG}binary", f"{_TAG}omap", f"{_TAG}pairs")
}
_Loader.add_constructor(f"{_TAG}int", _Loader.construct_integer)
# Before the numbers with a point, which may have none.
_Loader.add_implicit_resolver(
    f"{_TAG}int", re.compile(r"^[-+]?[0-9][0-9_]*$|^[-+]?0x[0-9a-fA-F_]+$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|^[-+]?\.inf$|^\.nan$", re.IGNORECASE),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(true|false)$", re.IGNORECASE), list("tTfF"))


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML that consists of numbers, text, lists and mappings alone."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be YAML, got {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a readable text file, got {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping, got {type(values).__name__}")
    return values


def _convert(kind: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to this type, or raise an error. Nothing is guessed."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in options:
            return None
        return _convert(next(option for option in options if option is not type(None)), value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return from_mapping(kind, value, where)
    if origin is Literal:
        if value not in options or isinstance(value, bool):
            raise ValueError(
                f"{where} must be one of {', '.join(options)}, got {value!r}{_nearest(str(value), options)}"
            )
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) != len(options):
            raise TypeError(f"{where} must be a list of {len(options)}, got {value!r}")
        return tuple(_convert(option, item, where) for option, item in zip(options, value, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{where} must be a mapping, got {value!r}")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            value = float(value)
        except OverflowError as error:
            raise ValueError(f"{where} must be a number that a float can hold, got {value}") from error
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {float: "a number", int: "an integer", str: "text", bool: "true or false"}
        raise TypeError(f"{where} must be {names[kind]}, got {value!r}")
    return value


def _nearest(name: str, names: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _path(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _without(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _positive(name: str, value: float) -> None:
    if not 0.0 < value < UNBOUNDED:
        raise ValueError(f"{name} must be positive and finite, got {value}")
