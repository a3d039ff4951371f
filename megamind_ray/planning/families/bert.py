"""bert: an encoder; checkpoints come with and without the ``bert.`` prefix."""

from __future__ import annotations

from collections.abc import Mapping

from megamind_ray.core.parallel import Rule
from megamind_ray.planning.families.linear import colwise, replicated, rowwise, vocabulary
from megamind_ray.planning.families.settings import query_heads
from megamind_ray.planning.quantization import quantization

__all__ = ["bert_rules"]


def bert_rules(config: Mapping[str, object]) -> tuple[Rule, ...]:
    """Attention by heads, the feed-forward layer by its inner features, the vocabulary where there is one."""
    quant, heads = quantization(config), query_heads(config)
    unit = quant.inner_unit
    return (
        *(
            rule
            for name in ("query", "key", "value")
            for rule in colwise(f"*attention.self.{name}", quant, heads=heads)
        ),
        *rowwise("*attention.output.dense", quant, heads=heads),
        *colwise("*intermediate.dense", quant, unit=unit),
        *rowwise("*output.dense", quant, unit=unit),
        vocabulary("*embeddings.word_embeddings.weight", "first"),
        replicated("*embeddings.position_*", "first"),
        replicated("*embeddings.token_type_*", "first"),
        replicated("*embeddings.LayerNorm.*", "first"),
        vocabulary("cls.predictions.decoder.*", "last"),
        vocabulary("cls.predictions.bias", "last"),
        replicated("cls.*", "last"),
        replicated("*pooler.dense.*", "last"),
        replicated("classifier.*", "last"),
        replicated("qa_outputs.*", "last"),
        replicated("*LayerNorm.*"),
    )
