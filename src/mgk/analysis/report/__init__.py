"""A comparison of runs as one HTML file: tables, curves, attention maps. It loads nothing, so it can be mailed."""

from mgk.analysis.report.page import AttentionMaps, Report, RunReport, Table, TableRow, write_report

__all__ = ["AttentionMaps", "Report", "RunReport", "Table", "TableRow", "write_report"]
