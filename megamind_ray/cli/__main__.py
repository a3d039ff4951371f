"""``python -m megamind_ray.cli``, where the console script is not on PATH."""

import sys

from megamind_ray.cli import main

sys.exit(main())
