"""Policies: pure function objects that propose. A frozen snapshot in, a frozen decision with its reasons out.

The planner validates what they propose (``planning.build``) and alone decides.
"""

if __name__ != "megamind_ray.policies":
    raise ImportError(
        f"the policies were imported as {__name__!r}; the link of that name in the checkout is for people, and "
        "importing it would make a second copy of every class. Import 'megamind_ray.policies' instead."
    )
