"""`upshot demo`: tables that show what the rewards do, in minutes on a CPU."""
