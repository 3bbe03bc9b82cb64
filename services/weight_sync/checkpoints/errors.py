"""What is wrong with a checkpoint."""

from __future__ import annotations

from services.common.errors import InvalidArgument


class CheckpointError(InvalidArgument):
    """A checkpoint that cannot be read, converted or written to; the message names the file."""
