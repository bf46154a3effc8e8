"""HTML reports: a self-contained page per run, and a page that compares runs."""

from softprune.report.comparison_page import render_comparison
from softprune.report.grouping import distinct
from softprune.report.paper_table import PaperFigures, PaperRow, paper_figures, paper_rows, paper_table_rows
from softprune.report.run_page import render_run
from softprune.report.tables import csv_text, markdown, paper_tables, paper_tables_markdown, table_cells
from softprune.runs.reading import load_run

__all__ = [
    "PaperFigures",
    "PaperRow",
    "csv_text",
    "distinct",
    "load_run",
    "markdown",
    "paper_figures",
    "paper_rows",
    "paper_table_rows",
    "paper_tables",
    "paper_tables_markdown",
    "render_comparison",
    "render_run",
    "table_cells",
]
