"""HTML reports: a self-contained page per run, and a page that compares runs.

Read `pages.py` first: it says what stands on both pages. `html.py` draws tables and charts, `comparison.py` makes a row
of the runs that differ only in their seed.
"""

from softprune.lab.report.pages import render_comparison as render_comparison
from softprune.lab.report.pages import render_run as render_run
