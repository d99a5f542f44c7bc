/* Channels and heads of ragged batches that read only themselves; raglane.h includes this file, and recurrences.h explains `sum`,
 * borders, resets, bits and null gradients. */
#ifndef RAGLANE_CHANNELS_H
#define RAGLANE_CHANNELS_H

/* The convolution of each channel c with the elements before in its sequence, for K taps:
 *   y[t] = bias + sum over j of weight[K - 1 - j] x[t - j]
 * A state is the last R elements of a sequence, oldest first, R at least K - 1. */
#define RAGLANE_CONVOLUTION_FIELDS(FIELD)                                                                            \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) FIELD(int64_t, threads)        \
  FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as in a layer */                                             \
  FIELD(int64_t, channels) FIELD(int64_t, taps) /* E and K */                                                        \
  FIELD(int64_t, kept)              /* R */                                                                          \
  FIELD(const int64_t*, offsets)    /* (B + 1), as in a layer */                                                     \
  FIELD(const unsigned char*, resets) /* (N) or null */                                                              \
  FIELD(const void*, x)             /* real (N, E) */                                                                \
  FIELD(const void*, weight)        /* sum (E, K) */                                                                 \
  FIELD(const void*, bias)          /* sum (E) or null */                                                            \
  FIELD(const void*, initial)       /* sum (B, R, E) or null for zeros, without a gradient */                        \
  FIELD(void*, output)              /* real (N, E), only forward */                                                  \
  FIELD(void*, final)               /* sum (B, R, E), only forward */                                                \
  FIELD(const void*, grad_output) FIELD(const void*, grad_final)                                                     \
  FIELD(void*, grad_x) FIELD(void*, grad_weight) FIELD(void*, grad_bias) FIELD(void*, grad_initial)
typedef struct raglane_convolution { RAGLANE_CONVOLUTION_FIELDS(RAGLANE_FIELD) } raglane_convolution;
RAGLANE_EXPORT int32_t raglane_convolve(const raglane_convolution* convolution, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_convolve_backward(const raglane_convolution* convolution, char* message, int64_t size);

/* The RG-LRU of Griffin:
 *   d = rates sigmoid(recurrent + recurrent_bias);  r = sqrt(1 - exp(-2 d)), its derivative at most 1000
 *   h = exp(-d) h + x sigmoid(entry + entry_bias) (r + fresh (1 - r)) */
#define RAGLANE_RGLRU_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) FIELD(int64_t, threads)        \
  FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as in a layer */                                             \
  FIELD(int64_t, channels)          /* E */                                                                          \
  FIELD(const int64_t*, offsets)    /* (B + 1), as in a layer */                                                     \
  FIELD(const unsigned char*, resets) /* (N) or null */                                                              \
  FIELD(const void*, x)             /* real (N, E) */                                                                \
  FIELD(const void*, entry) FIELD(const void*, recurrent) /* real (N, E) */                                          \
  FIELD(const void*, entry_bias) FIELD(const void*, recurrent_bias) FIELD(const void*, rates) /* sum (E) */          \
  FIELD(const void*, fresh)         /* sum (N): 1 for the first element of a sequence without a state; or null */    \
  FIELD(const void*, initial)       /* sum (B, E) or null for zeros */                                               \
  FIELD(void*, output)              /* real (N, E), only forward: h */                                               \
  FIELD(void*, final)               /* sum (B, E), only forward */                                                   \
  FIELD(void*, borders)             /* sum (N / border, E): out in forward, or null without a backward pass */       \
  FIELD(const void*, grad_output) FIELD(const void*, grad_final)                                                     \
  FIELD(void*, grad_x) FIELD(void*, grad_entry) FIELD(void*, grad_recurrent) FIELD(void*, grad_entry_bias)           \
  FIELD(void*, grad_recurrent_bias) FIELD(void*, grad_rates) FIELD(void*, grad_fresh) FIELD(void*, grad_initial)
typedef struct raglane_rglru { RAGLANE_RGLRU_FIELDS(RAGLANE_FIELD) } raglane_rglru;
RAGLANE_EXPORT int32_t raglane_accumulate(const raglane_rglru* rglru, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_accumulate_backward(const raglane_rglru* rglru, char* message, int64_t size);

/* The norm of each head of a row, times a weight and a gate, in float or double: output = n weight sigmoid(gate), with `silu` times
 * gate, too. n = y / sqrt(mean of y^2 + eps) of a head; with `centred` its mean is subtracted from y before. With grad, the gradient
 * of the output, all gradients in its place. The bits of a row depend only on that row, the weight and the instruction set. */
#define RAGLANE_GATED_NORM_FIELDS(FIELD)                                                                             \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) FIELD(int64_t, flags) FIELD(int64_t, threads)        \
  FIELD(int64_t, elements) /* as in a layer */                                                                       \
  FIELD(int64_t, heads) FIELD(int64_t, size) /* H and V, at least 1 */                                               \
  FIELD(int64_t, centred) FIELD(int64_t, silu) /* 1 or 0 */                                                          \
  FIELD(double, eps)                                                                                                 \
  FIELD(const void*, y) FIELD(const void*, gate) /* (N, H V) */                                                      \
  FIELD(const void*, weight) /* (H V) */                                                                             \
  FIELD(const void*, grad)   /* (N, H V), or null */                                                                 \
  FIELD(void*, output)       /* out, (N, H V), without grad */                                                       \
  FIELD(void*, grad_y) FIELD(void*, grad_gate) FIELD(void*, grad_weight) /* out, as y, gate and weight, with grad */
typedef struct raglane_gated_norm { RAGLANE_GATED_NORM_FIELDS(RAGLANE_FIELD) } raglane_gated_norm;
RAGLANE_EXPORT int32_t raglane_gate_norm(const raglane_gated_norm* norm, char* message, int64_t size);

#endif
