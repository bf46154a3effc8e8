#!/usr/bin/env bash
# tests.sh [OPTIONS OF PYTEST]: run tests in the background on this machine's Python and torch, after the trainings have
# started. Without options the quick tests, which do not touch the GPU; `-m gpu` waits until the queue has finished.
# The log comes back with wait.sh.
. benchmarks/gpu/env.sh
tree=$ROOT/tests; mkdir -p $tree && cp -r . $tree && cd $tree || exit 1
export PYTHONPATH=$ROOT/code/gpu-wheels:$tree/src OMP_NUM_THREADS=1
wait="while [ ! -e $ROOT/finished ]; do sleep 1; done"
[ $# = 0 ] && set -- -m "not slow" && wait="export CUDA_VISIBLE_DEVICES="
setsid nohup nice -n 19 bash -c "$wait; python3 -m pytest -q -p no:cacheprovider $(printf '%q ' "$@")" \
    > $ROOT/logs/tests.log 2>&1 < /dev/null &
