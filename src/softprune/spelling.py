"""What somebody may have meant by a name that nothing has."""

import difflib
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str:
    """' Did you mean X?' for the closest candidate, or nothing when none is close."""
    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
