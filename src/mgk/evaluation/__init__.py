"""Metrics of trained models: accuracy, perplexity and BLEU, equal on every rank of a distributed run.

``evaluation.accuracy(...)``, ``evaluation.perplexity.sliding(...)``, ``evaluation.bleu.translate(...)``. Every sample,
token and sentence counts exactly once, for every batch size and number of ranks.
"""

from mgk.evaluation import bleu, perplexity
from mgk.evaluation.accuracy import ClassificationScore, accuracy, in_order_of_length
from mgk.evaluation.bleu import BleuScore
from mgk.evaluation.items import pack_items, unpack_items
from mgk.evaluation.perplexity import Perplexity

__all__ = [
    "BleuScore",
    "ClassificationScore",
    "Perplexity",
    "accuracy",
    "bleu",
    "in_order_of_length",
    "pack_items",
    "perplexity",
    "unpack_items",
]
