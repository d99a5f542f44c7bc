/* Linear recurrences on ragged batches; raglane.h includes this file, and explains the conventions.
 *
 * `real` is the type of `dtype`; `sum` is float for bfloat16, otherwise the same type: that of states and parameters.
 * Outputs and states of a sequence have the same bits in any batch, and in any pieces that pass their states on; in float
 * and double so have the gradients of its elements and states, with the same pieces. Gradients of parameters are
 * bit-identical for any number of threads. A sequence's numbers never reach another sequence. Null gradients of
 * results are zeros; null gradients of arguments are not needed. */
#ifndef RAGLANE_RECURRENCES_H
#define RAGLANE_RECURRENCES_H

/* The states after every so many elements of a sequence are saved for backward, except those after the last element. Row
 * offsets[b] / raglane_border() + i - 1 of the borders of B sequences, N / raglane_border() rows, is the state before
 * element i * raglane_border() of sequence b. */
RAGLANE_EXPORT int64_t raglane_border(void);

/* The selective scan of Mamba, for each channel c, its group g = c / (C / G), and each state s:
 *   d = dt + dt_bias, with softplus log(1 + exp(d)), at least least_dt and at most most_dt
 *   h = exp(d A) h + d B x;  y = sum over s of C h, + D x */
#define RAGLANE_SELECTIVE_SCAN_FIELDS(FIELD)                                                                         \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) FIELD(int64_t, threads)        \
  FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as in a layer */                                             \
  FIELD(int64_t, channels) FIELD(int64_t, groups) /* E and G, which divides it */                                    \
  FIELD(int64_t, states)            /* S */                                                                          \
  FIELD(int64_t, softplus)          /* 1: of dt, else 0 */                                                           \
  FIELD(double, least_dt) FIELD(double, most_dt)                                                                     \
  FIELD(const int64_t*, offsets)    /* (B + 1), as in a layer */                                                     \
  FIELD(const unsigned char*, resets) /* (N): the state is 0 before an element with a number other than 0; or null */\
  FIELD(const void*, x) FIELD(const void*, dt) /* real (N, E) */                                                     \
  FIELD(const void*, A)             /* sum (E, S) */                                                                 \
  FIELD(const void*, B) FIELD(const void*, C) /* real (N, G, S) */                                                   \
  FIELD(const void*, D) FIELD(const void*, dt_bias) /* sum (E) or null */                                            \
  FIELD(const void*, initial)       /* sum (B, E, S) or null for zeros */                                            \
  FIELD(void*, output)              /* real (N, E), only forward */                                                  \
  FIELD(void*, final)               /* sum (B, E, S), only forward */                                                \
  FIELD(void*, borders)             /* sum (N / border, E * S), in a private order: out in forward, or null without a \
                                       backward pass; read by backward of the same instruction set */                \
  FIELD(const void*, grad_output) FIELD(const void*, grad_final)                                                     \
  FIELD(void*, grad_x) FIELD(void*, grad_dt) FIELD(void*, grad_A) FIELD(void*, grad_B) FIELD(void*, grad_C)          \
  FIELD(void*, grad_D) FIELD(void*, grad_dt_bias) FIELD(void*, grad_initial)
typedef struct raglane_selective_scan { RAGLANE_SELECTIVE_SCAN_FIELDS(RAGLANE_FIELD) } raglane_selective_scan;
RAGLANE_EXPORT int32_t raglane_scan_selectively(const raglane_selective_scan* scan, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_scan_selectively_backward(const raglane_selective_scan* scan, char* message, int64_t size);

/* Linear attention: per head h of v, with its head of q and k, h / (H / G), a state S (K, V), zeros at the start:
 *   S' = diag(exp(log_decay)) S;  e = v, with delta v - S'^T k;  S = S' + gain k e^T;  o = scale S^T q
 * With log_gain, the stabiliser m, 0 at the start, and the normaliser n (K): m = max(log_decay + m before, log_gain); the
 * decay is exp(log_decay + m before - m), the gain exp(log_gain - m); n has the same decay and gains k; and o is divided by
 * max(|scale n^T q|, exp(-m)) + eps. Gradients are those of this function of all arguments, m included. */
#define RAGLANE_ATTENTION_FIELDS(FIELD)                                                                              \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) FIELD(int64_t, threads)        \
  FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as in a layer */                                             \
  FIELD(int64_t, key_heads) FIELD(int64_t, heads) /* G, and H, a multiple of G */                                    \
  FIELD(int64_t, key_size) FIELD(int64_t, value_size) /* K and V */                                                  \
  FIELD(int64_t, per_key)           /* 1: a decay for each key, else 0: for each head */                             \
  FIELD(int64_t, delta)             /* 1 or 0 */                                                                     \
  FIELD(double, scale) FIELD(double, eps) /* eps is at least 0 */                                                    \
  FIELD(const int64_t*, offsets)    /* (B + 1), as in a layer */                                                     \
  FIELD(const unsigned char*, resets) /* (N): all states are 0 before an element with a number other than 0; or null */\
  FIELD(const void*, q) FIELD(const void*, k) /* real (N, G, K) */                                                   \
  FIELD(const void*, v)             /* real (N, H, V) */                                                             \
  FIELD(const void*, log_decay)     /* sum (N, H) or (N, H, K), at most 0, may be -inf; null for zeros */            \
  FIELD(const void*, gain)          /* sum (N, H); null for ones */                                                  \
  FIELD(const void*, log_gain)      /* sum (N, H) or null; then without delta, gain and decays for each key */       \
  FIELD(const void*, initial)       /* sum (B, H, K, V) or null for zeros */                                         \
  FIELD(const void*, initial_normaliser) FIELD(const void*, initial_stabiliser) /* sum (B, H, K) and (B, H), only    \
                                       with log_gain, or null for zeros */                                           \
  FIELD(void*, output)              /* real (N, H, V): out in forward; read by backward with log_gain */             \
  FIELD(void*, final) FIELD(void*, final_normaliser) FIELD(void*, final_stabiliser) /* as the initial ones: out in   \
                                       forward; the first two are read by backward with log_gain */                  \
  FIELD(void*, borders)             /* sum (N / border, H * K * (V + 1)), without log_gain H * K * V. This and the   \
                                       next three: out in forward, or null without a backward pass */                \
  FIELD(void*, errors)              /* sum (N, H, V): e, only with delta */                                          \
  FIELD(void*, reads)               /* sum (N, H): scale n^T q, only with log_gain */                                \
  FIELD(void*, levels)              /* sum (N, H): m, only with log_gain */                                          \
  FIELD(const void*, grad_output) FIELD(const void*, grad_final) FIELD(const void*, grad_final_normaliser)           \
  FIELD(const void*, grad_final_stabiliser)                                                                          \
  FIELD(void*, grad_q) FIELD(void*, grad_k) FIELD(void*, grad_v) FIELD(void*, grad_log_decay) FIELD(void*, grad_gain)\
  FIELD(void*, grad_log_gain) FIELD(void*, grad_initial) FIELD(void*, grad_initial_normaliser)                       \
  FIELD(void*, grad_initial_stabiliser)
typedef struct raglane_attention { RAGLANE_ATTENTION_FIELDS(RAGLANE_FIELD) } raglane_attention;
RAGLANE_EXPORT int32_t raglane_attend(const raglane_attention* attention, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_attend_backward(const raglane_attention* attention, char* message, int64_t size);

/* One step of Mamba's block for each of B rows, whose states are replaced, in float or double:
 *   v = x, with a norm x / sqrt(mean of x^2 + norm_eps) times it;  u, z = in_weight v + in_bias
 *   u = silu(conv_weight * (the inputs before and u) + conv_bias)
 *   r, b, c = x_weight u, with eps of at least 0 each divided by sqrt(its mean square + eps), times its norm
 *   y of the selective scan of u, dt_weight r, A, b, c, D and dt_bias, with softplus
 *   output = out_weight (y silu(z)) + out_bias, with residual + x
 * The bits of a row do not depend on the others. */
#define RAGLANE_MAMBA_STEP_FIELDS(FIELD)                                                                             \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) /* as in a layer */            \
  FIELD(int64_t, rows)              /* B */                                                                          \
  FIELD(int64_t, inputs) FIELD(int64_t, outputs) /* D and O */                                                       \
  FIELD(int64_t, channels) FIELD(int64_t, states) /* E and S */                                                      \
  FIELD(int64_t, taps) FIELD(int64_t, kept) /* K of the convolution; the inputs in its state, at least K - 1 */      \
  FIELD(int64_t, rank)              /* R of the step sizes */                                                        \
  FIELD(int64_t, row_stride) FIELD(int64_t, channel_stride) FIELD(int64_t, tap_stride) /* of `earlier` */            \
  FIELD(int64_t, logarithms)        /* 1: A is log(-A), else 0 */                                                    \
  FIELD(int64_t, residual)          /* 1 with O = D, or 0 */                                                         \
  FIELD(int64_t, ordered)           /* 1: sums of products in the order of columns, as in whole sequences; 0: faster */\
  FIELD(double, norm_eps) FIELD(double, eps)                                                                         \
  FIELD(const void*, x) FIELD(const void*, norm) /* (B, D); (D) or null */                                           \
  FIELD(const void*, in_weight) FIELD(const void*, in_bias) /* (2 E, D); (2 E) or null */                            \
  FIELD(const void*, conv_weight) FIELD(const void*, conv_bias) /* (E, K); (E) or null */                            \
  FIELD(const void*, x_weight)      /* (R + 2 S, E) */                                                               \
  FIELD(const void*, dt_weight) FIELD(const void*, dt_bias) /* (E, R); (E) or null */                                \
  FIELD(const void*, dt_norm) FIELD(const void*, B_norm) FIELD(const void*, C_norm) /* (R), (S), (S), or null */     \
  FIELD(const void*, A)             /* (E, S) */                                                                     \
  FIELD(const void*, D)             /* (E) or null */                                                                \
  FIELD(const void*, out_weight) FIELD(const void*, out_bias) /* (O, E); (O) or null */                              \
  FIELD(void*, earlier)             /* (B, E, kept) by the strides, oldest first */                                  \
  FIELD(void*, state)               /* (B, E, S) */                                                                  \
  FIELD(void*, output)              /* (B, O) */
typedef struct raglane_mamba_step { RAGLANE_MAMBA_STEP_FIELDS(RAGLANE_FIELD) } raglane_mamba_step;
RAGLANE_EXPORT int32_t raglane_step_mamba(const raglane_mamba_step* step, char* message, int64_t size);

/* One step of a block of linear attention for each of B rows, between its projections, whose states are replaced, in
 * float or double; with G, H, K and V of linear attention and C = 2 G K + H V channels:
 *   u = silu(conv_weight * (the inputs before and mixed) + conv_bias), which has q, k and v from three of its columns on
 *   with unit, q and k are divided by sqrt(the sum of squares + 1e-6)
 *   d = log(1 + exp(dt + dt_bias)), at least least_dt and at most most_dt;  log_decay = -d exp(A)
 *   gain = beta_scale sigmoid(beta), without beta d;  o = that of linear attention, + D v
 *   output = norm(o silu(gate)) with gates_first, else norm(o) silu(gate); the norm divides each of norm_groups groups of
 *   columns by the root of their mean square plus norm_eps, and multiplies by the weight, which repeats */
#define RAGLANE_ATTENTION_STEP_FIELDS(FIELD)                                                                         \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) /* as in a layer */            \
  FIELD(int64_t, rows)              /* B */                                                                          \
  FIELD(int64_t, key_heads) FIELD(int64_t, heads) FIELD(int64_t, key_size) FIELD(int64_t, value_size)                \
  FIELD(int64_t, q_first) FIELD(int64_t, k_first) FIELD(int64_t, v_first) /* columns of u */                         \
  FIELD(int64_t, taps) FIELD(int64_t, kept)                                                                          \
  FIELD(int64_t, row_stride) FIELD(int64_t, channel_stride) FIELD(int64_t, tap_stride) /* as in a step of Mamba */   \
  FIELD(int64_t, mixed_stride) FIELD(int64_t, dt_stride) FIELD(int64_t, beta_stride) FIELD(int64_t, gate_stride)     \
  FIELD(int64_t, unit) FIELD(int64_t, delta) FIELD(int64_t, gates_first) /* 1 or 0 */                                \
  FIELD(int64_t, transposed)        /* 1: states (V, K), without delta; 0: (K, V) */                                 \
  FIELD(int64_t, norm_groups)       /* a divisor of H V */                                                           \
  FIELD(int64_t, norm_size)         /* of the weight: a multiple of a group, and a divisor of H V */                 \
  FIELD(double, scale) FIELD(double, beta_scale) FIELD(double, least_dt) FIELD(double, most_dt)                      \
  FIELD(double, norm_eps)                                                                                            \
  FIELD(const void*, mixed)         /* (B, C) */                                                                     \
  FIELD(const void*, conv_weight) FIELD(const void*, conv_bias) /* (C, taps); (C) or null */                         \
  FIELD(const void*, dt) FIELD(const void*, dt_bias) /* (B, H); (H) */                                               \
  FIELD(const void*, A)             /* (H) */                                                                        \
  FIELD(const void*, beta)          /* (B, H) or null */                                                             \
  FIELD(const void*, D)             /* (H) or null */                                                                \
  FIELD(const void*, gate) FIELD(const void*, norm) /* (B, H V); (norm_size) */                                      \
  FIELD(void*, earlier)             /* (B, C, kept) by the strides, oldest first */                                  \
  FIELD(void*, state)               /* (B, H, K, V) or (B, H, V, K) */                                               \
  FIELD(void*, output)              /* (B, H V) */
typedef struct raglane_attention_step { RAGLANE_ATTENTION_STEP_FIELDS(RAGLANE_FIELD) } raglane_attention_step;
RAGLANE_EXPORT int32_t raglane_step_attention(const raglane_attention_step* step, char* message, int64_t size);

/* One step of a block for each of B rows, as a list of operations on the columns of a table in scratch, in float or double.
 * The table begins with the input; each operation writes `count` columns from `to` on, and reads those from a to e on. A row
 * has the bits of a sequence in whole calls: sums of products are in the order of columns.
 *   product     of a, `parts` groups of `size` columns, and weights (parts, count / parts, size), with option 1 (parts, size,
 *               count / parts); + bias (count) or null
 *   convolve    weight (count, size) * (the inputs before and a) + bias (count) or null; state (B, size - 1, count), oldest
 *               first
 *   function    of a, by its option; see below
 *   add, multiply  of a and b, or of a and weight (size), which repeats
 *   norm        of parts of `size` columns of a, by option: 0 x / sqrt(mean of x^2 + low), 1 x / sqrt(sum of x^2 + low), 2 x
 *               minus the mean
 *   attend      linear attention of q, k, v, log_decay and gain in a to e, with option 1 delta, with 2 log_gain in e; parts
 *               key heads and `extent` heads, keys of `size`; scale low and eps high; its three states
 *   decay       the RG-LRU of gates a and b and input c: d = a weight; f = sqrt(1 - exp(-2 d)), 1 before the first
 *               element; h = exp(-d) h + b c f; the state h and second (B), 0 before the first element and 1 after it
 * States (B, ...) are read, and written to other memory. */
enum raglane_row_kind {
  RAGLANE_ROW_PRODUCT, RAGLANE_ROW_CONVOLVE, RAGLANE_ROW_FUNCTION, RAGLANE_ROW_ADD, RAGLANE_ROW_MULTIPLY,
  RAGLANE_ROW_NORM, RAGLANE_ROW_ATTEND, RAGLANE_ROW_DECAY
};
/* sigmoid; x sigmoid(x); gelu by tanh; log(1 + exp(x)); -log(1 + exp(-x)); at least low and at most high; high tanh(x / high) */
enum raglane_row_function {
  RAGLANE_ROW_SIGMOID, RAGLANE_ROW_SILU, RAGLANE_ROW_GELU, RAGLANE_ROW_SOFTPLUS, RAGLANE_ROW_LOG_SIGMOID,
  RAGLANE_ROW_CLAMP, RAGLANE_ROW_CAP
};
#define RAGLANE_ROW_OPERATION_FIELDS(FIELD)                                                                          \
  FIELD(int64_t, kind) FIELD(int64_t, option) FIELD(int64_t, count) FIELD(int64_t, parts) FIELD(int64_t, size)       \
  FIELD(int64_t, extent)                                                                                             \
  FIELD(int64_t, to) FIELD(int64_t, a) FIELD(int64_t, b) FIELD(int64_t, c) FIELD(int64_t, d) FIELD(int64_t, e)       \
  FIELD(double, low) FIELD(double, high)                                                                             \
  FIELD(const void*, weight) FIELD(const void*, bias)                                                                \
  FIELD(const void*, state) FIELD(const void*, second) FIELD(const void*, third)                                     \
  FIELD(void*, next) FIELD(void*, next_second) FIELD(void*, next_third) /* the states after the step */
typedef struct raglane_row_operation { RAGLANE_ROW_OPERATION_FIELDS(RAGLANE_FIELD) } raglane_row_operation;

#define RAGLANE_BLOCK_STEP_FIELDS(FIELD)                                                                             \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) /* as in a layer */            \
  FIELD(int64_t, rows) FIELD(int64_t, inputs) /* B and D */                                                          \
  FIELD(int64_t, columns)           /* of the table */                                                               \
  FIELD(int64_t, first) FIELD(int64_t, outputs) /* the columns of the output: the first one, and O */                \
  FIELD(int64_t, operations)        /* how many */                                                                   \
  FIELD(const raglane_row_operation*, list)                                                                          \
  FIELD(const void*, x)             /* (B, D) */                                                                     \
  FIELD(void*, output)              /* (B, O) */
typedef struct raglane_block_step { RAGLANE_BLOCK_STEP_FIELDS(RAGLANE_FIELD) } raglane_block_step;
RAGLANE_EXPORT int32_t raglane_step_block(const raglane_block_step* step, char* message, int64_t size);

#endif
