"""Who speaks besides the policy: simulated users, environments; how models are asked."""
