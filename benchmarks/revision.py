"""The commit that a record is of."""

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def revision(*paths: str) -> str:
    """Return the commit of this source, with "+" and a digest of what was changed since in ``paths``."""

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).stdout

    changes = git("diff", "HEAD", "--", *paths)
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip() or "unknown"
    return commit + (f"+{hashlib.sha256(changes).hexdigest()[:8]}" if changes else "")
