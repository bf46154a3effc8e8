"""Text between marks of a document, which scripts render from records."""

import re
from collections.abc import Callable


def replace_tables(text: str, render: Callable[[str], str | None]) -> str:
    """Return ``text`` with new content in each of its tables.

    A table stands between the lines ``<!-- table: NAME -->`` and ``<!-- end -->``. ``render`` is called with NAME and
    returns the new content, or None to leave the table as it is.
    """

    def replaced(match: re.Match[str]) -> str:
        content = render(match[2])
        return match[0] if content is None else f"{match[1]}\n{content}\n<!-- end -->"

    return re.sub(r"(<!-- table: (\S+) -->)\n.*?<!-- end -->", replaced, text, flags=re.DOTALL)
