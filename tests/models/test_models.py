"""What every model promises, in the spirit of transformers' common model tests."""

import copy
import os
import warnings

import pytest
import torch
from cases import DEVICE
from model_cases import KINDS, SMALL, make_inputs, make_labels, make_model, values_checked
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    Trainer,
    TrainingArguments,
)

import mgk
from mgk.models import (
    MGKConfig,
    MGKForCausalLM,
    MGKForSeq2SeqLM,
    MGKForSequenceClassification,
    MGKModel,
    MGKSeq2SeqModel,
    cluster_rows,
)
from mgk.models.loss import shifted_labels
from mgk.nn import PRESETS
from mgk.nn.presets import SOFTMAX_PRESETS

CLOSE = {"rtol": 1e-8, "atol": 1e-8}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_preset = pytest.mark.parametrize("attention", PRESETS)


def run(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def gradients(model, kind, inputs):
    model.zero_grad()
    loss = model(**inputs, labels=make_labels(kind, inputs)).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(one, other, **tolerance):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@every_kind
@every_preset
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_every_preset_trains_in_every_model(kind, attention, kv_heads):
    """Multi-query and grouped-query too; every parameter gets a gradient, and it is finite."""
    model = make_model(kind, attention, num_key_value_heads=kv_heads).train()
    loss, grads = gradients(model, kind, make_inputs(kind, padding_side="right"))
    assert loss.isfinite()
    assert grads.keys() == {name for name, _ in model.named_parameters()}
    assert all(grad.isfinite().all() for grad in grads.values())
    priors = [module.log_prior.clone() for module in model.modules() if isinstance(module, mgk.nn.EMPrior)]
    mgk.update_priors(model)
    after = [module.log_prior for module in model.modules() if isinstance(module, mgk.nn.EMPrior)]
    assert (len(after) > 0) == attention.endswith("-em")
    assert all((a != b).any() for a, b in zip(priors, after, strict=True))


@every_kind
@every_preset
def test_a_row_of_a_batch_is_the_row_alone(kind, attention):
    """Batching and padding change nothing: every row cut to its tokens gives the same logits."""
    model = make_model(kind, attention)
    inputs = make_inputs(kind, padding_side="right")
    together = run(model, inputs)
    for row in range(3):
        alone = {}
        for name, tensor in inputs.items():
            mask = inputs.get(name.replace("input_ids", "attention_mask"))
            keep = slice(None) if mask is None or name.startswith("decoder") else mask[row].bool()
            alone[name] = tensor[row : row + 1, keep]
        got = run(model, alone)
        torch.testing.assert_close(together[row : row + 1, : got.shape[1]], got, **CLOSE)


@every_kind
@every_preset
def test_implementations_agree(kind, attention):
    model = make_model(kind, attention)
    inputs = make_inputs(kind, padding_side="right")
    expected = run(model, inputs)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    torch.testing.assert_close(run(model, inputs), expected, **CLOSE)
    with torch.no_grad():
        attended = model(**inputs, output_attentions=True)
    torch.testing.assert_close(attended.logits, expected, **CLOSE)


def test_unknown_implementations_are_refused():
    model = make_model("modern")
    with pytest.raises(ValueError, match='"flex"` is not supported: use'):
        model.set_attn_implementation("flex")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the fused kernels run")
def test_fused_kernels_want_a_gpu(monkeypatch):
    """`attn_implementation="triton"` is accepted, and says what is missing when it is run without a GPU."""
    monkeypatch.setattr(mgk.ops.dispatch, "_HAS_TRITON", False)
    model = MGKModel._from_config(MGKConfig(hidden_size=32), attn_implementation="triton").eval()
    with pytest.raises(ValueError, match="backend='triton' cannot do tensors on cpu"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


@every_preset
def test_attentions_are_the_weights(attention):
    """`output_attentions`: rows sum to one over what is visible, causal, and equal to the layer's own weights."""
    model = make_model("modern", attention, num_key_value_heads=2)
    inputs = make_inputs("modern", padding_side="right")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True, output_hidden_states=True)
        layer = model.model.layers[1].self_attn
        assert len(out.attentions) == 2
        assert len(out.hidden_states) == 3
        weights = out.attentions[1]
        assert weights.shape == (3, 4, 9, 9)
        valid = inputs["attention_mask"].bool()
        rows = weights.sum(-1).transpose(1, 2)[valid]
        torch.testing.assert_close(rows, torch.ones_like(rows))
        assert weights.triu(1).abs().max() == 0
        assert (weights.transpose(1, 3)[~valid] == 0).all()
        assert isinstance(layer, mgk.MixtureAttention)


@every_preset
@pytest.mark.parametrize("kind", ["modern", "classifier"])
def test_attentions_have_a_gradient(kind, attention):
    """The output is computed from the weights that are shown, so that a loss reaches them."""
    model, inputs = make_model(kind, attention, num_key_value_heads=2), make_inputs(kind, padding_side="right")
    out = model(**inputs, output_attentions=True)
    torch.testing.assert_close(out.logits, model(**inputs).logits, **CLOSE)
    for weights in out.attentions:
        weights.retain_grad()
    out.logits.square().sum().backward()
    assert all(weights.grad.abs().max() > 0 for weights in out.attentions)
    half = make_model(kind, attention, dtype=torch.bfloat16)(**inputs, output_attentions=True)
    assert half.logits.dtype == torch.bfloat16


def test_attentions_of_translation():
    model = make_model("translation")
    inputs = make_inputs("translation", padding_side="right")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    assert [len(each) for each in (out.encoder_attentions, out.decoder_attentions, out.cross_attentions)] == [2, 3, 3]
    assert out.cross_attentions[0].shape == (3, 4, 8, 9)
    torch.testing.assert_close(out.cross_attentions[0].sum(-1), torch.ones(3, 4, 8, dtype=torch.float64, device=DEVICE))


@every_kind
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk-em", "softmax-smgk"])
def test_what_is_saved_continues(kind, attention, tmp_path):
    """Identical logits from the same bits, before and after a further step of training; safetensors only."""
    model = make_model(kind, attention, variance_scale=1.0 if attention == "softmax" else [1.0, 3.0])
    inputs = make_inputs(kind, padding_side="right")
    model.save_pretrained(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".py", ".safetensors"}
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).to(DEVICE)
    assert torch.equal(run(loaded, inputs), run(model, inputs))
    for each in (model, loaded):
        gradients(each.train(), kind, inputs)
        torch.optim.SGD(each.parameters(), lr=0.1).step()
        mgk.update_priors(each)
    assert torch.equal(run(loaded.eval(), inputs), run(model.eval(), inputs))


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("classifier", AutoModelForSequenceClassification),
        ("modern", AutoModelForCausalLM),
        ("translation", AutoModelForSeq2SeqLM),
    ],
)
def test_auto_classes(kind, auto, tmp_path):
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, dtype=torch.float64).to(DEVICE)
    assert type(loaded) is type(model)
    assert torch.equal(run(loaded, make_inputs(kind)), run(model, make_inputs(kind)))
    trunk = AutoModel.from_pretrained(tmp_path, dtype=torch.float64).to(DEVICE)
    assert type(trunk) is type(AutoModel.from_config(model.config))
    assert type(trunk) is (MGKSeq2SeqModel if kind == "translation" else MGKModel)
    with torch.no_grad():
        got, expected = (each(**make_inputs(kind)).last_hidden_state for each in (trunk, model.model))
    assert torch.equal(got, expected)


def test_damaged_and_foreign_files_are_refused(tmp_path):
    model = make_model("modern", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="must hold safetensors, got a damaged or foreign file"):
        MGKForCausalLM.from_pretrained(tmp_path)
    path.write_bytes(b"PK\x03\x04 this is a pickle in a zip file")
    with pytest.raises(ValueError, match="must hold safetensors, got a damaged or foreign file"):
        MGKForCausalLM.from_pretrained(tmp_path)
    save_file({"bert.embeddings.weight": torch.zeros(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"must hold the weights of MGKForCausalLM, got bert\.embeddings\.weight"):
        MGKForCausalLM.from_pretrained(tmp_path)
    path.write_bytes(whole)
    with pytest.raises(RuntimeError, match="mismatch"):
        MGKForCausalLM.from_pretrained(tmp_path, intermediate_size=40)
    path.unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        MGKForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors must be True"):
        MGKForCausalLM.from_pretrained(tmp_path, use_safetensors=False)


@every_kind
@pytest.mark.parametrize("attention", ["mgk", "smgk-em"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(kind, attention, reentrant):
    model = make_model(kind, attention).train()
    inputs = make_inputs(kind, padding_side="right")
    loss, grads = gradients(model, kind, inputs)
    priors = {name: prior.gathered() for name, prior in model.named_modules() if isinstance(prior, mgk.nn.EMPrior)}
    mgk.update_priors(copy.deepcopy(model))
    for prior in model.modules():
        if isinstance(prior, mgk.nn.EMPrior):
            prior._probe.grad = None
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again, checkpointed = gradients(model, kind, inputs)
    torch.testing.assert_close(again, loss)
    assert_same_gradients(checkpointed, grads)
    for name, gathered in priors.items():
        torch.testing.assert_close(model.get_submodule(name).gathered(), gathered)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "translation")) for kind in KINDS]
)
@pytest.mark.parametrize(
    "attention",
    ["smgk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "mgk", "mgk-hard", "smlk"))],
)
def test_compiled_equals_eager(kind, attention):
    """One graph, forward and backward. (An adaptive softmax needs to be told where its targets are.)"""
    torch._dynamo.reset()
    model = make_model(kind, attention).train()
    inputs = make_inputs(kind, padding_side="right")
    if kind == "wikitext":
        targets = shifted_labels(make_labels(kind, inputs))
        inputs["cluster_rows"] = cluster_rows(targets.flatten(), model.config.adaptive_cutoffs, 4)
    loss, grads = gradients(model, kind, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    again, compiled_grads = gradients(compiled, kind, inputs)
    torch.testing.assert_close(again, loss)
    assert_same_gradients({name.removeprefix("_orig_mod."): g for name, g in compiled_grads.items()}, grads)


@every_kind
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk", "smgk-em"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_near(kind, attention, dtype):
    inputs = make_inputs(kind, padding_side="right")
    exact = make_model(kind, attention)
    rounded = copy.deepcopy(exact).to(dtype)
    # The same rounded weights in fp64: what remains is the error of the computation.
    exact.load_state_dict(rounded.state_dict())
    expected, got = run(exact, inputs), run(rounded, inputs)
    caps = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
    assert (got.double() - expected).norm() / expected.norm() < caps[dtype]
    loss, grads = gradients(rounded.train(), kind, inputs)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in grads.values())


@every_kind
def test_autocast(kind):
    model = make_model(kind, dtype=torch.float32).train()
    inputs = make_inputs(kind)
    loss, _ = gradients(model, kind, inputs)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        near, grads = gradients(model, kind, inputs)
    torch.testing.assert_close(near, loss, rtol=3e-2, atol=3e-2)
    assert all(grad.dtype == torch.float32 for grad in grads.values())


@every_kind
def test_meta_device(kind):
    """Shapes without memory; and a model built there gets its weights from a state dict."""
    model = make_model(kind, "smgk-em", variance_scale=[1.0, 3.0])
    with torch.device("meta"):
        empty = type(model)(copy.deepcopy(model.config))
    assert all(p.is_meta for p in empty.parameters())
    with torch.no_grad():
        shapes = empty(**{name: tensor.to("meta") for name, tensor in make_inputs(kind).items()})
    assert shapes.logits.shape == run(model, make_inputs(kind)).shape


@pytest.mark.parametrize("kind", ["wikitext", "modern", "translation"])
def test_tied_weights(kind, tmp_path):
    model = make_model(kind)
    decoder = model.model.decoder if kind == "translation" else model.model
    assert model.lm_head.weight is decoder.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    decoder = loaded.model.decoder if kind == "translation" else loaded.model
    assert loaded.lm_head.weight is decoder.embed_tokens.weight
    untied = make_model(kind, tie_word_embeddings=False)
    decoder = untied.model.decoder if kind == "translation" else untied.model
    assert untied.lm_head.weight is not decoder.embed_tokens.weight


def test_source_and_target_may_share_a_vocabulary():
    model = make_model("translation", source_vocab_size=None)
    assert model.model.encoder.embed_tokens.weight is model.lm_head.weight
    model = make_model("translation")
    assert model.model.encoder.embed_tokens.weight.shape == (53, 32)


def test_resizing_the_vocabulary():
    model = make_model("modern")
    model.resize_token_embeddings(70)
    assert run(model, make_inputs("modern")).shape[-1] == 70
    with pytest.raises(ValueError, match="adaptive softmax end at vocab_size=61, which cannot become 70"):
        make_model("wikitext").resize_token_embeddings(70)
    with pytest.raises(ValueError, match="which cannot become 64"):
        make_model("wikitext").resize_token_embeddings(pad_to_multiple_of=64)


@pytest.mark.parametrize("attention", SOFTMAX_PRESETS)
def test_packed_sequences_do_not_see_each_other(attention):
    """Positions that start anew mark sequences in one row."""
    model = make_model("modern", attention)
    tokens = make_inputs("modern", batch=1, tokens=12)["input_ids"]
    lengths = (5, 4, 3)
    positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
    alone = torch.cat([run(model, {"input_ids": part}) for part in tokens.split(lengths, dim=1)], dim=1)
    for use_cache in (False, True):
        packed = run(model, {"input_ids": tokens, "position_ids": positions, "use_cache": use_cache})
        torch.testing.assert_close(packed, alone, **CLOSE)


def test_masks_of_pairs():
    """A 4-D mask says everything: here a causal one, as bool and as numbers to add."""
    model = make_model("modern")
    tokens = make_inputs("modern")["input_ids"]
    expected = run(model, {"input_ids": tokens})
    pairs = torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril().expand(3, 1, 9, 9)
    torch.testing.assert_close(run(model, {"input_ids": tokens, "attention_mask": pairs}), expected, **CLOSE)
    added = torch.zeros(3, 1, 9, 9, device=DEVICE).masked_fill(~pairs, -torch.inf)
    torch.testing.assert_close(run(model, {"input_ids": tokens, "attention_mask": added}), expected, **CLOSE)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3, 1, 9, 9).tril().long(), "an attention_mask of pairs must be bool or float, got torch.int64"),
        (torch.ones(3, 1, 9, 9).tril(), "must hold 0 to attend and -inf not to, got 0 to 1"),
        (torch.full((3, 1, 9, 9), -0.5), "must hold 0 to attend and -inf not to, got -0.5 to -0.5"),
        (torch.ones(3, 1, 9, 7).bool(), r"must have shape \[B, 1 or H, 9, 9\], got \[3, 1, 9, 7\]"),
        (torch.full((3, 9), 2), "must hold 1 for tokens and 0 for padding, got 2 to 2"),
        (torch.zeros(3, 9).fill_diagonal_(-torch.inf), "must hold 1 for tokens and 0 for padding, got -inf to 0"),
    ],
    ids=["int pairs", "float pairs of ones", "a bias", "narrow", "twos", "additive"],
)
def test_masks_that_could_be_misread_are_refused(mask, message):
    model = make_model("modern")
    with values_checked(), pytest.raises((ValueError, TypeError), match=message):
        model(make_inputs("modern")["input_ids"], attention_mask=mask.to(DEVICE))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="torch.jit.trace turns sizes into CPU tensors: use torch.export there")
@every_kind
def test_traced_models_keep_their_mask(kind):
    """An example mask of ones must not become "no mask"."""
    model = make_model(kind).float()
    model.config.use_cache = False
    inputs = make_inputs(kind)
    names = list(inputs)

    class Traceable(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *tensors):
            return self.model(**dict(zip(names, tensors, strict=True))).logits

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(Traceable(), tuple(inputs.values()), check_trace=False)
    padded = make_inputs(kind, seed=2, padding_side="right")
    torch.testing.assert_close(traced(*padded.values()), run(model, padded), rtol=1e-4, atol=1e-4)


def test_classifier_takes_the_mean_over_valid_tokens():
    model = make_model("classifier")
    inputs = make_inputs("classifier", padding_side="right")
    states = model.model(**inputs).last_hidden_state
    means = torch.stack([s[m.bool()].mean(0) for s, m in zip(states, inputs["attention_mask"], strict=True)])
    torch.testing.assert_close(run(model, inputs), model.classifier(means))


def test_matcher_compares_two_means():
    model = make_model("matcher")
    inputs = make_inputs("matcher")
    a = model.model(inputs["input_ids"]).last_hidden_state.mean(1)
    b = model.model(inputs["pair_input_ids"]).last_hidden_state.mean(1)
    torch.testing.assert_close(run(model, inputs), model.classifier(torch.cat([a, b, a * b, a - b], dim=-1)))
    with pytest.raises(ValueError, match="exactly one of pair_input_ids and pair_inputs_embeds"):
        model(inputs["input_ids"])


@pytest.mark.parametrize("kind", ["wikitext", "modern"])
def test_loss_of_a_language_model(kind):
    """Mean of -log p(next token); shifted labels and a given number of items as transformers asks."""
    model = make_model(kind)
    inputs = make_inputs(kind)
    labels = inputs["input_ids"].clone()
    labels[1, 4:] = -100
    log_probability = run(model, inputs).log_softmax(-1)
    terms = [-log_probability[b, i, labels[b, i + 1]] for b in range(3) for i in range(8) if labels[b, i + 1] >= 0]
    torch.testing.assert_close(model(**inputs, labels=labels).loss, torch.stack(terms).mean())
    torch.testing.assert_close(model(**inputs, labels=labels, num_items_in_batch=7).loss, torch.stack(terms).sum() / 7)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(**inputs, shift_labels=shifted).loss, torch.stack(terms).mean())
    assert (model(**inputs, labels=labels).logits is None) == (kind == "wikitext")


def test_translation_reads_labels_one_position_late():
    model = make_model("translation")
    inputs = make_inputs("translation")
    labels = inputs.pop("decoder_input_ids")
    labels[1, 5:] = -100
    late = torch.cat(
        [torch.full((3, 1), 2, device=DEVICE), labels[:, :-1].masked_fill(labels[:, :-1] == -100, 1)], dim=1
    )
    logits = model(**inputs, decoder_input_ids=late).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(**inputs, labels=labels).loss, expected)


@every_kind
def test_all_labels_ignored(kind):
    """39: the loss is 0 with a warning, not NaN, and so are all gradients."""
    model = make_model(kind).train()
    inputs = make_inputs(kind)
    labels = torch.full_like(make_labels(kind, inputs), -100)
    with values_checked(), pytest.warns(UserWarning, match="all labels are ignored"):
        loss = model(**inputs, labels=labels).loss
    loss.backward()
    assert loss == 0
    if kind not in ("classifier", "matcher"):
        # As `Trainer` passes it.
        with values_checked(), pytest.warns(UserWarning, match="all labels are ignored"):
            assert model(**inputs, labels=labels, num_items_in_batch=torch.tensor(0)).loss == 0
    assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)


@every_kind
@pytest.mark.parametrize("wrong", [-1, 61, 10_000])
def test_tokens_and_labels_outside_their_range(kind, wrong):
    """37 and 38"""
    model = make_model(kind)
    inputs = make_inputs(kind)
    tokens = inputs["input_ids"].clone()
    tokens[1, 2] = wrong
    vocabulary = 53 if kind == "translation" else 61
    with (
        values_checked(),
        pytest.raises(ValueError, match=rf"input_ids must lie in \[0, {vocabulary}\), the vocabulary, got {wrong}"),
    ):
        model(**{**inputs, "input_ids": tokens})
    labels = make_labels(kind, inputs)
    labels.view(-1)[1] = wrong
    with values_checked(), pytest.raises(ValueError, match=rf"labels must lie in \[0, \d+\) or be -100, got {wrong}"):
        model(**inputs, labels=labels)


def test_constructors_leave_the_configuration_alone():
    config = MGKConfig(**SMALL)
    before = config.to_dict()
    MGKForCausalLM(config)
    MGKForSeq2SeqLM(config)
    assert not MGKForSequenceClassification(config).model.is_causal
    assert config.to_dict() == before
    with pytest.raises(ValueError, match="MGKForCausalLM needs is_encoder_decoder=False, got True"):
        MGKForCausalLM(MGKConfig(**SMALL, is_encoder_decoder=True))


def test_an_untied_table_of_the_source_survives_a_resize(tmp_path):
    model = make_model("translation", source_vocab_size=None, tie_word_embeddings=False)
    inputs = make_inputs("translation")
    expected = run(model, inputs)
    model.resize_token_embeddings(70)
    torch.testing.assert_close(run(model, inputs)[..., :61], expected)
    model.save_pretrained(tmp_path)
    loaded = MGKForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).to(DEVICE)
    torch.testing.assert_close(run(loaded, inputs)[..., :61], expected)


def test_empty_sequences():
    classifier, writer = make_model("classifier"), make_model("modern")
    nothing = torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
    assert run(classifier, {"input_ids": nothing}).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert writer(nothing, labels=nothing).loss == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"input_ids": torch.zeros(4, dtype=torch.long)},
            r"input_ids must be integers of shape \[B, N\], got torch.int64",
        ),
        ({"input_ids": torch.zeros(2, 4)}, "input_ids must be integers of shape .*, got torch.float32"),
        ({"inputs_embeds": torch.zeros(2, 4, 31)}, "inputs_embeds must have width hidden_size=32, got 31"),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.long), "position_ids": torch.arange(3)[None]},
            r"position_ids must have shape \[2, 4\], got \[1, 3\]",
        ),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.long), "past_key_values": ((1, 2), (3, 4))},
            "past_key_values must be a cache of transformers, such as DynamicCache, got tuple",
        ),
        (
            {"input_ids": torch.zeros(2, 4, dtype=torch.long), "labels": torch.zeros(2, 3, dtype=torch.long)},
            r"labels must have shape \[2, 4\], got \[2, 3\]",
        ),
    ],
    ids=["1-D", "floats", "width", "positions", "tuple", "labels"],
)
def test_wrong_shapes_are_named(wrong, message):
    model = make_model("modern", dtype=torch.float32)
    wrong = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in wrong.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        model(**wrong)


def test_a_decoder_without_inputs_says_so():
    model = make_model("translation")
    with pytest.raises(
        ValueError, match="one of decoder_input_ids and decoder_inputs_embeds must be given, got neither"
    ):
        model(make_inputs("translation")["input_ids"])


def test_other_problems_of_the_classifier():
    model = make_model("classifier", num_labels=1)
    targets = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64, device=DEVICE)
    out = model(**make_inputs("classifier"), labels=targets)
    torch.testing.assert_close(out.loss, (out.logits[:, 0] - targets).square().mean())
    column = model(**make_inputs("classifier"), labels=targets[:, None], num_items_in_batch=6)
    torch.testing.assert_close(column.loss, out.loss / 2)
    model = make_model("classifier", num_labels=3)
    targets = torch.eye(3, dtype=torch.float64, device=DEVICE)
    out = model(**make_inputs("classifier"), labels=targets)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(out.logits, targets)
    torch.testing.assert_close(out.loss, expected)


def test_a_regression_may_have_any_target():
    """-100 is a number like others, and the model's half precision does not round targets."""
    model = make_model("classifier", num_labels=1)
    targets = torch.tensor([-100.0, 1.0, -100.0], dtype=torch.float64, device=DEVICE)
    out = model(**make_inputs("classifier"), labels=targets)
    torch.testing.assert_close(out.loss, (out.logits[:, 0] - targets).square().mean())
    targets = torch.tensor([1001.0, 1003.0, 1005.0], device=DEVICE)
    out = model.to(torch.bfloat16)(**make_inputs("classifier"), labels=targets)
    torch.testing.assert_close(out.loss, (out.logits[:, 0].float() - targets).square().mean())


@pytest.mark.filterwarnings("ignore")
@every_kind
@pytest.mark.parametrize("attention", ["smgk", "mgk-em"])
def test_three_steps_of_the_trainer(kind, attention, tmp_path):
    model = make_model(kind, attention, dtype=torch.float32).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs = make_inputs(kind, batch=8, padding_side="right")
    data = [{name: tensor[i].cpu() for name, tensor in inputs.items()} for i in range(8)]
    for row, label in zip(data, make_labels(kind, inputs), strict=True):
        row["labels"] = label.cpu()
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=4, report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=2, logging_steps=1, save_steps=3,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    result = trainer.train()
    assert result.global_step == 3
    assert torch.tensor(result.training_loss).isfinite()
    assert any((before[name] != p).any() for name, p in model.named_parameters())
    assert os.path.exists(tmp_path / "checkpoint-3" / "model.safetensors")
    assert torch.tensor(trainer.evaluate()["eval_loss"]).isfinite()


@pytest.mark.filterwarnings("ignore")
@every_kind
def test_lora(kind, tmp_path):
    """PEFT finds the projections by their usual names; only its matrices learn; merged, the logits stay."""
    peft = pytest.importorskip("peft")
    model = make_model(kind, "mgk")
    inputs = make_inputs(kind, padding_side="right")
    expected = run(model, inputs)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj", "out_proj"])
    )
    torch.testing.assert_close(run(adapted, inputs), expected, **CLOSE)
    adapted.train()
    adapted(**inputs, labels=make_labels(kind, inputs)).loss.backward()
    learned = [name for name, p in adapted.named_parameters() if p.grad is not None]
    assert learned
    assert all("lora_" in name for name in learned)
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0).step()
    adapted.eval()
    tuned = run(adapted, inputs)
    assert (tuned - expected).abs().max() > 1e-6
    adapted.save_pretrained(tmp_path)
    fresh = peft.PeftModel.from_pretrained(make_model(kind, "mgk"), tmp_path).to(DEVICE)
    torch.testing.assert_close(run(fresh, inputs), tuned, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(run(adapted.merge_and_unload(), inputs), tuned, **CLOSE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("attention", ["softmax", "mgk", "smgk"])
def test_prefix_tuning(attention, kv_heads):
    """PEFT puts one key and one value for each virtual token into a cache; M projected keys all take that one."""
    peft = pytest.importorskip("peft")
    model = make_model("modern", attention, num_key_value_heads=kv_heads)
    inputs = make_inputs("modern", padding_side="left")
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    out = adapted(**inputs, labels=inputs["input_ids"])
    out.loss.backward()
    assert [name for name, p in adapted.named_parameters() if p.grad is not None] == [
        "prompt_encoder.default.embedding.weight"
    ]
    # The same by hand: a cache in our own layout, and a mask that shows it.
    copies = 2 if attention == "mgk" else 1
    prefix = adapted.get_prompt(3)
    cache = DynamicCache([(layer.keys.repeat(1, 1, 1, copies), layer.values) for layer in prefix.layers])
    mask = torch.cat([torch.ones(3, 5, dtype=torch.long, device=DEVICE), inputs["attention_mask"]], dim=1)
    with torch.no_grad():
        expected = model(inputs["input_ids"], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(out.logits, expected, **CLOSE)
    written = adapted.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=1)
    assert written.shape == (3, 13)


@pytest.mark.filterwarnings("ignore")
def test_prefix_tuning_of_translation():
    peft = pytest.importorskip("peft")
    model = make_model("translation", "mgk", decoder_layers=2)
    inputs = make_inputs("translation", padding_side="right")
    adapted = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=5))
    adapted(**inputs, labels=make_labels("translation", inputs)).loss.backward()
    inputs.pop("decoder_input_ids")
    written = adapted.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written.shape == (3, 5)


@pytest.mark.filterwarnings("ignore")
def test_prefixes_that_no_layer_can_take_are_refused():
    peft = pytest.importorskip("peft")
    inputs = make_inputs("modern")
    prefix = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
    adapted = peft.get_peft_model(make_model("modern", "mlk"), peft.PrefixTuningConfig(**prefix))
    with pytest.raises(ValueError, match="past_key_values must hold states of linear attention, got a DynamicLayer"):
        adapted(**inputs)
    keys = torch.zeros(3, 4, 5, 6, dtype=torch.float64, device=DEVICE)
    cache = DynamicCache([(keys, keys)] * 2)
    mask = torch.ones(3, 14, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match="must hold keys of width 16, or 8 for all components alike, got 6"):
        make_model("modern", "mgk")(inputs["input_ids"], attention_mask=mask, past_key_values=cache)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["wikitext", "modern"])
@pytest.mark.parametrize(
    "wrapped", [{"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens", "lm_head"]}]
)
def test_lora_that_learns_the_head_too(kind, wrapped):
    peft = pytest.importorskip("peft")
    inputs = make_inputs(kind)
    expected = make_model(kind)(**inputs, labels=inputs["input_ids"]).loss
    adapted = peft.get_peft_model(make_model(kind), peft.LoraConfig(target_modules=["q_proj"], **wrapped))
    loss = adapted(**inputs, labels=inputs["input_ids"]).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()


@every_kind
def test_no_warnings_in_ordinary_use(kind):
    model = make_model(kind).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, kind, make_inputs(kind, padding_side="right"))


def test_weight_decay_groups_know_the_mixture():
    """`mgk.nn.parameter_groups` on a whole model: nothing of the mixture decays."""
    model = make_model("modern", "smgk", learn_variance=True)
    decayed, others = mgk.nn.parameter_groups(model, 0.1)
    mixture = set(mgk.nn.mixture_parameters(model))
    assert len(mixture) == 2 * 3
    assert not mixture & set(decayed["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_initial_weights():
    """The three schemes, and mixtures that start as `mgk.nn` starts them."""
    torch.manual_seed(0)
    config = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "vocab_size": 500,
        "attention": "smgk",
        "num_hidden_layers": 1,
    }
    normal = MGKForSequenceClassification(MGKConfig(**config, initializer_range=0.05))
    layer = normal.model.layers[0].self_attn
    assert abs(layer.q_proj.weight.std() - 0.05) < 0.002
    assert (layer.q_proj.bias == 0).all()
    assert abs(layer.keys.shift.std() - 1.0) < 0.1
    assert (layer.prior.logits == 0).all()
    default = MGKForSequenceClassification(MGKConfig(**config, initialization="torch"))
    projection = default.model.layers[0].self_attn.q_proj
    assert abs(projection.weight.abs().max() - 256**-0.5) < 1e-3
    assert 0 < projection.bias.abs().max() <= 256**-0.5
    xavier = MGKForSequenceClassification(MGKConfig(**config, initialization="xavier"))
    assert abs(xavier.model.layers[0].self_attn.q_proj.weight.abs().max() - (6 / 512) ** 0.5) < 1e-3
    assert abs(xavier.model.embed_tokens.weight.std() - 1 / 16) < 1e-3


def test_both_or_no_inputs_are_refused():
    model = make_model("modern")
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    embeds = model.model.embed_tokens(make_inputs("modern")["input_ids"])
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(make_inputs("modern")["input_ids"], inputs_embeds=embeds)
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, run(model, make_inputs("modern")))


def test_an_encoder_keeps_no_cache():
    model = make_model("classifier")
    out = model.model(**make_inputs("classifier"), use_cache=True)
    assert out.past_key_values is None
    decoder = make_model("modern")
    assert isinstance(decoder(**make_inputs("modern")).past_key_values, DynamicCache)


def test_shifts_that_start_at_zero_are_loaded_as_they_were_saved(tmp_path):
    model = make_model("classifier", "smgk", shift_init="first-zero", shift_init_std=0.5)
    shifts = [module.shift for module in model.modules() if hasattr(module, "shift")]
    assert len(shifts) == 2
    for shift in shifts:
        assert not shift[:, 0].any()
        assert 0.3 < shift[:, 1].std() < 0.7
        shift.data += 1.0
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name].to(tensor)), name


def test_the_bias_of_the_queries_may_start_large(tmp_path):
    """As large as a shift is; the other biases start as they did. What was saved is loaded, not drawn."""
    torch.manual_seed(0)
    options = {"initialization": "torch", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}
    model = make_model("classifier", "softmax", query_bias_init_std=1.0, **options)
    attentions = [module for module in model.modules() if hasattr(module, "q_proj")]
    assert len(attentions) == 2
    for attention in attentions:
        assert 0.8 < attention.q_proj.bias.std() < 1.2
        assert attention.k_proj.bias.abs().max() <= 64**-0.5
        assert attention.q_proj.weight.abs().max() <= 64**-0.5
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name].to(tensor)), name


def test_a_prior_may_stay_uniform():
    model = make_model("classifier", "smgk", prior="uniform")
    assert not any("prior" in name for name, _ in model.named_parameters())
    learned = make_model("classifier", "smgk-em", prior="learned")
    assert sum(name.endswith("prior.logits") for name, _ in learned.named_parameters()) == 2
