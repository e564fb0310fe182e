"""What all sections of a recipe share: unknown keys are refused, and named things take their own options."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict

from upshot.config.short_form import ShortForm

Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
"""Words of a command line and environment variables are text where YAML reads numbers: 8192."""


class Section(ShortForm):
    """A part of the recipe; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class Named(ShortForm):
    """Something chosen by name; all other keys are its own options, checked against its constructor."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, allow_inf_nan=False)

    short_key: ClassVar[str] = "name"
    own_options: ClassVar[bool] = True

    name: str
    """A built-in name, or 'my_pkg.module:Thing'."""
