"""What cannot be converted, or not like this: one sentence, and the model stays as it was."""

import copy

import pytest
import torch
import transformers
from cases import DEVICE
from conversion_cases import logits, make_inputs, make_model
from transformers import DynamicCache, StaticCache

import mgk
import mgk.conversion

TINY = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0}  # fmt: skip
OTHERS = {
    "Gemma2ForCausalLM": (TINY, r"family 'gemma2' cannot be converted: its attention caps its logits \(softcap\)"),
    "T5ForConditionalGeneration": (T5, "family 't5' cannot be converted: its attention adds a position bias"),
    "GptOssForCausalLM": (
        {**TINY, "num_local_experts": 2, "num_experts_per_tok": 1},
        "family 'gpt_oss' cannot be converted: its attention has attention sinks",
    ),
    "MistralForCausalLM": ({**TINY, "sliding_window": 4}, "sliding windows cannot be converted, got sliding_window=4"),
    "Qwen2ForCausalLM": (
        {**TINY, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
        "sliding windows cannot be converted, got sliding_window=4 in a 'qwen2'",
    ),
    "OPTForCausalLM": (
        {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "word_embed_proj_dim": 32},
        "must be of one of the families llama, mistral, .*, bart, got 'opt'",
    ),
    "GPT2LMHeadModel": (
        {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "add_cross_attention": True},
        "a 'gpt2' with cross-attention cannot be converted",
    ),
}  # fmt: skip


def make_other(name, implementation=None):
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    config = model_class.config_class(**OTHERS[name][0])
    config._attn_implementation = implementation
    return model_class(config).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_models_that_cannot_be_converted(name):
    with pytest.raises(ValueError, match=OTHERS[name][1]):
        mgk.convert(make_other(name), "smgk")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gemma2ForCausalLM", "has no sliding windows|has no caps on logits"),
        ("T5ForConditionalGeneration", "has no position biases, got one from T5Attention"),
        ("GptOssForCausalLM", "has no (sliding windows|attention sinks)"),
        ("MistralForCausalLM", "has no sliding windows or chunks, got one of 4 tokens"),
    ],
)
def test_the_implementation_alone_refuses_what_it_would_ignore(name, message):
    model = make_other(name, "mgk")
    tokens = torch.randint(3, 61, (2, 9))
    decoder = {"decoder_input_ids": tokens} if name.startswith("T5") else {}
    with pytest.raises(ValueError, match=message):
        model(tokens, **decoder)


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask", "sliding_window"])
def test_arguments_that_would_change_the_attention_are_refused(name):
    from mgk.conversion.attention import attention

    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"attn_implementation 'mgk' has no .*, got one from Identity"):
        attention(torch.nn.Identity(), x, x, x, None, **{name: 1.0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide the 4 of the model, got 3"),
        ({"num_heads": 0}, "num_heads must divide the 4 of the model, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide the 2 of the model, got 3"),
        ({"num_kv_heads": 4}, "num_kv_heads must divide the 2 of the model, got 4"),
        ({"num_heads": 1}, "num_heads must be a multiple of num_kv_heads, got 1 and 2"),
        ({"components": 0}, "components must be at least 1, got 0"),
        ({"start": "exact"}, "start 'exact' needs a dot product, got 'smgk'"),
        ({"start": "slow"}, "start must be one of 'auto', 'exact', 'near', 'immediate', got 'slow'"),
        ({"fade_steps": 0}, "fade_steps must be at least 1, got 0"),
        ({"perturbation": -1.0}, "perturbation must be finite and not negative, got -1.0"),
        ({"pooling": "all"}, "pooling must be one of 'neighbours', 'similar', got 'all'"),
        ({"backend": "fast"}, "backend must be one of"),
        ({"variance_scale": (1.0, 3.0)}, "start 'near' needs one variance for all components"),
        ({"variance_scale": (1.0, 3.0, 2.0), "start": "immediate"}, "variance_scale must be one number or 2"),
    ],
)
def test_bad_options(options, message):
    model = make_model("llama")
    before, inputs = copy.deepcopy(model.config.to_dict()), make_inputs("llama")
    expected = logits(model, inputs)
    with pytest.raises(ValueError, match=message):
        mgk.convert(model, "smgk", **options)
    assert model.config.to_dict() == before
    assert torch.equal(logits(model, inputs), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": 2.0}, "components must be an integer, got 2.0"),
        ({"num_heads": 2.0}, "num_heads must be an integer, got 2.0"),
        ({"num_kv_heads": "1"}, "num_kv_heads must be an integer, got '1'"),
        ({"fade_steps": 2.5}, "fade_steps must be an integer, got 2.5"),
        ({"variance_scale": "a"}, "variance_scale must be one number or one per component, got 'a'"),
        ({"variance_scale": None}, "variance_scale must be one number or one per component, got None"),
    ],
)
def test_options_of_other_types(options, message):
    with pytest.raises(TypeError, match=message):
        mgk.convert(make_model("llama"), "smgk", **options)


def test_a_refused_option_leaves_the_heads():
    """Nothing is merged before all options are known to be right."""
    model, inputs = make_model("llama"), make_inputs("llama")
    expected = logits(model, inputs)
    with pytest.raises(ValueError, match="variance_scale must be one number or 2"):
        mgk.convert(model, "smgk", num_kv_heads=1, variance_scale=(1.0, 3.0, 2.0), start="immediate")
    assert torch.equal(logits(model, inputs), expected)


def test_presets_that_do_not_fit():
    with pytest.raises(ValueError, match=r"attention must be one of 'softmax', .*, got 'mlk'"):
        mgk.convert(make_model("llama"), "mlk")
    with pytest.raises(ValueError, match="'gaussian' has one key a position, got components=2"):
        mgk.convert(make_model("llama"), "gaussian", components=2)
    with pytest.raises(ValueError, match="start 'near' needs a soft mixture, got 'smgk-hard'"):
        mgk.convert(make_model("llama"), "smgk-hard", start="near")
    with pytest.raises(ValueError, match="start 'near' needs a distance, got 'softmax-mgk'"):
        mgk.convert(make_model("llama"), "softmax-mgk", start="near")


def test_what_is_no_model():
    with pytest.raises(TypeError, match="model must be a PreTrainedModel of transformers, got Linear"):
        mgk.convert(torch.nn.Linear(2, 2), "smgk")
    model = mgk.convert(make_model("llama"), "smgk")
    with pytest.raises(ValueError, match="must not have been converted before"):
        mgk.convert(model, "smgk")
    whole = make_model("llama")
    mgk.convert(whole.model, "smgk")
    with pytest.raises(ValueError, match="must not have been converted before"):
        mgk.convert(whole, "smgk")


def test_offloaded_weights():
    accelerate = pytest.importorskip("accelerate")
    model = make_model("llama")
    accelerate.cpu_offload(model, execution_device=DEVICE)
    with pytest.raises(ValueError, match="must hold its weights, got one that accelerate has offloaded"):
        mgk.convert(model, "smgk")


def test_projections_that_are_no_longer_plain():
    model = make_model("llama")
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Sequential(attention.k_proj)
    with pytest.raises(TypeError, match=r"projections must be nn.Linear, got Sequential in LlamaAttention"):
        mgk.convert(model, "smgk")
    assert not hasattr(model.model.layers[0].self_attn, "mixture")


def test_another_implementation_is_refused():
    model = mgk.convert(make_model("llama"), "smgk")
    with pytest.raises(ValueError, match="with attn_implementation 'mgk' alone, got 'sdpa'"):
        model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_a_cache_of_another_model(cache):
    """Heads that were pooled, or keys that became M, are not those of the model before."""
    old, inputs = make_model("llama"), make_inputs("llama")
    options = {"config": old.config, "max_cache_len": 16} if cache is StaticCache else {}
    for change in ({"num_kv_heads": 1}, {}):
        held = cache(**options)
        logits(old, inputs, past_key_values=held)
        model = mgk.convert(copy.deepcopy(old), "mgk", **change)
        keys, values = (2, 1) if change else (4, 2)
        sentence = f"must hold {keys} keys and {values} values of width 8 a token, got 2 and 2 of width 8: a cache of"
        with pytest.raises(ValueError, match=sentence):
            logits(model, {"input_ids": inputs["input_ids"][:, :1]}, past_key_values=held)


def test_loading_what_was_not_converted(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"path must hold a model that mgk.convert made, got a 'llama' in"):
        mgk.load_converted(tmp_path)


def test_loading_as_something_else(tmp_path):
    model = mgk.convert(make_model("llama"), "smgk")
    model.save_pretrained(tmp_path)
    for model_class in (transformers.AutoModelForCausalLM, "LlamaForCausalLM", torch.nn.Linear):
        with pytest.raises(TypeError, match="model_class must be a class of models such as LlamaForCausalLM, or None"):
            mgk.load_converted(tmp_path, model_class)
    with pytest.raises(ValueError, match="model_class must be of the family 'llama', got BertModel"):
        mgk.load_converted(tmp_path, transformers.BertModel)
    with pytest.raises(ValueError, match="reads the configuration beside the weights, got another"):
        mgk.load_converted(tmp_path, config=model.config)


def test_the_class_itself_does_not_load_a_part(tmp_path):
    """`AutoModel` refuses the model type, but a class named by the user only warns of it."""
    mgk.convert(make_model("llama"), "gaussian", start="immediate").save_pretrained(tmp_path)
    for name in ("LlamaForCausalLM", "LlamaModel"):
        with pytest.raises(OSError, match=r"load-this-folder-with-mgk.load_converted"):
            getattr(transformers, name).from_pretrained(tmp_path)


def test_continuous_batching():
    model = mgk.convert(make_model("llama"), "smgk")
    with pytest.raises(ValueError, match="continuous batching keeps keys in pages, which mixture attention does not"):
        model.generate_batch([[3, 4, 5]])


def test_pushing_while_saving(tmp_path):
    model = mgk.convert(make_model("llama"), "smgk")
    with pytest.raises(ValueError, match=r"call model.push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
