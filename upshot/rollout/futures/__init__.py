"""What comes of a reply: one file a kind of future."""
