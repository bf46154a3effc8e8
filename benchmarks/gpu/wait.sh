#!/usr/bin/env bash
# wait.sh SECONDS: wait until the queue and the tests have finished, at most that long; print how far each run is, and
# bring back records and weights. Trainings go on meanwhile, and what has come back cannot be lost with the machine.
. benchmarks/gpu/env.sh
[ -e $ROOT/queue.out ] || { echo "No queue was started on this machine: start again at once, or give it back."; exit 1; }
while { [ ! -e $ROOT/finished ] || [ -e $ROOT/testing ]; } && [ $SECONDS -lt "$1" ]; do sleep 1; done
bash benchmarks/gpu/show.sh
python3 benchmarks/gpu/pack.py $ROOT "$OUT"
