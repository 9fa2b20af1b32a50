"""A comparison of runs as one HTML file with tables, curves and attention maps, which loads no other files."""

from mgk.analysis.report.page import AttentionMaps, Report, RunReport, Table, TableRow, write_report

__all__ = ["AttentionMaps", "Report", "RunReport", "Table", "TableRow", "write_report"]
