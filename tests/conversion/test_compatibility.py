"""Converted models with what people use around models: PEFT, the Trainer, compile, DDP, pickle, AMP, offloading."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from cases import DEVICE
from conversion_cases import HEAD_DIM, logits, make_inputs, make_model, train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Trainer, TrainingArguments

import mgk
from mgk.conversion import advance_start
from mgk.conversion.saving import ConvertedModel, converted_class


def converted(family="llama", preset="smgk", **options):
    return mgk.convert(make_model(family), preset, **{"start": "immediate", **options})


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ["q_proj", "k_proj"]), ("gpt2", ["c_attn"]), ("bert", ["query", "key"])]
)
@pytest.mark.filterwarnings("ignore:.*Conv1D.*")
def test_lora_and_the_mixture(family, targets, tmp_path):
    """Adapters on projections, widened ones too, and the mixture trained beside them through `modules_to_save`."""
    peft = pytest.importorskip("peft")
    model = converted(family, "mgk" if family == "llama" else "smgk", perturbation=0.5)
    inputs, fresh = make_inputs(family), copy.deepcopy(model)
    expected = logits(model, inputs)
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=["mixture"])
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(logits(adapted, inputs), expected, rtol=0, atol=1e-5)
    losses = train(adapted, family)
    assert losses[-1] < losses[0]
    learned = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert all("lora_" in name or "modules_to_save" in name for name in learned)
    assert any("modules_to_save" in name and ".mixture." in name for name in learned)
    tuned = logits(adapted, inputs)
    assert (tuned - expected).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path).to(DEVICE).eval()
    torch.testing.assert_close(logits(again, inputs), tuned, rtol=0, atol=1e-5)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, inputs), tuned, rtol=0, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(mgk.load_converted(tmp_path / "merged"), inputs), tuned, rtol=0, atol=1e-5)


def test_a_start_fades_in_the_adapters(tmp_path):
    """The copy of the mixture that PEFT trains and saves fades, and the model below the adapters does not."""
    peft = pytest.importorskip("peft")
    model, inputs = mgk.convert(make_model("llama"), "smgk", fade_steps=4), make_inputs("llama")
    expected, fresh = logits(model, inputs), copy.deepcopy(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["mixture"]))
    for _ in range(3):
        advance_start(adapted)
    faded = logits(adapted, inputs)
    assert (faded - expected).abs().max() > 0.1
    with adapted.disable_adapter():
        torch.testing.assert_close(logits(adapted, inputs), expected)
    adapted.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(peft.PeftModel.from_pretrained(fresh, tmp_path), inputs), faded)
    torch.testing.assert_close(logits(adapted.merge_and_unload(), inputs), faded)


def test_the_trainer_resumes(tmp_path):
    """Checkpoints are those of `save_pretrained`; what goes on from one is what was not interrupted."""
    tokens = make_inputs("llama", batch=8)["input_ids"].cpu()
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def run(folder, model, steps, **options):
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=2, save_steps=2, report_to=[], disable_tqdm=True,
            learning_rate=1e-2, lr_scheduler_type="constant", use_cpu=DEVICE.type == "cpu",
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=data).train(**options)
        return model.eval()

    whole = run(tmp_path / "whole", converted(), 4)
    run(tmp_path / "half", converted(), 2)
    resumed = run(tmp_path / "half", converted(seed=5), 4, resume_from_checkpoint=True)
    inputs = make_inputs("llama")
    torch.testing.assert_close(logits(resumed, inputs), logits(whole, inputs), rtol=0, atol=1e-6)
    loaded = mgk.load_converted(tmp_path / "half" / "checkpoint-4").to(DEVICE)
    torch.testing.assert_close(logits(loaded, inputs), logits(whole, inputs), rtol=0, atol=1e-6)


def test_compiled_training():
    """The backward pass, too, and the bias of a start that fades without a new graph at each step."""
    eager = converted(start="near", fade_steps=10)
    compiled = copy.deepcopy(eager)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs("llama", padding="right")
    inputs["use_cache"] = False
    expected = train(eager, "llama", inputs=inputs)
    model = torch.compile(compiled, backend=counter, fullgraph=True)
    losses = train(model, "llama", inputs=inputs)
    assert losses[0] == pytest.approx(expected[0], abs=1e-5)
    # Shifts have no gradient but rounding at first, which Adam makes as large as any.
    assert losses == pytest.approx(expected, abs=1e-3)
    assert counter.frame_count == 1


def test_generation_compiled_with_a_static_cache():
    """One graph for all steps."""
    model = converted(preset="mgk", perturbation=0.5)
    inputs = make_inputs("llama", padding="left")
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model.forward = torch.compile(model.forward, backend=counter, fullgraph=True, dynamic=False)
    got = model.generate(**inputs, max_new_tokens=5, do_sample=False, cache_implementation="static")
    assert torch.equal(got, expected)
    assert counter.frame_count == 2  # the prompt, and every other step


def test_exported_with_a_dynamic_length():
    """The number of queries is a symbol then, which says no plain yes or no to causality."""
    model = mgk.convert(make_model("llama", num_hidden_layers=1), "smgk")
    inputs, others = make_inputs("llama"), make_inputs("llama", batch=2, tokens=13, seed=4)
    axes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(
        model, (), {**inputs, "use_cache": False}, dynamic_shapes={**dict.fromkeys(inputs, axes), "use_cache": None}
    )
    expected = logits(model, others, use_cache=False)
    torch.testing.assert_close(exported.module()(**others, use_cache=False).logits, expected, rtol=0, atol=1e-5)


def test_a_converted_model_is_pickled():
    model, inputs = converted(), make_inputs("llama")
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    assert isinstance(again, (transformers.LlamaForCausalLM, ConvertedModel))
    torch.testing.assert_close(logits(again, inputs), logits(model, inputs))
    assert converted_class(type(model)) is type(model)
    assert type(model).__qualname__ == "MGKLlamaForCausalLM"


class OwnLlama(transformers.LlamaForCausalLM):
    """A class of the user, outside transformers."""


def test_a_class_of_the_user(tmp_path):
    """It is converted, pickled, saved, and loaded by its name in Python, which no file can hold."""
    model, inputs = mgk.convert(OwnLlama(make_model("llama").config).eval(), "smgk"), make_inputs("llama")
    expected = logits(model.to(DEVICE), inputs)
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again) is type(model)
        assert isinstance(again, OwnLlama)
        torch.testing.assert_close(logits(again, inputs), expected)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(mgk.load_converted(tmp_path, OwnLlama).to(DEVICE), inputs), expected)
    with pytest.raises(ValueError, match="model_class must be given for a class outside transformers, got OwnLlama"):
        mgk.load_converted(tmp_path)


def test_other_models_of_one_configuration():
    """Models that were built from the configuration of a converted one, before or after, are what they would be."""
    config = make_model("llama").config
    converted_model, before = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    fields = copy.deepcopy(config.to_dict())
    mgk.convert(converted_model, "smgk", num_kv_heads=1)
    after = transformers.LlamaForCausalLM(config)
    for other in (before, after):
        assert other.config.to_dict() == fields
        assert other.config._attn_implementation == "eager"
        assert other.model.layers[0].self_attn.k_proj.out_features == 2 * HEAD_DIM
    own = converted_model.config
    assert own.num_key_value_heads == 1
    assert all(module.config is own for module in converted_model.modules() if hasattr(module, "config"))
    mgk.convert(before, "mgk")
    # The configuration of a converted model makes a model that was not converted.
    mgk.convert(transformers.LlamaForCausalLM(own), "gaussian")


def test_numbers_of_numpy(tmp_path):
    """Whoever sweeps options passes numbers of NumPy or torch, and saves the model."""
    model = mgk.convert(
        make_model("llama"), "smgk", components=np.int64(3), num_kv_heads=np.int64(1), fade_steps=np.int64(5),
        variance_scale=torch.tensor(2.0), shift_init_std=np.float32(0.5),
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    assert mgk.load_converted(tmp_path).config.mgk == model.config.mgk
    scales = np.array([1.0, 2.0])
    model = mgk.convert(make_model("llama"), "smgk", variance_scale=scales, start="immediate")
    assert model.config.mgk["variance_scale"] == [1.0, 2.0]


def test_pipelines_know_the_model(caplog):
    """They go by the name of its class."""
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 3, "b": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[UNK]")
    transformers.utils.logging.enable_propagation()
    generate = transformers.pipeline("text-generation", model=converted(), tokenizer=tokenizer)
    assert generate("a b", max_new_tokens=2)[0]["generated_text"].startswith("a b")
    assert "not supported" not in caplog.text


def test_another_class_of_the_family(tmp_path):
    """The body alone, or with another head on it."""
    model, inputs = converted(), make_inputs("llama")
    model.save_pretrained(tmp_path)
    body = mgk.load_converted(tmp_path, transformers.LlamaModel)
    with torch.no_grad():
        hidden, expected = body(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state
    torch.testing.assert_close(hidden, expected)
    head = mgk.load_converted(tmp_path, transformers.LlamaForSequenceClassification, num_labels=5)
    assert logits(head, inputs).shape == (3, 5)
    assert head.config.mgk == model.config.mgk


def test_options_of_from_pretrained(tmp_path):
    model = converted(learn_variance=True)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded = mgk.load_converted(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    inputs = make_inputs("llama")
    torch.testing.assert_close(logits(loaded, inputs).float(), logits(model, inputs), rtol=0.1, atol=0.15)
    with pytest.raises(ValueError, match="with attn_implementation 'mgk' alone, got 'eager'"):
        mgk.load_converted(tmp_path, attn_implementation="eager")


def test_heads_in_the_configuration(tmp_path):
    """Whoever sizes caches by the configuration sees what is there."""
    model = converted(num_heads=2, num_kv_heads=1)
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, HEAD_DIM)
    model.save_pretrained(tmp_path)
    assert mgk.load_converted(tmp_path).config.to_diff_dict() == config.to_diff_dict()


def test_prefix_tuning():
    """A prefix is a cache that is there before the first token."""
    peft = pytest.importorskip("peft")
    model = converted(num_heads=2, num_kv_heads=1)
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    adapted(**make_inputs("llama", padding="left")).logits.sum().backward()
    assert adapted.prompt_encoder.default.embedding.weight.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
def test_autocast(family, dtype):
    model, inputs = converted(family), make_inputs(family, padding="right")
    expected = logits(model, inputs)[inputs["attention_mask"].bool()]
    with torch.autocast(DEVICE.type, dtype):
        out = logits(model, inputs)[inputs["attention_mask"].bool()]
    torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)


def test_attentions_are_shown():
    """The weights that the output is computed from, of a mixture and of softmax."""
    model, inputs = make_model("llama"), make_inputs("llama", padding="right")
    keep = inputs["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**inputs, output_attentions=True).attentions
    mgk.convert(model, "smgk")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    for weights, old in zip(out.attentions, expected, strict=True):
        torch.testing.assert_close(weights.movedim(1, 2)[keep], old.movedim(1, 2)[keep], rtol=0, atol=1e-5)
    torch.testing.assert_close(out.logits[keep], logits(model, inputs)[keep], rtol=0, atol=1e-5)


@pytest.mark.parametrize("preset", ["mgk-em", "smgk-em", "smgk-hard", "mgk-hard"])
def test_the_other_presets(preset, tmp_path):
    model, inputs = converted(preset=preset, perturbation=0.5), make_inputs("llama")
    train(model, "llama", steps=1)
    before = logits(model, inputs)
    if preset.endswith("em"):
        model.train()
        model(**inputs).logits.sum().backward()
        mgk.update_priors(model)
        assert (logits(model.eval(), inputs) - before).abs().max() > 1e-6
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(mgk.load_converted(tmp_path), inputs), logits(model, inputs))


def test_weight_decay_spares_the_mixture():
    model = converted(learn_variance=True)
    _, others = mgk.nn.parameter_groups(model, 0.1)
    mixture = [p for name, p in model.named_parameters() if ".mixture." in name]
    assert len(mixture) == 2 * 3
    assert {id(p) for p in mixture} <= {id(p) for p in others["params"]}


def test_offloading():
    """accelerate brings weights to the device for the length of a call, those of the mixture as well."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = converted(learn_variance=True), make_inputs("llama")
    expected = logits(model, inputs)
    accelerate.cpu_offload(model, execution_device=DEVICE)
    assert all(p.is_meta for p in model.model.layers[0].self_attn.mixture.parameters())
    torch.testing.assert_close(logits(model, inputs), expected)


RANK = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from conversion_cases import make_inputs, make_model
import mgk
rank, size, file = int(sys.argv[1]), 2, sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
inputs = make_inputs("llama", batch=4)
for preset in ("smgk", "mgk"):
    model = mgk.convert(make_model("llama"), preset, learn_variance=True, seed=rank)
    parallel = DDP(model.train())
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        parallel(**{name: x[rank * 2 : rank * 2 + 2] for name, x in inputs.items()}).logits.square().mean().backward()
        optimizer.step()
        mgk.conversion.advance_start(model)
    if rank == 0:
        alone = mgk.convert(make_model("llama"), preset, learn_variance=True, seed=0).train()
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            alone(**inputs).logits.square().mean().backward()
            optimizer.step()
            mgk.conversion.advance_start(alone)
        for (name, one), other in zip(model.named_parameters(), alone.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_two_ranks_are_one(tmp_path):
    """DDP with every parameter used at every step, and the weights of rank 0 at the start."""
    folder = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent / "src")])}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meeting")], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1].decode()[-2000:] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), errors


def test_a_start_advances_a_model_that_was_not_converted():
    advance_start(make_model("llama"))
