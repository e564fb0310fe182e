"""Reward managers: where verifiers run. In process, in killable worker processes, or behind HTTP."""
