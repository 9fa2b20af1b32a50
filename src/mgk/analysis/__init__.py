"""Analyses of trained models: cost, attention maps, learned mixtures, and a report that shows them."""

from mgk.analysis.attention_maps import PooledMaps, attention_maps, pooled_maps
from mgk.analysis.component_shares import component_shares
from mgk.analysis.cost import (
    cache_bytes_of_run,
    cache_bytes_per_token,
    embedding_parameters,
    forward_flops,
    parameters,
    training_flops,
)
from mgk.analysis.curves import LearningCurves, learning_curves
from mgk.analysis.density import QueryDensity, query_density
from mgk.analysis.figures import draw_all
from mgk.analysis.findings import Findings, analyze, to_mapping, write_numbers
from mgk.analysis.mixture import LearnedMixture, learned_mixture
from mgk.analysis.rank import AttentionRank, MatrixRank, attention_rank, matrix_rank
from mgk.analysis.record import AttentionCall, AttentionRecord, record_attention
from mgk.analysis.redundancy import HeadRedundancy, head_redundancy
from mgk.analysis.report import AttentionMaps, Report, RunReport, Table, TableRow, write_report
from mgk.analysis.responsibilities import TokenResponsibilities, token_responsibilities
from mgk.analysis.theorem import Approximation, GaussianMixture, approximate, fit_mixture

__all__ = [
    "Approximation",
    "AttentionCall",
    "AttentionMaps",
    "AttentionRank",
    "AttentionRecord",
    "Findings",
    "GaussianMixture",
    "HeadRedundancy",
    "LearnedMixture",
    "LearningCurves",
    "MatrixRank",
    "PooledMaps",
    "QueryDensity",
    "Report",
    "RunReport",
    "Table",
    "TableRow",
    "TokenResponsibilities",
    "analyze",
    "approximate",
    "attention_maps",
    "attention_rank",
    "cache_bytes_of_run",
    "cache_bytes_per_token",
    "component_shares",
    "draw_all",
    "embedding_parameters",
    "fit_mixture",
    "forward_flops",
    "head_redundancy",
    "learned_mixture",
    "learning_curves",
    "matrix_rank",
    "parameters",
    "pooled_maps",
    "query_density",
    "record_attention",
    "to_mapping",
    "token_responsibilities",
    "training_flops",
    "write_numbers",
    "write_report",
]
