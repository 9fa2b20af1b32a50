"""P21, P22: views of every kind, and more elements and programs than 32 or 16 bits count."""

import pytest
import torch
from cases import KINDS, OUTPUT_CAP
from cases import attend as attend_with
from triton_cases import (
    BFLOAT16,
    INTERPRETED,
    ONE_DTYPE,
    attend,
    check,
    error_of,
    gradients_of,
    make_inputs,
    random_grad,
    rms,
)  # fmt: skip

every_kind = pytest.mark.parametrize("kind", KINDS)
TOLERANCE = 1e-6 if INTERPRETED else OUTPUT_CAP[ONE_DTYPE]
SIZES = {"queries": 18, "keys": 20, "dim": 16, "batch": 2, "heads": 1 if INTERPRETED else 2}


def storage_offset(tensor):
    return torch.cat([tensor.new_full((3,), 9.0), tensor.flatten()])[3:].view(tensor.shape)


def sequence_first(tensor):
    """As projections deliver it: [.., N, D] a view of [N, .., D]."""
    order = [tensor.ndim - 2, *range(tensor.ndim - 2), tensor.ndim - 1]
    back = [*range(1, tensor.ndim - 1), 0, tensor.ndim - 1]
    return tensor.permute(order).contiguous().permute(back)


def strided_features(tensor):
    return torch.stack([tensor, torch.full_like(tensor, 9.0)], dim=-1).flatten(-2)[..., ::2]


def transposed(tensor):
    """Features first."""
    return tensor.mT.contiguous().mT


def packed(tensor):
    """A slice of a wider projection, whose rows are not aligned."""
    return torch.cat([torch.full_like(tensor[..., :1], 9.0), tensor, tensor], dim=-1)[..., 1 : 1 + tensor.shape[-1]]


VIEWS = {view.__name__: view for view in (storage_offset, sequence_first, strided_features, transposed, packed)}


@every_kind
@pytest.mark.parametrize("view", list(VIEWS))
def test_memory_layout_is_irrelevant(kind, view, device):
    """P21: outputs and gradients, of inputs and of the incoming gradient; only norms may be summed in another order."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, is_causal=True, **SIZES)
    grad = random_grad(inputs)
    expected_out, expected = gradients_of(inputs, grad)
    leaves = {name: VIEWS[view](inputs[name]).requires_grad_() for name in ("query", "key", "value")}
    out = attend({**inputs, **leaves})
    out.backward(VIEWS[view](grad))
    assert error_of(out, expected_out.double()) <= TOLERANCE
    for name, leaf in leaves.items():
        assert error_of(leaf.grad, expected[name].double()) <= 2 * TOLERANCE, name


@pytest.mark.parametrize("kind", KINDS if INTERPRETED else ["shifted"])
@pytest.mark.parametrize("what", ["all"] if INTERPRETED else ["variance", "padding", "pairs"])
def test_layouts_of_parameters_and_masks_are_irrelevant(kind, what, device):
    """P21: transposed and expanded parameters and masks; compiled, one after the other."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, prior="position", variance="component", **SIZES)
    if what in ("all", "padding"):
        inputs["key_mask"] = torch.rand(20, 2, device=device).T > 0.3
        inputs["query_mask"] = torch.rand(18, 2, device=device).T > 0.1
    if what in ("all", "pairs"):
        inputs["attn_mask"] = (torch.rand(20, 18, 1, 2, device=device) > 0.3).permute(3, 2, 1, 0)
    inputs["log_prior"] = inputs["log_prior"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    if what in ("all", "variance"):
        inputs["variance"] = inputs["variance"].T.contiguous().T
    else:
        inputs.pop("variance")
    if kind == "shifted":
        inputs["shift"] = inputs["shift"].mT.contiguous().mT
    contiguous = {name: v.contiguous() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()}
    assert error_of(attend(inputs), attend(contiguous).double()) <= TOLERANCE
    check(inputs)


@every_kind
def test_expanded_inputs(kind, device):
    """P21: stride 0 in batch and head, forward and backward."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **{**SIZES, "batch": 1, "heads": 1})
    for name in ("shift", "log_prior"):
        if name in inputs:
            inputs[name] = inputs[name].expand(2, *inputs[name].shape[1:])
    grad = torch.randn(3, 2, 18, 16, device=device).to(ONE_DTYPE)
    leaves = {name: inputs[name].clone().requires_grad_() for name in ("query", "key", "value")}
    views = {name: leaf.expand(3, 2, *leaf.shape[2:]) for name, leaf in leaves.items()}
    out = attend({**inputs, **views})
    out.backward(grad)
    copies = {name: view.detach().contiguous() for name, view in views.items()}
    expected, gradients = gradients_of({**inputs, **copies}, grad)
    assert torch.equal(out, expected)
    for name, leaf in leaves.items():
        assert error_of(leaf.grad, gradients[name].double().sum((0, 1), keepdim=True)) <= 2 * TOLERANCE


@every_kind
def test_expanded_gradients(kind, device):
    """P21: a sum hands back a gradient of stride 0 everywhere."""
    inputs = make_inputs(kind=kind, dtype=ONE_DTYPE, device=device, **SIZES)
    _, expected = gradients_of(inputs, torch.ones_like(inputs["query"]))
    inputs["query"].requires_grad_()
    attend(inputs).sum().backward()
    assert torch.equal(inputs["query"].grad, expected["query"])


@pytest.mark.gpu
@pytest.mark.slow
@every_kind
def test_more_elements_than_32_bits_count(kind):
    """P22: the last of 2^31 and more elements of key and value, found by priors that leave only them; backward, too."""
    components, keys, dim, last = (8, 2**20 + 64, 256, 128) if kind == "projected" else (2, 2**23 + 64, 256, 128)
    shape = (1, 1, components, keys, dim) if kind == "projected" else (1, 1, keys, dim)
    inputs = make_inputs(
        kind=kind, batch=1, heads=1, queries=64, keys=last, dim=dim, components=components, prior="position",
        dtype=BFLOAT16, device="cuda",
    )  # fmt: skip
    key = torch.zeros(shape, dtype=BFLOAT16, device="cuda")
    assert key.numel() > 2**31
    key[..., -last:, :] = inputs["key"]
    value = torch.zeros(1, 1, keys, dim, dtype=BFLOAT16, device="cuda")
    value[..., -last:, :] = inputs["value"]
    log_prior = torch.full((1, components, keys), -torch.inf, device="cuda")
    log_prior[..., -last:] = inputs["log_prior"]
    large = {**inputs, "key": key.requires_grad_(), "value": value.requires_grad_(), "log_prior": log_prior}
    grad = random_grad(inputs)
    expected_out, expected = gradients_of(inputs, grad)
    out = attend(large)
    out.backward(grad)
    assert error_of(out, expected_out.double()) <= 4e-3
    for name in ("key", "value"):
        gradient = large[name].grad
        assert error_of(gradient[..., -last:, :], expected[name].double()) <= 1e-2, name
        assert not gradient[..., : last * 4, :].any(), name


@pytest.mark.gpu
@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("long", ["queries", "keys", "batch", "heads"])
def test_more_programs_than_16_bits_count(kind, long):
    """P22: more than 65,535 programs along each axis of the grid."""
    sizes = {"batch": 1, "heads": 1, "queries": 16, "keys": 16}
    sizes[long] = 2**23 + 130 if long in ("queries", "keys") else 70_000
    inputs = make_inputs(kind=kind, dim=16, dtype=BFLOAT16, device="cuda", **sizes)
    grad = random_grad(inputs)
    out, got = gradients_of(inputs, grad)
    if long == "keys":
        expected = attend_with(inputs, "chunked")
        assert error_of(out, expected.double(), 1e-2 * rms(inputs["value"])) <= 4e-3
        assert all(gradient.isfinite().all() for gradient in got.values())
        return
    axis = {"batch": 0, "heads": 1, "queries": 2}[long]
    for part in (slice(0, 64), slice(-64, None)):
        some = {
            name: value.movedim(axis, 0)[part].movedim(0, axis)
            if name == "query" or (name in ("key", "value") and long != "queries")
            else value[part]
            if name in ("shift", "log_prior") and long == "heads"
            else value
            for name, value in inputs.items()
        }
        some_grad = grad.movedim(axis, 0)[part].movedim(0, axis)
        expected_out, expected = gradients_of(some, some_grad)
        found = [tensor.movedim(axis, 0)[part].movedim(0, axis) for tensor in (out, got["query"])]
        for here, there in zip(found, (expected_out, expected["query"]), strict=True):
            # The first query says from where logits are measured, and so how they are rounded.
            if long == "queries" and part.start != 0:
                assert error_of(here, there.double()) <= 1e-2
            else:
                assert torch.equal(here, there)


def test_ranges_of_masks(device):
    """From the first valid token to the last, over holes and over blocks; nothing where nothing is valid."""
    from mgk.ops.triton.call import Call
    from mgk.ops.triton.inputs import Options, Tensors

    length = 150 if INTERPRETED else 9000
    masks = torch.zeros(5, length, dtype=torch.bool, device=device)
    masks[0, :7] = masks[1, 3] = masks[1, -1] = masks[2, length // 2 :] = masks[4] = True
    inputs = make_inputs(kind="shifted", batch=5, heads=1, queries=length, dim=16, dtype=ONE_DTYPE, device=device)
    tensors = Tensors(inputs["query"], inputs["key"][:, :, None], inputs["value"], inputs["shift"])
    expected = [[0, 7], [3, length], [length // 2, length], [0, 0], [0, length]]
    for key_mask, query_mask in ((masks, None), (None, masks.T.contiguous().T)):
        values = Call(tensors._replace(key_mask=key_mask, query_mask=query_mask), Options(1.0, True)).values
        names = ("p_key_range", "p_query_range") if query_mask is None else ("p_query_range", "p_key_range")
        found = [values[name] for name in names]
        assert found[0].tolist() == expected
        assert found[1].tolist() == [[0, length]] * 5
