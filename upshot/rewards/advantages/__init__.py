"""Credits of a step → advantages of every span. One file an estimator."""
