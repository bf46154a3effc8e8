"""Names of the records that reports use."""

from softprune.runs.reading import Run as Run
from softprune.runs.result import Epoch as Epoch
from softprune.runs.result import Module as Module
from softprune.runs.result import Moment as Moment
from softprune.runs.result import Site as Site
from softprune.runs.result import Totals as Totals
from softprune.runs.result import Variant as Variant
