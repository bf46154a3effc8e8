"""HTML reports: one self-contained page per run, and one that compares runs. Standard library only."""

from .comparison_page import render_comparison
from .grouping import distinct
from .paper import PaperFigures, paper_figures
from .paper_table import PaperRow, markdown, paper_rows, table_cells
from .reading import load_run
from .run_page import render_run

__all__ = [
    "PaperFigures",
    "PaperRow",
    "distinct",
    "load_run",
    "markdown",
    "paper_figures",
    "paper_rows",
    "render_comparison",
    "render_run",
    "table_cells",
]
