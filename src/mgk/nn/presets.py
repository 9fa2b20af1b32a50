"""The paper's attention variants by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mgk.nn.attention import MixtureAttention


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The options of :class:`MixtureAttention` in which the variants differ."""

    num_components: int = 2
    """Keys per position."""
    keys: str = "projected"
    """``"projected"`` or ``"shifted"``."""
    similarity: str = "gaussian"
    """``"gaussian"`` or ``"dot"``."""
    assignment: str = "soft"
    """``"soft"`` or ``"hard"``."""
    prior: str = "learned"
    """``"learned"`` (by gradient), ``"em"`` or ``"uniform"``."""
    feature_map: str | None = None
    """Feature map of linear attention; ``None`` if the attention is not linear."""


PRESETS = {
    "softmax": Preset(num_components=1, similarity="dot", prior="uniform"),
    "gaussian": Preset(num_components=1, prior="uniform"),
    "mgk": Preset(),
    "smgk": Preset(keys="shifted"),
    "mgk-hard": Preset(assignment="hard", prior="uniform"),
    "smgk-hard": Preset(keys="shifted", assignment="hard", prior="uniform"),
    "mgk-em": Preset(prior="em"),
    "smgk-em": Preset(keys="shifted", prior="em"),
    "softmax-mgk": Preset(similarity="dot"),
    "softmax-smgk": Preset(keys="shifted", similarity="dot"),
    "linear": Preset(num_components=1, similarity="dot", prior="uniform", feature_map="elu"),
    "mlk": Preset(similarity="dot", feature_map="elu"),
    "smlk": Preset(keys="shifted", similarity="dot", feature_map="elu"),
}
LINEAR_PRESETS = tuple(name for name, preset in PRESETS.items() if preset.feature_map is not None)
SOFTMAX_PRESETS = tuple(name for name in PRESETS if name not in LINEAR_PRESETS)


def build_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> MixtureAttention:
    """Build a :class:`MixtureAttention` from a preset.

    ============================  =  =====================  ==========  ==========  =======
    name                          M  keys                   similarity  assignment  prior
    ============================  =  =====================  ==========  ==========  =======
    ``softmax``                   1  projected              dot         -           -
    ``gaussian``                  1  projected              gaussian    -           -
    ``mgk``, ``smgk``             2  projected, shifted     gaussian    soft        learned
    ``mgk-hard``, ``smgk-hard``   2  projected, shifted     gaussian    hard        -
    ``mgk-em``, ``smgk-em``       2  projected, shifted     gaussian    soft        EM
    ``softmax-mgk``, ``-smgk``    2  projected, shifted     dot         soft        learned
    ``linear``                    1  projected              features    -           -
    ``mlk``, ``smlk``             2  projected, shifted     features    soft        learned
    ============================  =  =====================  ==========  ==========  =======

    Args:
        name: one of the names above.
        embed_dim: width of the input and of the output.
        num_heads: number of query heads.
        options: further arguments of :class:`MixtureAttention`, which override the preset.
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, got {name!r}")
    return MixtureAttention(embed_dim, num_heads, **{**asdict(PRESETS[name]), **options})
