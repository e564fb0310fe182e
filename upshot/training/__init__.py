"""How a policy learns: loops (one file a method), objectives, the learner. The run around it is in `run`."""
