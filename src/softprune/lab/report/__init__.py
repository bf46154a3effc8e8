"""HTML reports: a self-contained page per run, and a page that compares runs.

Read `run_page.py` and `comparison_page.py` first: each computes what its template in `templates/` shows.
"""

from softprune.lab.report.comparison_page import render_comparison as render_comparison
from softprune.lab.report.run_page import render_run as render_run
