# Settings of every call on the GPU machine. The code is copied once, so that later calls do not change it under a run.
ROOT=${GPU_ROOT:-/tmp/g}
mkdir -p $ROOT/{runs,logs,in,data,mps,mpslog,cache}
export PYTHONPATH=$ROOT/code/gpu-wheels:$ROOT/code/src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 NO_COLOR=1 TERM=dumb
export CUDA_MPS_PIPE_DIRECTORY=$ROOT/mps CUDA_MPS_LOG_DIRECTORY=$ROOT/mpslog
export TORCHINDUCTOR_CACHE_DIR=$ROOT/cache TORCHINDUCTOR_COMPILE_THREADS=6
