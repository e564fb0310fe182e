"""Sections with a short form, a single value: `kl: 0.1`, `credit: turns`, `task: gsm8k`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from upshot.config.bools import PlainNumbers


class ShortForm(PlainNumbers):
    """A mapping that may be given as a single value."""

    short_key: ClassVar[str] = ""
    """The key that a plain string or number is short for; empty: no short form."""
    own_options: ClassVar[bool] = False
    """Whether the other keys are options of the thing that the short key names, so that a different name drops them."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of the named thing: keys that are none of the section's own."""
        return dict(self.model_extra or {})

    @classmethod
    def expand(cls, value: Any) -> Any:
        """The mapping that a single value is short for; anything else is returned unchanged."""
        alone = cls.short_key and value is not None and not isinstance(value, Mapping | BaseModel | list | tuple)
        return {cls.short_key: value} if alone else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe the short form to editors, too."""
        schema = handler(core_schema)
        if cls.short_key:
            resolved = handler.resolve_ref_schema(schema)
            alone_schema = resolved["properties"][cls.short_key]
            alone = {name: alone_schema[name] for name in ("type", "enum", "minimum", "anyOf") if name in alone_schema}
            whole = dict(resolved)
            resolved.clear()
            resolved["anyOf"] = [whole, alone]
        return schema

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, value: Any) -> Any:
        return cls.expand(value)
