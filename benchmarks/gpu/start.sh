#!/usr/bin/env bash
# start.sh SECONDS [MOST]: start MPS and the queue, which waits for the data. Carries gpu-wheels, gpu-job, gpu-data-1.
. benchmarks/gpu/env.sh
mkdir -p $ROOT/code && cp -r src benchmarks gpu-wheels gpu-job $ROOT/code/ || exit 1
nvidia-smi -L; nvidia-cuda-mps-control -d
cd $ROOT/code
setsid nohup python3 benchmarks/gpu/run_jobs.py gpu-job/jobs.json $ROOT --seconds "$1" --most "${2:-6}" \
    > $ROOT/queue.out 2>&1 < /dev/null &
cd "$OLDPWD"
bash benchmarks/gpu/receive.sh gpu-data-1
