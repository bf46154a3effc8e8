#!/usr/bin/env bash
# wait.sh SECONDS: wait until the queue has finished, at most that long; print how far each run is.
. benchmarks/gpu/env.sh
while [ ! -e $ROOT/finished ] && [ $SECONDS -lt "$1" ]; do sleep 1; done
bash benchmarks/gpu/show.sh
