"""Train Nystromformer's own Long Range Arena code on our ListOps: what it does is not for our code to say.

Runs ``LRA/code/run_tasks.py`` of a checkout of https://github.com/mlpen/Nystromformer as it is: their model, their
configuration, their optimiser, schedule, autocast and scaled loss, their order of operations. Around it this changes

- the configuration: the number of heads, dropout (that of attention likewise), no recomputation of attention;
- the attention: the same softmax of the same queries and keys, with the same mask and dropout on the weights, by a
  fused kernel. Before anything is trained its logits, gradients and dropout are compared with theirs, and refused if
  they differ. ``padded`` and ``packed`` are fp32. ``packed`` leaves out the padding, whose outputs their model
  multiplies by 0 and whose keys their mask takes away. ``half`` does so in fp16, which their projections give in any
  case under autocast: the weights and the outputs are rounded as well, and it is many times faster;
- the data: our prepared corpus, padded with 0 to their 2,048 tokens and kept on the GPU. Samples come in their order:
  all shuffled by ``random``, and again at the end, while batches go on across it;
- one GPU, so that their DataParallel has nothing to do;
- the end: at a number of steps or seconds it is interrupted as if by Ctrl-C, and their code goes on to the test.

::

    python benchmarks/published_control.py path/to/Nystromformer --heads 8 --dropout 0.1 --seed 0

Losses and accuracies are read from the log that their code writes, with its four decimals, and go to
``results/controls/``. On a CPU there is no autocast to fp16; that is for trials.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib
import json
import math
import os
import platform
import random
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import mgk
from mgk.data.registry import open_corpus
from mgk.data.store import Corpus, Sequences
from mgk.training.result import device_name, write

ROOT = Path(__file__).parent.parent
CONTROL = "nystromformer-listops-softmax"
TASK, MODEL = "listops", "softmax"
FILES = ("run_tasks.py", "lra_config.py", "model.py", "model_wrapper.py", "attention.py")
"""What is theirs in a run."""
SPLITS = {"train": "train", "dev": "valid", "test": "test"}
"""Their names of our splits."""
REPORT = 500
"""Steps between lines about the time."""
LOSS_SCALE = 2.0**16
"""Where their scaled loss begins; without it gradients would be too small for fp16."""
ERRORS = {"packed": (1e-4, 1e-3), "padded": (1e-4, 1e-3), "half": (1e-2, 3e-2)}
"""By how much logits and gradients may differ, of the largest. Sums of 2,048 terms of fp32 in another order differ by
some 1e-6 and 1e-5. In ``half`` the queries, keys and values of the comparison are rounded; those of a run come so."""
DROPPED_TWICE = {"packed": 1e-4, "padded": 1e-4, "half": 5e-3}
"""By how much the sums of what the forward and the backward pass dropped may differ."""
DROPOUT_SPREAD = 0.1
"""By how much the standard deviation that dropout causes may differ, relative to theirs; some thousand are sampled."""


class Layout(NamedTuple):
    """Where the valid tokens of a batch are."""

    mask: Tensor
    """``[batch, tokens]``"""
    lengths: list[int]
    """of each sequence"""
    places: Tensor
    """of all valid tokens, one after the other, in the flat batch"""
    starts: Tensor
    """int32: where each sequence starts among them, and where the last one ends"""


def layout_of(mask: Tensor, lengths: Sequence[int] | None = None) -> Layout:
    """The layout of a mask. Where the host knows the lengths, it does not wait for the device."""
    known = mask.sum(1).int().tolist() if lengths is None else list(lengths)
    rows = [np.arange(length) + row * mask.shape[1] for row, length in enumerate(known)]
    places = torch.from_numpy(np.concatenate(rows))
    starts = torch.tensor([0, *np.cumsum(known)], dtype=torch.int32)
    if mask.is_cuda:
        places, starts = (each.pin_memory().to(mask.device, non_blocking=True) for each in (places, starts))
    return Layout(mask.bool(), known, places, starts)


def attend_to_padded(query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Softmax attention ``[batch, heads, tokens, width]`` to the valid tokens."""
    mask = layout.mask[:, None, None, :]
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)


def attend_to_valid(query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Likewise, computed for the valid tokens only: 0 for all others."""
    batch, heads, tokens, width = query.shape
    packed = [each.transpose(1, 2).flatten(0, 1).index_select(0, layout.places) for each in (query, key, value)]
    if not query.is_cuda:
        parts = zip(*(each.transpose(0, 1).split(layout.lengths, dim=1) for each in packed), strict=True)
        alone = [nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout) for q, k, v in parts]
        out = torch.cat(alone, dim=1).transpose(0, 1)
    elif query.dtype == torch.float32:
        # The one kernel of scaled_dot_product_attention for fp32, which takes several sequences in a row by this name.
        out = torch.ops.aten._efficient_attention_forward(
            *(each[None] for each in packed), None, layout.starts, layout.starts, tokens, tokens, dropout, 0, True
        )[0][0]
    else:
        # FlashAttention by its own name, for the same reason.
        out = torch.ops.aten._flash_attention_forward(
            *packed, layout.starts, layout.starts, max(layout.lengths), max(layout.lengths), dropout, False, False
        )[0]
    padded = out.new_zeros(batch * tokens, heads, width).index_copy(0, layout.places, out)
    return padded.unflatten(0, (batch, tokens)).transpose(1, 2)


def attend_in_half(query: Tensor, key: Tensor, value: Tensor, layout: Layout, dropout: float) -> Tensor:
    """Likewise, of queries, keys and values that come from fp16 and go there again."""
    return attend_to_valid(query.half(), key.half(), value.half(), layout, dropout).float()


ATTENTION = {"packed": attend_to_valid, "padded": attend_to_padded, "half": attend_in_half}
EXACT = ("packed", "padded")


def replacement(kind: str) -> type[nn.Module]:
    """What stands in for their class of softmax attention: it is made and called likewise."""
    attend = ATTENTION[kind]

    class Softmax(nn.Module):
        def __init__(self, config: Mapping[str, Any]) -> None:
            super().__init__()
            self.dropout = float(config["attention_dropout"])

        def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
            # Their model hands on the mask that it got, in fp32, so that what we have noted on it is still there.
            layout = getattr(mask, "token_layout", None) or layout_of(mask)
            return attend(query, key, value, layout, self.dropout if self.training else 0.0)

    return Softmax


class Single(nn.Module):
    """DataParallel on one device: the module itself."""

    def __init__(self, module: nn.Module, device_ids: Sequence[int]) -> None:
        super().__init__()
        self.module = module

    def forward(self, **inputs: Tensor) -> Any:
        return self.module(**inputs)


def pad(sequences: Sequences, length: int) -> NDArray[np.uint8]:
    """Sequences as one array ``[count, length]``, with 0 behind their ends."""
    lengths = sequences.lengths
    if lengths.max() > length:
        raise ValueError(f"sequences must have at most {length} tokens, got one of {lengths.max()}")
    padded = np.zeros((len(sequences), length), dtype=np.uint8)
    padded[np.arange(length) < lengths[:, None]] = sequences.tokens
    return padded


class Data:
    """The corpus on the device, and when a run is to be interrupted."""

    def __init__(self, corpus: Corpus, length: int, device: torch.device, steps: int, end: float) -> None:
        self.steps, self.end, self.start = steps, end, time.monotonic()
        self.tokens, self.labels, self.lengths = {}, {}, {}
        for theirs, ours in SPLITS.items():
            split = corpus.splits[ours]
            if split.sequences["text"].tokens.min() < 1:
                raise ValueError(f"tokens must be 1 and more, for 0 is padding, got one of 0 in {ours}")
            self.tokens[theirs] = torch.from_numpy(pad(split.sequences["text"], length)).to(device)
            self.lengths[theirs] = np.asarray(split.sequences["text"].lengths)
            self.labels[theirs] = torch.tensor(np.asarray(split.numbers["labels"]), dtype=torch.long, device=device)

    def open(self, path: str, endless: bool) -> Samples:
        """What stands in for their dataset."""
        # As in ../datasets/listops.train.pickle
        return Samples(self, Path(path).name.split(".")[-2], endless)


class Samples:
    """A split in the order of their dataset."""

    def __init__(self, data: Data, split: str, endless: bool) -> None:
        self.data, self.split, self.endless = data, split, endless
        self.order = list(range(len(data.labels[split])))
        self.shuffle()

    def shuffle(self) -> None:
        random.shuffle(self.order)
        self.shuffled = np.array(self.order)
        self.position = 0

    def take(self, count: int) -> NDArray[np.int64] | None:
        """The indices of so many samples, or nothing where the split ends before."""
        if self.position + count <= len(self.order):
            self.position += count
            return self.shuffled[self.position - count : self.position]
        if not self.endless:
            return None
        parts = [self.shuffled[self.position :]]
        while (missing := count - sum(map(len, parts))) > 0:
            self.shuffle()
            self.position = min(missing, len(self.order))
            parts.append(self.shuffled[: self.position])
        return np.concatenate(parts)


class Batches:
    """What stands in for their DataLoader."""

    def __init__(self, samples: Samples, batch_size: int, drop_last: bool) -> None:
        self.samples, self.size, self.count = samples, batch_size, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        data, split = self.samples.data, self.samples.split
        if split == "train" and (self.count == data.steps or time.monotonic() > data.end):
            raise KeyboardInterrupt(f"stopped after {self.count} steps")
        if split == "train" and self.count % REPORT == 0:
            print(f"{self.count:,} steps, {time.monotonic() - data.start:.0f} s", file=sys.stderr, flush=True)
        chosen = self.samples.take(self.size)
        if chosen is None:
            raise StopIteration
        self.count += 1
        where = torch.from_numpy(chosen)
        if data.labels[split].is_cuda:
            where = where.pin_memory().to(data.labels[split].device, non_blocking=True)
        tokens, labels = (each[split].index_select(0, where) for each in (data.tokens, data.labels))
        mask = (tokens != 0).float()
        vars(mask)["token_layout"] = layout_of(mask, data.lengths[split][chosen].tolist())
        return {"input_ids_0": tokens.long(), "mask_0": mask, "label": labels}


def compare_attention(kind: str, modules: Mapping[str, Any], config: Mapping[str, Any], data: Data) -> dict[str, float]:
    """Their whole model with their attention and with ours, in fp32 on two samples: errors relative to the largest.

    Queries and keys are made four times as large as they start, so that attention is not flat.
    """
    device = data.labels["test"].device
    tokens, labels = data.tokens["test"][:2].long(), data.labels["test"][:2]
    mask = (tokens != 0).float()
    plain = {**config, "dropout_prob": 0.0, "attention_dropout": 0.0, "mixed_precision": False}
    torch.manual_seed(0)
    state: Mapping[str, Any] | None = None
    found = []
    for attention in (modules["attention"].SoftmaxAttention, replacement(kind)):
        with mock.patch.object(modules["attention"], "SoftmaxAttention", attention):
            model = modules["model_wrapper"].ModelForSC(plain).to(device)
        if state is None:
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(4 if ".W_q.weight" in name or ".W_k.weight" in name else 1)
            state = model.state_dict()
        model.load_state_dict(state)
        logits = model.seq_classifer(model.model(tokens, mask))
        loss = LOSS_SCALE * nn.functional.cross_entropy(logits, labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append((logits.detach(), torch.cat([each.flatten() for each in gradients])))
    errors = [float((own - theirs).abs().max() / theirs.abs().max()) for theirs, own in zip(*found, strict=True)]
    found_dropout = compare_dropout(kind, modules, device) if config["attention_dropout"] > 0 else {}
    return {"logits": errors[0], "gradients": errors[1], **found_dropout}


def compare_dropout(kind: str, modules: Mapping[str, Any], device: torch.device) -> dict[str, float]:
    """Dropout of the weights: how the standard deviation that it causes compares with theirs, and whether the backward
    pass drops what the forward pass did."""
    batch, heads, tokens, width = 4, 16, 64, 32
    query = torch.zeros(batch, heads, tokens, width, device=device)
    mask = (torch.arange(tokens, device=device) < torch.tensor([[64], [48], [40], [33]], device=device)).float()
    weight = mask[:, None, :, None].expand_as(query)
    spreads, unlike = [], 0.0
    for attention in (modules["attention"].SoftmaxAttention, replacement(kind)):
        value = torch.ones_like(query, requires_grad=True)
        module = attention({"attention_dropout": 0.3, "head_dim": width})
        # Weights are equal, so each output is 1 but for what was dropped.
        out = module(query, query, value, mask)
        (gradient,) = torch.autograd.grad((out * weight).sum(), value)
        spreads.append(float(out.detach()[weight > 0].std()))
        totals = [each.sum((2, 3)) for each in (out.detach() * weight, gradient)]
        unlike = float(((totals[0] - totals[1]).abs() / totals[0]).max())
    return {"dropout_spread": spreads[1] / spreads[0] - 1, "dropout_backward": unlike}


def agrees(kind: str, errors: Mapping[str, float]) -> bool:
    logits, gradients = ERRORS[kind]
    limits = {
        "logits": logits, "gradients": gradients,
        "dropout_spread": DROPOUT_SPREAD, "dropout_backward": DROPPED_TWICE[kind],
    }  # fmt: skip
    # A NaN is no agreement.
    return all(abs(error) <= limits[name] for name, error in errors.items())


def choose_attention(
    wanted: str, modules: Mapping[str, Any], config: Mapping[str, Any], data: Data
) -> tuple[str, dict[str, float]]:
    """The first kind of attention that does what theirs does, and how nearly."""
    kinds = EXACT if wanted == "auto" else (wanted,)
    said = []
    for kind in kinds:
        try:
            errors = compare_attention(kind, modules, config, data)
        except (RuntimeError, TypeError, AttributeError) as error:
            said.append(f"{kind}: {str(error).splitlines()[0]}")
        else:
            if agrees(kind, errors):
                return kind, errors
            said.append(f"{kind}: {errors}")
        print(f"not taken, {said[-1]}", file=sys.stderr, flush=True)
    raise SystemExit(f"the attention must agree with that of the checkout, got {'; '.join(said)}")


def configure(own: dict[str, Any], heads: int, dropout: float) -> dict[str, Any]:
    """Change their configuration of the task, and return that of the model as their script makes it."""
    own["model"].update({"num_head": heads, "dropout_prob": dropout, "attention_dropout": dropout})
    own["extra_attn_config"][MODEL]["attention_grad_checkpointing"] = False
    length = 2 ** math.ceil(math.log2(own["model"]["max_seq_len"]))
    return {**own["model"], **own["extra_attn_config"][MODEL], "attn_type": MODEL, "max_seq_len": length}


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, from git or from a file COMMIT beside an unpacked archive."""
    if (checkout / "COMMIT").is_file():
        return (checkout / "COMMIT").read_text(encoding="utf-8").strip()
    if not (checkout / ".git").exists():
        raise SystemExit(f"{checkout} must be a git checkout or have a file COMMIT that names the commit, got neither")
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def on_cpu() -> Iterator[Any]:
    """Their code asks for a GPU at each turn; without one, everything stays where it is."""
    yield mock.patch.object(nn.Module, "cuda", lambda module: module)
    yield mock.patch.object(Tensor, "cuda", lambda tensor: tensor)


def run_theirs(code: Path, kind: str, modules: Mapping[str, Any], data: Data, is_gpu: bool) -> list[dict[str, Any]]:
    """Run their script in a temporary folder, and return the lines of its log."""
    patches = [
        mock.patch.object(modules["attention"], "SoftmaxAttention", replacement(kind)),
        mock.patch.object(modules["dataset"], "LRADataset", data.open),
        mock.patch.object(torch.utils.data, "DataLoader", Batches),
        mock.patch.object(nn, "DataParallel", Single),
        mock.patch.object(torch.cuda, "device_count", return_value=1),
        mock.patch.object(sys, "argv", ["run_tasks.py", "--model", MODEL, "--task", TASK]),
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs, here = Path(folder, "logs"), Path(folder, "code")
        logs.mkdir()
        here.mkdir()
        for patch in (*patches, *(() if is_gpu else on_cpu())):
            stack.enter_context(patch)
        stack.enter_context(contextlib.chdir(here))
        # A line for each step, which nobody reads.
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        try:
            runpy.run_path(str(code / "run_tasks.py"), run_name="__main__")
        except FileNotFoundError as error:
            # Stopped before the first validation: there is no best model to test.
            if not str(error.filename).endswith(".model"):
                raise
        (log,) = logs.glob("*.log")
        return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def summarise(log: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Curve and numbers of a log of theirs; ``steps`` is how many a whole run has."""
    kinds = {"train": "train", "dev": "valid"}
    curve = [
        {
            "kind": kinds[line["component"]], "step": line["train_step_idx"] + 1,
            "loss": line["loss"], "accuracy": line["accu"],
        }
        for line in log if line["component"] in kinds
    ]  # fmt: skip
    valid = [line for line in curve if line["kind"] == "valid"]
    best = max(valid, key=lambda line: line["accuracy"], default=None)
    test = next((line for line in log if line["component"] == "test"), None)
    metrics: dict[str, Any] = {}
    if best is not None:
        metrics = {"best_step": best["step"], "valid_accuracy": best["accuracy"]}
    if test is not None:
        metrics |= {"test_accuracy": test["accu"], "test_loss": test["loss"]}
    last = valid[-1]["step"] if valid else 0
    return {"steps": last, "complete": test is not None and last == steps, "metrics": metrics, "curve": curve}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of mlpen/Nystromformer")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1, help="everywhere, attention included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="stop there; the schedule stays that of a whole run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop training after so many, and test")
    parser.add_argument("--data", type=Path, help="folder of the prepared corpus, by default where mgk keeps it")
    parser.add_argument(
        "--attention", choices=("auto", *ATTENTION), default="auto", help="auto: packed if it agrees, else padded"
    )
    parser.add_argument("--output", type=Path, help="by default in results/controls, named after the run")
    return parser.parse_args()


def main() -> None:
    start = time.monotonic()
    arguments = parse()
    warnings.filterwarnings("ignore", category=FutureWarning)
    checkout = arguments.checkout.resolve()
    code = checkout / "LRA" / "code"
    if not (code / "run_tasks.py").is_file():
        raise SystemExit(f"{checkout} must be a checkout of mlpen/Nystromformer, got no LRA/code/run_tasks.py")
    commit = commit_of(checkout)
    files = {each: hashlib.sha256((code / each).read_bytes()).hexdigest() for each in FILES}
    name = f"{CONTROL}-{arguments.heads}-dropout-{arguments.dropout:g}-seed-{arguments.seed}"
    output = (arguments.output or ROOT / "results" / "controls" / f"{name}.json").resolve()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    corpus = open_corpus("listops", arguments.data)

    sys.path.insert(0, str(code))
    modules = {each: importlib.import_module(each) for each in ("attention", "model_wrapper", "dataset", "lra_config")}
    own = modules["lra_config"].config[TASK]
    config = configure(own, arguments.heads, arguments.dropout)
    whole = own["training"]["num_train_steps"]
    steps = whole if arguments.steps is None else arguments.steps
    if not 1 <= steps <= whole:
        raise SystemExit(f"--steps must lie in [1, {whole}], got {steps}")

    data = Data(corpus, config["max_seq_len"], device, steps, start + arguments.seconds)
    kind, errors = choose_attention(arguments.attention, modules, config, data)
    print(f"{name}: {kind} attention agrees with theirs, {errors}", file=sys.stderr, flush=True)
    # Theirs sets none.
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = summarise(run_theirs(code, kind, modules, data, device.type == "cuda"), whole)
    result = {
        "control": CONTROL,
        "commit": commit,
        "files": files,
        "heads": arguments.heads,
        "dropout": arguments.dropout,
        "seed": arguments.seed,
        **found,
        "config": {"model": config, "training": own["training"]},
        "attention": {"kind": kind, "errors": errors},
        "corpus": {"name": corpus.name, "fingerprint": corpus.fingerprint},
        "device": device_name(device),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "seconds": time.monotonic() - start,
        "versions": {
            "mgk": mgk.__version__, "torch": torch.__version__, "cuda": torch.version.cuda or "none",
            "numpy": np.__version__, "python": platform.python_version(),
        },
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write(output, result)
    print(f"{name}: {found['steps']} steps in {result['seconds']:.0f} s, {found['metrics']}, {output}", flush=True)


if __name__ == "__main__":
    main()
