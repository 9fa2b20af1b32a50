"""What a trained model costs, where it looks, and a page that shows it."""

from mgk.analysis.attention_maps import attention_maps
from mgk.analysis.component_shares import component_shares
from mgk.analysis.cost import (
    cache_bytes_per_token,
    embedding_parameters,
    forward_flops,
    parameters,
    training_flops,
)
from mgk.analysis.report import AttentionMaps, Report, RunReport, Table, TableRow, write_report

__all__ = [
    "AttentionMaps",
    "Report",
    "RunReport",
    "Table",
    "TableRow",
    "attention_maps",
    "cache_bytes_per_token",
    "component_shares",
    "embedding_parameters",
    "forward_flops",
    "parameters",
    "training_flops",
    "write_report",
]
