"""Conversion of Hugging Face models, such as Llama, Qwen, BERT and ViT, to mixture attention with their weights.

Importing this module registers ``attn_implementation="mgk"``, which gives every model that uses transformers' attention
interface the fused softmax of this library. :func:`convert` puts mixtures into the models of :data:`FAMILIES`.
"""

from mgk.conversion.attention import register
from mgk.conversion.convert import convert
from mgk.conversion.families import FAMILIES, Family
from mgk.conversion.mixture import KeyMixture
from mgk.conversion.saving import load_converted
from mgk.conversion.starts import AdvanceStart, advance_start
from mgk.conversion.weights import find_weights, unpack_weights

register()

__all__ = [
    "FAMILIES",
    "AdvanceStart",
    "Family",
    "KeyMixture",
    "advance_start",
    "convert",
    "find_weights",
    "load_converted",
    "unpack_weights",
]
