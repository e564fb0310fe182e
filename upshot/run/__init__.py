"""A run and its folder: phases, checkpoints, resume, checks, report. How a model learns is in `training`."""
