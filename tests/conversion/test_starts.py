"""Starts of converted models: what is equal to the model before, and how it leaves it."""

import copy

import pytest
import torch
from conversion_cases import HEAD_DIM, logits, make_inputs, make_model, train
from transformers import Trainer, TrainingArguments

import mgk
from mgk.conversion import AdvanceStart, advance_start
from mgk.conversion.heads import plan_heads
from mgk.conversion.starts import NearStart


def keys_of(model):
    """The key weights of the first layer, ``[Hkv, M, D, in]``."""
    attention = model.model.layers[0].self_attn
    return attention.k_proj.weight.detach().unflatten(0, (2, -1, HEAD_DIM))


def test_equal_components_stay_equal_until_they_are_moved_apart():
    still = mgk.convert(make_model("llama", dtype=torch.float64), "softmax-mgk", perturbation=0.0)
    moved = mgk.convert(make_model("llama"), "softmax-mgk", perturbation=0.05)
    before = keys_of(moved).clone()
    train(still, "llama", steps=3)
    train(moved, "llama", steps=3)
    one, other = keys_of(still).unbind(1)
    torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    apart = keys_of(moved)
    assert (apart[:, 0] - apart[:, 1] - before[:, 0] + before[:, 1]).abs().max() > 1e-3


def test_a_perturbation_changes_the_model_by_its_square():
    model, inputs = make_model("llama", dtype=torch.float64), make_inputs("llama")
    expected = logits(model, inputs)
    changes = []
    for size in (0.02, 0.01):
        moved = mgk.convert(copy.deepcopy(model), "softmax-mgk", perturbation=size)
        changes.append((logits(moved, inputs) - expected).abs().max().item())
    assert changes[0] / changes[1] == pytest.approx(4.0, rel=0.05)
    assert changes[1] < 1e-3
    # Its mean over the components is the weight that was there.
    old = model.model.layers[0].self_attn.k_proj.weight.detach().unflatten(0, (2, HEAD_DIM))
    torch.testing.assert_close(keys_of(moved).mean(dim=1), old)


@pytest.mark.parametrize("preset", ["softmax-mgk", "smgk"])
def test_the_seed_decides_and_nobody_else(preset):
    def state(seed):
        model = make_model("llama")
        torch.manual_seed(7)
        drawn = torch.get_rng_state()
        mgk.convert(model, preset, seed=seed)
        assert torch.equal(torch.get_rng_state(), drawn)
        names = [name for name in model.state_dict() if "shift" in name or "k_proj" in name]
        return torch.cat([model.state_dict()[name].flatten() for name in names])

    assert torch.equal(state(1), state(1))
    assert not torch.equal(state(1), state(2))


@pytest.mark.parametrize("preset", ["gaussian", "smgk", "mgk"])
def test_the_bias_fades_out(preset):
    """From the old model to the Gaussian, step by step; then nothing is left of it."""
    model, inputs = make_model("llama"), make_inputs("llama")
    first = logits(model, inputs)
    last = logits(mgk.convert(copy.deepcopy(model), preset, start="immediate"), inputs)
    mgk.convert(model, preset, fade_steps=4)
    starts = [module for module in model.modules() if isinstance(module, NearStart)]
    assert len(starts) == 2
    distances = []
    for _ in range(4):
        distances.append((logits(model, inputs) - last).abs().max().item())
        assert not any(start.is_over for start in starts)
        advance_start(model)
    size = (first - last).abs().max().item()
    assert distances[0] == pytest.approx(size, abs=1e-2 if preset == "mgk" else 1e-4)  # equal keys are moved apart
    assert distances == sorted(distances, reverse=True)
    assert all(start.is_over for start in starts)
    torch.testing.assert_close(logits(model, inputs), last)
    advance_start(model)
    torch.testing.assert_close(logits(model, inputs), last)


def test_half_of_the_bias():
    """`remaining |k + b|^2 / (2 variance)`, written out."""
    start = NearStart(4)
    for _ in range(2):
        start.advance()
    key, shift, variance = torch.randn(2, 3, 1, 5, 8), torch.randn(3, 2, 8), torch.rand(3, 2) + 1
    expected = 0.5 * (key + shift[:, :, None]).square().sum(dim=-1) / (2 * variance[:, :, None])
    torch.testing.assert_close(start(key, shift, variance), expected)
    projected = torch.randn(2, 3, 2, 5, 8)
    torch.testing.assert_close(start(projected, None, 3.0), 0.5 * projected.square().sum(dim=-1) / 6.0)


def test_gradients_at_the_start_are_those_of_the_old_model():
    """The bias has a gradient: the first step is the old model's, not only its first loss."""
    old, inputs = make_model("llama"), make_inputs("llama")
    new = mgk.convert(copy.deepcopy(old), "smgk")
    for model in (old, new):
        model(**inputs).logits.square().sum().backward()
    gradients = dict(new.named_parameters())
    for name, parameter in old.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-3, msg=name)
    shift = gradients["model.layers.0.self_attn.mixture.keys.shift"]
    assert shift.grad.abs().max() < 1e-3  # which changes nothing yet


def test_a_start_is_saved_and_loaded_half_way(tmp_path):
    model, inputs = mgk.convert(make_model("llama"), "smgk", fade_steps=4), make_inputs("llama")
    advance_start(model)
    expected = logits(model, inputs)
    model.save_pretrained(tmp_path)
    loaded = mgk.load_converted(tmp_path)
    torch.testing.assert_close(logits(loaded, inputs), expected, rtol=0, atol=0)
    for _ in range(3):
        advance_start(model)
        advance_start(loaded)
    torch.testing.assert_close(logits(loaded, inputs), logits(model, inputs), rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    over = [m for m in mgk.load_converted(tmp_path).modules() if isinstance(m, NearStart)]
    assert all(start.is_over for start in over)
    # A state dict into a model that has just begun: it goes on where that one was.
    fresh = mgk.convert(make_model("llama"), "smgk", fade_steps=4, seed=3)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(fresh, inputs), logits(model, inputs), rtol=0, atol=0)
    assert all(m.is_over for m in fresh.modules() if isinstance(m, NearStart))


def test_half_precision_counts_all_steps():
    model = mgk.convert(make_model("llama"), "smgk", fade_steps=1000).to(torch.bfloat16)
    start = model.model.layers[0].self_attn.mixture.start
    advance_start(model)
    assert start.steps_left.item() == 999
    key = torch.ones(1, 2, 1, 3, HEAD_DIM, dtype=torch.bfloat16)
    assert start(key, None, 1.0)[0, 0, 0, 0].item() == pytest.approx(0.999 * HEAD_DIM / 2)


def test_the_trainer_advances_the_start(tmp_path):
    model = mgk.convert(make_model("llama"), "smgk", fade_steps=5)
    tokens = make_inputs("llama", batch=4)["input_ids"].cpu()
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[AdvanceStart()]).train()
    assert model.model.layers[1].self_attn.mixture.start.steps_left.item() == 2


def test_similar_heads_become_one():
    """Heads 0 and 2 are equal, and 1 and 3: who compares them loses nothing, who takes neighbours does."""
    model, inputs = make_model("llama", num_key_value_heads=4), make_inputs("llama")
    for layer in model.model.layers:
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = projection.weight.data.unflatten(0, (4, HEAD_DIM))
            heads[2:] = heads[:2].clone()
    expected = logits(model, inputs)
    similar = mgk.convert(copy.deepcopy(model), "softmax", num_kv_heads=2, pooling="similar")
    torch.testing.assert_close(logits(similar, inputs), expected, rtol=0, atol=1e-5)
    neighbours = mgk.convert(model, "softmax", num_kv_heads=2)
    assert (logits(neighbours, inputs) - expected).abs().max() > 0.1


def test_plans_of_heads():
    assert plan_heads((6, 3), (6, 1)) == ([[0], [1], [2], [3], [4], [5]], [[0, 1, 2]])
    assert plan_heads((6, 3), (3, 3)) == ([[0, 1], [2, 3], [4, 5]], [[0], [1], [2]])
    assert plan_heads((4, 4), (2, 2)) == ([[0, 1], [2, 3]], [[0, 1], [2, 3]])
    # Query heads go where their keys go.
    alike = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]])
    assert plan_heads((8, 4), (8, 2), None, alike) == ([[0], [1], [4], [5], [2], [3], [6], [7]], [[0, 2], [1, 3]])


def test_pooled_weights_are_means():
    """As in the conversion to grouped queries; outputs are added up."""
    model = make_model("llama", num_key_value_heads=4)
    old = copy.deepcopy(model).model.layers[0].self_attn
    new = mgk.convert(model, "softmax", num_heads=2, num_kv_heads=1).model.layers[0].self_attn

    def by_head(weight):
        return weight.detach().unflatten(0, (-1, HEAD_DIM))

    torch.testing.assert_close(by_head(new.k_proj.weight), by_head(old.k_proj.weight).mean(dim=0, keepdim=True))
    torch.testing.assert_close(by_head(new.v_proj.weight), by_head(old.v_proj.weight).mean(dim=0, keepdim=True))
    queries = by_head(old.q_proj.weight).unflatten(0, (2, 2)).mean(dim=1)
    torch.testing.assert_close(by_head(new.q_proj.weight), queries)
    outputs = by_head(old.o_proj.weight.T).unflatten(0, (2, 2)).sum(dim=1)
    torch.testing.assert_close(by_head(new.o_proj.weight.T), outputs)
