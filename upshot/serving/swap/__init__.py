"""Many models in one process on one device, under one memory plan: those that do not fit together take turns."""
