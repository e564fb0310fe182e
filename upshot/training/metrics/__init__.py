"""What is logged of a step, and what rings an alarm."""
