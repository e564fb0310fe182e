"""Who speaks besides the policy: simulated users, judges, environments."""
