"""The picture of a sweep, from numbers as a GPU has them."""

import itertools

import pytest

from mgk.benchmark.plot import _spread, draw, lines


@pytest.fixture
def result():
    """Lengths from 512 to 4096; the eager formula stops at 1024."""
    row = {
        "sweep": True,
        "heads": 4,
        "baseline_heads": 8,
        "batch": 1,
        "head_dim": 64,
        "causal": True,
        "dtype": "bfloat16",
    }
    found = {"device": "NVIDIA H200", "baselines": [], "rows": []}
    for power in range(4):
        tokens = 512 * 2**power
        for kernel, time in (("cudnn", 2.0), ("flash", 1.0 if power == 0 else 3.0)):
            record = {"sweep": True, "heads": 8, "tokens": tokens, "kernel": kernel, "training_ms": time * 4**power}
            found["baselines"].append({**record, "peak_bytes": 1000 * tokens})
        for preset, backend, last in (("smgk", "triton", 4), ("mgk", "triton", 4), ("smgk", "eager", 2)):
            if power < last:
                record = {**row, "tokens": tokens, "preset": preset, "backend": backend, "training_ms": 4.0**power}
                found["rows"].append({**record, "peak_bytes": 600 * tokens})
    return found


def test_lines_of_a_sweep(result):
    softmax, smgk, mgk, eager = lines(result)
    assert softmax.label == "softmax, 8 heads, SDPA"
    # The fastest kernel at each length.
    assert softmax.milliseconds == {512: 1.0, 1024: 8.0, 2048: 32.0, 4096: 128.0}
    assert [line.label for line in (smgk, mgk)] == ["smgk, 4 heads, triton", "mgk, 4 heads, triton"]
    assert smgk.megabytes[1024] == 0.6144
    assert list(eager.milliseconds) == [512, 1024]
    assert len({line.colour for line in (softmax, smgk, mgk)}) == 3


def test_softmax_through_our_own_kernel_has_a_line_of_its_own(result):
    """It must not pass for a stock kernel, however fast it is."""
    stock = lines(result)[0]
    for record in [record for record in result["baselines"] if record["kernel"] == "cudnn"]:
        own = {name: value for name, value in record.items() if name != "kernel"}
        result["baselines"].append({**own, "backend": "triton", "preset": "softmax", "training_ms": 0.5})
    softmax, own, *_ = lines(result)
    assert softmax == stock
    assert (own.label, set(own.milliseconds.values())) == ("softmax, 8 heads, triton", {0.5})
    assert own.colour != softmax.colour


def test_a_picture_is_drawn(result, tmp_path):
    draw(result, tmp_path / "folder" / "lengths.png")
    assert (tmp_path / "folder" / "lengths.png").stat().st_size > 10_000


def test_labels_do_not_touch():
    places = _spread([0.0, 0.01, 0.02, 5.0, 9.99, 10.0], 0.5, highest=10.0)
    assert places[-1] == pytest.approx(10.0)
    assert all(above - below > 0.49 for below, above in itertools.pairwise(places))
    assert places[3] == 5.0
