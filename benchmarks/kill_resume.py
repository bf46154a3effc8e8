"""Kill a short run with SIGKILL at random moments, resume it each time, and compare with a run left alone, bit for bit.

    python benchmarks/kill_resume.py [--kills 10] [--set train.deterministic=true ...]

The same as tests/train/test_killed.py, for other devices; writes benchmarks/records/kill_resume-DEVICE.json.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent / "tests" / "train")]
# The fork server, and its children, import from here too.
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])


def main() -> None:
    """Run, compare, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    options = parser.parse_args()

    from killing import kill_and_resume
    from tiny import tiny_recipe

    from softprune.distributed import pick_device
    from softprune.runs.environment import describe_environment

    with tempfile.TemporaryDirectory() as folder:
        tiny_recipe(Path(folder))
        began = time.monotonic()
        counts = kill_and_resume(Path(folder), options.kills, options.seed, tuple(options.overrides))
        seconds = time.monotonic() - began
    device = pick_device()
    record = {
        "kills": counts["kills"],
        "kills_within_a_write": counts["torn"],
        "identical": True,  # a difference raises
        "overrides": options.overrides,
        "seed": options.seed,
        "seconds": round(seconds, 1),
        "environment": describe_environment(device).model_dump(),
    }
    path = HERE / "records" / f"kill_resume-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
