"""HTML reports: one self-contained page per run, and one that compares runs. Standard library only."""

from .comparison_page import render_comparison
from .reading import load_run
from .run_page import render_run

__all__ = ["load_run", "render_comparison", "render_run"]
