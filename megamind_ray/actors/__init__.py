"""The home of ray: planner, node agents, GPU workers, and what wires them (docs/design/0007)."""

if __name__ != "megamind_ray.actors":
    raise ImportError(
        f"imported as {__name__!r}: the link 'actors' at the top of the repository is for reading; "
        "a second copy of each class would come of it. Write 'from megamind_ray import actors'."
    )
