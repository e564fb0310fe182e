"""What a run needs of a device, and what is chosen so that it fits."""
