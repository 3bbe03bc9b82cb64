#!/usr/bin/env bash
# The tests that need GPUs; each call takes at most 9 minutes on a bare host. Usage:
#   tests/gpu/run.sh 1 [PARTS]   # what one GPU shows
#   tests/gpu/run.sh 2 [PARTS]   # what takes two
# PARTS: folder with the output of host/pack.sh, for a host without vLLM and without a network. LOGS: where logs go.
set -euo pipefail
gpus=${1:-} parts=${2:+$(realpath -- "$2")} logs=$(realpath -- "${LOGS:-$(mktemp -d)}")
if [[ $gpus != [12] || $# -gt 2 ]]; then
  echo "usage: tests/gpu/run.sh 1|2 [PARTS]" >&2
  exit 2
fi
cd "$(dirname "$0")/../.."
mkdir -p "$logs"
export PYTHONPATH=$PWD:$PWD/protos/gen
if [ -n "$parts" ]; then
  site=${SITE:-/tmp/flotilla-site}
  if [ ! -e "$site/complete" ]; then
    tests/gpu/host/unpack.sh "$parts" "$site"
    touch "$site/complete"
  fi
  PYTHONPATH=$site:$site/vllm:$PYTHONPATH
fi
# Models this small need no kernels that are compiled at start.
export VLLM_USE_DEEP_GEMM=0 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
if [ "$gpus" = 1 ]; then
  export CUDA_VISIBLE_DEVICES=0
  files=(tests/gpu/test_*.py)
else
  files=(tests/gpu/test_nccl_two_gpus.py tests/gpu/test_stack_gpu.py tests/gpu/test_trainer_two_gpus.py)
fi

# All files at once: together they take a fraction of a GPU's memory, and hardly its time.
declare -A running
for file in "${files[@]}"; do
  python3 -m pytest -o addopts= -m gpu -rsA --tb=short --durations=5 -p no:cacheprovider "$file" \
    >"$logs/$(basename "$file" .py).log" 2>&1 &
  running[$file]=$!
done
failed=0
for file in "${files[@]}"; do
  log=$logs/$(basename "$file" .py).log
  if wait "${running[$file]}"; then
    echo "$file: $(tail -n 1 "$log")"
  else
    failed=1
    echo "$file FAILED"
    tail -n 40 "$log"
  fi
done
exit $failed
