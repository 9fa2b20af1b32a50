"""The adaptive softmax against its definition."""

import pytest
import torch

from mgk.models import AdaptiveSoftmax


@pytest.fixture
def softmax():
    torch.manual_seed(0)
    module = AdaptiveSoftmax(8, 50, [10, 25]).double()
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


@pytest.mark.parametrize("targets", [[0, 9, 10, 24, 25, 49, 3], [0, 1, 2, 3, 4, 5, 6], [30] * 7], ids=str)
def test_loss_and_its_gradients(softmax, targets):
    """Empty clusters included."""
    hidden = torch.randn(7, 8).double().requires_grad_()
    target = torch.tensor(targets)
    leaves = [hidden, *softmax.parameters()]
    loss = softmax.loss(hidden, target)
    expected = -by_definition(softmax, hidden).log().gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(loss, expected)
    weight = torch.randn(7).double()
    got = torch.autograd.grad((loss * weight).sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_loss_forms_no_full_logits():
    """20,000 words in all, 100 in the head, 512 targets of which 4 are rare: far less than 512 x 20,000 numbers."""
    module = AdaptiveSoftmax(16, 20_000, [100, 1000])
    hidden, target = torch.randn(512, 16), torch.randint(100, (512,))
    target[:4] = torch.tensor([150, 999, 1000, 19_999])
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        module.loss(hidden, target).sum().backward()
    assert largest <= 20_000 * 16
    assert largest < 512 * 20_000 / 10
