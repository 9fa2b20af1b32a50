"""What the page ``shift`` says about the theory, its limits and its measurements."""

from __future__ import annotations

from mgk.reproduction.recipe import bundled
from mgk.reproduction.shift_measurements import SCRIPT, Measurement
from mgk.reproduction.shift_questions import LISTOPS

QUESTION = (
    "On ListOps smgk leaves the plateau of the largest class earlier than softmax, and mgk is not shown to "
    "([plateau](plateau.md)). A mixture of shifted keys has three parts that softmax lacks: a distance in place of the "
    "dot product, a constant that is the same for every key, and the mixture. This page asks which of them does it."
)
NOT_SHOWN = (
    "**What this page does not show.** ListOps is one task, and the outermost operator, which is always the first "
    "token, is all that any row learns of it. The task asks for a weight of the keys that all queries share; a task "
    "that asks for something else may have no use for such a weight. A run that leaves early ends no higher than one "
    "that leaves late. Gradients before the first step say in which direction and how reliably a model starts, not "
    "where it arrives. The short lists are a proxy: in the lists of the task one token of a thousand matters, in these "
    "one of 75, so rows that are alike here may differ there, and the other way round. The options of the library "
    "cannot give a dot product the whole factor of two shifts; a bias of the queries is its case of one shift."
)
THEORY = (
    "**What one shift is.** With one shift b for all keys the logit is "
    r"$-|q - k - b|^2 / 2\sigma^2 = -|(q - b) - k|^2 / 2\sigma^2$, so the shift is a constant that is subtracted from "
    r"every query. Up to a term that is the same for all keys this is "
    r"$(q - b) \cdot k / \sigma^2 - |k|^2 / 2\sigma^2$: every key has a weight $-b \cdot k / \sigma^2$ that does not "
    r"depend on the query and is linear in the key. Under a dot product $q \cdot (k + b)$ the shift itself cancels "
    r"(softmax-smgk is softmax), but a bias of the queries gives the same weight.",
    r"**What several shifts are.** To second order in $q - k$ the logits of M shifts are those of one Gaussian with "
    r"two changes. It has the constant $\bar b = \sum_r \rho_r b_r$, where $\rho_r$ is proportional to "
    r"$\pi_r e^{-|b_r|^2 / 2\sigma^2}$. And it has $I - C / \sigma^2$ in place of $I$ between query and key, where C "
    r"is the covariance of the shifts under $\rho$, of rank M - 1. Shifts that start at 0 stay one component, since "
    "they and their priors get equal gradients: that row is one Gaussian whose bias of the keys learns faster.",
    r"**What that does to gradients.** The derivative of the logit with respect to the key is $(q - k - b) / "
    r"\sigma^2$, and $q / \sigma^2$ under a dot product. Where all queries ask for the same key, their sum keeps the "
    r"mean of the queries and the constant, and the rest averages out. The mean of the queries is small before it is "
    r"learned, and the gradient of $W_k$ vanishes with $W_q$ and that of $W_q$ with $W_k$: 0 is a saddle point. The "
    r"constant is there from the start, with a length of $s \sqrt{D / M}$ for M shifts of standard deviation s. The "
    r"distance alone adds $-k$, which makes keys shorter or longer and turns none. Torch starts entries of q and k "
    r"with the variance 1/3, and $\sigma^2 = \sqrt D$. Then the logits of a query have over its keys the variance 1/9 "
    r"for a dot product, 1/18 more for a distance, and $s^2 / 3M$ more for the shifts, whatever D is. A table below "
    "shows this (derived) beside what was measured.",
)


def notes(gradients: Measurement, short: Measurement) -> tuple[str, ...]:
    """Describe how the numbers of the page were measured."""
    found = [
        "Steps, medians and tests are those of [plateau](plateau.md). The p of a question is adjusted over the two "
        "premises or over the questions about the parts. The test for trend is Tarone's, with a stratum for each "
        "number of heads and the place of each size in their order; its p comes from sharing out the runs at random.",
        "Rows that both lra/listops-shifts and lra/listops have are the same runs. A row of smgk with num_components=1 "
        "is one Gaussian whose keys have one shift.",
    ]
    if gradients.runs:
        options = gradients.options
        found.append(
            f"Before the first step: `{SCRIPT} gradients` takes the model of "
            f"{bundled(LISTOPS).title.partition(',')[0]} with {options['heads']} heads and without dropout, "
            f"{options['batches']} batches of {options['batch_size']} lists of {options['longer_than']} to "
            f"{options['shorter_than']} tokens, and {gradients.seeds} seeds. The biases of the output are the "
            "logarithms of the shares of the classes. The spread of the logits is their standard deviation over the "
            "keys of a query; the share of the key alone is the part of their variance that is the same for all "
            "queries. The size of a gradient is the root of its mean square over batches. What two batches have in "
            "common is their product over their squares; this estimate may be below 0. A step is how far the logits "
            f"move, over keys, if every weight goes {options['step']:g} against the sign of its mean gradient, "
            "as Adam's first step does."
        )
    if short.runs:
        options = short.options
        found.append(
            f"Short lists: `{SCRIPT} short-lists` trains the same model with {options['heads']} head, batches of "
            f"{options['batch_size']}, AdamW at {options['learning_rate']:g} after {options['warmup']} steps of "
            f"warm-up, no dropout, and {short.seeds} seeds of each row. A run has left when its accuracy over the last "
            f"{options['window']} steps, on lists that it had not seen, exceeds {100 * options['threshold']:.1f} %, "
            f"half way between the largest class ({100 * options['largest_class']:.1f} %) and what the root operator "
            f"says ({100 * options['root_operator']:.1f} %)."
        )
    return tuple(found)
