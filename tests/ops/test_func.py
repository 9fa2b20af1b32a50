"""The operations themselves under torch.func and forward-mode derivatives: every backend is right, or refuses."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from cases import KINDS, attend, make_inputs, padding, relative_error
from torch.func import grad, jvp, vjp, vmap

import mgk

every_kind = pytest.mark.parametrize("kind", KINDS)
# Without a mapping rule vmap takes one call after the other, and warns: only the stock kernels lack one.
with_rules_alone = pytest.mark.filterwarnings("error:There is a performance drop:UserWarning")


def of_key(inputs, backend="auto", **options):
    return lambda key: attend({**inputs, "key": key}, backend, **options)


def loss_of(function):
    return lambda key: function(key).square().sum()


def plain_gradient(loss, key):
    leaf = key.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad


def two_of(key):
    return torch.stack([key, key.flip(-2)])


@every_kind
@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", "sdpa"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_and_maps_are_those_of_single_calls(backend, kind, device):
    inputs = make_inputs(kind=kind, device=device)
    function = of_key(inputs, backend)
    loss, keys = loss_of(function), two_of(inputs["key"])
    expected = torch.stack([plain_gradient(loss, key) for key in keys])
    assert relative_error(grad(loss)(keys[0]), expected[0]) < 1e-12
    assert relative_error(vmap(grad(loss))(keys), expected) < 1e-12
    assert relative_error(grad(lambda keys: vmap(loss)(keys).sum())(keys), expected) < 1e-12
    assert relative_error(vmap(function)(keys), torch.stack([function(key) for key in keys])) < 1e-12


@with_rules_alone
@every_kind
@pytest.mark.parametrize(
    "options",
    [{"assignment": "hard"}, {"variance": "component"}, {"is_causal": True}, {"similarity": "dot"}, {"kv_heads": 1}],
    ids=str,
)
def test_every_option_is_mapped(kind, options, device):
    """What is mapped, and what is not, in one call: keys and masks are, queries, values and priors are not."""
    inputs = make_inputs(kind=kind, device=device, **options)
    batch, _, length, _ = inputs["value"].shape
    masks = torch.stack([padding(batch, length, device), padding(batch, length, device).flip(1)])
    pairs = torch.rand(1, 1, inputs["query"].shape[2], length, device=device) > 0.2
    keys = two_of(inputs["key"])

    def loss(key, mask):
        return attend({**inputs, "key": key, "key_mask": mask, "attn_mask": pairs}).square().sum()

    got = vmap(grad(loss))(keys, masks)
    for number in range(2):
        expected = plain_gradient(lambda key, mask=masks[number]: loss(key, mask), keys[number])
        assert relative_error(got[number], expected) < 1e-12


def test_mapped_calls_stay_in_blocks(device, monkeypatch):
    """Linear memory under `vmap(grad)`: no block holds more logits than it may."""
    from mgk.ops import chunked

    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS_CPU", 2**12)
    monkeypatch.setattr(chunked, "BLOCK_ELEMENTS", 2**12)
    sizes = []
    of_block = chunked._block_logits

    def watched(*arguments):
        logit = of_block(*arguments)
        sizes.append(logit.numel())
        return logit

    monkeypatch.setattr(chunked, "_block_logits", watched)
    inputs = make_inputs(batch=1, heads=1, queries=256, device=device, dtype=torch.float32)
    vmap(grad(loss_of(of_key(inputs))))(two_of(inputs["key"]))
    everything = 2 * 256 * 256 * 2
    assert sizes
    assert max(sizes) <= everything // 8


@with_rules_alone
@every_kind
def test_dropout_is_drawn_as_vmap_is_told(kind, device):
    inputs = make_inputs(kind=kind, device=device)
    keys = torch.stack([inputs["key"], inputs["key"]])
    function = of_key(inputs, dropout_p=0.4)
    same = vmap(function, randomness="same")(keys)
    assert torch.equal(same[0], same[1])
    different = vmap(function, randomness="different")(keys)
    assert not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(keys)


@every_kind
def test_forward_mode_is_right_or_refused(kind, device):
    """In torch.func and in torch.autograd.forward_ad."""
    inputs = make_inputs(kind=kind, device=device)
    key, tangent = inputs["key"], torch.randn_like(inputs["key"])
    step = 1e-6 * tangent
    function = of_key(inputs)
    expected = (function(key + step) - function(key - step)) / 2e-6
    assert relative_error(jvp(function, (key,), (tangent,))[1], expected) < 1e-6
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(key, tangent))
        assert relative_error(forward_ad.unpack_dual(out).tangent, expected) < 1e-6
        for backend in ("chunked", "sdpa"):
            with pytest.raises(ValueError, match=f"backend='{backend}' cannot do forward-mode .* use 'auto'"):
                attend({**inputs, "key": forward_ad.make_dual(key, tangent)}, backend)


@every_kind
def test_second_derivatives_are_right_or_refused(kind, device):
    inputs = make_inputs(kind=kind, queries=5, device=device)
    key = inputs["key"]

    def slope(backend):
        loss = loss_of(of_key(inputs, backend))
        return lambda key: grad(loss)(key).square().sum()

    expected = grad(slope("reference"))(key)
    assert relative_error(grad(slope("auto"))(key), expected) < 1e-12
    for backend in ("chunked", "sdpa"):
        with pytest.raises(ValueError, match=f"backend='{backend}' cannot do .* second derivatives"):
            grad(slope(backend))(key)
    # What was not known when the gradient was computed.
    leaf = key.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        slope("auto")(leaf).backward()
    _, pull_back = vjp(of_key(inputs), key)
    cotangent = torch.randn_like(inputs["value"])
    with pytest.raises(NotImplementedError, match="double backward needs backend='reference'"):
        jvp(lambda cotangent: pull_back(cotangent)[0], (cotangent,), (cotangent,))


def test_fused_kernels_are_refused_a_derivative(device):
    """Before it is asked whether they could run here at all."""
    inputs = make_inputs(device=device)
    with pytest.raises(ValueError, match=r"backend='triton' cannot do a derivative of torch.func: use 'auto'"):
        grad(loss_of(of_key(inputs, "triton")))(inputs["key"])

    def linear(key):
        return mgk.linear_mixture_attention(inputs["query"], key, inputs["value"], backend="triton").sum()

    with pytest.raises(ValueError, match=r"backend='triton' cannot do a derivative of torch.func"):
        grad(linear)(inputs["key"])


def test_unused_parameters_of_an_ensemble_get_gradients_of_zero(device):
    """A hard assignment ignores the prior, whose gradient is zero and not missing."""
    inputs = make_inputs(assignment="hard", prior="head", device=device)
    priors = torch.stack([inputs["log_prior"]] * 2).requires_grad_()
    out = vmap(lambda prior: attend({**inputs, "log_prior": prior}))(priors)
    assert out.requires_grad
    out.sum().backward()
    assert torch.equal(priors.grad, torch.zeros_like(priors))


@with_rules_alone
@every_kind
def test_statistics_are_mapped_and_differentiated(kind, device):
    inputs = make_inputs(kind=kind, device=device)
    inputs.pop("value")

    def density(key):
        return mgk.mixture_log_density(**{**inputs, "key": key}).sum()

    def responsibilities(key):
        return mgk.mixture_responsibilities(**{**inputs, "key": key})

    keys = two_of(inputs["key"])
    expected = torch.stack([plain_gradient(density, key) for key in keys])
    assert relative_error(vmap(grad(density))(keys), expected) < 1e-12
    assert relative_error(vmap(responsibilities)(keys), torch.stack([responsibilities(key) for key in keys])) < 1e-12
