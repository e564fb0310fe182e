"""The version, where everybody can have it without importing the package's face."""

__version__ = "0.1.0"
