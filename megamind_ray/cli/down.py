"""``megamind down``: the end of a fleet."""

from __future__ import annotations

from megamind_ray.cli.options import Address, AsJson, Fleet, examples
from megamind_ray.cli.output import Output

__all__ = ["EXAMPLES", "down_command"]

EXAMPLES = examples("megamind down", "megamind down --fleet staging")


def down_command(address: Address = None, fleet: Fleet = "default", as_json: AsJson = False) -> None:
    """Ends a detached fleet: its models, actors and blocks. Ray itself keeps running."""
    with Output(as_json) as output:
        from megamind_ray.api.cluster import down
        from megamind_ray.cli.running import running_address

        cluster = running_address(address)
        ended = down(cluster, fleet=fleet)
        what = f"is down ({len(ended)} actors ended)" if ended else "was not there"
        text = f"fleet {fleet} {what}, cluster {cluster}"
        output.emit({"address": cluster, "fleet": fleet, "ended": ended}, text)
