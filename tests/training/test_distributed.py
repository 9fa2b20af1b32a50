"""Two processes: they must come to what one comes to, and stop, start and stumble together."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from distributed_cases import (
    CASES,
    DAMAGED,
    ELSEWHERE,
    EQUAL,
    RECIPE_FILE,
    STOPPED,
    TEST,
    UNDISTURBED,
    VALID,
    compute_logits,
    environment,
    make_corpora,
    open_corpus,
    read_rank,
    run_case,
    start_pair,
)
from safetensors.torch import load_file

import mgk.models
from mgk.evaluation import shares
from mgk.training import checkpoint, result
from mgk.training.distributed import build_fabric
from mgk.training.errors import CheckpointError
from mgk.training.loop import Trainer
from mgk.training.tracking import read_curves

pytestmark = pytest.mark.distributed

LAST = Path("checkpoints") / "step-00000020"


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """The folder in which two processes have made all cases; once, however many workers pytest has."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "distributed"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_corpora(folder / "corpora")
            pair = start_pair([str(Path(__file__).parents[1] / "distributed_cases.py"), str(folder)])
            try:
                said = [process.communicate(timeout=240)[0] for process in pair]
            finally:
                for process in pair:
                    process.kill()
            for rank, (process, text) in enumerate(zip(pair, said, strict=True)):
                (folder / f"exit-{rank}").write_text(f"{process.returncode}\n{text}")
    return folder


def seen_by(runs, name, rank):
    """What a rank saw; where it saw nothing, what it said at the end."""
    if not (runs / name / f"rank-{rank}.json").exists():
        pytest.fail(f"rank {rank} did not finish {name}:\n{(runs / f'exit-{rank}').read_text()[-4000:]}")
    return read_rank(runs / name, rank)


@pytest.fixture
def alone(runs, tmp_path):
    """Makes a case in this process, and gives its folder."""

    def make(name):
        run_case(name, runs / "corpora", tmp_path / name)
        return tmp_path / name

    return make


def assert_equal_runs(found, expected, name):
    """Losses, metrics, weights and moments: fp64 throughout, but for the responsibilities of EM, which are fp32."""
    is_em = CASES[name].values["model"]["attention"].endswith("-em")
    exact = {"rtol": 1e-5, "atol": 1e-6} if is_em else {"rtol": 1e-9, "atol": 1e-11}
    (seen, tensors), (seen_alone, tensors_alone) = read_rank(found, 0), read_rank(expected, 0)
    # The loss itself is reported in fp32.
    assert seen["losses"] == pytest.approx(seen_alone["losses"], rel=1e-6)
    assert seen["tokens"] == seen_alone["tokens"]
    assert len(seen["validated"]) == len(seen_alone["validated"]) == 2
    for ours, theirs in zip(
        [*seen["validated"], *seen["metrics"].values()],
        [*seen_alone["validated"], *seen_alone["metrics"].values()],
        strict=True,
    ):
        assert ours == pytest.approx(theirs, rel=1e-6 if is_em else 1e-9)
    torch.testing.assert_close(tensors, tensors_alone, **exact)
    moments, moments_alone = (load_file(folder / LAST / "optimizer.safetensors") for folder in (found, expected))
    torch.testing.assert_close(moments, moments_alone, **exact)
    written, written_alone = (load_file(folder / LAST / "model.safetensors") for folder in (found, expected))
    torch.testing.assert_close(written, written_alone, **exact)


@pytest.mark.parametrize("name", EQUAL)
def test_two_ranks_are_one(runs, alone, name):
    """G8: whatever the strategy, task and attention, at the same global batch."""
    seen_by(runs, name, 0)
    assert_equal_runs(runs / name, alone(name), name)


@pytest.mark.parametrize("name", [*EQUAL, *DAMAGED])
def test_ranks_agree(runs, name):
    """E4 and F8: bit for bit, priors of EM and metrics included."""
    (first, weights), (second, others) = (seen_by(runs, name, rank) for rank in (0, 1))
    assert first == second
    torch.testing.assert_close(weights, others, rtol=0, atol=0)
    priors = {name for name in weights if name.endswith("log_prior")}
    assert bool(priors) == CASES[name].values["model"]["attention"].endswith("-em")
    for prior in priors:
        # They have moved.
        assert (weights[prior].exp() - 0.5).abs().max() > 0.005


def test_every_sample_is_evaluated_once(runs, alone):
    """Also where ranks cannot share the batches evenly, or are more than there are batches."""
    valid, test = (shares.share(-(-count // 8), 1, 2) for count in (VALID, TEST))
    assert not valid[-1].counts
    assert not test[-1].counts
    for name in ("smgk-ddp", "smgk-fsdp2"):
        seen = seen_by(runs, name, 0)[0]
        metrics = seen["metrics"]
        assert (metrics["valid"]["count"], metrics["test"]["count"]) == (VALID, TEST)
        assert seen["items"]["test"]["count"] == TEST
        # The same items, in the same order, as one process finds.
        assert seen["items"] == json.loads((alone(name) / "rank-0.json").read_text())["items"]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_rank_that_has_no_number(runs, alone, name):
    """F8: one rank's loss, or one row of the gradient in one shard, and both skip that update and nothing else."""
    seen = seen_by(runs, name, 0)[0]
    assert seen["skipped"] == 1
    assert seen["losses"][4] is None
    assert None not in seen["losses"][:4] + seen["losses"][5:]
    folder = alone(name)
    losses, alone_losses = ([x for x in each["losses"] if x is not None] for each in (seen, read_rank(folder, 0)[0]))
    assert losses == pytest.approx(alone_losses, rel=1e-6)
    (_, weights), (_, weights_alone) = read_rank(runs / name, 0), read_rank(folder, 0)
    torch.testing.assert_close(weights, weights_alone, rtol=1e-5, atol=1e-6)
    # Each rank tells of its own samples; gradients are those of all.
    kept = [json.loads((runs / name / file).read_text()) for file in ("skipped.jsonl", "rank1-skipped.jsonl")]
    samples = [line["batches"][0]["samples"] for line in kept]
    assert len(samples[0]) == len(samples[1]) == 8
    assert not set(samples[0]) & set(samples[1])
    assert kept[0]["batches"][0]["gradient_norms"] == kept[1]["batches"][0]["gradient_norms"] != {}


def test_a_signal_to_one_rank_stops_both(runs):
    """Within step 7: one checkpoint, of that step, and the exit code of SIGTERM on both."""
    codes = [int((runs / f"exit-{rank}").read_text().split("\n", 1)[0]) for rank in (0, 1)]
    assert codes == [143, 143], (runs / "exit-0").read_text()[-4000:]
    assert [path.name for path in (runs / STOPPED / "checkpoints").iterdir()] == ["step-00000007"]
    assert checkpoint.read(runs / STOPPED / "checkpoints" / "step-00000007").manifest["state"]["step"] == 7


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("smgk-em-fsdp2", mgk.models.MGKForSequenceClassification),
        ("language-fsdp2", mgk.models.MGKForCausalLM),
        ("translation-fsdp2", mgk.models.MGKForSeq2SeqLM),
    ],
)
def test_a_sharded_model_is_saved_whole(runs, name, kind):
    """One process loads it as any other model, and it says the same."""
    model = kind.from_pretrained(runs / name / LAST)
    written = load_file(runs / name / LAST / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert written.keys() <= shapes.keys()
    assert {name: tensor.shape for name, tensor in written.items()} == {name: shapes[name] for name in written}
    assert {tensor.dtype for tensor in written.values()} == {torch.float64}
    logits = seen_by(runs, name, 1)[1]["logits"]
    torch.testing.assert_close(compute_logits(model), logits, rtol=1e-12, atol=1e-12)


def test_a_sharded_run_goes_on_bit_for_bit(runs):
    """With dropout, which each rank draws for itself."""
    seen_by(runs, "resumed-fsdp2", 0)
    for file in ("model", "optimizer", "random"):
        before, after = (
            load_file(runs / name / LAST / f"{file}.safetensors") for name in ("whole-fsdp2", "resumed-fsdp2")
        )
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    (whole, _), (resumed, _) = (seen_by(runs, name, 1) for name in ("whole-fsdp2", "resumed-fsdp2"))
    assert resumed["losses"] == whole["losses"][10:]
    assert resumed["metrics"] == whole["metrics"]
    generators = load_file(runs / "whole-fsdp2" / LAST / "random.safetensors")
    assert not torch.equal(*generators["torch"])


def test_another_strategy_goes_on(runs):
    """A checkpoint does not know in how many pieces the weights were."""
    resumed, whole = (seen_by(runs, name, 0) for name in ("ddp-goes-on-as-fsdp2", "smgk-ddp"))
    assert resumed[0]["losses"] == pytest.approx(whole[0]["losses"][10:], rel=1e-6)
    torch.testing.assert_close(resumed[1], whole[1], rtol=1e-9, atol=1e-11)


def test_another_number_of_ranks_is_refused(runs):
    case = CASES["smgk-fsdp2"]
    fabric = build_fabric(device="cpu")
    with pytest.raises(CheckpointError, match=r"must come from as many ranks, 1, got 2: go on with --devices and"):
        Trainer(case.config(1), runs / "smgk-fsdp2", open_corpus(runs / "corpora", case), fabric)


def test_ranks_that_find_different_checkpoints_stop(runs):
    """As on nodes that do not share a disk: both say so, and neither waits for the other."""
    errors = [(runs / ELSEWHERE / f"error-{rank}").read_text() for rank in (0, 1)]
    assert "got step 20, none: is it on a disk that all nodes share?" in errors[0]
    assert errors[0].replace("elsewhere/0", "elsewhere/1") == errors[1]


def workers_of(launcher):
    """The processes that torchrun has started, by their rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            rank = re.search(rb"\0RANK=(\d)\0", (folder / "environ").read_bytes()) if parent == launcher else None
        except OSError:
            # It has ended meanwhile.
            continue
        if rank is not None:
            found[int(rank[1])] = int(folder.name)
    return found


def command(runs, folder, *options):
    return ["-m", "mgk", "train", str(runs / "corpora" / RECIPE_FILE), "--device", "cpu", "--to", str(folder), *options]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_a_dead_rank_again(runs, tmp_path, victim):
    """F9: SIGKILL to one rank; all start again from the last checkpoint and come to the same weights."""
    started = environment(MGK_CACHE=str(tmp_path), TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    launch = [*TORCHRUN, "--max-restarts", "2", *command(runs, tmp_path / "run", "--devices", "2")]
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(launch, env=started, stdout=said, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 100
            while not list((tmp_path / "run").glob("checkpoints/step-*")):
                assert process.poll() is None, Path(said.name).read_text()
                assert time.monotonic() < deadline, Path(said.name).read_text()
                time.sleep(0.02)
            os.kill(workers_of(process.pid)[victim], signal.SIGKILL)
            code = process.wait(100)
        finally:
            process.terminate()
            process.wait()
    text = Path(said.name).read_text()
    assert code == 0, text
    assert text.count("starting at step 0") == 1
    # More might have been written until the signal came, but not all.
    (step,) = re.findall(r"going on from step-(\d+)", text)
    assert 5 <= int(step) < 100
    for file in ("model", "optimizer", "random"):
        before, after = (
            load_file(folder / "checkpoints" / "step-00000100" / f"{file}.safetensors")
            for folder in (runs / UNDISTURBED, tmp_path / "run")
        )
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    lines, lines_undisturbed = (
        read_curves(folder / "metrics.jsonl") for folder in (tmp_path / "run", runs / UNDISTURBED)
    )
    assert [(line["step"], line["kind"]) for line in lines] == [
        (line["step"], line["kind"]) for line in lines_undisturbed
    ]


def test_the_command_with_shards(runs, tmp_path):
    """From nothing to a result, the second process started by the first."""
    options = ("--devices", "2", "--strategy", "fsdp2", "--results", str(tmp_path / "results"))
    done = subprocess.run(
        [sys.executable, *command(runs, tmp_path / "run", *options)],
        env=environment(MGK_CACHE=str(tmp_path / "cache")), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    found = result.read(tmp_path / "run" / "result.json")
    assert found["ranks"] == 2
    assert found["metrics"]["test"]["count"] == TEST
    assert [path.name for path in (tmp_path / "results").rglob("*.json")] == ["smgk-em-2-seed-0.json"]
    # What DDP found in other processes, with the same dropout.
    expected = result.read(runs / UNDISTURBED / "result.json")
    assert found["tokens"] == expected["tokens"]
    for split, metrics in expected["metrics"].items():
        assert found["metrics"][split] == pytest.approx(metrics, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": "fsdp"}, r"--strategy must be one of auto, ddp, fsdp2, got 'fsdp'"),
        ({"device": "gpu"}, r"--device must be one of auto, cpu, cuda, got 'gpu'"),
        ({"devices": 0}, r"--devices and --nodes must be at least 1, got 0 and 1"),
        ({"nodes": 0}, r"--devices and --nodes must be at least 1, got 1 and 0"),
    ],
)
def test_build_fabric_refuses(options, match):
    with pytest.raises(ValueError, match=match):
        build_fabric(**{"device": "cpu", **options})


def test_build_fabric_without_enough_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"--device must be one that is there, got cuda, and torch sees no GPU"):
        build_fabric(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"--devices must be at most the 1 GPUs here, got 2"):
        build_fabric(devices=2)


def test_build_fabric_under_a_launcher(monkeypatch):
    """Processes that do not know of each other would all write into one folder."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(
        ValueError, match=r"--devices times --nodes must be the 4 processes that srun has started, got 2 times 1"
    ):
        build_fabric(device="cpu", devices=2)
    # torchrun itself as the task of srun.
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"must be the 2 processes that torchrun has started, got 1 times 1"):
        build_fabric(device="cpu")
    assert build_fabric(device="cpu", devices=2).world_size == 2
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        ValueError, match=r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, got --max-restarts 3"
    ):
        build_fabric(device="cpu", devices=2)
