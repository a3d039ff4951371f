"""Rules from elsewhere, for tensors that neither the user's rules nor the built-in ones place.

Where they come from is not planning's business: whoever calls ``build_demands`` hands in a source, and it is asked only
if there is such a tensor, since asking may import a large library (docs/design/0009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from megamind_ray.core.parallel import Rule

__all__ = ["Fallback", "RuleSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """The answer of a source.

    Attributes:
        rules: In order; the first that matches decides.
        hint: Where rules are missing, why, and what the user can do about it: a sentence that ends the refusal to
            replicate too much. Empty otherwise.
    """

    rules: tuple[Rule, ...] = ()
    hint: str = ""


# Called with the model's configuration, and the shape of each kind of module tensor by its template (the name with 0
# for each number; the first layer's shape where layers differ).
RuleSource: TypeAlias = Callable[[Mapping[str, object], Mapping[str, tuple[int, ...]]], Fallback]
