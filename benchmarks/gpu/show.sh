#!/usr/bin/env bash
# show.sh: the queue's log, the GPU's load, and the last epoch of each run.
. benchmarks/gpu/env.sh
cat $ROOT/queue.out $ROOT/queue.log 2>/dev/null
nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
python3 - $ROOT <<'PYTHON'
import json, sys
from pathlib import Path
root = Path(sys.argv[1])
for file in sorted(root.glob("runs/**/metrics.jsonl")):
    rows = file.read_text().splitlines()
    if rows and not (file.parent / "result.json").exists():
        row = json.loads(rows[-1])
        keys = ("epoch", "phase", "test_top1", "strength", "macs", "images_per_second")
        print(file.parent.relative_to(root / "runs"), {key: row.get(key) for key in keys})
for file in sorted(root.glob("logs/*.log")):
    lines = [line for line in file.read_text(errors="replace").splitlines() if "rror" in line]
    if lines:
        print(file.name, lines[-1][:300])
PYTHON
