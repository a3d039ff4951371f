"""One process, no Ray: read, verify, cut, copy. What the actors wrap."""
