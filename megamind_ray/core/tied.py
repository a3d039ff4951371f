"""Names that are absent on disk because the model ties them to a name that is there.

The groups below say which parameters of a family are one tensor, as transformers ties them
(``_tied_weights_keys`` of its model classes, and the defaults of its configurations).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

__all__ = ["tied_names"]

# Endings of classes with a language-model head; base models and classifiers have none.
_WITH_HEAD: Final = (
    "ForCausalLM",
    "LMHeadModel",
    "DoubleHeadsModel",
    "ForConditionalGeneration",
    "ForImageTextToText",
    "ForMaskedLM",
    "ForPreTraining",
)


@dataclass(frozen=True, slots=True)
class _Group:
    """Names of one tensor.

    Attributes:
        body: Names in the base model.
        head: Names in the language-model head; only models with a head have them.
        implies_head: The names of the body have a prefix that they have only inside a larger model.
    """

    body: tuple[str, ...]
    head: tuple[str, ...] = ()
    implies_head: bool = False


def _decoder(embedding: str, base: str = "model") -> tuple[_Group, ...]:
    """The head of a decoder is its embedding; some checkpoints leave out the prefix of the base model."""
    return (
        _Group((f"{base}.{embedding}.weight",), ("lm_head.weight",), implies_head=True),
        _Group((f"{embedding}.weight",), ("lm_head.weight",)),
    )


def _masked(base: str, decoder: str, bias: str) -> tuple[_Group, ...]:
    """The prediction head of an encoder, with its bias."""
    return (
        _Group((f"{base}.embeddings.word_embeddings.weight",), (f"{decoder}.weight",)),
        _Group((), (bias, f"{decoder}.bias")),
    )


_EMBED_TOKENS: Final = (
    *_decoder("embed_tokens"),
    _Group(("model.language_model.embed_tokens.weight",), ("lm_head.weight",), implies_head=True),
    _Group(("language_model.model.embed_tokens.weight",), ("language_model.lm_head.weight",), implies_head=True),
)
_WTE: Final = _decoder("wte", "transformer")
_T5: Final = (
    _Group(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), ("lm_head.weight",)),
)
_BART: Final = (
    _Group(
        ("model.shared.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
        ("lm_head.weight",),
    ),
    _Group(("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")),
)
_ROBERTA: Final = _masked("roberta", "lm_head.decoder", "lm_head.bias")

# Families whose names are not those of ``_EMBED_TOKENS``.
_GROUPS: Final[Mapping[str, tuple[_Group, ...]]] = {
    "albert": _masked("albert", "predictions.decoder", "predictions.bias"),
    "bart": _BART,
    "bert": _masked("bert", "cls.predictions.decoder", "cls.predictions.bias"),
    "bloom": _decoder("word_embeddings", "transformer"),
    "codegen": _WTE,
    "distilbert": (_Group(("distilbert.embeddings.word_embeddings.weight",), ("vocab_projector.weight",)),),
    "electra": (_Group(("electra.embeddings.word_embeddings.weight",), ("generator_lm_head.weight",)),),
    "falcon": _decoder("word_embeddings", "transformer"),
    "gpt2": _WTE,
    "gpt_bigcode": _WTE,
    "gpt_neo": _WTE,
    "gpt_neox": _decoder("embed_in", "gpt_neox"),
    "gptj": _WTE,
    "longt5": _T5,
    "mamba": _decoder("embeddings", "backbone"),
    "mbart": _BART,
    "mpt": _WTE,
    "mt5": _T5,
    "opt": _decoder("decoder.embed_tokens"),
    "roberta": _ROBERTA,
    "switch_transformers": _T5,
    "t5": _T5,
    "umt5": _T5,
    "xlm-roberta": _ROBERTA,
}
# Families that tie where ``config.json`` says nothing.
_TIED_BY_DEFAULT: Final = frozenset(_GROUPS) - {"codegen", "gpt_neox", "gptj"} | {
    "cohere",
    "cohere2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gemma3n",
    "gemma3n_text",
    "gemma4",
    "gemma4_text",
    "mistral3",
    "paligemma",
    "smollm3",
    "starcoder2",
}
# Here ``tie_word_embeddings: false`` means only that outputs are not scaled (T5 v1.1 and its descendants).
_ALWAYS_TIED: Final = frozenset({"mt5", "t5", "umt5"})


def tied_names(config: Mapping[str, object], names: Set[str]) -> dict[str, str]:
    """Which absent names share the bytes of a name on disk.

    Args:
        config: The model's ``config.json``; empty where there is none, then nothing is tied.
        names: Names on disk.

    Returns:
        Absent name -> name on disk. Names of a head appear only if the ``architectures`` of the configuration have one,
        or, where it has none, if the names on disk carry the prefix that only a model around the base model gives.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or not _ties(config, family):
        return {}
    tied: dict[str, str] = {}
    for group in _GROUPS.get(family, _EMBED_TOKENS):
        candidates = (*group.body, *(group.head if _has_head(config, group) else ()))
        target = next((name for name in candidates if name in names), None)
        if target is None:
            continue
        for name in candidates:
            if name not in names and name not in tied and _has_place(name, target, group, names):
                tied[name] = target
    return tied


def _ties(config: Mapping[str, object], family: str) -> bool:
    if family in _ALWAYS_TIED:
        return True
    inner = config.get("text_config")
    for section in (config, inner if isinstance(inner, Mapping) else {}):
        flag = section.get("tie_word_embeddings")
        if isinstance(flag, bool):
            return flag
    return family in _TIED_BY_DEFAULT


def _has_head(config: Mapping[str, object], group: _Group) -> bool:
    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return any(isinstance(name, str) and name.endswith(_WITH_HEAD) for name in architectures)
    return group.implies_head


def _has_place(name: str, target: str, group: _Group, names: Set[str]) -> bool:
    """Whether the model has the module that would hold the name; an encoder alone has no ``decoder.embed_tokens``."""
    parent = ".".join(name.split(".")[:-2])
    if not parent:  # at the top: the body's name without its prefix cannot be told from one that is not there
        return name in group.head or target in group.body
    return any(other.startswith(f"{parent}.") for other in names)
