"""HTML reports: a self-contained page per run, and a page that compares runs.

Start with `pages.py`, which defines the content of both pages. `html.py` renders tables and charts; `comparison.py`
averages runs that differ only in the seed.
"""

from softprune.lab.report.pages import render_comparison as render_comparison
from softprune.lab.report.pages import render_run as render_run
