#!/usr/bin/env bash
# Writes protos/gen from the .proto files. CI runs it and fails if the result differs from what is checked in.
set -euo pipefail
cd "$(dirname "$0")"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mapfile -t files < <(find flotilla -name '*.proto' | sort)
python -m grpc_tools.protoc -I . --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" \
  --mypy_grpc_out=quiet:"$out" "${files[@]}"
find "$out/flotilla" -type d -exec touch {}/__init__.py \;
rm -rf gen && mkdir gen && mv "$out/flotilla" gen/
