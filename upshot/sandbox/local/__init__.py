"""Programs run on this machine: zygotes in slots, sessions, cgroups."""
