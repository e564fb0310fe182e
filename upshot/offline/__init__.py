"""Everything that processes a file or a table, or plays single conversations; nothing here trains."""
