"""The backward pass: what its two large kernels need of each row before, and what is added up after them.

One of the two is for keys and values (:mod:`mgk.ops.triton.kernels.key_value_gradients`, or for two projected keys at
once :mod:`mgk.ops.triton.kernels.two_key_gradients`), one for queries (:mod:`mgk.ops.triton.kernels.query_gradients`).
Neither writes where another program writes.

With w_ijr = exp(logit_ijr - normaliser_i), dW_ij = dO_i . v_j and delta_i = dO_i . o_i - dnormaliser_i::

    dlogit_ijr = w_ijr (dW_ij - delta_i)         under a hard choice the largest components share w_ij
    dq_i  = sum_jr scale_r dlogit_ijr k_jr       drow_ir    = sum_j dlogit_ijr
    dk_jr = sum_i  scale_r dlogit_ijr q_i        dcolumn_jr = sum_i dlogit_ijr
    dv_j  = sum_ir w_ijr dO_i                    dscale_jr  = sum_i dlogit_ijr q_i . k_jr

Every sum is taken by one program in a fixed order, so that gradients are the same bits each time. The price is that
both kernels compute the logits again. ``TWO_SHIFTS`` means two shifted keys of one variance, which share a product and
the gradient of a key. Heads in which the two lie too far apart for a common factor are left to a second launch
(``UNFACTORED``), with one exponential for each component.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.kernels.terms import of_head, place
from mgk.ops.triton.kernels.tiles import HEAD_NUMBERS, LN_2, LOG2_E, VARYING, Tokens, load_tokens

HIGHEST_REFERENCE = tl.constexpr(2.0**28)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_delta(
    # rows
    p_out, p_grad, p_normaliser, p_grad_normaliser, p_row, p_level, p_reference, p_delta,
    # strides
    stride_out_batch, stride_out_head, stride_out_token, stride_grad_batch, stride_grad_head, stride_grad_token,
    # numbers
    keep_probability, num_heads, group_size, num_queries, padded_queries, num_blocks, value_width,
    BLOCK_I: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write what the two kernels need of each row, padded: ``reference`` (in units of log 2) and ``delta``.

    Under dropout they divide gradients by the probability to keep a pair once, when all are added up: delta is given
    for what they add. ``row`` is that of two shifted keys.
    """
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    i_batch, i_query_head = i_head // num_heads, i_head % num_heads
    results = Tokens(p_out, stride_out_batch, stride_out_head, stride_out_token, num_queries, value_width)
    gradients = Tokens(p_grad, stride_grad_batch, stride_grad_head, stride_grad_token, num_queries, value_width)
    b_out = load_tokens(results, i_batch, i_query_head, o_first, BLOCK_I, DV).to(tl.float32)  # [BLOCK_I, DV]
    b_grad = load_tokens(gradients, i_batch, i_query_head, o_first, BLOCK_I, DV).to(tl.float32)  # [BLOCK_I, DV]
    m_i = o_i < num_queries
    o_row = i_head.to(tl.int64) * num_queries + o_i
    b_delta = tl.sum(b_out * b_grad, 1)
    if p_grad_normaliser is not None:
        b_delta -= tl.load(p_grad_normaliser + o_row, mask=m_i, other=0.0)
    b_normaliser = tl.load(p_normaliser + o_row, mask=m_i, other=float("-inf"))
    b_reference = b_normaliser * LOG2_E
    # Between logits so large fp32 cannot tell a factor of 2^32: backward, which measures them from a normaliser that is
    # rounded as much, would find weights of any size.
    m_hopeless = tl.abs(b_reference) > HIGHEST_REFERENCE
    if p_row is not None:
        b_reference -= tl.load(of_head(p_row, i_head, padded_queries, 2) + place(o_i))
    if p_level is not None:
        i_kv = i_batch * (num_heads // group_size) + i_query_head // group_size
        b_reference -= tl.load(p_level + i_kv)
    # Such rows, rows that see nothing (their normaliser is -inf), and rows beyond the end weigh nothing.
    b_reference = tl.where(m_hopeless, float("inf"), b_reference)
    o_padded = i_head.to(tl.int64) * padded_queries + place(o_i)
    tl.store(p_reference + o_padded, b_reference)
    tl.store(p_delta + o_padded, b_delta * keep_probability)


@triton.jit(do_not_specialize=["num_query_partials", "num_key_partials", "num_columns", "width"])
def parameter_gradients(
    p_query_partials, p_key_partials, p_grad_column, p_inverse_variance, p_grad_shift, p_grad_prior,
    natural_scale, num_query_partials, num_key_partials, num_columns, width,
    ROWS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums that other programs have left for the shift and the prior. One program does it for one
    component of a head."""
    i = tl.program_id(0).to(tl.int64)
    if p_query_partials is not None:
        o_d = tl.arange(0, D)
        b_sum = _sum_of_rows(p_query_partials + i * num_query_partials * D, num_query_partials, ROWS, D)
        if p_key_partials is not None:
            b_sum -= _sum_of_rows(p_key_partials + i * num_key_partials * D, num_key_partials, ROWS, D)
        b_scale = natural_scale if p_inverse_variance is None else tl.load(p_inverse_variance + i) * LN_2
        tl.store(p_grad_shift + i * width + o_d, b_sum * b_scale, mask=o_d < width)
    if p_grad_column is not None:
        b_sum = _sum_of_rows(p_grad_column + i * num_columns, num_columns, ROWS * D, 1)
        tl.store(p_grad_prior + i + tl.arange(0, 1), b_sum)


@triton.jit
def _sum_of_rows(p_rows, num_rows, ROWS: tl.constexpr, D: tl.constexpr):
    """The sum of ``[num_rows, D]`` over its rows, some of them at a time, ``[D]``."""
    o_row = tl.arange(0, ROWS)[:, None]
    b_sum = tl.zeros([ROWS, D], tl.float32)
    for o_first in range(0, num_rows, ROWS):
        p_some = p_rows + (o_first + o_row) * D + tl.arange(0, D)[None, :]
        b_sum += tl.load(p_some, mask=o_first + o_row < num_rows, other=0.0)
    return tl.sum(b_sum, 0)
