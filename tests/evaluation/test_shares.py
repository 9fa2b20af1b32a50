"""Shares of the ranks; and two real ranks, plain and with sharded weights, against one.

Run as a script, this file is one of the two: ``test_shares.py RANK FOLDER``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS), str(TESTS / "evaluation")]

from mgk.evaluation.shares import Turn, reduce_sums, share  # noqa: E402


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("count", range(1, 16))
def test_every_batch_counts_once_and_all_ranks_take_as_many_turns(count, ranks):
    shares = [share(count, rank, ranks) for rank in range(ranks)]
    assert {len(turns) for turns in shares} == {-(-count // ranks)}
    assert sorted(turn.number for turns in shares for turn in turns if turn.counts) == list(range(count))
    assert all(0 <= turn.number < count for turns in shares for turn in turns)


def test_a_rank_with_none_left_repeats_the_last():
    assert share(3, 0, 2) == [Turn(0), Turn(2)]
    assert share(3, 1, 2) == [Turn(1), Turn(2, counts=False)]
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 2\), got -1"):
        share(3, -1, 2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        share(0, 0, 2)


def test_without_other_ranks_sums_stay_as_they_are():
    sums = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert reduce_sums(sums) is sums
    assert sums.tolist() == [1.0, 2.0]


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_ranks_find_what_one_finds(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)


def _sharded(model):
    from torch.distributed.fsdp import fully_shard

    from mgk.models.layer import MGKLayer

    for module in model.modules():
        if isinstance(module, MGKLayer):
            fully_shard(module)
    return fully_shard(model)


def _run_as(rank, folder):
    """Both ranks find alike, the last bits apart, what one would."""
    from model_cases import make_model
    from test_accuracy import make_data
    from test_bleu import make_translator, prepare_corpus
    from test_perplexity import stream

    from mgk import evaluation

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    together = {"rank": rank, "ranks": 2}
    sequences, labels, *_ = make_data()
    batches = evaluation.in_order_of_length(sequences, labels, 5)
    windows = {"length": 8, "stride": 3, "batch_size": 2, "device": "cpu"}
    corpus = prepare_corpus(folder / f"corpus of {rank}")
    search = {"max_length_ratio": 0.5, "max_length_offset": 2, "max_tokens": 40, "device": "cpu"}
    for wrap in (lambda model: model, _sharded):
        alone = evaluation.accuracy(make_model("classifier"), batches, device="cpu")
        found = evaluation.accuracy(wrap(make_model("classifier")), batches, device="cpu", **together)
        assert (found.correct, found.count) == (alone.correct, alone.count)
        assert found.loss == pytest.approx(alone.loss, rel=1e-12)
        for kind in ("wikitext", "modern"):
            alone = evaluation.perplexity.sliding(make_model(kind), stream(40), **windows)
            found = evaluation.perplexity.sliding(wrap(make_model(kind)), stream(40), **windows, **together)
            assert found.tokens == alone.tokens
            assert found.nats_per_token == pytest.approx(alone.nats_per_token, rel=1e-12)
        for beams in (1, 3):
            alone = evaluation.bleu.translate(make_translator(corpus), corpus, "test", beams=beams, **search)
            model = wrap(make_translator(corpus))
            for _ in range(2):
                assert evaluation.bleu.translate(model, corpus, "test", beams=beams, **search, **together) == alone
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _run_as(int(sys.argv[1]), Path(sys.argv[2]))
    # A thread of gloo may outlive its group for a moment, and then aborts a process that ends the usual way.
    os._exit(0)
