"""Results as runs would have left them, made up: every file that tables and figures are read from."""

import functools
import json
import math
import random
import struct
import zlib

from mgk import recipes
from mgk.evaluation import pack_items
from mgk.reproduction.published_code import fidelity, settings
from mgk.reproduction.recipe import home
from mgk.reproduction.results import run_name
from mgk.reproduction.stand_ins import STAND_INS
from mgk.reproduction.tables import TIMED
from mgk.training import result
from mgk.training.agreement import record_of

LAYERS = {
    "lra/retrieval": 2, "lra/retrieval-linear": 2, "peerread": 2, "lra/text-linear": 2, "wikitext103/small": 16,
}  # fmt: skip
PICTURES = ("attention-maps.png", "keys.png", "key-projections.png")


load = functools.cache(recipes.load)


def config_of(recipe, row, seed, changes=()):
    return record_of(load(recipe).config(row, list(changes), seed))


def write_run(folder, recipe, row, seed, *, changes=(), parameters=1_000_000, right=None, **metrics):
    """The result of a run with these metrics on the test set; ``right`` says which of its items were."""
    items = {} if right is None else {"items": {"test": pack_items(right)}}
    if right is not None:
        metrics |= {"accuracy": float(right.mean()), "count": float(len(right))}
    path = folder / recipe / f"{row}-seed-{seed}.json"
    content = {
        "format": 2, "recipe": recipe, "row": row, "seed": seed, **config_of(recipe, row, seed, changes),
        # Two seeds never have the same loss.
        "metrics": {"valid": {"loss": 1.0 + seed / 64}, "test": {"loss": 1.0, **metrics}}, "parameters": parameters,
        "corpus": {"name": "made up", "fingerprint": "0" * 64}, "something_new": {"that": "nobody reads"}, **items,
    }  # fmt: skip
    result.write(path, content)
    return path


def write_evaluation(folder, recipe, row, seed, split="test", *, stride=1, **metrics):
    path = folder / "evaluations" / f"{run_name(recipe, row, seed)}-{split}.json"
    content = {
        "format": 2, "recipe": recipe, "row": row, "seed": seed, "split": split, "metrics": metrics, "stride": stride,
        **config_of(recipe, row, seed),
    }  # fmt: skip
    result.write(path, content)
    return path


def write_curve(folder, recipe, row, seed, *, steps=2000, best=0.8):
    """A loss that falls and an accuracy that rises to ``best``."""
    draw = random.Random(f"{recipe} {row} {seed}")
    lines = []
    for step in range(50, steps + 1, 50):
        done = step / steps
        lines.append(
            {"step": step, "kind": "train", "loss": 3.8 - best + 3 * math.exp(-4 * done) + draw.gauss(0, 0.03)}
        )
        if step % 100 == 0:
            accuracy = best - 0.3 * math.exp(-5 * done) + draw.gauss(0, 0.004)
            lines.append(
                {"step": step, "kind": "valid", "loss": 4.2 - best + 2.5 * math.exp(-4 * done), "accuracy": accuracy}
            )
    path = folder / "curves" / f"{run_name(recipe, row, seed)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def write_escape(folder, recipe, row, seed, step, *, last=5000, every=50):
    """The curve of a run that leaves the plateau at a step; ``None``: it never does."""
    lines = [
        {"step": at, "kind": "valid", "loss": 2.0, "accuracy": 0.36 if step is not None and at >= step else 0.18}
        for at in range(every, last + 1, every)
    ]
    path = folder / "curves" / f"{run_name(recipe, row, seed)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def write_control(folder, heads, dropout, seed, *, accuracy, escape=None, steps=5000, complete=True, corpus="0" * 64):
    """A run of the published code."""
    name = fidelity()["control"]["name"]
    path = folder / "controls" / f"{name}-{heads}-dropout-{dropout:g}-seed-{seed}.json"
    curve = [
        {"kind": kind, "step": step, "loss": 1.5, "accuracy": 0.36}
        if escape and step >= escape
        else {"kind": kind, "step": step, "loss": 2.25, "accuracy": 0.18}
        for step in range(50, steps + 1, 50)
        for kind in ("train", "valid")
    ]
    content = {
        "control": name, "heads": heads, "dropout": dropout, "seed": seed, "complete": complete, "steps": steps,
        "metrics": {} if accuracy is None else {"test_accuracy": accuracy}, "curve": curve,
        "corpus": {"name": "listops", "fingerprint": corpus},
    }  # fmt: skip
    result.write(path, content)
    return path


def write_same_start(
    folder,
    heads,
    dropout,
    seed,
    *,
    escape=None,
    steps=5000,
    apart=0.0,
    complete=True,
    only=None,
    device="CPU, 2 threads",
):
    """A run of ours from the start of a control; its losses are so far apart from those of ``write_control``."""
    name = fidelity()["control"]["same_start"]["name"]
    path = folder / "controls" / f"{name}-{heads}-dropout-{dropout:g}-seed-{seed}-{only}-{device[:3]}.json"
    left = [(step, escape is not None and step >= escape) for step in range(50, steps + 1, 50)]
    curve = [{"kind": "train", "step": step, "loss": (1.5 if done else 2.25) + apart} for step, done in left]
    curve += [{"kind": "valid", "step": step, "accuracy": 0.36 if done else 0.18} for step, done in left]
    content = {
        "control": name, "heads": heads, "dropout": dropout, "seed": seed, "complete": complete, "steps": steps,
        "metrics": {}, "curve": curve, "corpus": {"name": "listops", "fingerprint": "0" * 64},
        "device": device, "precision": "float32",
    }  # fmt: skip
    result.write(path, content if only is None else {**content, "takes": [only]})
    return path


def write_shift(folder, *, seeds=4, escapes=None):
    """Both files of ``benchmarks/shift.py``; ``escapes``: by row of short lists, the step at which the first seed left,
    the others a little later."""
    layer = {"logits": 0.5, "logits_of_the_key_alone": 0.3}
    layer |= {f"{name}_{what}": 0.1 for name in ("q_proj", "k_proj") for what in ("gradient", "in_common", "step")}
    options = {"longer_than": 50, "shorter_than": 100, "batch_size": 16, "batches": 8, "step": 1e-4}
    rows = ["mgk-4", *(row for row in load("lra/listops-shifts").rows if "-4" in row)]
    runs = {
        "gradients": [
            {"row": row, "seed": seed, "layers": [layer, layer]} for row in rows for seed in range(seeds)
        ],
        "short-lists": [
            {"row": row, "seed": seed, "step": step + seed, "left": True}
            for row, step in (escapes or {row.replace("-4", "-1"): 300 for row in rows}).items()
            for seed in range(seeds)
        ],
    }  # fmt: skip
    facts = {"learning_rate": 2e-4, "warmup": 100, "steps": 1500, "window": 100, "largest_class": 0.16,
             "root_operator": 0.34, "threshold": 0.25}  # fmt: skip
    more = {"gradients": {"heads": 4}, "short-lists": {"heads": 1, **facts}}
    for name, own in runs.items():
        content = {"measurement": name, "recipe": "lra/listops", "options": {**options, **more[name]}, "runs": own}
        result.write(folder / "shift" / f"{name}.json", content)


def write_analysis(folder, recipe, row, seed, *, rank=100.0, nll=0.2, layers=2, priors=None):
    draw = random.Random(f"{recipe} {row} {seed} analysis")
    content = {
        "format": 1, "recipe": recipe, "row": row, "seed": seed, "corpus": "made up",
        "redundancy": [{"nobody": "reads it"}],
        "rank": [
            {"layer": f"layer {k}", "rank": [[round(draw.gauss(rank, 5)) for _ in range(4)] for _ in range(25)]}
            for k in range(1, layers + 1)
        ],
        "density": None if recipe.endswith("linear") else [
            {"layer": f"layer {k}", "mixture": [nll + draw.gauss(0, 0.002)]} for k in range(1, layers + 1)
        ],
        "mixture": [
            {"layer": f"layer {k}", "prior": [(priors or {}).get(k, [0.5, 0.5])]} for k in range(1, layers + 1)
        ],
    }  # fmt: skip
    path = folder / "analysis" / run_name(recipe, row, seed) / "analysis.json"
    result.write(path, content)
    for name in PICTURES:
        write_picture(path.parent / name)
    return path


def write_picture(path, width=300, height=90):
    """A grey gradient as a PNG, without any library."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((x * 255 // width) for x in range(width)) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def write_benchmark(folder, rows):
    """Time and memory by row, as ``mgk bench retrieval`` writes them."""
    records = []
    for row, (milliseconds, size) in rows.items():
        preset, _, heads = row.rpartition("-")
        records.append(
            {
                "preset": preset, "heads": int(heads), "pairs": 32, "tokens": 4096, "attention_dropout": 0.0,
                "evaluation_ms": milliseconds, "peak_bytes": size, "noise": 0.001, "device": "none",
            }
        )  # fmt: skip
    path = folder / "bench" / "retrieval-none.json"
    result.write(path, {"benchmark": "retrieval", "device": "none", "baselines": records[:1], "rows": records[1:]})
    return path


def write_speeds(folder, recipe, tokens, *, device="none", groups=1, quick=False, changes=()):
    """Tokens a second by row, as ``mgk bench rows`` writes them; each group after the first has a slower clock."""
    first, *others = tokens
    batch = 1000.0
    content = {
        "benchmark": "rows", "device": device, "config": {"recipe": recipe, "quick": quick, "changes": list(changes)},
        "baselines": [], "rows": [], "failures": [], "skipped": [],
    }  # fmt: skip
    for number in range(groups):
        for row in (first, *others[number::groups]):
            speed = tokens[row] / (1 + 0.1 * number)
            record = {
                "row": row, "group": number, "device": device, "dtype": "bfloat16", "tokens": batch,
                "tokens_per_second": speed, "training_ms": 1e3 * batch / speed, "baseline": first,
                "training_ratio": tokens[row] / tokens[first],
            }  # fmt: skip
            content["baselines" if row == first else "rows"].append(record)
    path = folder / "bench" / f"rows-{recipe.replace('/', '-')}-{device.split()[0].lower()}.json"
    result.write(path, content)
    return path


def write_everything(folder, seeds, *, gone=None):
    """All that the paper's tables and figures need: its own numbers with some noise. Recipes that begin with ``gone``
    have none, and what stands in for them has them instead."""
    tables = recipes.paper()["tables"]
    own = [] if gone is None else [recipe for recipe in recipes.names() if recipe.startswith(gone)]
    place = {recipe: STAND_INS[recipe] for recipe in own if recipe in STAND_INS}
    published = published_rows()
    for recipe in own:
        rows = published.pop(recipe)
        # Those of PeerRead and of the articles of enwik8 are all made below.
        if place.get(recipe) not in (None, "peerread", "enwik8-words"):
            published[place[recipe]] = rows | published.get(place[recipe], {})
    for recipe, rows in published.items():
        for row, metrics in rows.items():
            for seed in range(seeds):
                draw = random.Random(f"{recipe} {row} {seed}")
                noise = draw.gauss(0, 0.05)
                test = {}
                if "test_accuracy" in metrics:
                    test["accuracy"] = (metrics["test_accuracy"] + noise) / 100
                write_run(folder, recipe, row, seed, parameters=201_000_000, **test)
                for split in ("valid", "test"):
                    if f"{split}_perplexity" in metrics:
                        value = metrics[f"{split}_perplexity"] + noise
                        write_evaluation(folder, recipe, row, seed, split, sliding_perplexity=value)
                if "test_bleu" in metrics:
                    value = metrics["test_bleu"] + noise
                    write_evaluation(
                        folder, recipe, row, seed, stride=None, tokenised_lowercase_bleu=value, signature="none"
                    )
    levels = {
        "demo": (0.6, 0.01), "enwik8-small": (2.3, -0.02),
        "peerread": (0.6, 0.01), "enwik8": (1.5, -0.02), "wikitext2": (90.0, -2.0), "smollm2": (30.0, -1.0),
        "multi30k": (30.0, 1.0), "tatoeba": (40.0, 1.0), "multi30k-variances": (30.0, 1.0),
        "enwik8-shifts": (1.5, -0.02), "enwik8-words": (90.0, -2.0),
    }  # fmt: skip
    for recipe, (first, step) in levels.items():
        # Mixtures are the best, then one Gaussian, then normalised softmax.
        kinds = {"softmax": 0, "gaussian": 2, "smgk": 4, "mgk": 3, "smgk-hard": 3, "mgk-hard": 3}
        for row in load(recipe).rows:
            level = 1 if "qk_norm" in row else kinds.get(row.split("+")[0].rpartition("-")[0], 3)
            for seed in range(seeds):
                value = first + step * (level + 0.02 * seed)
                if home(recipe, row) != recipe:
                    continue
                run = {"accuracy": value} if recipe in ("demo", "peerread") else {}
                run = {"bits_per_token": value} if recipe.startswith("enwik8") else run
                run = {"perplexity": value} if recipe in ("smollm2", "wikitext2", "enwik8-words") else run
                write_run(folder, recipe, row, seed, **run)
                if recipe == "wikitext2":
                    write_evaluation(folder, recipe, row, seed, sliding_perplexity=value)
                elif recipe == "enwik8-words":
                    for split in ("valid", "test"):
                        write_evaluation(folder, recipe, row, seed, split, sliding_perplexity=value)
                elif recipe in ("enwik8", "enwik8-small"):
                    write_evaluation(folder, recipe, row, seed, stride=64, sliding_bits_per_token=value - 0.01)
                elif recipe.startswith(("multi30k", "tatoeba")):
                    write_evaluation(folder, recipe, row, seed, stride=None, tokenised_lowercase_bleu=value)
        if recipe in TIMED:
            write_speeds(folder, recipe, {row: 2e6 - 1e4 * place for place, row in enumerate(load(recipe).rows)})
    write_equal_cache(folder, seeds)
    for recipe, rows in {
        "lra/retrieval": ("softmax-2", "mgk-1", "mgk-2"),
        "lra/retrieval-linear": ("linear-2", "mlk-1", "mlk-2"),
        "wikitext103/small": ("softmax-8", "mgk-4", "mgk-8"),
        "wikitext103/small-linear": ("linear-8", "mlk-4", "mlk-8"),
    }.items():
        for number, row in enumerate(rows):
            for seed in range(seeds):
                write_curve(folder, place.get(recipe, recipe), row, seed, best=0.75 + 0.02 * number)
    for heads in (1, 2, 4, 8):
        for kind, step in (("smgk-{}", 1000), ("mgk-{}", 3000), ("softmax-{}", 4000), ("gaussian-{}", 2000),
                           ("softmax-{}+qk_norm", 3500)):  # fmt: skip
            for seed in range(seeds):
                row = kind.format(heads)
                if row not in published["lra/listops"]:
                    write_run(folder, "lra/listops", row, seed, accuracy=0.37 + 0.001 * seed)
                write_escape(folder, "lra/listops", row, seed, step + 50 * seed)
    for row in load("lra/listops-shifts").rows:
        for seed in range(seeds):
            if home("lra/listops-shifts", row) == "lra/listops-shifts":
                write_run(folder, "lra/listops-shifts", row, seed, accuracy=0.37)
                write_escape(folder, "lra/listops-shifts", row, seed, 2000 + 50 * seed)
    for row in load("enwik8-shifts").rows:
        for seed in range(seeds):
            write_curve(folder, home("enwik8-shifts", row), row, seed)
    write_shift(folder)
    for recipe, rows in {
        "lra/retrieval": ("softmax-2", "softmax-4", "mgk-1", "mgk-2", "mgk-4", "smgk-1", "gaussian-1"),
        "lra/retrieval-linear": ("linear-4", "mlk-4", "mlk-2"),
        "wikitext103/small": ("softmax-8", "mgk-8", "mgk-4"),
    }.items():
        for row in rows:
            priors = tables["T8"]["recipes"]["lra/retrieval"].get(row)
            learned = priors and {k: [priors[f"prior_1_layer_{k}"], priors[f"prior_2_layer_{k}"]] for k in (1, 2)}
            for seed in range(seeds):
                write_analysis(
                    folder, place.get(recipe, recipe), row, seed, layers=LAYERS[recipe], priors=learned,
                    rank=120.0 if "mgk" in row or "mlk" in row else 90.0, nll=0.18 if row == "mgk-1" else 0.25,
                )  # fmt: skip
    for heads, dropout in {(each.heads, each.dropout) for each in settings()}:
        write_control(folder, heads, dropout, 0, accuracy=0.37, escape=3000)
        write_same_start(folder, heads, dropout, 0, escape=3000)
    for comparison in fidelity()["comparisons"]:
        for recipe in (comparison["recipe"], *comparison["variants"]):
            for row in load(recipe).rows:
                for seed in range(seeds):
                    if not (folder / recipe / f"{row}-seed-{seed}.json").exists():
                        write_run(folder, recipe, row, seed, accuracy=0.37 + 0.001 * seed)
                    if "plateau" in comparison:
                        write_curve(folder, recipe, row, seed, best=0.37)
    measured = {
        row: (1000 * metrics["seconds_per_iteration"], int(1e9 * metrics["memory"]))
        for rows in tables["T7"]["recipes"].values()
        for row, metrics in rows.items()
    }
    write_benchmark(folder, measured)


def write_equal_cache(folder, seeds):
    """Rows of enwik8 are there. Shifted keys are the best again, more so with more components or queries."""
    recipe = load("enwik8-equal-cache")
    bits = {"softmax": 1.48, "mgk": 1.45, "gaussian": 1.46, "smgk": 1.40}
    for row in recipe.rows:
        for seed in range(seeds):
            write_curve(folder, home(recipe.name, row), row, seed, best=0.4)
            if home(recipe.name, row) == recipe.name:
                value = bits[row.partition("-")[0]] - 0.0004 * seed
                write_run(folder, recipe.name, row, seed, bits_per_token=value)
    write_speeds(folder, recipe.name, {row: 1e6 + 1e5 * place for place, row in enumerate(recipe.rows)})


def published_rows():
    """Every row that has a number of a run in the paper, with all of its numbers."""
    found = {}
    for table in recipes.paper()["tables"].values():
        for recipe, rows in table["recipes"].items():
            for row, metrics in rows.items():
                found.setdefault(recipe, {}).setdefault(row, {}).update(metrics)
    return found
