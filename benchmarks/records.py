"""What the GPU benchmarks write, and how it gets into docs/gpu.md.

    python -m benchmarks.records RECORD...

puts each record's table between the marks `<!-- figures: NAME -->` and `<!-- end -->` of docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
DOCUMENT = Path(__file__).parents[1] / "docs" / "gpu.md"
PACKAGES = ("torch", "triton", "vllm", "megatron-core")


def need_gpus(parser: argparse.ArgumentParser, count: int = 1) -> None:
    """End with one sentence where torch sees fewer GPUs."""
    import torch

    if (found := torch.cuda.device_count()) < count:
        parser.error(f"it takes {count} NVIDIA GPU{'s' * (count > 1)}, and torch sees {found}")


def write_record(path: Path, name: str, rows: Sequence[Row]) -> None:
    """Write the figures of one benchmark: rows of one table, all with the same keys, units in the keys."""
    record = {"name": name, "machine": machine(), "date": time.strftime("%Y-%m-%d"), "rows": list(rows)}
    path.write_text(json.dumps(record, indent=1) + "\n")


def machine() -> str:
    """GPUs and versions, in one line."""
    import torch

    gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    found = [f"{name} {number}" for name in PACKAGES if (number := _version(name))]
    return ", ".join([gpus, f"Python {sys.version.split()[0]}", *found])


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(map(_text, row.values())) + " |" for row in rows]
    return "\n".join(lines)


def put_into(document: str, record: Row) -> str:
    """The document with the record's table in its place. Raises ValueError if it has no such place."""
    begin, end = f"<!-- figures: {record['name']} -->", "<!-- end -->"
    found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    content = f"{begin}\n{record['machine']}, {record['date']}:\n\n{table(record['rows'])}\n{end}"
    changed, count = found.subn(lambda _: content, document)
    if count != 1:
        raise ValueError(f"{DOCUMENT}: there are {count} places {begin}, not one")
    return changed


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
    return "-" if value is None else str(value)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, help="files that the benchmarks wrote")
    document = DOCUMENT.read_text()
    for path in parser.parse_args().records:
        document = put_into(document, json.loads(path.read_text()))
    DOCUMENT.write_text(document)


if __name__ == "__main__":
    main()
