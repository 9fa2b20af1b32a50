"""Attention modules, which own parameters: layers, priors, variances and presets."""

from mgk.nn.attention import MixtureAttention
from mgk.nn.keys import ProjectedKeys, ShiftedKeys
from mgk.nn.parameters import mixture_parameters, parameter_groups
from mgk.nn.presets import PRESETS, Preset, build_attention
from mgk.nn.prior import EMPrior, LearnedPrior, UniformPrior, update_priors
from mgk.nn.replacement import MultiheadMixtureAttention, replace_attention
from mgk.nn.variance import FixedVariance, LearnedVariance

__all__ = [
    "PRESETS",
    "EMPrior",
    "FixedVariance",
    "LearnedPrior",
    "LearnedVariance",
    "MixtureAttention",
    "MultiheadMixtureAttention",
    "Preset",
    "ProjectedKeys",
    "ShiftedKeys",
    "UniformPrior",
    "build_attention",
    "mixture_parameters",
    "parameter_groups",
    "replace_attention",
    "update_priors",
]
