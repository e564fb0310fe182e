"""A discrete-event simulation of a step: who waits for whom, and how long. Nothing here knows torch, Ray or verl."""
