"""One small file a metric."""
