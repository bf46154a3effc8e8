"""HTML reports: a self-contained page per run, and a page that compares runs.

Read `run_page.py` and `comparison_page.py` first: each computes what its template in `templates/` shows.
"""

from softprune.lab.report.comparison_page import render_comparison as render_comparison
from softprune.lab.report.grouping import distinct as distinct
from softprune.lab.report.paper_table import PaperFigures as PaperFigures
from softprune.lab.report.paper_table import PaperRow as PaperRow
from softprune.lab.report.paper_table import paper_figures as paper_figures
from softprune.lab.report.paper_table import paper_rows as paper_rows
from softprune.lab.report.paper_table import paper_table_rows as paper_table_rows
from softprune.lab.report.run_page import render_run as render_run
from softprune.lab.report.tables import csv_text as csv_text
from softprune.lab.report.tables import markdown as markdown
from softprune.lab.report.tables import paper_tables as paper_tables
from softprune.lab.report.tables import paper_tables_markdown as paper_tables_markdown
from softprune.lab.report.tables import table_cells as table_cells
from softprune.lab.runs.reading import load_run as load_run
