#!/usr/bin/env bash
# pack.sh: write records and weights to $OUT, which comes back.
. benchmarks/gpu/env.sh
python3 benchmarks/gpu/pack.py $ROOT "$OUT"
cat $ROOT/queue.log
