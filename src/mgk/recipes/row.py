"""A row of a table as a short string: ``smgk-4``, ``softmax-8+qk_norm``, ``mgk-2+variance_scale=1,3``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

from mgk.nn.presets import LINEAR_PRESETS, PRESETS, SOFTMAX_PRESETS
from mgk.training.configuration import merge, parse_yaml

_FIRST_PART = re.compile(r"(?P<attention>[a-z-]+)-(?P<heads>[1-9][0-9]*)")
# Text that needs no quotes in a shell, is a valid file name everywhere, and contains neither "+" nor ",".
_PLAIN_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ALWAYS = ("attention", "num_attention_heads")


def parse_row(text: str) -> dict[str, Any]:
    """Parse a row into the fields of :class:`mgk.models.MGKConfig` that it sets.

    A row is ``PRESET-HEADS``, then any number of ``+option`` (true) and ``+option=value``. Values are YAML, and lists
    may omit their brackets: ``1,3`` is ``[1, 3]`` and ``1,`` is ``[1]``. A dot addresses a key of a mapping:
    ``rope_parameters.rope_theta=1e6``.
    """
    if not isinstance(text, str):
        raise TypeError(f"a row must be text such as smgk-4, got {text!r}")
    first, *options = text.split("+")
    match = _FIRST_PART.fullmatch(first)
    if match is None:
        raise ValueError(f"a row must start with a preset and its number of heads, such as smgk-4, got {text!r}")
    attention = match["attention"]
    if attention not in PRESETS:
        hint = _nearest(attention, SOFTMAX_PRESETS) or _nearest(attention, LINEAR_PRESETS)
        raise ValueError(f"a row must start with one of {', '.join(PRESETS)}, got {text!r}{hint}")
    fields: dict[str, Any] = {"attention": attention, "num_attention_heads": int(match["heads"])}
    for option in options:
        path, separator, value = option.partition("=")
        *parents, last = path.split(".")
        _check_name([*parents, last][0], text)
        place = fields
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{parent} in a row must be a value or a mapping, got both in {text!r}")
        if last in place:
            raise ValueError(f"{path} must stand in a row once, got {text!r}")
        place[last] = _parse_value(value, text) if separator else True
    return fields


def row_name(model_changes: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return the unique name of a model in its table, which is a valid folder name. :func:`parse_row` is the inverse.

    Args:
        model_changes: fields of :class:`mgk.models.MGKConfig`, and optionally ``architecture``.
        base: section ``model`` of the recipe. Fields that agree with it are left out, except attention and heads.
    """
    model = merge(base, model_changes)
    defaults = _of_architecture(model) if any(model.get(key) is None for key in _ALWAYS) else {}
    attention, heads = (defaults.get(key) if model.get(key) is None else model[key] for key in _ALWAYS)
    parts = [f"{attention}-{heads}"]
    others = {key: value for key, value in model_changes.items() if key not in _ALWAYS}
    for path, value in sorted(_changed(others, base, "").items()):
        parts.append(path if value is True else f"{path}={_write_value(value, path)}")
    return "+".join(parts)


def _changed(changes: Mapping[str, Any], base: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields that differ from ``base``, by their path."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, Mapping):
            before = base.get(key)
            found |= _changed(value, before if isinstance(before, Mapping) else {}, f"{where}{key}.")
        elif key not in base or _comparable(base[key]) != _comparable(value):
            found[f"{where}{key}"] = value
    return found


def _comparable(value: Any) -> Any:
    # YAML writes a tuple as a list, and 1 must differ from true.
    return (list(value) if isinstance(value, tuple) else value, isinstance(value, bool))


def _of_architecture(model: Mapping[str, Any]) -> Mapping[str, Any]:
    # Imported here, because transformers takes seconds to import and most rows do not need it.
    from mgk.models.architectures import ARCHITECTURES

    name = model.get("architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"a model must have attention and num_attention_heads, or an architecture that has them, got {dict(model)}"
        )
    return ARCHITECTURES[name]


def _check_name(name: str, row: str) -> None:
    """Refuse a name that :class:`mgk.models.MGKConfig` would refuse, before other rows have run for hours."""
    from mgk.models.configuration import KEYS_OF_TRANSFORMERS, OTHER_NAMES, MGKConfig

    if name in _ALWAYS:
        raise ValueError(f"{name} must be the first part of a row, such as smgk-4, got {row!r}")
    own = {field.name for field in dataclasses.fields(MGKConfig)} | {"architecture", "num_labels"}
    if name not in own | MGKConfig.attribute_map.keys() | KEYS_OF_TRANSFORMERS:
        hint = f" (did you mean {OTHER_NAMES[name]!r}?)" if name in OTHER_NAMES else _nearest(name, own)
        raise ValueError(f"an option of a row must be a field of MGKConfig, got {name!r} in {row!r}{hint}")


def _parse_value(text: str, row: str) -> Any:
    if "," in text and text[0] not in "[{'\"":
        return [_parse_value(item, row) for item in text.removesuffix(",").split(",")]
    if not text.strip():
        raise ValueError(f"an option of a row must have a value after its =, got {row!r}")
    return parse_yaml(text, f"an option of the row {row!r}")


def _write_value(value: Any, path: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)) and math.isfinite(value):
        # 3.0 and 3 are the same model, and the plus sign of an exponent would begin an option.
        whole = abs(value) < 1e15 and value == int(value)
        return str(int(value)) if whole or isinstance(value, int) else repr(value).replace("e+", "e")
    if isinstance(value, (list, tuple)) and not any(isinstance(item, (list, tuple)) for item in value):
        items = [_write_value(item, path) for item in value]
        return ",".join(items) + ("," if len(items) == 1 else "") if items else "[]"
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and parse_yaml(value, path) == value:
        return value
    raise ValueError(f"{path} must be a plain word, a finite number or a list of them to stand in a row, got {value!r}")


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
