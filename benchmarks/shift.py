"""What a shift of the keys does before and while a model of ListOps learns, on a CPU: for docs/results/shift.md.

``gradients`` builds models as ``lra/listops`` builds them and reads what one batch after another asks of the
projections of queries and keys, before the first step. The biases of the output are set to the logarithms of the shares
of the classes: so the model stands on its plateau, and the gradient is not that of finding out how common classes are.

``short-lists`` trains the model of ``lra/listops`` with one head on lists of 50 to 100 tokens until it leaves the
plateau. It is a proxy: lists are ten times shorter, so there is one root operator among 75 tokens and not among 1,000,
and batch, learning rate and warm-up are such that a run takes seconds. What it says of the recipe is a guess until that
has been run.

::

    python benchmarks/shift.py gradients
    python benchmarks/shift.py short-lists --seeds 8

Results go to ``results/shift/``; a call goes on where the last one was cut, and several may run side by side with other
seeds each (``--first``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import mgk.recipes
from mgk.data import Samples, iterate, prepare
from mgk.data.listops import CLASSES, TOKENS, root_operator_rule
from mgk.data.store import Split
from mgk.models import MGKForSequenceClassification, architecture
from mgk.models.attention import MGKAttention
from mgk.training.result import write

ROOT = Path(__file__).parent.parent
RECIPE = "lra/listops"
ROWS = (
    "softmax", "gaussian", "mgk", "smgk+shift_init_std=0", "smgk+shift_init_std=0.1", "smgk+shift_init_std=0.3", "smgk",
    "smgk+shift_init_std=2", "smgk+num_components=1", "gaussian+query_bias_init_std=1", "softmax+query_bias_init_std=1",
    "smgk+prior=uniform",
)  # fmt: skip
"""Without their number of heads."""
STEP = 1e-4
"""By how much each weight is moved, the learning rate of the recipe: a step of Adam, before it has an average."""

GRADIENTS = {"heads": 4, "longer_than": 100, "shorter_than": 200, "batch_size": 16, "batches": 8}
SHORT = {
    "heads": 1, "longer_than": 50, "shorter_than": 100, "batch_size": 16, "learning_rate": 2e-4, "warmup": 100,
    "steps": 1500, "window": 100,
}  # fmt: skip
"""``window``: the accuracy is that of so many steps, on lists that the model has not seen before."""


def with_heads(row: str, heads: int) -> str:
    kind, plus, changes = row.partition("+")
    return f"{kind}-{heads}{plus}{changes}"


def build(row: str, seed: int) -> MGKForSequenceClassification:
    """The model of the recipe, without dropout."""
    changes = mgk.recipes.load(RECIPE).config(row).model.changes
    torch.manual_seed(seed)
    return MGKForSequenceClassification(
        architecture("lra-listops", **{**changes, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0})
    )


def draw_lists(options: dict[str, Any], count: int, folder: str) -> Split:
    """So many lists of these lengths, from the grammar of ListOps."""
    corpus = prepare(
        "listops", folder=Path(folder) / "listops", train=count, valid=1, test=1,
        minimum=options["longer_than"], maximum=options["shorter_than"],
    )  # fmt: skip
    return corpus.splits["train"]


def batches_of(lists: Split, batch_size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Each list once."""
    samples = Samples(
        sequences=lists.sequences["text"], labels=lists.numbers["labels"], batch_size=batch_size, seed=seed
    )
    return iterate(samples, epoch=0)


def shares(lists: Split) -> NDArray[np.float64]:
    """How common each class is."""
    return np.bincount(np.asarray(lists.numbers["labels"]), minlength=CLASSES) / len(lists.numbers["labels"])


# Before the first step.


def attentions(model: MGKForSequenceClassification) -> list[MGKAttention]:
    return [module for module in model.modules() if isinstance(module, MGKAttention)]


def weights(layer: MGKAttention) -> dict[str, Tensor]:
    """What is looked at."""
    return {"q_proj": layer.q_proj.weight, "k_proj": layer.k_proj.weight}


@torch.no_grad()
def log_weights(model: MGKForSequenceClassification, batch: dict[str, Tensor]) -> list[Tensor]:
    """Of each layer ``[B, H, N, N]``: logits up to a constant for each query, which no attention depends on."""
    layers, states = attentions(model), []
    handles = [layer.register_forward_pre_hook(lambda _, given: states.append(given[0])) for layer in layers]
    model(batch["input_ids"], attention_mask=batch["attention_mask"])
    for handle in handles:
        handle.remove()
    mask = batch["attention_mask"].bool()
    return [layer.attention_weights(x, key_mask=mask).log() for layer, x in zip(layers, states, strict=True)]


def spread(logits: Tensor, mask: Tensor) -> tuple[float, float]:
    """The standard deviation over the keys of a query, and that of what is the same for all queries of a list."""
    whole, common = [], []
    for own, valid in zip(logits, mask.bool(), strict=True):
        found = own[:, valid][:, :, valid]
        found = found - found.mean(dim=-1, keepdim=True)
        whole.append(found.square().mean())
        common.append(found.mean(dim=1).square().mean())
    return math.sqrt(torch.stack(whole).mean()), math.sqrt(torch.stack(common).mean())


def gradients(row: str, seed: int, lists: Split, options: dict[str, Any]) -> list[dict[str, float]]:
    """What is measured, for each layer."""
    model = build(row, seed)
    with torch.no_grad():
        model.classifier.out_proj.bias.copy_(torch.from_numpy(shares(lists)).clamp(min=1e-3).log())
    drawn = batches_of(lists, options["batch_size"], seed)
    learned = list(itertools.islice(drawn, options["batches"]))
    asked = next(drawn)
    layers = attentions(model)
    found: dict[tuple[int, str], list[Tensor]] = {}
    for batch in learned:
        model.zero_grad()
        model(**batch).loss.backward()
        for number, layer in enumerate(layers):
            for name, weight in weights(layer).items():
                assert weight.grad is not None
                found.setdefault((number, name), []).append(weight.grad.clone())
    before, mask = log_weights(model, asked), asked["attention_mask"]
    lines = []
    for number, layer in enumerate(layers):
        whole, common = spread(before[number], mask)
        line = {"logits": whole, "logits_of_the_key_alone": common}
        for name, weight in weights(layer).items():
            own = torch.stack(found[number, name]).flatten(1)
            squares = own.square().sum(dim=1).mean()
            # Of two different batches: what noise adds to a square, it does not add to a product.
            products = (own.sum(dim=0).square().sum() - own.square().sum()) / (len(own) * (len(own) - 1))
            kept = weight.detach().clone()
            with torch.no_grad():
                weight -= STEP * torch.stack(found[number, name]).mean(dim=0).sign()
                moved = log_weights(model, asked)[number] - before[number]
                weight.copy_(kept)
            line |= {
                f"{name}_gradient": math.sqrt(squares), f"{name}_in_common": float(products / squares),
                f"{name}_step": spread(moved.masked_fill(moved.isnan(), 0.0), mask)[0],
            }  # fmt: skip
        lines.append(line)
    return lines


def measure_gradients(path: Path, seeds: Sequence[int], options: dict[str, Any], rows: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lists = draw_lists(options, options["batch_size"] * (options["batches"] + 1) * 4, folder)
        for seed, row in itertools.product(seeds, rows):
            name = with_heads(row, options["heads"])
            if not _has(_runs(path, options), name, seed):
                found = {"row": name, "seed": seed, "layers": gradients(name, seed, lists, options)}
                _add(path, "gradients", options, {"step": STEP}, found)
                print(name, seed, flush=True)


# Until the plateau is left.


def learn(row: str, seed: int, lists: Split, options: dict[str, Any], threshold: float) -> tuple[int, bool]:
    """The step at which the accuracy of the last ``window`` steps exceeds the threshold, or the last step."""
    model = build(row, seed)
    optimizer = torch.optim.AdamW(
        mgk.nn.parameter_groups(model, 0.0), lr=options["learning_rate"], eps=1e-6, betas=(0.9, 0.999)
    )
    right: list[float] = []
    for step, batch in enumerate(batches_of(lists, options["batch_size"], seed), start=1):
        for group in optimizer.param_groups:
            group["lr"] = options["learning_rate"] * min(1.0, step / options["warmup"])
        out = model(**batch)
        # Before the model learns from them.
        right.append(float((out.logits.argmax(dim=-1) == batch["labels"]).float().mean()))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        if step >= options["window"] and np.mean(right[-options["window"] :]) > threshold:
            return step, True
        if step == options["steps"]:
            break
    return step, False


def measure_short_lists(path: Path, seeds: Sequence[int], options: dict[str, Any], rows: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lists = draw_lists(options, options["batch_size"] * options["steps"], folder)
        labels = np.asarray(lists.numbers["labels"])
        largest = float(shares(lists).max())
        root = root_operator_rule(lists.sequences["text"], labels, lists.sequences["text"], labels)
        threshold = (largest + root) / 2
        facts = {"largest_class": largest, "root_operator": root, "threshold": threshold, "tokens": len(TOKENS)}
        for seed, row in itertools.product(seeds, rows):
            name = with_heads(row, options["heads"])
            if not _has(_runs(path, options), name, seed):
                step, has_left = learn(name, seed, lists, options, threshold)
                _add(path, "short-lists", options, facts, {"row": name, "seed": seed, "step": step, "left": has_left})
                print(name, seed, step, has_left, flush=True)


def _runs(path: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that an earlier call has made with the same options."""
    if not path.is_file():
        return []
    content = json.loads(path.read_text())
    if any(content["options"].get(name) != value for name, value in options.items()):
        raise ValueError(f"{path} must have been made with the options of today, got {content['options']}")
    return list(content["runs"])


def _has(runs: Sequence[dict[str, Any]], row: str, seed: int) -> bool:
    return any((run["row"], run["seed"]) == (row, seed) for run in runs)


def _add(path: Path, name: str, options: dict[str, Any], facts: dict[str, Any], run: dict[str, Any]) -> None:
    """Write the file with one run more: in the order of its seeds, then in that of the rows."""
    order = [with_heads(row, options["heads"]) for row in ROWS]
    known = {row: place for place, row in enumerate(order)}
    runs = [*_runs(path, options), run]
    runs.sort(key=lambda each: (each["seed"], known.get(each["row"], len(known))))
    made = {"torch": torch.__version__, "mgk": mgk.__version__, "device": "CPU"}
    write(path, {"measurement": name, "recipe": RECIPE, "options": {**options, **facts}, "runs": runs, **made})


MEASUREMENTS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "gradients": (measure_gradients, GRADIENTS),
    "short-lists": (measure_short_lists, SHORT),
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=tuple(MEASUREMENTS))
    parser.add_argument("--seeds", type=int, default=4, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--rows", help="some of them only, with a space between two")
    parser.add_argument("--to", type=Path, default=ROOT / "results" / "shift", help="folder of the results")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another option")
    arguments = parser.parse_args(given)
    measure, options = MEASUREMENTS[arguments.measurement]
    changes = {name: json.loads(value) for name, _, value in (each.partition("=") for each in arguments.set)}
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    rows = ROWS if arguments.rows is None else arguments.rows.split()
    measure(arguments.to / f"{arguments.measurement}.json", seeds, {**options, **changes}, rows)


if __name__ == "__main__":
    main()
