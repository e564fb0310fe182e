"""Episodes that somebody else's program plays: it calls the policy, and every call is recorded."""
