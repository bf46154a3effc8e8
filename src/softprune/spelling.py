"""What somebody may have meant by a name that nothing has."""

import difflib
from collections.abc import Iterable, Sequence


def few_of(word: str, candidates: Sequence[str]) -> str:
    """The closest candidates as a list to read, or the first ones when none is close."""
    near = difflib.get_close_matches(word, candidates, n=3) or candidates[:3]
    return f"{', '.join(map(repr, near))}{' ...' if len(candidates) > len(near) else ''}"


def nearest(word: str, candidates: Iterable[str]) -> str:
    """' Did you mean X?' for the closest candidate, or nothing when none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
