"""megamind-ray moves model weights."""

__version__ = "0.1.0"
