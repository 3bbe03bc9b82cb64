#!/usr/bin/env bash
# Packs vLLM, and the wheels that Flotilla and vLLM need, for a GPU host without a network that has torch 2.11 for
# Python 3.12. Usage: pack.sh OUT. Makes OUT/0, OUT/1, ...: folders of at most 60 MB, to be copied to one place there.
set -euo pipefail
here=$(cd -- "$(dirname -- "$0")" && pwd)
out=${1:?usage: pack.sh OUT}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=(--no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for glibc in 39 35 34 31 28 27 26 24 17 12 5; do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
for year in 2014 2010 1; do target+=(--platform "manylinux${year}_x86_64"); done

python3 -m pip download -q "${target[@]}" -d "$work/wheels" -r "$here/wheels.txt"
python3 -m pip wheel -q --no-deps -w "$work/wheels" interegular==0.3.3
python3 -m pip download -q "${target[@]}" -d "$work" vllm==0.24.0
python3 -m zipfile -e "$work"/vllm-*.whl "$work/vllm"
# Of no use on a Hopper GPU with FlashAttention 3.
rm -rf "$work"/vllm/vllm/{vllm_flash_attn/_vllm_fa2_C.abi3.so,vllm-rs,_qutlass_C.abi3.so,third_party/fmha_sm100}
find "$work/vllm/vllm/third_party/deep_gemm" -name '_C.cpython-*' ! -name '*-312-*' -delete

tar -C "$work" -cf - vllm wheels | xz -T0 -3 | split -b 56M -d - "$work/part"
number=0
for part in "$work"/part*; do
  mkdir -p "$out/$number"
  mv "$part" "$out/$number/"
  number=$((number + 1))
done
ls -lh "$out"/*
