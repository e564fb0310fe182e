"""What the policy gradient minimises, token by token. One file a surrogate."""
