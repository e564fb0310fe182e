"""What is minimised: losses, surrogates, KL, importance weights. Pure functions of log-probabilities."""
