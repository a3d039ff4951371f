"""Benchmarks. Each is a module with a ``main()``: ``python -m benchmarks.NAME --json OUT [--quick]``."""

import os

# What ``megamind tune`` found on the machine of whoever runs them would make their results incomparable.
os.environ["MEGAMIND_PROFILE"] = "off"
