"""The backward kernels: one for keys and values, one for queries. Neither writes where another program writes.

With w_ijr = exp(logit_ijr - normaliser_i), dW_ij = dO_i . v_j and delta_i = dO_i . o_i - dnormaliser_i::

    dlogit_ijr = w_ijr (dW_ij - delta_i)         under hard assignment the largest components share w_ij
    dq_i  = sum_jr scale_r dlogit_ijr k_jr       drow_ir    = sum_j dlogit_ijr
    dk_jr = sum_i  scale_r dlogit_ijr q_i        dcolumn_jr = sum_i dlogit_ijr
    dv_j  = sum_ir w_ijr dO_i                    dscale_jr  = sum_i dlogit_ijr q_i . k_jr

Every sum is taken by one program in a fixed order, so that gradients are the same bits each time. The price is that
both kernels compute the logits again. ``PAIRED`` are two shifted keys of one variance, which share a product and the
gradient of a key. Heads in which the two lie too far apart to be factored are left to a second launch (``WIDE``), with
one exponential for each component.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mgk.ops.triton.tiles import (
    HEAD_NUMBERS,
    VARYING,
    VARYING_WITH_WIDTH,
    column_keys,
    component_bias,
    finite,
    first_share,
    is_visible,
    load_rows,
    load_terms,
    load_tile,
    partial_sums,
    place,
    rows_unless_dropped,
    unless_dropped,
    visible_keys,
    visible_queries,
    weight_of,
)

HIGHEST_REFERENCE = tl.constexpr(2.0**28)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_delta(
    p_out, p_grad_out, p_normaliser, p_grad_normaliser, p_row, p_level, p_reference, p_delta, stride_out_batch,
    stride_out_head, stride_out_token, stride_grad_batch, stride_grad_head, stride_grad_token, keep_probability,
    num_heads, group_size, num_queries, padded_queries, num_blocks, width,
    M: tl.constexpr, PAIRED: tl.constexpr, HAS_LEVEL: tl.constexpr, HAS_GRAD_NORMALISER: tl.constexpr,
    BLOCK_I: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """What the two kernels need of each row, padded: ``reference`` (in units of log 2) and ``delta``.

    Under dropout they divide gradients by the probability to keep a pair once, when all are added up: delta is given
    for what they add.
    """
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    b_out = load_rows(
        p_out, stride_out_batch, stride_out_head, stride_out_token, i_head // num_heads, i_head % num_heads, o_first,
        num_queries, width, BLOCK_I, DV,
    ).to(tl.float32)  # fmt: skip
    b_grad = load_rows(
        p_grad_out, stride_grad_batch, stride_grad_head, stride_grad_token, i_head // num_heads, i_head % num_heads,
        o_first, num_queries, width, BLOCK_I, DV,
    ).to(tl.float32)  # fmt: skip
    m_i = o_i < num_queries
    o_row = i_head.to(tl.int64) * num_queries + o_i
    b_delta = tl.sum(b_out * b_grad, 1)
    if HAS_GRAD_NORMALISER:
        b_delta -= tl.load(p_grad_normaliser + o_row, mask=m_i, other=0.0)
    b_normaliser = tl.load(p_normaliser + o_row, mask=m_i, other=float("-inf"))
    b_reference = b_normaliser * 1.4426950408889634
    # Of logits so large fp32 has not one digit behind the point: backward, which rounds them otherwise than forward,
    # would find weights of any size.
    b_hopeless = (tl.abs(b_reference) > HIGHEST_REFERENCE) & (b_normaliser != float("inf"))
    if PAIRED:
        b_reference -= tl.load(p_row + i_head.to(tl.int64) * M * padded_queries + place(o_i))
    if HAS_LEVEL:
        i_kv = i_head // num_heads * (num_heads // group_size) + i_head % num_heads // group_size
        b_reference -= tl.load(p_level + i_kv)
    # Such rows, rows that see nothing (of which the normaliser is -inf), and rows beyond the end weigh nothing.
    b_reference = tl.where(b_hopeless, float("inf"), b_reference)
    o_padded = i_head.to(tl.int64) * padded_queries + place(o_i)
    tl.store(p_reference + o_padded, b_reference)
    tl.store(p_delta + o_padded, b_delta * keep_probability)


@triton.jit(do_not_specialize=["num_query_shares", "num_key_shares", "num_columns", "width"])
def parameter_gradients(
    p_query_share, p_key_share, p_grad_column, p_scale, p_grad_shift, p_grad_prior, natural_scale, num_query_shares,
    num_key_shares, num_columns, width,
    EQUAL: tl.constexpr, HAS_SHIFT: tl.constexpr, GAUSSIAN: tl.constexpr, HAS_PRIOR: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Add up what other programs have left for the shift and the prior: one program for a component of a head."""
    i = tl.program_id(0).to(tl.int64)
    if HAS_SHIFT:
        o_d = tl.arange(0, D)
        b_sum = _sum_of_rows(p_query_share + i * num_query_shares * D, num_query_shares, ROWS, D)
        if GAUSSIAN:
            b_sum -= _sum_of_rows(p_key_share + i * num_key_shares * D, num_key_shares, ROWS, D)
        b_scale = natural_scale if EQUAL else tl.load(p_scale + i) * 0.6931471805599453
        tl.store(p_grad_shift + i * width + o_d, b_sum * b_scale, mask=o_d < width)
    if HAS_PRIOR:
        b_sum = _sum_of_rows(p_grad_column + i * num_columns, num_columns, ROWS * D, 1)
        tl.store(p_grad_prior + i + tl.arange(0, 1), b_sum)


@triton.jit
def _sum_of_rows(p_rows, num_rows, ROWS: tl.constexpr, D: tl.constexpr):
    """``[num_rows, D]``, some rows at a time."""
    o_row = tl.arange(0, ROWS)[:, None]
    b_sum = tl.zeros([ROWS, D], tl.float32)
    for o_first in range(0, num_rows, ROWS):
        p_some = p_rows + (o_first + o_row) * D + tl.arange(0, D)[None, :]
        b_sum += tl.load(p_some, mask=o_first + o_row < num_rows, other=0.0)
    return tl.sum(b_sum, 0)


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_key_value(
    d_query, d_key, d_value, d_grad_out, d_grad_key, d_grad_value, p_row, p_column, p_alpha, p_rho, p_scale,
    p_shift, p_reference, p_delta, p_wide, p_grad_column, p_grad_scale, p_share, p_origin, p_mask, p_key_range,
    p_query_range, p_spans, p_row_key, p_column_key, stride_mask_batch, stride_mask_head, stride_mask_row,
    stride_mask_column, rows_per_span,
    scale, natural_scale,
    threshold, keep_scale, num_heads, group_size, num_queries, num_keys, padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED: tl.constexpr, PAIRED: tl.constexpr, WIDE: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr, CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ORIGIN: tl.constexpr, ONE_GROUP: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """One program for one block of keys of one key/value head: ``dk``, ``dv``, ``dcolumn``, ``dscale``. ``ONE_GROUP``
    tells the compiler that a key has one query head, where it makes better use of that than of a loop."""
    i_block = tl.program_id(0) % num_blocks
    i_kv = tl.program_id(0) // num_blocks
    num_kv_heads = num_heads // group_size
    num_samples = tl.num_programs(0) // (num_blocks * num_kv_heads)
    i_batch = i_kv // num_kv_heads
    i_kv_head = i_kv % num_kv_heads
    o_first = i_block * BLOCK_J
    o_j = o_first + tl.arange(0, BLOCK_J)
    o_d = tl.arange(0, D)
    if PAIRED and not HARD:  # noqa: SIM102 (the outer condition is a constant: without it there is no such pointer)
        if (tl.load(p_wide + i_kv) != 0) != WIDE:
            return

    first_query, first_full, end_query, causal_offset = visible_queries(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if not EQUAL:
        p_scale += i_kv_head * M
    b_value = load_tile(d_value, i_batch, i_kv_head, o_first, BLOCK_J, DV)
    b_rho = tl.zeros([BLOCK_J], tl.float32)
    if PAIRED:
        b_rho = tl.load(p_rho + i_kv.to(tl.int64) * padded_keys + place(o_j))
    b_column_key = tl.zeros([BLOCK_J], tl.int32)
    if DROPOUT:
        b_column_key = column_keys(p_column_key + i_kv.to(tl.int64) * (padded_keys // 2), o_j)
    b_grad_value = tl.zeros([BLOCK_J, DV], tl.float32)

    # The factored pair shares one key gradient; otherwise one component after the other.
    for r in range(1 if PAIRED else M):
        b_key = load_tile(d_key, i_batch, i_kv_head if SHARED else i_kv_head * M + r, o_first, BLOCK_J, D)
        b_other_key = b_key
        if HARD and M == 2 and not SHARED:
            b_other_key = load_tile(d_key, i_batch, 2 * i_kv_head + 1 - r, o_first, BLOCK_J, D)
        b_column = tl.zeros([BLOCK_J], tl.float32)
        if HAS_COLUMN:
            b_column = tl.load(p_column + r * padded_keys + place(o_j))
        b_grad_key = tl.zeros([BLOCK_J, D], tl.float32)
        b_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        b_both_sum = tl.zeros([BLOCK_J, 4], tl.float32)
        for g in range(1 if ONE_GROUP else group_size):
            i_query_head = i_kv_head * group_size + g
            i_head = (i_batch * num_heads + i_query_head).to(tl.int64)
            p_head_row = p_row
            if HAS_ROW:
                p_head_row = p_row + i_head * M * padded_queries
            p_head_mask = p_mask
            if HAS_MASK:
                p_head_mask = p_mask + i_batch.to(tl.int64) * stride_mask_batch + i_query_head * stride_mask_head
            p_head_alpha = p_alpha
            if PAIRED:
                p_head_alpha = p_alpha + i_head * padded_queries
            p_head_key = p_row_key
            if DROPOUT:
                p_head_key = p_row_key + i_head * padded_queries
            if CAUSAL:
                for o_i in tl.range(first_query, first_full, BLOCK_I):
                    b_grad_key, b_grad_value, b_sum, b_both_sum = _gather_key_value(
                        b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_rho,
                        b_column_key, d_query, d_key, d_grad_out, p_head_row, p_column, p_head_alpha, p_scale,
                        p_reference + i_head * padded_queries, p_delta + i_head * padded_queries, p_head_mask,
                        p_head_key, i_batch, i_query_head, i_kv_head, r, o_i, o_first, o_j, scale, threshold,
                        stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys,
                        padded_queries, padded_keys,
                        M, SHARED, PAIRED, WIDE, HARD, HAS_ROW, HAS_COLUMN, EQUAL, True, HAS_MASK, DROPOUT,
                        PRECISION, BLOCK_I, BLOCK_J, D, DV,
                    )  # fmt: skip
            for o_i in tl.range(first_full, end_query, BLOCK_I):
                b_grad_key, b_grad_value, b_sum, b_both_sum = _gather_key_value(
                    b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_rho,
                    b_column_key, d_query, d_key, d_grad_out, p_head_row, p_column, p_head_alpha, p_scale,
                    p_reference + i_head * padded_queries, p_delta + i_head * padded_queries, p_head_mask, p_head_key,
                    i_batch, i_query_head, i_kv_head, r, o_i, o_first, o_j, scale, threshold,
                    stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries,
                    padded_keys,
                    M, SHARED, PAIRED, WIDE, HARD, HAS_ROW, HAS_COLUMN, EQUAL, False, HAS_MASK, DROPOUT,
                    PRECISION, BLOCK_I, BLOCK_J, D, DV,
                )  # fmt: skip

        b_sum = tl.sum(b_sum, 1)
        b_both_sum = tl.sum(b_both_sum, 1)
        if DROPOUT:
            b_grad_key *= keep_scale
            b_sum *= keep_scale
            b_both_sum *= keep_scale
        b_natural = natural_scale if EQUAL else tl.load(p_scale + r) * 0.6931471805599453
        o_column = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_keys + o_j
        if HAS_COLUMN:
            tl.store(p_grad_column + o_column, b_sum, mask=o_j < num_keys)
        if not EQUAL:
            # sum_i dlogit_ij q_i . k_j is the gradient of the key, before scaling, times the key.
            b_grad_scale = tl.sum(b_grad_key * b_key.to(tl.float32), 1)
            tl.store(p_grad_scale + o_column, b_grad_scale, mask=o_j < num_keys)
        if GAUSSIAN:
            # The column holds -|k_j + shift_r|^2 / 2, times the scale.
            b_grad_key -= (b_both_sum if PAIRED else b_sum)[:, None] * b_key.to(tl.float32)
        if GAUSSIAN and HAS_SHIFT:
            b_moved_key = b_key.to(tl.float32)
            if HAS_ORIGIN:
                b_moved_key -= tl.load(p_origin + i_kv.to(tl.int64) * D + o_d)[None, :]
            b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
            b_grad_key -= b_sum[:, None] * b_shift[None, :]
            o_share = ((i_kv_head * M + r) * num_samples + i_batch).to(tl.int64) * num_blocks + i_block
            p_own_share = p_share + o_share * D + o_d
            tl.store(p_own_share, tl.sum(b_sum[:, None] * (b_moved_key + b_shift[None, :]), 0))
        if PAIRED:
            b_second = b_both_sum - b_sum
            o_column += num_samples.to(tl.int64) * num_keys
            tl.store(p_grad_column + o_column, b_second, mask=o_j < num_keys)
            if GAUSSIAN:
                b_shift = tl.load(p_shift + (i_kv_head * M + 1) * width + o_d, mask=o_d < width, other=0.0)
                b_grad_key -= b_second[:, None] * b_shift[None, :]
                p_own_share += num_samples.to(tl.int64) * num_blocks * D
                tl.store(p_own_share, tl.sum(b_second[:, None] * (b_moved_key + b_shift[None, :]), 0))
        i_out_head = i_kv_head if PAIRED else i_kv_head * M + r
        d_grad_key.store(
            [i_batch, i_out_head, o_first, 0], (b_grad_key * b_natural).to(b_key.dtype).reshape(1, 1, BLOCK_J, D)
        )
    if DROPOUT:
        b_grad_value *= keep_scale
    d_grad_value.store([i_batch, i_kv_head, o_first, 0], b_grad_value.to(b_value.dtype).reshape(1, 1, BLOCK_J, DV))


@triton.jit
def _gather_key_value(
    b_grad_key, b_grad_value, b_sum, b_both_sum, b_key, b_other_key, b_value, b_column, b_rho, b_column_key, d_query,
    d_key, d_grad_out,
    p_row, p_column, p_alpha, p_scale, p_reference, p_delta, p_mask, p_row_key, i_batch, i_query_head, i_kv_head,
    i_component, o_first_row, o_first_column, o_j, scale, threshold, stride_mask_row, stride_mask_column,
    causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED: tl.constexpr, PAIRED: tl.constexpr, WIDE: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add what one block of queries sends back to a block of keys. Pairs are transposed, ``[BLOCK_J, BLOCK_I]``."""
    o_i = o_first_row + tl.arange(0, BLOCK_I)
    b_query = load_tile(d_query, i_batch, i_query_head, o_first_row, BLOCK_I, D)
    b_grad_out = load_tile(d_grad_out, i_batch, i_query_head, o_first_row, BLOCK_I, DV)
    b_reference = load_terms(p_reference, o_first_row, BLOCK_I)
    b_delta = load_terms(p_delta, o_first_row, BLOCK_I)
    b_product = tl.dot(b_key, b_query.T, input_precision=PRECISION)
    b_grad_weight = tl.dot(b_value, b_grad_out.T, input_precision=PRECISION)
    b_scale = scale if EQUAL else tl.load(p_scale + i_component)
    b_row = -b_reference
    if HAS_ROW and not PAIRED:
        b_row += load_terms(p_row + i_component * padded_queries, o_first_row, BLOCK_I)
    b_logit = b_product * b_scale + (b_row[None, :] + b_column[:, None])
    if PAIRED and HARD:
        # Only the biases compete: `alpha` and `rho` are how far the second row and column exceed the first.
        b_difference = load_terms(p_alpha, o_first_row, BLOCK_I)[None, :] + b_rho[:, None]
        b_share = first_share(b_difference)
        b_weight = weight_of(b_logit + tl.maximum(b_difference, 0.0), b_query)
    elif HARD and M == 2:
        b_other = b_product
        if not SHARED:
            b_other = tl.dot(b_other_key, b_query.T, input_precision=PRECISION)
        b_other = b_other * (scale if EQUAL else tl.load(p_scale + 1 - i_component)) + component_bias(
            p_row, p_column + (1 - i_component) * padded_keys if HAS_COLUMN else p_column, 1 - i_component,
            o_first_row, o_j, b_reference, padded_queries, HAS_ROW, HAS_COLUMN, False, BLOCK_J, True,
        )  # fmt: skip
        b_weight = first_share(b_other - finite(b_logit)) * weight_of(b_logit, b_query)
    elif HARD and M > 2:
        b_best = tl.full([BLOCK_J, BLOCK_I], float("-inf"), tl.float32)
        b_ties = tl.zeros([BLOCK_J, BLOCK_I], tl.float32)
        for r in tl.static_range(M):
            b_other = _other_logit(
                b_product, b_query, d_key, p_row, p_column, p_scale, b_reference, i_batch, i_kv_head, r,
                o_first_row, o_first_column, o_j, scale, padded_queries, padded_keys,
                M, SHARED, HAS_ROW, HAS_COLUMN, EQUAL, PRECISION, BLOCK_J, D,
            )  # fmt: skip
            b_ties = tl.where(b_other > b_best, 1.0, b_ties + (b_other == b_best).to(tl.float32))
            b_best = tl.maximum(b_best, b_other)
        b_weight = tl.where(b_logit >= b_best, weight_of(b_logit, b_query) / b_ties, 0.0)
    else:
        b_weight = weight_of(b_logit, b_query)
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[None, :], o_j[:, None], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        b_weight = tl.where(b_seen, b_weight, 0.0)
    b_kept_weight = b_weight
    if DROPOUT:
        b_row_key = load_terms(p_row_key, o_first_row, BLOCK_I)
        b_kept_weight = unless_dropped(b_weight, b_row_key[None, :], b_column_key[:, None], threshold)
        b_grad_logit = b_kept_weight * b_grad_weight - b_weight * b_delta[None, :]
    if PAIRED and not HARD:
        if WIDE:
            b_difference = load_terms(p_row + padded_queries, o_first_row, BLOCK_I)
            b_difference -= load_terms(p_row, o_first_row, BLOCK_I)
            b_step = tl.load(p_column + padded_keys + place(o_j))
            b_other = b_product * scale + ((b_difference - b_reference)[None, :] + b_step[:, None])
            b_other = weight_of(b_other, b_query)
            if CAUSAL or HAS_MASK:
                b_other = tl.where(b_seen, b_other, 0.0)
            b_kept_other = b_other
            if DROPOUT:
                b_kept_other = unless_dropped(b_other, b_row_key[None, :], b_column_key[:, None], threshold)
            b_kept_weight += b_kept_other
        else:
            b_ratio = load_terms(p_alpha, o_first_row, BLOCK_I)[None, :] * b_rho[:, None]
            b_kept_weight += b_kept_weight * b_ratio
    if not DROPOUT:
        b_grad_weight -= b_delta[None, :]
        b_grad_logit = b_weight * b_grad_weight
    if PAIRED and HARD:
        b_sum += partial_sums(b_grad_logit * b_share)
        b_both_sum += partial_sums(b_grad_logit)
    elif PAIRED or HAS_COLUMN:
        b_sum += partial_sums(b_grad_logit)
    if PAIRED and not HARD:
        if WIDE and DROPOUT:
            b_grad_logit += b_kept_other * b_grad_weight - b_other * b_delta[None, :]
        elif WIDE:
            b_grad_logit += b_other * b_grad_weight
        else:
            b_grad_logit += b_grad_logit * b_ratio
        b_both_sum += partial_sums(b_grad_logit)
    # Last of all: while these products run, their operands stay in registers.
    b_grad_value = tl.dot(b_kept_weight.to(b_grad_out.dtype), b_grad_out, b_grad_value, input_precision=PRECISION)
    b_grad_key = tl.dot(b_grad_logit.to(b_query.dtype), b_query, b_grad_key, input_precision=PRECISION)
    return b_grad_key, b_grad_value, b_sum, b_both_sum


@triton.jit
def _other_logit(
    b_product, b_query, d_key, p_row, p_column, p_scale, b_reference, i_batch, i_kv_head, i_component, o_first_row,
    o_first_column, o_j, scale, padded_queries, padded_keys,
    M: tl.constexpr, SHARED: tl.constexpr, HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The transposed logits of any component, ``[BLOCK_J, BLOCK_I]``, to compare with."""
    if not SHARED:
        b_key = load_tile(d_key, i_batch, i_kv_head * M + i_component, o_first_column, BLOCK_J, D)
        b_product = tl.dot(b_key, b_query.T, input_precision=PRECISION)
    b_scale = scale if EQUAL else tl.load(p_scale + i_component)
    p_own_column = p_column + i_component * padded_keys if HAS_COLUMN else p_column
    return b_product * b_scale + component_bias(
        p_row,
        p_own_column,
        i_component,
        o_first_row,
        o_j,
        b_reference,
        padded_queries,
        HAS_ROW,
        HAS_COLUMN,
        False,
        BLOCK_J,
    )


@triton.jit(do_not_specialize=VARYING_WITH_WIDTH, do_not_specialize_on_alignment=HEAD_NUMBERS)
def attention_backward_query(
    d_query, d_key, d_value, d_grad_out, d_grad_query, p_row, p_column, p_alpha, p_rho, p_scale, p_reference,
    p_delta, p_grad_normaliser, p_wide, p_shift, p_grad_row, p_share, p_origin, p_mask, p_key_range, p_query_range,
    p_spans, p_row_key, p_column_key, stride_mask_batch, stride_mask_head, stride_mask_row, stride_mask_column,
    rows_per_span, scale, natural_scale, threshold, keep_scale, num_heads, group_size, num_queries, num_keys,
    padded_queries, padded_keys, num_blocks, width,
    M: tl.constexpr, SHARED: tl.constexpr, PAIRED: tl.constexpr, WIDE: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_RANGE: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, GAUSSIAN: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ORIGIN: tl.constexpr,
    HAS_GRAD_NORMALISER: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """One program for one block of queries of one head: ``dq`` and ``drow``."""
    i_block = tl.program_id(0) % num_blocks
    i_head = tl.program_id(0) // num_blocks
    if CAUSAL:
        i_block = num_blocks - 1 - i_block
    i_batch = i_head // num_heads
    i_query_head = i_head % num_heads
    i_kv_head = i_query_head // group_size
    i_kv = i_batch * (num_heads // group_size) + i_kv_head
    o_first = i_block * BLOCK_I
    o_i = o_first + tl.arange(0, BLOCK_I)
    if PAIRED and not HARD:  # noqa: SIM102 (the outer condition is a constant: without it there is no such pointer)
        if (tl.load(p_wide + i_kv) != 0) != WIDE:
            return

    if HAS_ROW:
        p_row += i_head.to(tl.int64) * M * padded_queries
    if HAS_COLUMN:
        p_column += i_kv.to(tl.int64) * M * padded_keys
    if HAS_MASK:
        p_mask += i_batch.to(tl.int64) * stride_mask_batch + i_query_head.to(tl.int64) * stride_mask_head
    if not EQUAL:
        p_scale += i_kv_head * M
    b_alpha = tl.zeros([BLOCK_I], tl.float32)
    if PAIRED:
        p_rho += i_kv.to(tl.int64) * padded_keys
        b_alpha = tl.load(p_alpha + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_row_key = tl.zeros([BLOCK_I], tl.int32)
    if DROPOUT:
        b_row_key = tl.load(p_row_key + i_head.to(tl.int64) * padded_queries + place(o_i))
        p_column_key += i_kv.to(tl.int64) * (padded_keys // 2)

    first_key, end_full, end_key, causal_offset = visible_keys(
        p_key_range, p_query_range, p_spans, i_batch, o_first, num_queries, num_keys, rows_per_span, CAUSAL, HAS_RANGE,
        PACKED, BLOCK_I, BLOCK_J,
    )  # fmt: skip
    b_query = load_tile(d_query, i_batch, i_query_head, o_first, BLOCK_I, D)
    b_grad_out = load_tile(d_grad_out, i_batch, i_query_head, o_first, BLOCK_I, DV)
    b_reference = tl.load(p_reference + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_delta = tl.load(p_delta + i_head.to(tl.int64) * padded_queries + place(o_i))
    b_grad_query = tl.zeros([BLOCK_I, D], tl.float32)
    # One column for each component; the factored pair keeps the sum of its first component in a vector.
    b_grad_row = tl.zeros([BLOCK_I, 4], tl.float32) if PAIRED else tl.zeros([BLOCK_I, 8], tl.float32)
    for o_j in tl.range(first_key, end_full, BLOCK_J):
        b_grad_query, b_grad_row = _gather_query(
            b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_alpha, b_row_key, d_key,
            d_value, p_row, p_column, p_rho, p_scale, p_mask, p_column_key, i_batch, i_kv_head, o_j, o_i, scale,
            threshold, stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys,
            padded_queries, padded_keys,
            M, SHARED, PAIRED, WIDE, HARD, HAS_ROW, HAS_COLUMN, EQUAL, False, HAS_MASK, DROPOUT, PRECISION,
            BLOCK_J, D, DV,
        )  # fmt: skip
    if CAUSAL:
        for o_j in tl.range(end_full, end_key, BLOCK_J):
            b_grad_query, b_grad_row = _gather_query(
                b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_alpha, b_row_key, d_key,
                d_value, p_row, p_column, p_rho, p_scale, p_mask, p_column_key, i_batch, i_kv_head, o_j, o_i,
                scale, threshold, stride_mask_row, stride_mask_column, causal_offset, num_queries,
                num_keys, padded_queries, padded_keys,
                M, SHARED, PAIRED, WIDE, HARD, HAS_ROW, HAS_COLUMN, EQUAL, True, HAS_MASK, DROPOUT, PRECISION,
                BLOCK_J, D, DV,
            )  # fmt: skip

    if PAIRED:
        b_grad_row = tl.sum(b_grad_row, 1)
    if DROPOUT:
        b_grad_query *= keep_scale
        b_grad_row *= keep_scale
    m_i = o_i < num_queries
    o_d = tl.arange(0, D)
    # Of one component of one key/value head, over samples, query heads and blocks.
    num_shares = (tl.num_programs(0) // (num_heads // group_size)).to(tl.int64)
    if HAS_SHIFT:
        i_share = (i_batch * group_size + i_query_head % group_size) * num_blocks + i_block
        p_share += (i_kv_head * M * num_shares + i_share) * D + o_d
    b_moved_query = b_query.to(tl.float32)
    if HAS_ORIGIN:
        b_moved_query -= tl.load(p_origin + i_kv.to(tl.int64) * D + o_d)[None, :]
    if PAIRED:
        # The logits of a row rise and fall together with its normaliser alone: what one component does not get, the
        # other does.
        b_second = -b_grad_row
        if HAS_GRAD_NORMALISER:
            b_total = tl.load(p_grad_normaliser + i_head.to(tl.int64) * num_queries + o_i, mask=m_i, other=0.0)
            b_second += tl.where(b_reference == float("inf"), 0.0, b_total)
        b_shift = tl.load(p_shift + i_kv_head * M * width + o_d, mask=o_d < width, other=0.0)
        b_grad_query += b_grad_row[:, None] * b_shift[None, :]
        b_shift = tl.load(p_shift + (i_kv_head * M + 1) * width + o_d, mask=o_d < width, other=0.0)
        b_grad_query += b_second[:, None] * b_shift[None, :]
        tl.store(p_share, tl.sum(b_grad_row[:, None] * b_moved_query, 0))
        # Rows beyond the end have no gradient, but what stands for their query is not zero once it is moved.
        tl.store(p_share + num_shares * D, tl.sum(tl.where(m_i, b_second, 0.0)[:, None] * b_moved_query, 0))
    elif HAS_ROW:
        o_r = tl.arange(0, 8)
        for r in tl.static_range(M):
            b_own = tl.sum(tl.where(o_r[None, :] == r, b_grad_row, 0.0), 1)
            b_scaled = b_own if EQUAL else b_own * tl.load(p_scale + r) * 0.6931471805599453
            if HAS_SHIFT:
                b_shift = tl.load(p_shift + (i_kv_head * M + r) * width + o_d, mask=o_d < width, other=0.0)
                b_grad_query += b_scaled[:, None] * b_shift[None, :]
                tl.store(p_share + r * num_shares * D, tl.sum(b_own[:, None] * b_moved_query, 0))
            if GAUSSIAN and not EQUAL:
                b_grad_query -= b_scaled[:, None] * b_query.to(tl.float32)
            if not EQUAL:
                tl.store(p_grad_row + (i_head.to(tl.int64) * M + r) * num_queries + o_i, b_own, mask=m_i)
    if EQUAL:
        b_grad_query *= natural_scale
    d_grad_query.store([i_batch, i_query_head, o_first, 0], b_grad_query.to(b_query.dtype).reshape(1, 1, BLOCK_I, D))


@triton.jit
def _gather_query(
    b_grad_query, b_grad_row, b_query, b_grad_out, b_reference, b_delta, b_alpha, b_row_key, d_key, d_value, p_row,
    p_column, p_rho, p_scale, p_mask, p_column_key, i_batch, i_kv_head, o_first, o_i, scale, threshold,
    stride_mask_row, stride_mask_column, causal_offset, num_queries, num_keys, padded_queries, padded_keys,
    M: tl.constexpr, SHARED: tl.constexpr, PAIRED: tl.constexpr, WIDE: tl.constexpr, HARD: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COLUMN: tl.constexpr, EQUAL: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_J: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add what one block of keys sends back to a block of queries."""
    o_j = o_first + tl.arange(0, BLOCK_J)
    b_value = load_tile(d_value, i_batch, i_kv_head, o_first, BLOCK_J, DV)
    b_grad_weight = tl.dot(b_grad_out, b_value.T, input_precision=PRECISION)
    if DROPOUT:
        AS_PRODUCT: tl.constexpr = b_query.dtype != tl.float32 and not HAS_MASK
        b_grad_weight = rows_unless_dropped(b_grad_weight, b_row_key, p_column_key, o_first, threshold, AS_PRODUCT)
    b_grad_weight -= b_delta[:, None]
    if CAUSAL or HAS_MASK:
        b_seen = is_visible(
            o_i[:, None], o_j[None, :], p_mask, stride_mask_row, stride_mask_column, causal_offset, num_queries,
            num_keys, CAUSAL, HAS_MASK,
        )  # fmt: skip
        # Every gradient of a pair is a weight times this.
        b_grad_weight = tl.where(b_seen, b_grad_weight, 0.0)

    if PAIRED:
        b_key = load_tile(d_key, i_batch, i_kv_head, o_first, BLOCK_J, D)
        b_product = tl.dot(b_query, b_key.T, input_precision=PRECISION)
        if HARD:
            # Only the biases compete: `alpha` and `rho` are how far the second row and column exceed the first.
            b_difference = b_alpha[:, None] + load_terms(p_rho, o_first, BLOCK_J)[None, :]
            b_share = first_share(b_difference)
            b_bias = load_terms(p_column, o_first, BLOCK_J)[None, :] - b_reference[:, None]
            b_weight = weight_of(b_product * scale + b_bias + tl.maximum(b_difference, 0.0), b_query)
        else:
            b_logit = b_product * scale + (load_terms(p_column, o_first, BLOCK_J)[None, :] - b_reference[:, None])
            b_weight = weight_of(b_logit, b_query)
        if CAUSAL or HAS_MASK:
            # An unseen key may be infinitely likely: 0 times it must stay 0.
            b_weight = tl.where(b_seen, b_weight, 0.0)
        b_first = b_weight * b_grad_weight
        if HARD:
            b_grad_logit = b_first
            b_first = b_grad_logit * b_share
        elif WIDE:
            b_difference = tl.load(p_row + padded_queries + place(o_i)) - tl.load(p_row + place(o_i))
            b_step = load_terms(p_column + padded_keys, o_first, BLOCK_J)
            b_other = b_product * scale + ((b_difference - b_reference)[:, None] + b_step[None, :])
            b_weight = weight_of(b_other, b_query)
            if CAUSAL or HAS_MASK:
                b_weight = tl.where(b_seen, b_weight, 0.0)
            b_grad_logit = b_first + b_weight * b_grad_weight
        else:
            b_grad_logit = b_first + b_first * (b_alpha[:, None] * load_terms(p_rho, o_first, BLOCK_J)[None, :])
        b_grad_query = tl.dot(b_grad_logit.to(b_key.dtype), b_key, b_grad_query, input_precision=PRECISION)
        b_grad_row += partial_sums(b_first)
    elif HARD and M == 2:
        b_first_key = load_tile(d_key, i_batch, i_kv_head if SHARED else i_kv_head * M, o_first, BLOCK_J, D)
        b_second_key = load_tile(d_key, i_batch, i_kv_head if SHARED else i_kv_head * M + 1, o_first, BLOCK_J, D)
        b_first_scale = scale if EQUAL else tl.load(p_scale)
        b_second_scale = scale if EQUAL else tl.load(p_scale + 1)
        b_first = tl.dot(b_query, b_first_key.T, input_precision=PRECISION) * b_first_scale + component_bias(
            p_row, p_column, 0, o_i, o_first, b_reference, padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J, True
        )
        b_second = tl.dot(b_query, b_second_key.T, input_precision=PRECISION) * b_second_scale + component_bias(
            p_row, p_column + padded_keys if HAS_COLUMN else p_column, 1, o_i, o_first, b_reference, padded_queries,
            HAS_ROW, HAS_COLUMN, True, BLOCK_J, True,
        )  # fmt: skip
        b_weight = weight_of(tl.maximum(b_first, b_second), b_query)
        if CAUSAL or HAS_MASK:
            b_weight = tl.where(b_seen, b_weight, 0.0)
        b_share = first_share(b_second - b_first)
        b_grad_logit = b_weight * b_grad_weight
        b_first = b_share * b_grad_logit
        b_second = b_grad_logit - b_first
        if HAS_ROW:
            o_r = tl.arange(0, 8)
            b_grad_row += tl.where(o_r[None, :] == 0, tl.sum(b_first, 1)[:, None], 0.0)
            b_grad_row += tl.where(o_r[None, :] == 1, tl.sum(b_second, 1)[:, None], 0.0)
        if not EQUAL:
            b_first *= b_first_scale * 0.6931471805599453
            b_second *= b_second_scale * 0.6931471805599453
        b_grad_query = tl.dot(b_first.to(b_first_key.dtype), b_first_key, b_grad_query, input_precision=PRECISION)
        b_grad_query = tl.dot(b_second.to(b_first_key.dtype), b_second_key, b_grad_query, input_precision=PRECISION)
    else:
        o_r = tl.arange(0, 8)
        b_best = tl.full([b_query.shape[0], BLOCK_J], float("-inf"), tl.float32)
        b_ties = tl.zeros([b_query.shape[0], BLOCK_J], tl.float32)
        if HARD and M > 2:
            for r in tl.static_range(M):
                b_key = load_tile(d_key, i_batch, i_kv_head if SHARED else i_kv_head * M + r, o_first, BLOCK_J, D)
                b_product = tl.dot(b_query, b_key.T, input_precision=PRECISION)
                b_logit = b_product * (scale if EQUAL else tl.load(p_scale + r)) + component_bias(
                    p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_first, b_reference,
                    padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
                )  # fmt: skip
                b_ties = tl.where(b_logit > b_best, 1.0, b_ties + (b_logit == b_best).to(tl.float32))
                b_best = tl.maximum(b_best, b_logit)
            b_ties = tl.maximum(b_ties, 1.0)
        for r in tl.static_range(M):
            b_key = load_tile(d_key, i_batch, i_kv_head if SHARED else i_kv_head * M + r, o_first, BLOCK_J, D)
            b_product = tl.dot(b_query, b_key.T, input_precision=PRECISION)
            b_scale = scale if EQUAL else tl.load(p_scale + r)
            b_logit = b_product * b_scale + component_bias(
                p_row, p_column + r * padded_keys if HAS_COLUMN else p_column, r, o_i, o_first, b_reference,
                padded_queries, HAS_ROW, HAS_COLUMN, True, BLOCK_J,
            )  # fmt: skip
            b_weight = weight_of(b_logit, b_query)
            if HARD and M > 2:
                b_weight = tl.where(b_logit == b_best, b_weight / b_ties, 0.0)
            if CAUSAL or HAS_MASK:
                b_weight = tl.where(b_seen, b_weight, 0.0)
            b_grad_logit = b_weight * b_grad_weight
            if HAS_ROW:
                b_grad_row += tl.where(o_r[None, :] == r, tl.sum(b_grad_logit, 1)[:, None], 0.0)
            if not EQUAL:
                b_grad_logit *= b_scale * 0.6931471805599453
            b_grad_query = tl.dot(b_grad_logit.to(b_key.dtype), b_key, b_grad_query, input_precision=PRECISION)
    return b_grad_query, b_grad_row
