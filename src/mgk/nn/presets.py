"""The paper's attention variants by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mgk.nn.attention import MixtureAttention

LINEAR_PRESETS = ("linear", "mlk", "smlk")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The options of :class:`MixtureAttention` that tell one variant from another."""

    num_components: int = 2
    keys: str = "projected"
    similarity: str = "gaussian"
    assignment: str = "soft"
    prior: str = "learned"


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
}


def build_attention(name: str, embed_dim: int, num_heads: int, **options: Any) -> MixtureAttention:
    """Build a :class:`MixtureAttention` from a preset.

    ============================  =  =========  ========  ======  ========
    name                          M  keys       formula   assign  prior
    ============================  =  =========  ========  ======  ========
    ``softmax``                   1  projected  dot       -       -
    ``gaussian``                  1  projected  gaussian  -       -
    ``mgk``, ``smgk``             2  p. / s.    gaussian  soft    learned
    ``mgk-hard``, ``smgk-hard``   2  p. / s.    gaussian  hard    -
    ``mgk-em``, ``smgk-em``       2  p. / s.    gaussian  soft    EM
    ``softmax-mgk``, ``-smgk``    2  p. / s.    dot       soft    learned
    ============================  =  =========  ========  ======  ========

    Args:
        name: one of the names above (s. = shifted keys, p. = projected keys).
        embed_dim: width of the input and of the output.
        num_heads: query heads.
        options: any further argument of :class:`MixtureAttention`; they win over the preset.
    """
    if name in LINEAR_PRESETS:
        raise ValueError(
            f"{name!r} is linear attention, which this version does not have: use one of {', '.join(PRESETS)}"
        )
    if name not in PRESETS:
        raise ValueError(f"name must be one of {', '.join(PRESETS)}, got {name!r}")
    return MixtureAttention(embed_dim, num_heads, **{**asdict(PRESETS[name]), **options})
