"""What other libraries do with our models: docs/compatibility.md has a line for each."""

import json

import pytest
import torch
from cases import DEVICE
from model_cases import make_inputs, make_labels, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TorchAoConfig, pipeline

from mgk.models import MGKForCausalLM
from mgk.nn import PRESETS

pytestmark = pytest.mark.filterwarnings("ignore")
every_preset = pytest.mark.parametrize("attention", list(PRESETS))
four_presets = pytest.mark.parametrize("attention", ["softmax", "smgk", "mgk", "mlk"])


def byte_tokenizer():
    vocabulary = ["<pad>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def make_reader(kind, attention, **changes):
    """A model that reads the bytes of a text, and their tokenizer."""
    tokenizer = byte_tokenizer()
    changes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **changes}
    return make_model(kind, attention, dtype=torch.float32, **changes), tokenizer


def tokens_of(tokenizer, text):
    return tokenizer(text, return_tensors="pt").to(DEVICE)


@every_preset
def test_text_generation_pipeline(attention):
    """A batch of prompts, padded on the left, gives what each prompt gives alone."""
    model, tokenizer = make_reader("modern", attention)
    tokenizer.padding_side = "left"
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["a mixture", "of Gaussian keys"]
    texts = generator(prompts, max_new_tokens=5, do_sample=False, batch_size=2)
    for prompt, [text] in zip(prompts, texts, strict=True):
        tokens = tokens_of(tokenizer, prompt)
        expected = model.generate(**tokens, max_new_tokens=5, do_sample=False)
        assert text["generated_text"] == tokenizer.decode(expected[0], skip_special_tokens=True)


@every_preset
def test_text_classification_pipeline(attention):
    model, tokenizer = make_reader("classifier", attention, num_labels=3)
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    texts = ["one key", "or a mixture of them"]
    for text, answers in zip(texts, classify(texts, batch_size=2), strict=True):
        expected = model(**tokens_of(tokenizer, text)).logits[0].softmax(-1)
        for answer in answers:
            assert answer["score"] == pytest.approx(float(expected[model.config.label2id[answer["label"]]]), abs=1e-5)


def test_feature_extraction_pipeline():
    model, tokenizer = make_reader("modern", "smgk")
    features = pipeline("feature-extraction", model=model.model, tokenizer=tokenizer)("four keys", return_tensors=True)
    expected = model.model(**tokens_of(tokenizer, "four keys")).last_hidden_state
    torch.testing.assert_close(features.to(DEVICE), expected)


@pytest.mark.parametrize("attention", list(PRESETS))
@pytest.mark.parametrize("scheme", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"])
def test_quantized_projections(attention, scheme):
    """torchao quantises the projections; the mixture, a few numbers a head, stays as it is."""
    quantization = pytest.importorskip("torchao.quantization")
    model, inputs = make_model("modern", attention, dtype=torch.float32), make_inputs("modern", padding_side="left")
    expected = model(**inputs).logits
    quantization.quantize_(model, getattr(quantization, scheme)())
    for name, parameter in model.named_parameters():
        is_projection = name.endswith("_proj.weight") or name == "lm_head.weight"
        assert (type(parameter) is not torch.nn.Parameter) == is_projection, name
    got = model(**inputs).logits
    assert 0 < (got - expected).norm() / expected.norm() < 0.1
    model.generate(**inputs, max_new_tokens=3, do_sample=False)


def test_quantized_models_are_saved_and_loaded(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    inputs = make_inputs("modern")
    make_model("modern", "smgk", dtype=torch.float32).save_pretrained(tmp_path / "full")
    settings = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = MGKForCausalLM.from_pretrained(tmp_path / "full", quantization_config=settings, device_map=DEVICE)
    model.save_pretrained(tmp_path / "quantized")
    loaded = MGKForCausalLM.from_pretrained(tmp_path / "quantized", device_map=DEVICE)
    assert type(loaded.model.layers[0].self_attn.k_proj.weight) is not torch.nn.Parameter
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits, rtol=0, atol=0)


@four_presets
def test_accelerator(attention):
    """A step under ``accelerate.Accelerator`` is the step without it."""
    from accelerate import Accelerator

    inputs = make_inputs("modern")
    models = [make_model("modern", attention, dtype=torch.float32).train() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models[0](**inputs, labels=make_labels("modern", inputs)).loss.backward()
    optimizers[0].step()
    accelerator = Accelerator(cpu=DEVICE.type == "cpu")
    prepared, optimizer = accelerator.prepare(models[1], optimizers[1])
    accelerator.backward(prepared(**inputs, labels=make_labels("modern", inputs)).loss)
    optimizer.step()
    for name, parameter in accelerator.unwrap_model(prepared).named_parameters():
        torch.testing.assert_close(parameter, models[0].get_parameter(name), rtol=1e-5, atol=1e-6)


@four_presets
def test_continuous_batching_is_refused(attention):
    with pytest.raises(ValueError, match=r"continuous batching .* use generate with a padded batch"):
        make_model("modern", attention).generate_batch([[5, 6, 7], [8, 9]], max_new_tokens=2)


@pytest.mark.slow
@four_presets
def test_evaluation_harness(attention, tmp_path):
    """lm-eval's accuracy on a task of ours is the share of questions whose right answer has the higher likelihood."""
    lm_eval = pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    model, tokenizer = make_reader("modern", attention, eos_token_id=1)
    rows = [{"question": f"key {i}", "answers": [f" {i}", f" query {7 - i}"], "right": i % 2} for i in range(6)]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = {"data_files": {"test": str(tmp_path / "test.jsonl")}}
    task = {
        "task": "keys", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test",
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{answers}}",
        "doc_to_target": "{{right}}", "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    harness = huggingface.HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device=str(DEVICE))
    result = lm_eval.simple_evaluate(model=harness, tasks=[task], bootstrap_iters=0)

    def log_likelihood(question, answer):
        start = len(tokenizer(question)["input_ids"])
        tokens = tokens_of(tokenizer, question + answer)["input_ids"]
        log_probabilities = model(tokens).logits[0, :-1].log_softmax(-1)
        return float(log_probabilities.gather(1, tokens[0, 1:, None])[start - 1 :].sum())

    chosen = [max((0, 1), key=lambda n, row=row: log_likelihood(row["question"], row["answers"][n])) for row in rows]
    expected = sum(choice == row["right"] for choice, row in zip(chosen, rows, strict=True)) / len(rows)
    assert result["results"]["keys"]["acc,none"] == pytest.approx(expected)
