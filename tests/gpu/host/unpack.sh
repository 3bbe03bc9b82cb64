#!/usr/bin/env bash
# Puts the parts of pack.sh together. Usage: unpack.sh PARTS SITE. Then: export PYTHONPATH=SITE:SITE/vllm
set -euo pipefail
parts=${1:?usage: unpack.sh PARTS SITE} site=${2:?usage: unpack.sh PARTS SITE}
if ! compgen -G "$parts/*/part*" >/dev/null; then
  echo "$parts: there are no parts of pack.sh" >&2
  exit 1
fi
mkdir -p "$site"
cat "$parts"/*/part* | xz -dc -T0 | tar -xf - -C "$site"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$site"/wheels/*.whl
rm -r "$site/wheels"
