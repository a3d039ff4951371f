import json
from typing import Any

import pytest

from megamind_ray.core.tied import tied_names

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
EMBED = "model.embed_tokens.weight"
T5 = {"shared.weight", "encoder.block.0.w", "decoder.block.0.w"}


def test_a_head_that_is_tied_is_the_embedding() -> None:
    assert tied_names(LLAMA | {"tie_word_embeddings": True}, {EMBED}) == {"lm_head.weight": EMBED}


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"tie_word_embeddings": False}, {}, {"model_type": 3}])
def test_nothing_is_tied_that_the_configuration_does_not_tie(config: dict[str, Any]) -> None:
    assert tied_names(config, {EMBED}) == {}


def test_a_name_on_disk_is_not_tied() -> None:
    assert tied_names(LLAMA | {"tie_word_embeddings": True}, {EMBED, "lm_head.weight"}) == {}


def test_nothing_is_tied_to_a_name_that_is_not_there() -> None:
    assert tied_names(LLAMA | {"tie_word_embeddings": True}, {"model.norm.weight"}) == {}


def test_an_embedding_that_was_left_out_is_the_head() -> None:
    names = {"lm_head.weight", "model.norm.weight"}

    assert tied_names(LLAMA | {"tie_word_embeddings": True}, names) == {EMBED: "lm_head.weight"}


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "smollm3", "cohere"])
def test_families_that_tie_by_default(family: str) -> None:
    config = {"model_type": family, "architectures": ["XForCausalLM"]}

    assert tied_names(config, {EMBED}) == {"lm_head.weight": EMBED}
    assert tied_names(config | {"tie_word_embeddings": False}, {EMBED}) == {}


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "deepseek_v3", "gpt_oss"]
)
def test_families_that_do_not(family: str) -> None:
    assert tied_names({"model_type": family, "architectures": ["XForCausalLM"]}, {EMBED}) == {}


def test_a_base_model_has_no_head() -> None:
    config = {"model_type": "gemma", "architectures": ["GemmaModel"]}

    assert tied_names(config, {EMBED}) == {}


@pytest.mark.parametrize(
    ("prefix", "architectures", "tied"),
    [
        ("transformer.", ["GPT2LMHeadModel"], True),
        ("", ["GPT2LMHeadModel"], True),
        ("", ["GPT2Model"], False),
        ("transformer.", None, True),
        ("", None, False),
    ],
)
def test_gpt2_with_and_without_its_prefix(prefix: str, architectures: Any, tied: bool) -> None:
    config = {"model_type": "gpt2"} | ({} if architectures is None else {"architectures": architectures})

    expected = {"lm_head.weight": f"{prefix}wte.weight"} if tied else {}
    assert tied_names(config, {f"{prefix}wte.weight", f"{prefix}h.0.w"}) == expected


def test_gpt_neox_ties_only_when_told() -> None:
    config = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}
    names = {"gpt_neox.embed_in.weight"}

    assert tied_names(config, names) == {}
    assert tied_names(config | {"tie_word_embeddings": True}, names) == {"lm_head.weight": "gpt_neox.embed_in.weight"}


def test_bert_ties_weight_and_bias_of_its_head() -> None:
    embedding = "bert.embeddings.word_embeddings.weight"
    names = {embedding, "cls.predictions.bias", "cls.predictions.transform.dense.weight"}

    assert tied_names({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, names) == {
        "cls.predictions.decoder.weight": embedding,
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification"])
def test_bert_without_a_language_head(architecture: str) -> None:
    names = {"bert.embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight"}

    assert tied_names({"model_type": "bert", "architectures": [architecture]}, names) == {}


@pytest.mark.parametrize("family", ["t5", "switch_transformers"])
def test_an_encoder_decoder_shares_one_embedding(family: str) -> None:
    config = {"model_type": family, "architectures": ["XForConditionalGeneration"]}

    assert tied_names(config, T5) == dict.fromkeys(
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"
    )


def test_t5_shares_its_embedding_also_where_its_head_is_its_own() -> None:
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False}

    assert tied_names(config, T5 | {"lm_head.weight"}) == dict.fromkeys(
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"], "shared.weight"
    )


def test_an_encoder_alone_has_no_decoder_embedding() -> None:
    config = {"model_type": "t5", "architectures": ["T5EncoderModel"]}

    assert tied_names(config, {"shared.weight", "encoder.block.0.w"}) == {
        "encoder.embed_tokens.weight": "shared.weight"
    }


def test_a_flag_of_the_text_model_counts_where_the_whole_has_none() -> None:
    config = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"tie_word_embeddings": True},
    }

    assert tied_names(config, {EMBED, "visual.w"}) == {"lm_head.weight": EMBED}


def test_a_multimodal_layout_ties_its_own_names() -> None:
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    embedding = "language_model.model.embed_tokens.weight"

    assert tied_names(config, {embedding, "language_model.model.norm.weight"}) == {
        "language_model.lm_head.weight": embedding
    }


def _tiny(family: str) -> Any:
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "n_layer": 1,
        "n_embd": 8,
        "n_head": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "d_model": 8,
        "d_ff": 8,
        "d_kv": 4,
        "num_heads": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return {"model_type": family} | sizes


@pytest.mark.parametrize(
    ("family", "auto"),
    [
        ("llama", "AutoModelForCausalLM"),
        ("qwen3", "AutoModelForCausalLM"),
        ("gemma2", "AutoModelForCausalLM"),
        ("gpt2", "AutoModelForCausalLM"),
        ("gpt_neox", "AutoModelForCausalLM"),
        ("bert", "AutoModelForMaskedLM"),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("llama", "AutoModel"),
        ("bert", "AutoModel"),
        ("t5", "AutoModel"),
    ],
)
def test_it_is_what_transformers_ties(family: str, auto: str) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**_tiny(family))
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(config)
    expected = dict(model.all_tied_weights_keys)
    saved = json.loads(config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}

    on_disk = {name for name, _ in model.named_parameters(remove_duplicate=False)} - expected.keys()

    assert tied_names(saved, on_disk) == expected
