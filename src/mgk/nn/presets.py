"""The paper's attention variants by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mgk.nn.attention import MixtureAttention


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The options of :class:`MixtureAttention` that tell one variant from another."""

    num_components: int = 2
    """Keys per position."""
    keys: str = "projected"
    """How a position gets them: a projection for each, or shifts of one."""
    similarity: str = "gaussian"
    """Distance or dot product."""
    assignment: str = "soft"
    """Sum over components, or the best one."""
    prior: str = "learned"
    """By gradient, by EM, or none."""
    feature_map: str | None = None
    """Of linear attention; ``None``: no such."""


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
        num_heads: query heads.
        options: any further argument of :class:`MixtureAttention`; they win over the preset.
    """
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, got {name!r}")
    return MixtureAttention(embed_dim, num_heads, **{**asdict(PRESETS[name]), **options})
