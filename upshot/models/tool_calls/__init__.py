"""How families of models write tool calls: one file each, found by name or by the chat template's own words."""
