"""The characters of the report that a keyboard lacks, by name: a minus is easily taken for a hyphen."""

from __future__ import annotations

BETA = "\N{GREEK SMALL LETTER BETA}"
GAMMA = "\N{GREEK SMALL LETTER GAMMA}"
DELTA = "\N{GREEK SMALL LETTER DELTA}"
SQUARED = "\N{SUPERSCRIPT TWO}"
MINUS = "\N{MINUS SIGN}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
ARROW = "\N{RIGHTWARDS ARROW}"
UNKNOWN = "\N{EM DASH}"
DOT = "\N{MIDDLE DOT}"
THIN = "\N{NARROW NO-BREAK SPACE}"
