"""YAML → plain data, within bounds: a file of a few lines must not expand to a value that takes minutes to process."""

from __future__ import annotations

import re
from typing import Any

import yaml

DEEPEST = 64
"""Levels of nesting; a recipe has about six."""
LARGEST = 100_000
"""Values after aliases are filled in; a recipe has a few hundred."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml: eight times as fast
    """YAML whose numbers include 1e-5, which YAML 1.1 takes for a text, and whose keys stand once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping; a key that is there twice would silently lose its first value."""
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value
            if key.tag != "tag:yaml.org,2002:merge" and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{name}' appears twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """What a YAML text holds; `yaml.YAMLError` where it is not valid, nested too deeply or too large."""
    # Refuse values that would take too long to build or to process: an alias counts as much as its value.
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []
    total = 0
    for event in yaml.parse(text, _Loader):
        wrong = ""
        if isinstance(event, yaml.NodeEvent):
            if isinstance(event, yaml.AliasEvent):
                if event.anchor in [anchor for anchor, _ in open_nodes]:
                    wrong = f"'*{event.anchor}' stands inside what it names"
                total += sizes.get(event.anchor or "", 0)
            total += 1
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append((event.anchor, total))
            elif isinstance(event, yaml.ScalarEvent) and event.anchor:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            if anchor:
                sizes[anchor] = total - before + 1
        if len(open_nodes) > DEEPEST:
            wrong = f"nested more than {DEEPEST} levels deep"
        elif total > LARGEST:
            wrong = f"more than {LARGEST:,} values once aliases are filled in"
        if wrong:
            raise yaml.constructor.ConstructorError(None, None, wrong, event.start_mark)
    return yaml.load(text, _Loader)
