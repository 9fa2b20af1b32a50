"""The adaptive softmax against its definition."""

import pytest
import torch
from model_cases import make_model
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgk.models import AdaptiveSoftmax, cluster_rows

ENDS = [10, 25]

# All in the head, all in one cluster, none in a cluster, and each somewhere.
TARGETS = [[0, 1, 2, 3, 4, 5, 6], [30] * 7, [24] * 7, [0, 9, 10, 24, 11, 3, 3], [0, 9, 10, 24, 25, 49, 3]]


@pytest.fixture
def softmax():
    torch.manual_seed(0)
    module = AdaptiveSoftmax(8, 50, ENDS).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def by_definition(module, hidden):
    """p(w), cluster by cluster."""
    logits = hidden @ module.weight.T + module.bias
    clusters = hidden @ module.cluster_weight.T + module.cluster_bias
    head = torch.cat([logits[:, :10], clusters], dim=1).softmax(dim=1)
    middle, rare = logits[:, 10:25].softmax(dim=1), logits[:, 25:].softmax(dim=1)
    return torch.cat([head[:, :10], head[:, 10:11] * middle, head[:, 11:12] * rare], dim=1)


def test_log_probabilities(softmax):
    hidden = torch.randn(7, 8).double()
    log_probability = softmax(hidden)
    torch.testing.assert_close(log_probability.exp(), by_definition(softmax, hidden))
    torch.testing.assert_close(log_probability.exp().sum(dim=1), torch.ones(7).double())


def loss_and_gradients(softmax, hidden, target, rows=None):
    loss = softmax.loss(hidden, target, rows)
    weight = torch.linspace(-1, 2, len(target), dtype=loss.dtype)
    return loss, *torch.autograd.grad((loss * weight).sum(), [hidden, *softmax.parameters()])


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("multiple_of", [None, 1, 7, 8], ids="rows={}".format)
def test_loss_and_its_gradients(softmax, targets, multiple_of):
    """Empty clusters included; 7 is exactly what a cluster may hold, 8 is padded."""
    hidden = torch.randn(7, 8).double().requires_grad_()
    target = torch.tensor(targets)
    rows = None if multiple_of is None else cluster_rows(target, ENDS, multiple_of)
    got = loss_and_gradients(softmax, hidden, target, rows)
    expected = -by_definition(softmax, hidden).log().gather(1, target[:, None])[:, 0]
    weight = torch.linspace(-1, 2, 7).double()
    wanted = expected, *torch.autograd.grad((expected * weight).sum(), [hidden, *softmax.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_given_rows_change_nothing(softmax, targets, autocast):
    """Where they are not padded, to the last bit; where they are, a product of more rows may round otherwise."""
    softmax = softmax.float()
    hidden, target = torch.randn(7, 8, requires_grad=True), torch.tensor(targets)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        looked_up = loss_and_gradients(softmax, hidden, target)
        exact = loss_and_gradients(softmax, hidden, target, cluster_rows(target, ENDS))
        padded = loss_and_gradients(softmax, hidden, target, cluster_rows(target, ENDS, 16))
        again = loss_and_gradients(softmax, hidden, target, cluster_rows(target, ENDS, 16))
    assert all(a.equal(b) for a, b in zip(exact, looked_up, strict=True))
    assert all(a.equal(b) for a, b in zip(again, padded, strict=True))
    for a, b in zip(padded, looked_up, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_by_differences(softmax):
    """First and second ones, with padded rows."""
    hidden, target = torch.randn(7, 8).double().requires_grad_(), torch.tensor(TARGETS[-1])
    rows = cluster_rows(target, ENDS, 4)
    leaves = [hidden, *softmax.parameters()]

    def loss(hidden, *_):
        return softmax.loss(hidden, target, rows)

    torch.autograd.gradcheck(loss, leaves)
    torch.autograd.gradgradcheck(loss, leaves)


def test_rows_of_clusters():
    target = torch.tensor([3, 10, 49, -100, 24, 25, 9])
    assert [row.tolist() for row in cluster_rows(target, ENDS)] == [[1, 4], [2, 5]]
    assert [row.tolist() for row in cluster_rows(target, ENDS, 4)] == [[1, 4, 7, 7], [2, 5, 7, 7]]


@pytest.mark.parametrize(
    ("count", "size"), [(0, 64), (64, 64), (65, 128), (512, 512), (513, 640), (1000, 1024), (1025, 1280), (9000, 10240)]
)
def test_few_sizes_of_clusters(count, size):
    assert [len(row) for row in cluster_rows(torch.full((count,), 12), ENDS, 64)] == [size, 64]


@pytest.mark.parametrize("count", range(1, 3000, 97))
def test_padding_is_at_most_a_quarter(count):
    (row,) = cluster_rows(torch.ones(count, dtype=torch.long), [1], 8)
    assert count <= len(row) <= max(8 * -(-count // 8), 1.25 * count)


def test_a_target_without_a_row_has_no_loss(softmax):
    """Rows of another batch are never a wrong number: one is missing, one is in another cluster, one is in the head."""
    hidden, target = torch.randn(7, 8).double(), torch.tensor(TARGETS[-1])
    expected = softmax.loss(hidden, target)
    rows = cluster_rows(target, ENDS, 4)
    rows[0] = torch.tensor([0, 3, 4, 7])
    expected[[2, 4]] = torch.nan
    rows[1] = torch.tensor([5, 7, 7, 7])
    torch.testing.assert_close(softmax.loss(hidden, target, rows), expected, equal_nan=True)


def test_rows_of_another_number_of_clusters(softmax):
    target = torch.tensor(TARGETS[-1])
    with pytest.raises(ValueError, match="rows must be those of 2 clusters, got 1"):
        softmax.loss(torch.randn(7, 8).double(), target, cluster_rows(target, [10]))


def test_one_graph_for_batches_of_one_shape(softmax):
    """Compiled without a break, and not again for other targets."""
    torch._dynamo.reset()
    hidden = torch.randn(7, 8).double().requires_grad_()
    compiled = torch.compile(softmax.loss, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for targets in TARGETS:
            target = torch.tensor(targets)
            rows = cluster_rows(target, ENDS, 8)
            torch.testing.assert_close(compiled(hidden, target, rows), softmax.loss(hidden, target))


class NoHost(TorchFunctionMode):
    """Nothing is copied from the host: a recording would have the numbers of its own batch in it, if any at all."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        devices = {each.device.type for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)}
        assert devices <= {"meta"}, f"{function} is on {devices}"
        assert function not in (torch.tensor, torch.as_tensor)
        return out


@pytest.mark.parametrize("attention", ["softmax", "gaussian", "smgk", "mgk", "linear"])
def test_an_update_needs_nothing_of_the_host(attention):
    """A device that holds no numbers: whatever asks for one, or has a shape that depends on one, fails there."""
    model = make_model("wikitext", attention, dtype=torch.float32).train().to("meta")
    ids = torch.zeros(3, 9, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "shift_labels": ids, "use_cache": False}
    rows = [torch.zeros(size, dtype=torch.long, device="meta") for size in (8, 16)]
    with NoHost():
        loss = model(**inputs, cluster_rows=rows, num_items_in_batch=torch.zeros((), device="meta")).loss
        loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(NotImplementedError, match="nonzero"):
        model(**inputs)
    with NoHost(), pytest.raises(AssertionError):
        torch.tensor([20, 40], device="meta")


def test_a_recording_serves_other_batches(softmax):
    """What was noted down of one batch, and is done again with others of its shape: as a CUDA graph is."""

    def batch(targets):
        target = torch.tensor(targets)
        return torch.randn(7, 8).double().requires_grad_(), target, *cluster_rows(target, ENDS, 8)

    def update(hidden, target, *rows):
        return loss_and_gradients(softmax, hidden, target, rows)

    recording = make_fx(update)(*batch(TARGETS[-1]))
    for targets in TARGETS:
        inputs = batch(targets)
        for again, expected in zip(recording(*inputs), update(*inputs), strict=True):
            torch.testing.assert_close(again, expected)


@pytest.mark.parametrize("multiple_of", [None, 8])
def test_loss_forms_no_full_logits(multiple_of):
    """20,000 words in all, 100 in the head, 512 targets of which 4 are rare: far less than 512 x 20,000 numbers."""
    module = AdaptiveSoftmax(16, 20_000, [100, 1000])
    hidden, target = torch.randn(512, 16), torch.randint(100, (512,))
    target[:4] = torch.tensor([150, 999, 1000, 19_999])
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    rows = None if multiple_of is None else cluster_rows(target, [100, 1000], multiple_of)
    with Watch():
        module.loss(hidden, target, rows).sum().backward()
    assert largest <= 20_000 * 16
    assert largest < 512 * 20_000 / 10
