"""A call that is done again does what it would have done anew: the same kernels, numbers and addresses.

No kernel runs here. What would have been started is noted instead, and compared.
"""

import gc
import weakref

import pytest
import torch
from cases import make_inputs

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from mgk.ops.triton import call, launch, operator, passes, replay, tuning
from mgk.ops.triton.inputs import Options, Tensors


class Compiled:
    """Stands in for a compiled kernel, and notes how it is started."""

    packed_metadata = None

    def __init__(self, function, log):
        self.function, self.log = function, log

    def run(self, programs, _y, _z, stream, function, _metadata, _launch, _enter, _exit, *arguments):
        self.log.append((function, programs, arguments))


@pytest.fixture
def log(monkeypatch):
    """Every start: kernel, programs, arguments with the constants."""
    if not isinstance(passes.forward.attention_forward, JITFunction):
        pytest.skip("TRITON_INTERPRET=1: nothing is compiled")
    noted = []

    def compile_and_start(kernel, programs, arguments, constants, tile):
        noted.append((kernel.__name__, programs, (*arguments, *constants)))
        return Compiled(kernel.__name__, noted)

    monkeypatch.setattr(launch, "_compile_and_start", compile_and_start)
    monkeypatch.setattr(launch, "current_stream", lambda: (0, 0))
    monkeypatch.setattr(replay, "current_stream", lambda: (0, 0))
    monkeypatch.setattr(launch, "_compiled", {})
    monkeypatch.setattr(replay, "_recordings", {})
    monkeypatch.setattr(replay, "is_possible", lambda device: True)
    monkeypatch.setattr(tuning, "_architecture", lambda index: "sm90")
    monkeypatch.setattr(tuning, "multiprocessors", lambda index: 132)
    return noted


KINDS = {
    "smgk": {"kind": "shifted"},
    "smgk-hard": {"kind": "shifted", "assignment": "hard", "prior": None},
    "mgk": {"kind": "projected"},
    "gaussian": {"kind": "projected", "components": 1, "prior": None},
    "softmax": {"kind": "projected", "components": 1, "prior": None, "similarity": "dot"},
    "mgk3": {"kind": "projected", "components": 3},
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def make(kind, queries=70, dim=32, **changes):
    """Tensors of a call with nothing but the mixture, and its options."""
    inputs = make_inputs(
        **{"batch": 2, "heads": 4, "queries": queries, "dim": dim, "dtype": torch.bfloat16, **KINDS[kind], **changes}
    )
    key = inputs["key"] if inputs["key"].ndim == 5 else inputs["key"][:, :, None]
    prior = inputs.get("log_prior")
    if prior is not None and prior.ndim == 2:
        prior = prior[..., None]
    tensors = Tensors(inputs["query"], key, inputs["value"], inputs.get("shift"), prior)
    return tensors, Options(0.3, inputs.get("similarity") != "dot", True, inputs.get("assignment") == "hard")


def forward(tensors, options):
    return operator.run_forward(*tensors, *options)


def backward(results, tensors, options, grad, run=operator.run_backward):
    return run(grad, None, results, tensors, options)


def one_mask():
    mask = torch.arange(70).expand(2, -1) < torch.tensor([[70], [31]])
    return {"key_mask": mask, "query_mask": mask}


def two_masks_and_dropout():
    mask = torch.arange(70).expand(2, -1) < torch.tensor([[70], [31]])
    return {"key_mask": mask, "query_mask": mask.clone(), "seed": torch.randint(2**62, (1,))}


OTHERS = {"nothing": dict, "one mask": one_mask, "two masks and dropout": two_masks_and_dropout}


def in_names(starts, known):
    """Addresses as (tensor, bytes from its beginning): known tensors by name, buffers in the order of their use."""
    ranges = [(t.data_ptr(), t.data_ptr() + max(1, t.numel() * t.element_size()), name) for name, t in known.items()]
    buffers = {}

    def place(address, storage):
        for first, end, name in ranges:
            if first <= address < end:
                return (name, address - first)
        return (buffers.setdefault(storage, f"buffer {len(buffers)}"), address - storage)

    def name(argument):
        if isinstance(argument, TensorDescriptor):
            at = place(argument.base.data_ptr(), argument.base.untyped_storage().data_ptr())
            return ("descriptor", *at, argument.shape, argument.strides, argument.block_shape, argument.padding)
        if isinstance(argument, torch.Tensor):
            if argument.numel() == 0:
                return None
            return place(argument.data_ptr(), argument.untyped_storage().data_ptr())
        return argument

    return [(kernel, programs, [name(argument) for argument in arguments]) for kernel, programs, arguments in starts]


def named(tensors, prefix=""):
    """By the names of their fields."""
    found = tensors._asdict()
    return {prefix + name: tensor for name, tensor in found.items() if tensor is not None and tensor.numel()}


def with_tensors(starts, held):
    """What was replayed has addresses where there were tensors: put tensors there again."""
    spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), t) for t in held]
    restored = []
    for kernel, programs, arguments in starts:
        changed = []
        for argument in arguments:
            found = None
            if type(argument) is int and argument > 2**32:
                found = next((t for first, size, t in spans if first <= argument < first + size), None)
            if found is None:
                changed.append(argument)
            else:
                offset = argument - found.untyped_storage().data_ptr()
                part = torch.empty(0, dtype=torch.uint8).set_(found.untyped_storage(), offset, (1,), (1,))
                changed.append(part)
        restored.append((kernel, programs, changed))
    return restored


@pytest.fixture
def held(monkeypatch):
    """All buffers that are allocated meanwhile stay alive, so that no address is used twice."""
    kept = []
    functions = (torch, "empty"), (torch, "empty_strided"), (torch, "empty_like"), (torch.Tensor, "new_empty")
    for module, name in functions:
        allocate = getattr(module, name)

        def keep(*args, allocate=allocate, **kwargs):
            kept.append(allocate(*args, **kwargs))
            return kept[-1]

        monkeypatch.setattr(module, name, keep)
    return kept


@every_kind
@pytest.mark.parametrize(("beside", "dim"), [*((beside, 32) for beside in OTHERS), ("nothing", 128)])
def test_replayed_is_anew(kind, beside, dim, log, held):
    """Forward and backward, on other tensors than those that were recorded. Wide heads have descriptors of terms."""
    first, options = make(kind, dim=dim)
    options = options._replace(dropout_p=0.1 if "dropout" in beside else 0.0)
    grad = torch.randn(2, 4, 70, dim).to(torch.bfloat16)
    first = first._replace(**OTHERS[beside]())
    backward(forward(first, options), first, options, grad)
    assert [recording is not None for recording in replay._recordings.values()] == [True, True]

    second = make(kind, dim=dim)[0]._replace(**OTHERS[beside]())
    grad = torch.randn(2, 4, 70, dim).to(torch.bfloat16)
    given, inputs = [tensor for tensor in second if tensor is not None], named(second)
    log.clear()
    results = forward(second, options)
    replayed = with_tensors(log, [*held, *given])
    known = inputs | named(results)
    again = in_names(replayed, known)
    log.clear()
    anew_results = passes.forward_pass(second, options)
    assert again == in_names(log, inputs | named(anew_results))
    assert len(log) == {"nothing": 3, "one mask": 4, "two masks and dropout": 5}[beside]

    log.clear()
    gradients = backward(results, second, options, grad)
    known = known | {"grad": grad}
    again = in_names(with_tensors(log, [*held, grad, *given]), known | named(gradients, "grad_"))
    log.clear()
    anew = backward(results, second, options, grad, passes.backward_pass)
    assert again == in_names(log, known | named(anew, "grad_"))
    for got, expected in zip((*results, *gradients), (*anew_results, *anew), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_one_mask_for_both_is_not_two(log):
    """Each is recorded for itself: the addresses of one stand where those of two would."""
    tensors, options = make("mgk")
    tensors = tensors._replace(**one_mask())
    forward(tensors, options)
    forward(tensors._replace(query_mask=tensors.query_mask.clone()), options)
    assert len(replay._recordings) == 2


def test_a_mask_that_must_be_copied_is_not_recorded(log):
    tensors, options = make("mgk")
    mask = torch.ones(70, 2, dtype=torch.bool).T
    for _ in range(2):
        forward(tensors._replace(key_mask=mask), options)
    assert list(replay._recordings.values()) == [None]


def test_the_flag_of_unfactored_heads_is_cleared(log):
    tensors, options = make("smgk")
    forward(tensors, options)
    lengths = call.TermsLayout(tensors, options).lengths()
    at = lengths.row + lengths.row_second + lengths.column + lengths.column_second + lengths.origin
    poisoned = torch.empty_strided

    def full_of_ones(*args, **kwargs):
        return poisoned(*args, **kwargs).fill_(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_strided", full_of_ones)
        terms = forward(tensors, options).terms
    assert (terms[at : at + lengths.unfactored] == 0).all()
    assert (terms[:at] == 1).all()
    assert (terms[at + lengths.unfactored :] == 1).all()


CHANGES = {
    "length": {"queries": 71},
    "width": {"dim": 64},
    "dtype": {"dtype": torch.float16},
    "batch": {"batch": 3},
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_another_signature_is_another_recording(change, log):
    for changes in ({}, CHANGES[change]):
        forward(*make("smgk", **changes))
    assert len(replay._recordings) == 2


def test_another_layout_is_another_recording(log):
    tensors, options = make("mgk")
    forward(tensors, options)
    by_token = tensors.query.transpose(1, 2).contiguous().transpose(1, 2)
    forward(tensors._replace(query=by_token), options)
    assert len(replay._recordings) == 2


@pytest.mark.parametrize("kind", ["smgk", "mgk"])
def test_a_prior_of_each_sample_has_recordings_of_its_own(kind, log, held):
    """Also where a prior of each position has as many numbers; what is replayed reads the new prior."""
    for prior in ("head", "position", "sample"):
        forward(*make(kind, batch=1, prior=prior))
    assert [recording is not None for recording in replay._recordings.values()] == [True] * 3
    tensors, options = make(kind, batch=1, prior="sample")
    log.clear()
    results = forward(tensors, options)
    given = [tensor for tensor in tensors if tensor is not None]
    again = in_names(with_tensors(log, [*held, *given]), named(tensors) | named(results))
    log.clear()
    anew = passes.forward_pass(tensors, options)
    assert again == in_names(log, named(tensors) | named(anew))
    assert any(("log_prior", 0) in arguments for _, _, arguments in again)


def test_a_prior_that_must_be_copied_is_not_recorded(log):
    tensors, options = make("mgk", prior="sample")
    for _ in range(2):
        forward(tensors._replace(log_prior=tensors.log_prior.transpose(0, 1).contiguous().transpose(0, 1)), options)
    assert list(replay._recordings.values()) == [None]


@pytest.mark.parametrize("other", ["inverse_variance", "attn_mask", "query_spans", "key_spans"])
def test_what_hardly_comes_again_is_thought_through(other, log):
    """And what needs more than kernels."""
    tensors, options = make("mgk")
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "forward_pass", lambda *inputs: seen.append(inputs))
        forward(tensors._replace(**{other: torch.ones(1)}), options)
    assert len(seen) == 1
    assert not replay._recordings


@pytest.mark.parametrize("change", ["width", "shift", "alignment"])
def test_what_must_be_copied_is_not_recorded(change, log):
    tensors, options = make("smgk", dim=13 if change == "width" else 32)
    if change == "shift":
        tensors = tensors._replace(shift=tensors.shift.double())
    elif change == "alignment":
        room = torch.zeros(tensors.query.numel() + 1, dtype=tensors.query.dtype)
        tensors = tensors._replace(query=room[1:].view_as(tensors.query))
    for _ in range(2):
        forward(tensors, options)
    assert list(replay._recordings.values()) == [None]


def test_one_tensor_in_two_roles_is_not_recorded(log):
    tensors, options = make("smgk")
    for _ in range(2):
        forward(tensors._replace(value=tensors.key[:, :, 0]), options)
    assert not replay._recordings


def test_a_recording_keeps_no_tensor(log):
    tensors, options = make("smgk")
    results = forward(tensors, options)
    kept = [weakref.ref(tensor) for tensor in (*tensors, *results) if tensor is not None]
    log.clear()
    del tensors, results
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_too_many_recordings_begin_anew(log, monkeypatch):
    monkeypatch.setattr(replay, "MOST_RECORDINGS", 3)
    for queries in range(1, 7):
        forward(*make("gaussian", queries=queries))
    assert len(replay._recordings) <= 3


def test_an_output_that_no_kernel_writes_is_not_recorded():
    with pytest.raises(replay.NotRecordable, match="no kernel has written"):
        replay.Recording((torch.zeros(2),), (torch.zeros(3),), [])


def test_a_copy_of_nowhere_is_not_recorded():
    half = torch.zeros(4)[:2]
    start = launch.Start(None, 1, (half,), ())
    with pytest.raises(replay.NotRecordable, match="nowhere whole"):
        replay.Recording((torch.zeros(2),), (), [start])
