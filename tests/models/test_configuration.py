"""`MGKConfig`: what it refuses, what it lets pass, and what it keeps."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from mgk.models import ARCHITECTURES, MGKConfig, MGKModel, architecture


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        # 23: unknown keys
        ({"num_component": 3}, "no key 'num_component': did you mean 'num_components'"),
        ({"hiden_size": 64}, "did you mean 'hidden_size'"),
        ({"num_heads": 4}, "did you mean 'num_attention_heads'"),
        ({"embed_dim": 64}, "did you mean 'hidden_size'"),
        ({"frobnicate": 1}, "no key 'frobnicate'"),
        # 24: wrong types
        ({"dropout": "1e-3"}, "'dropout' with value '1e-3'"),
        ({"hidden_size": "64"}, "'hidden_size' expected int, got str"),
        ({"hidden_size": True}, "'hidden_size' expected int, got bool"),
        ({"hidden_size": 64.0}, "'hidden_size' expected int, got float"),
        ({"qk_norm": 1}, "'qk_norm' expected bool, got int"),
        ({"num_labels": True}, "num_labels must be a number, got True"),
        # 25: shapes that do not fit
        ({"hidden_size": 65}, "hidden_size must be a multiple of num_attention_heads, or head_dim given, got 65 and 4"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, got 4 and 3"),
        ({"head_dim": 33}, "positions='rotary' needs an even head_dim, got 33"),
        ({"hidden_size": 33, "head_dim": 8, "positions": "sinusoidal"}, "needs an even hidden_size, got 33"),
        # names and ranges
        ({"attention": "smkg"}, "got 'smkg' (did you mean 'smgk'?)"),
        ({"attention": "mlk", "feature_map": "gelu"}, "feature_map must be one of elu, relu, dpfp, favor, got 'gelu'"),
        ({"attention": "mlk", "learn_variance": True}, "learn_variance must be false with attention='mlk', got true"),
        (
            {"attention": "mgk", "feature_map": "elu"},
            "feature_map and normalization must be left out with attention='mgk'",
        ),
        ({"normalization": "length"}, "got None and 'length': they belong to linear, mlk, smlk"),
        ({"hidden_act": "gulu"}, "hidden_act must be an activation that transformers knows, got 'gulu'"),
        ({"positions": "relative"}, "'positions' expected one of"),
        ({"positions_from": "end"}, "needs learned or sinusoidal positions of one text, got rotary positions"),
        (
            {"positions_from": "end", "positions": "sinusoidal", "is_encoder_decoder": True},
            "needs learned or sinusoidal positions of one text, got translation",
        ),
        ({"pooling_length": 0}, "pooling_length must be at least 1, got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_components": 0}, "num_components must be at least 1, got 0"),
        ({"dropout": 1.0}, "dropout must lie in [0, 1), got 1.0"),
        ({"query_bias_init_std": -1.0}, "query_bias_init_std must be finite and not negative, got -1.0"),
        (
            {"query_bias_init_std": 1.0, "attention_bias": False},
            "query_bias_init_std must be left out with attention_bias=False, got 1.0",
        ),
        ({"prior": "em"}, "'prior' expected one of"),
        ({"norm_eps": float("nan")}, "norm_eps must be finite and not negative, got nan"),
        ({"adaptive_cutoffs": [20, 10]}, "adaptive_cutoffs must grow from above 0 to below vocab_size=32000"),
        ({"adaptive_cutoffs": [40000]}, "got [40000]"),
        ({"adaptive_cutoffs": []}, "got []"),
        ({"num_labels": 0}, "num_labels must be at least 1, got 0"),
        ({"rope_parameters": {"rope_type": "bogus"}}, "rope_type must be one of default, "),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises((ValueError, StrictDataclassError)) as error:
        MGKConfig(**wrong)
    assert message in str(error.value)


def test_every_key_of_transformers_passes():
    written = {key: value for key, value in PreTrainedConfig().to_dict().items() if key != "model_type"}
    config = MGKConfig(**written, num_labels=3, max_length=7, rope_theta=5e5, torch_dtype="bfloat16", prefix="x")
    assert config.num_labels == 3
    assert config.rope_parameters["rope_theta"] == 5e5
    assert str(config.dtype) == "torch.bfloat16"


def test_configurations_of_other_versions_load(tmp_path):
    """Their unknown keys pass, a misspelt key of ours does not."""
    config = MGKConfig(hidden_size=64).to_dict()
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "transformers_version": "5.99.0", "future_feature_switch": {"a": 1}}))
    assert AutoConfig.from_pretrained(tmp_path).hidden_size == 64
    path.write_text(json.dumps({**config, "transformers_version": "5.99.0", "num_component": 3}))
    with pytest.raises(ValueError, match="did you mean 'num_components'"):
        MGKConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_saved_comes_back(name, tmp_path):
    config = architecture(name, attention="mgk", variance_scale=(1.0, 3.0))
    config.save_pretrained(tmp_path)
    loaded = MGKConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert loaded.variance_scale == [1.0, 3.0]


def test_changes_while_loading_are_checked(tmp_path):
    MGKConfig(hidden_size=64).save_pretrained(tmp_path)
    assert MGKConfig.from_pretrained(tmp_path, dropout=0.5).dropout == 0.5
    with pytest.raises(ValueError, match="did you mean 'num_components'"):
        MGKConfig.from_pretrained(tmp_path, num_componets=4)
    with pytest.raises(StrictDataclassError, match=r"dropout must lie in \[0, 1\), got 7.0"):
        MGKModel(MGKConfig.from_pretrained(tmp_path, dropout=7.0))
    with pytest.raises(StrictDataclassError, match="multiple of num_key_value_heads, got 2 and 4"):
        MGKModel(MGKConfig.from_pretrained(tmp_path, num_attention_heads=2))


def test_unknown_architectures_are_refused():
    with pytest.raises(ValueError, match=r"name must be one of lra-listops, .* got 'lra'"):
        architecture("lra")


def test_usual_names_of_the_norms_epsilon():
    assert MGKConfig(rms_norm_eps=1e-3).norm_eps == 1e-3
    assert MGKConfig(layer_norm_eps=1e-3).norm_eps == 1e-3
