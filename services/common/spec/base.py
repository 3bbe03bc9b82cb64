"""What all sections of a spec share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class SpecError(ValueError):
    """The run spec cannot be used; the message names the file and the field."""


HOOK = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A function by import path, `package.module:function`."""


class Strict(BaseModel):
    """Base of every section: immutable, unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
