#!/usr/bin/env bash
# tests.sh [OPTIONS OF PYTEST]: run tests in the background on this machine's Python and torch, after the trainings have
# started. Without options the quick tests, which do not touch the GPU; `-n 8 -m gpu` waits until the queue has
# finished. The log comes back with wait.sh. pytest-benchmark, which is on that machine, warns beside pytest-xdist, and
# warnings are errors here.
. benchmarks/gpu/env.sh
tree=$ROOT/tests; mkdir -p $tree && cp -r . $tree && cd $tree || exit 1
export PYTHONPATH=$ROOT/code/gpu-wheels:$tree/src OMP_NUM_THREADS=1
wait="while [ ! -e $ROOT/finished ]; do sleep 1; done"
[ $# = 0 ] && set -- -m "not slow" && wait="export CUDA_VISIBLE_DEVICES="
touch $ROOT/testing
setsid nohup nice -n 19 bash -c "$wait; python3 -m pytest -q -p no:cacheprovider -p no:benchmark $(printf '%q ' "$@")
    rm $ROOT/testing" \
    > $ROOT/logs/tests.log 2>&1 < /dev/null &
