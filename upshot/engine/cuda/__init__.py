"""The engine on a GPU: captured steps over paged keys and values."""
