/* Raglane's CPU kernels: the whole C interface.
 *
 * One call runs one recurrent layer, in one direction or in both, on a ragged batch: N elements, sequence after
 * sequence, and B + 1 offsets. There are two kinds of layers: matrix layers, in which a matrix multiplies the state,
 * and element-wise ones, in which a unit reads only its own state. Another call runs a step of any cell, given as data.
 * Rows are converted between that layout and those of padded tensors and packs. Letters: B sequences, N elements, D
 * input size, H hidden size, P size of the state h (of the projection if there is one, else H), K directions, G gates.
 *
 * Every pointer is owned by the caller and used only during the call. All matrices are row-major without gaps, unless a
 * row length is given. `real` is the type of `dtype`: float, double or bfloat16 (16 bits, computed in float). Unless
 * stated otherwise, no two arrays of a call may overlap, and inputs are not written. Integers that address memory
 * (offsets, slots, sizes, order) are copied before they are checked, so that a caller that writes to them during a call gets
 * an error or other numbers, but never an access out of bounds.
 *
 * Functions return a raglane_status, and on failure write a zero-terminated message of at most `size` bytes. Scratch of
 * a call: packed weights, at most 96 rows per thread, in inference at most 256 MB of input products, and copies of the
 * factors of gradients of values and weights (in bfloat16, wider ones); with `checkpoint_every`, also the gates of a
 * round. Of an element-wise call: packed weights, at most 192 rows of gates per thread, 130 rows of sums per direction.
 * All scratch is reserved before anything is overwritten: a failed call leaves its arguments unchanged. No function
 * throws. Three things outlive a call: the detected facts of the processor; the last 16 decoded programs of a thread;
 * and large blocks of scratch, which any later call may use, and whose pages the system may reclaim, see
 * raglane_take_block(). All functions are thread-safe. All threads of a call use the rounding mode of the caller's
 * thread, and its treatment of denormal numbers. After fork, a child must pass one thread unless raglane_own_threads():
 * OpenMP's threads do not survive a fork.
 */
#ifndef RAGLANE_H
#define RAGLANE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define RAGLANE_EXPORT __declspec(dllexport)
#else
#define RAGLANE_EXPORT __attribute__((visibility("default")))
#endif

/* Incremented whenever a struct below changes; Python rejects a library of another version. */
#define RAGLANE_ABI 25

enum raglane_status { RAGLANE_OK = 0, RAGLANE_BAD_ARGUMENT = 1, RAGLANE_OUT_OF_MEMORY = 2 };
/* RAGLANE_INT8: all numbers of the call are float, weights included. Weights are packed as int8, with a scale for each
 * row of a matrix. Their factors are rounded to int8, with a scale for each row of values, of h, or of a projection's
 * input, so a sequence's bits do not depend on the batch. Sums are int32, the same on every instruction set. A row with
 * a non-finite number gives NaN. Only for raglane_forward without gates, and raglane_pack; no size is above 65,536. */
enum raglane_dtype { RAGLANE_FLOAT32 = 0, RAGLANE_FLOAT64 = 1, RAGLANE_BFLOAT16 = 2, RAGLANE_INT8 = 3 };
enum raglane_function {
  RAGLANE_EXP = 0,
  RAGLANE_TANH = 1,
  RAGLANE_SIGMOID = 2,
  RAGLANE_EXPM1 = 3,
  RAGLANE_LOG = 4,
  RAGLANE_LOG1P = 5,
  RAGLANE_ERF = 6,
  RAGLANE_SQRT = 7,
  RAGLANE_SOFTPLUS = 8,
  RAGLANE_GELU = 9, /* by tanh */
  RAGLANE_SILU = 10
};

/* Division of the work, for tests. Results are bit-identical with any flags; with 0 the kernel chooses. */
enum raglane_flags {
  RAGLANE_POISON = 1,        /* fill scratch with NaN */
  RAGLANE_FOLD = 2,          /* compute input products inside the time loop */
  RAGLANE_PREPARE = 4,       /* compute all input products before it */
  RAGLANE_TEAM = 8,          /* the threads of a direction share rows and divide the hidden units */
  RAGLANE_NO_TEAM = 16       /* every thread has its own rows */
};

/* Each struct below is a list of its fields, type and name, which raglane_fields() returns. All fields but names have 8
 * bytes, so that the layout is the same on all platforms. */
#define RAGLANE_FIELD(type, name) type name;

/* The facts of a cell: a line of csrc/cells/table.h. */
#define RAGLANE_CELL_FACTS_FIELDS(FIELD)                                                                             \
  FIELD(raglane_name, name)       /* as in raglane.cells.CELLS, zero-terminated */                                   \
  FIELD(int64_t, is_elementwise)  /* 1: a unit reads only its own state; 0: a matrix multiplies the state */         \
  FIELD(int64_t, gates)           /* G */                                                                            \
  FIELD(int64_t, slots)           /* S: blocks of H per element in grad_gates */                                     \
  FIELD(int64_t, saved)           /* blocks of H per element in gates; 0 if gates is null */                         \
  FIELD(int64_t, has_c)           /* 1: there is a second state, c */                                                \
  FIELD(int64_t, projects)        /* 1: h may be a projection */                                                     \
  FIELD(int64_t, skips)           /* 1: the output adds the input: unchanged if D is H, otherwise by the weights     \
                                     `skip`, with which there is one more slot, and one more saved */                \
  FIELD(int64_t, factors)         /* V: recurrent factors per unit of an element-wise cell */                        \
  FIELD(int64_t, biases)          /* blocks of H in a bias */
typedef char raglane_name[24];
typedef struct raglane_cell_facts { RAGLANE_CELL_FACTS_FIELDS(RAGLANE_FIELD) } raglane_cell_facts;

/* The facts of a cell by its number, from 0 without gaps; RAGLANE_BAD_ARGUMENT if there is none. */
RAGLANE_EXPORT int32_t raglane_describe_cell(int64_t cell, raglane_cell_facts* facts, char* message, int64_t size);

/* Weights of one direction, in torch's layout. Order of gate blocks: LSTM i f g o; GRU r z n; IndRNN h;
 * minGRU z n; minLSTM f i n; QRNN n f o; SRU n f r. */
#define RAGLANE_WEIGHTS_FIELDS(FIELD)                                                                                \
  FIELD(const void*, input)       /* real (G * H, D) */                                                              \
  FIELD(const void*, hidden)      /* real (G * H, P). Element-wise: the factors, real (V * H): IndRNN, SRU (f r);    \
                                     null where V is 0 */                                                            \
  FIELD(const void*, input_bias)  /* real (blocks of a bias * H), SRU those of f r; or null */                       \
  FIELD(const void*, hidden_bias) /* real (G * H) or null; null if element-wise */                                   \
  FIELD(const void*, projection)  /* real (P, H); null if there is none and P is H */                                \
  FIELD(const void*, skip)        /* real (H, D): cells that skip, if D is not H; else null */
typedef struct raglane_weights { RAGLANE_WEIGHTS_FIELDS(RAGLANE_FIELD) } raglane_weights;

/* Gradients of one direction's weights, of their shapes; null if not needed. */
#define RAGLANE_WEIGHT_GRADIENTS_FIELDS(FIELD)                                                                       \
  FIELD(void*, input) FIELD(void*, hidden) FIELD(void*, input_bias) FIELD(void*, hidden_bias)                        \
  FIELD(void*, projection) FIELD(void*, skip)
typedef struct raglane_weight_gradients { RAGLANE_WEIGHT_GRADIENTS_FIELDS(RAGLANE_FIELD) } raglane_weight_gradients;

/* Forward, reverse; the second is not read where K is 1. */
typedef raglane_weights raglane_weights_pair[2];
typedef raglane_weight_gradients raglane_weight_gradients_pair[2];

/* A layer's call. In element-wise layers P is H, and S includes the slot of `skip`. */
#define RAGLANE_LAYER_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi)              /* RAGLANE_ABI */                                                                 \
  FIELD(int64_t, isa)              /* an instruction set that raglane_has_isa() confirms */                          \
  FIELD(int64_t, cell)             /* the number of one, see raglane_describe_cell() */                              \
  FIELD(int64_t, dtype)            /* raglane_dtype */                                                               \
  FIELD(int64_t, flags)            /* raglane_flags, or 0; element-wise: only those of poison and teams matter */    \
  FIELD(int64_t, threads)          /* at least 1 */                                                                  \
  FIELD(int64_t, directions)       /* K: 1, or 2 */                                                                  \
  FIELD(int64_t, sequences)        /* B, may be 0 */                                                                 \
  FIELD(int64_t, elements)         /* N, may be 0 */                                                                 \
  FIELD(int64_t, slot_count)       /* rows of a pool; not read without `slots` */                                    \
  FIELD(int64_t, input_size)       /* D, at least 1 */                                                               \
  FIELD(int64_t, hidden_size)      /* H, at least 1 */                                                               \
  FIELD(int64_t, projection_size)  /* P if there is a projection, else 0 */                                          \
  FIELD(int64_t, gate_stride)      /* matrix: row length of gates and grad_gates, in reals: at least S * H, and      \
                                      S * (H rounded up to a multiple of 16) where gates are saved. Element-wise:    \
                                      not read */                                                                    \
  FIELD(int64_t, checkpoint_every) /* 0 if backward reads saved gates; else (only matrix) it recomputes them         \
                                      again, for so many steps of a sequence at a time, which are all that it has in \
                                      scratch. Forward prepares no input products in scratch then. */                \
  FIELD(int64_t, row_count) FIELD(int64_t, steps) /* not read without `rows` */                                      \
                                                                                                                     \
  FIELD(const int64_t*, offsets)   /* (B + 1), first 0, last N, never falling */                                     \
  FIELD(const int64_t*, slots)     /* (B), only forward: the slot of each sequence, all different, from 0 to         \
                                      slot_count - 1; or null. With slots, `final_h` and `final_c` are pools of      \
                                      states, from which initial states are read as well, in inference in one        \
                                      direction. The pool's rows of other slots, and those of empty sequences, are   \
                                      not written. */                                                                \
  FIELD(const int64_t*, rows)      /* (B), only matrix, forward without `gates`, `c_states` and slots, or null. With \
                                      rows, values and output are tables of row_count rows: element t of sequence b  \
                                      is row rows[b] + starts[t]. Other rows are neither read nor written. */        \
  FIELD(const int64_t*, starts)    /* (steps), with rows, else not read */                                           \
  FIELD(const void*, values)       /* real (N, D) */                                                                 \
  FIELD(const void*, initial_h)    /* real (K, B, P); null for zeros, and with slots. Element-wise cells with c read \
                                      that of empty sequences alone. */                                              \
  FIELD(const void*, initial_c)    /* real (K, B, H); only cells with c; null for zeros */                           \
  FIELD(raglane_weights_pair, weights)                                                                               \
  FIELD(const void*, packed)       /* only forward: the result of raglane_pack for these weights and this instruction\
                                      set, dtype and sizes, which is read in their place: of the weights only which  \
                                      ones are null; null where the call packs them itself */                        \
                                                                                                                     \
  /* Written by forward, read by backward. */                                                                        \
  FIELD(void*, output)   /* real (N, K * P), forward then reverse in each row. May be null in forward, of a matrix   \
                            where `gates` is. Element-wise cells with c: null in backward. */                        \
  FIELD(void*, final_h)  /* real (K, B, P); only forward. With slots a pool (slot_count, P), of float if `real` is   \
                            bfloat16, so that states are not rounded between calls. */                               \
  FIELD(void*, final_c)  /* real (K, B, H); only forward, only cells with c, else null. With slots (slot_count, H),  \
                            as final_h. */                                                                           \
  FIELD(void*, gates)    /* null if nothing is saved, and in forward without a backward pass. Matrix: real           \
                            (K, N, gate_stride): LSTM i f g o, GRU r z n and W_hn h + b_hn, in an order that the     \
                            kernels and the instruction set choose. Element-wise: real (K, N, saved blocks * H),     \
                            what backward reads of them, gate after gate. */                                         \
  FIELD(void*, c_states) /* c after each element, only cells with c: real (K, N, H), element-wise (N, K * H). May    \
                            be null where `gates` is. */                                                             \
                                                                                                                     \
  /* Only backward. Null gradients are zeros. */                                                                     \
  FIELD(const void*, grad_output)   /* real (N, K * P) or null */                                                    \
  FIELD(const void*, grad_c_states) /* of the shape of c_states, or null: only cells with c */                       \
  FIELD(const void*, grad_final_h)  /* real (K, B, P) or null */                                                     \
  FIELD(const void*, grad_final_c)  /* real (K, B, H) or null */                                                     \
  /* With `checkpoint_every`, the next four and `gates` are not read: scratch takes their place. */                  \
  FIELD(void*, grad_gates)     /* out. Matrix: real (K, N, gate_stride), of which the first S * H of a row are       \
                                  written: gradients of the gates' arguments, gate after gate. With S = G + 1 (GRU:  \
                                  r, z, n, n) that of the last gate is there twice: with respect to the input        \
                                  product, and to the hidden one. Element-wise: real (K, N, S * H), gradients of the \
                                  input products. May be `gates` itself. */                                          \
  FIELD(void*, previous_h)     /* out, matrix, real (K, N, P): h before each element. May be `c_states` itself if P  \
                                  is H. */                                                                           \
  FIELD(void*, grad_h)         /* out, real (K, N, P): the gradient of h; only with a projection, else null */       \
  FIELD(void*, unprojected)    /* out, real (K, N, H): o * tanh(c); only with a projection, else null */             \
  FIELD(void*, grad_skip)      /* out, real (K, N, H): the gradient of the values without a product; cells that skip,\
                                  without `skip`; else null */                                                       \
  FIELD(void*, grad_initial_h) /* out, real (K, B, P); null if not needed */                                          \
  FIELD(void*, grad_initial_c) /* out, real (K, B, H); only cells with c; null if not needed */                       \
  FIELD(void*, grad_values)    /* out, real (N, D), the sum over the directions; null if not needed */                \
  FIELD(raglane_weight_gradients_pair, grad_weights) /* out */
typedef struct raglane_layer { RAGLANE_LAYER_FIELDS(RAGLANE_FIELD) } raglane_layer;

/* Run a layer: compute outputs, final states and, with `gates`, the data saved for the backward pass. */
RAGLANE_EXPORT int32_t raglane_forward(const raglane_layer* layer, char* message, int64_t size);

/* Run the backward pass of a layer: gradients of the gates' arguments and of the initial states. The non-sequential
 * part (gradients of values, weights and biases) consists of products and sums of grad_gates, computed here if the call
 * requests them. Sums add their terms in the order of memory, for any number of threads; the sums for biases and
 * factors of an element-wise layer in an order that depends only on the lengths. */
RAGLANE_EXPORT int32_t raglane_backward(const raglane_layer* layer, char* message, int64_t size);

/* Pack the weights of a layer for many calls of forward. Only sizes, isa, cell, dtype and weights of the layer are
 * read. `to`, 64-byte aligned, has `*bytes` bytes; with a null `to` they are only counted. The format is internal, and
 * valid in this process. */
RAGLANE_EXPORT int32_t raglane_pack(const raglane_layer* layer, void* to, int64_t* bytes, char* message, int64_t size);
/* One step of any cell as data: a program of src/raglane/programs/program.py as integers. A call runs it over all
 * elements of a batch. The integers of a program:
 *
 *   counts        blocks, weights, instructions, outputs, states, columns (of all gathers together)
 *   each block    raglane_block, width, index: of each kind but locals, the indices are 0, 1, 2 ... in any order
 *   each weight   groups, rows, depth
 *   each instruction  raglane_operation, width, segments, epsilon, weight, columns, groups; then places: two results,
 *                 three operands; unused ones are not read
 *   each output   place, width
 *   each state    place of the next state
 *   columns       of the gathers, in the order of their instructions
 *
 * A place is four integers: block, start, spread, number; block -1 for the number. Epsilons and numbers are the
 * bits of doubles. Spread is a raglane_spread; only those of pointwise operations and dots are of a matrix with `segments`
 * rows, in `groups` of as many rows. */
enum raglane_spread {
  RAGLANE_ADJACENT = 0,  /* as many columns as the operation reads */
  RAGLANE_ONE = 1,       /* one column for all of them */
  RAGLANE_BY_ROW = 2,    /* a column for each row of the matrix */
  RAGLANE_BY_COLUMN = 3  /* for each group, a column for each column of the matrix */
};
enum raglane_block { RAGLANE_ELEMENT = 0, RAGLANE_SEQUENCE = 1, RAGLANE_STATE = 2, RAGLANE_VECTOR = 3, RAGLANE_LOCAL = 4 };
enum raglane_operation {
  RAGLANE_OF_COPY, RAGLANE_OF_NEG, RAGLANE_OF_ABS, RAGLANE_OF_SIGN, RAGLANE_OF_NOT, RAGLANE_OF_RELU, RAGLANE_OF_EXP,
  RAGLANE_OF_EXPM1, RAGLANE_OF_LOG, RAGLANE_OF_LOG1P, RAGLANE_OF_SQRT, RAGLANE_OF_RSQRT, RAGLANE_OF_RECIPROCAL,
  RAGLANE_OF_SIGMOID, RAGLANE_OF_TANH, RAGLANE_OF_ERF, RAGLANE_OF_SIN, RAGLANE_OF_COS, RAGLANE_OF_FLOOR,
  RAGLANE_OF_ROUND, RAGLANE_OF_ADD, RAGLANE_OF_SUB, RAGLANE_OF_MUL, RAGLANE_OF_DIV, RAGLANE_OF_MAX, RAGLANE_OF_MIN,
  RAGLANE_OF_LT, RAGLANE_OF_LE, RAGLANE_OF_GT, RAGLANE_OF_GE, RAGLANE_OF_EQ, RAGLANE_OF_NE, RAGLANE_OF_AND,
  RAGLANE_OF_OR, RAGLANE_OF_POW, RAGLANE_OF_SIGMOID_BACKWARD, RAGLANE_OF_TANH_BACKWARD, RAGLANE_OF_FMA,
  RAGLANE_OF_WHERE, RAGLANE_OF_ROW_SUM, RAGLANE_OF_ROW_MAX, RAGLANE_OF_NORM, RAGLANE_OF_NORM_BACKWARD,
  RAGLANE_OF_ROW_CUMSUM, RAGLANE_OF_ROW_DOT, RAGLANE_OF_COLUMN_DOT, RAGLANE_OF_GATHER, RAGLANE_OF_PRODUCT,
  RAGLANE_OPERATIONS
};

/* The integers of a block, a weight, an instruction, an output, a state and a gathered column. */
#define RAGLANE_CODE_SIZES {3, 3, 27, 5, 4, 1}

/* A tensor of a program's call. */
#define RAGLANE_TENSOR_FIELDS(FIELD)                                                                                 \
  FIELD(void*, data)              /* may be null if it is empty */                                                   \
  FIELD(int64_t, dtype)           /* the call's; of elements and outputs of a call in float also bfloat16, widened   \
                                     when read and rounded when written */                                           \
  FIELD(raglane_strides, strides) /* of a weight from group to group, row to row, and number to number; of others    \
                                     only the first, from row to row, whose numbers are contiguous: at least         \
                                     0, of an output at least its width */
typedef int64_t raglane_strides[3];
typedef struct raglane_tensor { RAGLANE_TENSOR_FIELDS(RAGLANE_FIELD) } raglane_tensor;

/* A program's call. `tensors` are, in this order: elements (N, width), sequences (B, width), states (B, width), vectors
 * (width), weights (groups, rows, depth), all read-only; then outputs (N, width) and final states (B, width), which are
 * only written. Of each kind there are as many as in the program, in the order of their indices. An output may use the
 * memory of an element's tensor, if no other output and no next state is a place of that element: a row is written
 * after its last read. Otherwise nothing that is written may overlap anything. An empty sequence's final states are its
 * initial ones.
 *
 * With slots, states are pools (slot_count, width), whose rows are read and written as those of a layer; the tensors of
 * final states are not read. With packed weights, the tensors of weights are not read. */
#define RAGLANE_PROGRAM_FIELDS(FIELD)                                                                                \
  FIELD(int64_t, abi) FIELD(int64_t, isa) /* as above */                                                             \
  FIELD(int64_t, dtype)           /* RAGLANE_FLOAT32 or RAGLANE_FLOAT64: of the computation */                       \
  FIELD(int64_t, flags)           /* raglane_flags, or 0; input products are those of only elements and vectors */   \
  FIELD(int64_t, threads) FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as above */                          \
  FIELD(int64_t, ascending)       /* 1: from a sequence's first element to its last; 0: from its last to its first */\
  FIELD(int64_t, slot_count) FIELD(const int64_t*, offsets) FIELD(const int64_t*, slots) /* as in a layer */         \
  FIELD(const int64_t*, code)     /* the program */                                                                  \
  FIELD(int64_t, code_size)       /* number of integers */                                                           \
  FIELD(const raglane_tensor*, tensors)                                                                              \
  FIELD(int64_t, tensor_count)                                                                                       \
  FIELD(const void*, packed)      /* the result of raglane_pack_program for these weights, and this instruction set, \
                                     dtype and program; null where the call packs them itself */
typedef struct raglane_program { RAGLANE_PROGRAM_FIELDS(RAGLANE_FIELD) } raglane_program;

/* Run a program. The bits of a sequence's outputs and final states depend only on that sequence, the parameters and the
 * instruction set. */
RAGLANE_EXPORT int32_t raglane_run_program(const raglane_program* program, char* message, int64_t size);

/* Pack the weights of a program for many calls, as raglane_pack. Only isa, dtype, code and tensors are read, of which
 * only weights. */
RAGLANE_EXPORT int32_t raglane_pack_program(const raglane_program* program, void* to, int64_t* bytes, char* message,
                                            int64_t size);

/* Sums over all elements, for the gradients of parameters: of outer products, and of rows. */
#define RAGLANE_OUTER_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) /* as above; bfloat16 too */                         \
  FIELD(int64_t, flags)                                     /* RAGLANE_POISON or 0 */                                \
  FIELD(int64_t, threads) FIELD(int64_t, elements)          /* as above */                                           \
  FIELD(int64_t, groups)                                    /* at least 1 */                                         \
  FIELD(int64_t, left_columns) FIELD(int64_t, right_columns) /* of each group, at least 1 */                         \
  FIELD(int64_t, left_stride) FIELD(int64_t, right_stride)  /* from row to row, in reals: at least 0 */              \
  FIELD(const void*, left)  /* real (N, groups * left_columns) */                                                    \
  FIELD(const void*, right) /* real (N, groups * right_columns); null if `to` is */                                  \
  FIELD(void*, to)          /* out, real (groups, left_columns, right_columns): for each group the sum of the outer  \
                               products of a row of left and the row of right; null where it is not wanted */         \
  FIELD(void*, sums)        /* out, real (groups * left_columns): the sum of the rows of left; null where it is not  \
                               wanted */
typedef struct raglane_outer { RAGLANE_OUTER_FIELDS(RAGLANE_FIELD) } raglane_outer;

/* Sums add their terms in the order of memory, for any number of threads. */
RAGLANE_EXPORT int32_t raglane_outer_products(const raglane_outer* outer, char* message, int64_t size);

/* Products of the rows of all elements with a weight, such as those of a head: of each group of columns with its own
 * matrix. The bits of a row depend only on that row, the weight and the instruction set. */
#define RAGLANE_FACTORS_FIELDS(FIELD)                                                                                \
  FIELD(int64_t, abi) FIELD(int64_t, isa)                                    /* as above */                          \
  FIELD(int64_t, dtype)            /* RAGLANE_FLOAT32 or RAGLANE_FLOAT64: of the computation */                      \
  FIELD(int64_t, flags) FIELD(int64_t, threads) FIELD(int64_t, elements)     /* as above */                          \
  FIELD(int64_t, groups) FIELD(int64_t, width) FIELD(int64_t, depth)         /* at least 1 */                        \
  FIELD(raglane_tensor, values)    /* (N, groups * depth), as a program's tensor of elements */                      \
  FIELD(raglane_tensor, weight)    /* (groups, width, depth), of any strides */                                      \
  FIELD(raglane_tensor, output)    /* out, (N, groups * width), as a program's output; overlaps nothing */
typedef struct raglane_factors { RAGLANE_FACTORS_FIELDS(RAGLANE_FIELD) } raglane_factors;

RAGLANE_EXPORT int32_t raglane_product(const raglane_factors* factors, char* message, int64_t size);

/* A layer or a program, the other null. */
typedef struct raglane_stage {
  const raglane_layer* layer;
  const raglane_program* program;
} raglane_stage;

/* Run raglane_forward or raglane_run_program for one stage after the other, e.g. on the output of the one before, with
 * these threads, sequences and elements in place of those of the structs. The first that fails ends the call; the
 * stages before it have written their states. */
RAGLANE_EXPORT int32_t raglane_run_stages(const raglane_stage* stages, int64_t count, int64_t threads, int64_t sequences,
                                          int64_t elements, char* message, int64_t size);

/* The rows of a batch in another layout: a padded tensor, or the data of a pack. Rows are bytes. */
#define RAGLANE_ROWS_FIELDS(FIELD)                                                                                   \
  FIELD(int64_t, abi)          /* RAGLANE_ABI */                                                                     \
  FIELD(int64_t, threads)      /* at least 1 */                                                                      \
  FIELD(int64_t, is_pack)      /* 1 for a pack, 0 for a padded tensor */                                             \
  FIELD(int64_t, row_bytes)    /* of one element; the features of a row have no gaps */                              \
  FIELD(int64_t, sequences) FIELD(int64_t, steps) FIELD(int64_t, elements) /* B, T, N */                             \
  FIELD(int64_t, sequence_stride) FIELD(int64_t, step_stride) /* in a padded tensor, the bytes from one row to that  \
                                  of the next sequence, and of the next step, at least 0; not read of a pack */      \
  FIELD(const int64_t*, sizes) /* only read by raglane_flatten. A padded tensor: (B), the lengths. A pack: (T), the  \
                                  number of sequences that have each step */                                         \
  FIELD(const int64_t*, order) /* only read by raglane_flatten. A pack: (B), its sequences, longest first; null      \
                                  if they have that order */                                                         \
  FIELD(int64_t*, offsets)     /* (B + 1), only written by raglane_flatten, for the caller */                        \
  FIELD(int64_t*, plan)        /* (B + 1), of a pack (2 * B + 1 + T): written by raglane_flatten, read by the other  \
                                  two: the offsets, and of a pack order and sizes, so that the way back is the way   \
                                  there whatever became of the caller's arrays. Its content is private. */           \
  FIELD(void*, flat)           /* (N), sequence after sequence */                                                    \
  FIELD(void*, table)          /* a padded tensor (T, B) or (B, T), or a pack (N) */
typedef struct raglane_rows { RAGLANE_ROWS_FIELDS(RAGLANE_FIELD) } raglane_rows;

/* Check sizes and order, write offsets and plan, and run raglane_gather. */
RAGLANE_EXPORT int32_t raglane_flatten(const raglane_rows* rows, char* message, int64_t size);
/* Copy rows from the table to `flat`, by the plan that raglane_flatten wrote. */
RAGLANE_EXPORT int32_t raglane_gather(const raglane_rows* rows, char* message, int64_t size);
/* Copy rows from `flat` to the table, with zeros in padding. Otherwise as raglane_gather. */
RAGLANE_EXPORT int32_t raglane_scatter(const raglane_rows* rows, char* message, int64_t size);
/* Write zeros to the padding of the table; `flat` is not read. Otherwise as raglane_gather. */
RAGLANE_EXPORT int32_t raglane_fill(const raglane_rows* rows, char* message, int64_t size);

/* The alignments of the frames and labels of B sequences, T frames and U labels each, for the loss of a transducer. A
 * row is a pair of a frame t and a number of labels u before it; row t * (U + 1) + u of its sequence. */
#define RAGLANE_LATTICES_FIELDS(FIELD)                                                                               \
  FIELD(int64_t, abi)            /* RAGLANE_ABI */                                                                   \
  FIELD(int64_t, threads)        /* at least 1 */                                                                    \
  FIELD(int64_t, dtype)          /* RAGLANE_FLOAT32 or RAGLANE_FLOAT64, of `real`; sums are double */                \
  FIELD(int64_t, sequences) FIELD(int64_t, rows) /* B, and the sum of T * (U + 1) */                                 \
  FIELD(int64_t, one_per_frame)  /* 1: a label ends its frame, as a blank does; 0: only a blank does */              \
  FIELD(const int64_t*, frames) FIELD(const int64_t*, labels) /* (B), the lengths T and U, copied before use */      \
  FIELD(const void*, emissions)  /* real (rows, 2): log-probabilities of the blank and of label u, which is not      \
                                    used where u = U */                                                              \
  FIELD(void*, losses)           /* real (B): minus the log-probability of the labels, inf if there is no path */    \
  FIELD(void*, shares)           /* real (rows, 2): the probability that a path of the labels has each emission,     \
                                    minus the derivative of the loss; 0 without a path. Null if not needed */
typedef struct raglane_lattices { RAGLANE_LATTICES_FIELDS(RAGLANE_FIELD) } raglane_lattices;

/* Compute losses and shares. A sequence's results depend only on its own emissions. Scratch: with shares a double for
 * each row, and U + 1 doubles per thread. */
RAGLANE_EXPORT int32_t raglane_align(const raglane_lattices* lattices, char* message, int64_t size);

/* A beam search over the prefixes of CTC (connectionist temporal classification), or its continuation. Doubles may be
 * -inf where stated, and no number is NaN. Without n-grams, `order` is 0 and their arrays are not read. An n-gram model is
 * an automaton: a context of at most order - 1 tokens has the grams that follow it, and another context, shorter by the
 * first token, for all other tokens. Its integers are checked when they are read. */
#define RAGLANE_SEARCH_FIELDS(FIELD)                                                                                 \
  FIELD(int64_t, abi) FIELD(int64_t, dtype) /* RAGLANE_FLOAT32 or RAGLANE_FLOAT64 */                                 \
  FIELD(int64_t, threads) FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as in a layer */                     \
  FIELD(int64_t, classes)         /* C, at least 1 */                                                                \
  FIELD(int64_t, blank)           /* from 0 to C - 1 */                                                              \
  FIELD(int64_t, beam)            /* the number of prefixes that are kept, at least 1 */                             \
  FIELD(int64_t, tokens_per_step) /* only so many of the likeliest tokens extend a prefix, at least 1 */             \
  FIELD(double, least)            /* and only those of at least this log-probability, or -inf */                     \
  FIELD(double, weight)           /* of the n-gram's log-probabilities, at least 0 */                                \
  FIELD(double, bonus)            /* is added to the score for each token */                                         \
  FIELD(const int64_t*, offsets)  /* (B + 1), as in a layer */                                                       \
  FIELD(const void*, log_probs)   /* real (N, C), below inf */                                                       \
  FIELD(const int64_t*, state)    /* (state_size), where the search before ended; null to begin */                   \
  FIELD(const int64_t*, state_offsets) /* (B + 1), with a state */                                                   \
  FIELD(int64_t, state_size)                                                                                         \
  FIELD(int64_t, order)           /* of the n-grams, or 0 */                                                         \
  FIELD(int64_t, contexts)        /* S, with n-grams at least 1; the first is empty */                               \
  FIELD(int64_t, begin)           /* the context of a sequence's first token */                                      \
  FIELD(int64_t, grams)           /* G */                                                                            \
  FIELD(const int64_t*, first)    /* (S + 1), the first gram of each context */                                      \
  FIELD(const int64_t*, shorter)  /* (S), the context for other tokens: below its own index */                       \
  FIELD(const double*, backoff)   /* (S), the log-probability of these, at most 0 */                                 \
  FIELD(const int64_t*, tokens)   /* (G), rising within a context */                                                 \
  FIELD(const int64_t*, next)     /* (G), the context after the token */                                             \
  FIELD(const double*, gram_log_probs) /* (G), at most 0 */
typedef struct raglane_search { RAGLANE_SEARCH_FIELDS(RAGLANE_FIELD) } raglane_search;

/* Search, and return in `found` the new state, and in `state_size` the number of its integers. The bits of a sequence's
 * state depend only on its own log-probabilities and state, and not on how they are cut into calls. A state is a record
 * per sequence: steps so far, E prefixes, best first, E lengths, then as bits of doubles E log-probabilities of
 * alignments that end in a blank, E of those that end in the last token, E of the best of each, and E scores of n-grams
 * and bonuses. Of the n tokens of all prefixes follow n tokens and twice, for the best alignments of each kind, n first
 * steps, n steps after the last, and the bits of n sums of the token's probabilities over these steps. */
RAGLANE_EXPORT int32_t raglane_find_prefixes(const raglane_search* search, void** found, int64_t* state_size,
                                             char* message, int64_t size);
/* Copy a found state, offsets (B + 1) and integers; null to copy nothing. Frees `found`. */
RAGLANE_EXPORT int32_t raglane_take_prefixes(void* found, int64_t* state_offsets, int64_t* state, char* message,
                                             int64_t size);

/* The best alignment by CTC of labels with the steps of their sequence. */
#define RAGLANE_ALIGNMENT_FIELDS(FIELD)                                                                              \
  FIELD(int64_t, abi) FIELD(int64_t, dtype) FIELD(int64_t, threads) FIELD(int64_t, sequences)                        \
  FIELD(int64_t, elements) FIELD(int64_t, classes) FIELD(int64_t, blank) /* as in raglane_search */                  \
  FIELD(int64_t, labels)               /* M */                                                                       \
  FIELD(const int64_t*, offsets)       /* (B + 1), of the steps */                                                   \
  FIELD(const int64_t*, label_offsets) /* (B + 1), from 0 to M */                                                    \
  FIELD(const void*, log_probs)        /* real (N, C) */                                                             \
  FIELD(const int64_t*, targets)       /* (M), from 0 to C - 1 */                                                    \
  FIELD(int64_t*, times)               /* out (M, 2): the first step of each label, and the step after its last */   \
  FIELD(double*, confidences)          /* out (M): the mean probability of a label over its steps */                 \
  FIELD(double*, scores)               /* out (B): the log-probability of the alignment; -inf, with zeros in times   \
                                          and confidences, without one; NaN if a number that is read is NaN or inf */
typedef struct raglane_alignment { RAGLANE_ALIGNMENT_FIELDS(RAGLANE_FIELD) } raglane_alignment;
RAGLANE_EXPORT int32_t raglane_best_alignment(const raglane_alignment* alignment, char* message, int64_t size);

/* Two sequences per item, of lengths T and U, and tables (T, U) of all items, one after the other, P numbers. */
#define RAGLANE_PAIRS_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi) FIELD(int64_t, threads) FIELD(int64_t, sequences)                                              \
  FIELD(int64_t, left_elements) FIELD(int64_t, right_elements) /* the sums of T and U */                             \
  FIELD(int64_t, pairs)                 /* P; not read by raglane_edits */                                           \
  FIELD(double, gamma)                  /* above 0; only soft-DTW */                                                 \
  FIELD(const int64_t*, left_offsets) FIELD(const int64_t*, right_offsets) /* (B + 1) */                             \
  FIELD(const double*, costs)           /* (P), of each pair; only soft-DTW */                                       \
  FIELD(double*, reach)                 /* (P), written by raglane_soft_dtw, read by raglane_soft_dtw_shares: the    \
                                           soft minimum over the paths to each pair */                               \
  FIELD(double*, shares)                /* (P), written by raglane_soft_dtw_shares: the derivative of the soft       \
                                           minimum with respect to each cost */                                      \
  FIELD(const int64_t*, left) FIELD(const int64_t*, right) /* tokens; only raglane_edits */                          \
  FIELD(int64_t*, counts)               /* out (B, 3): insertions, deletions and substitutions that make the right   \
                                           sequence the left one; only raglane_edits */
typedef struct raglane_pairs { RAGLANE_PAIRS_FIELDS(RAGLANE_FIELD) } raglane_pairs;
RAGLANE_EXPORT int32_t raglane_soft_dtw(const raglane_pairs* pairs, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_soft_dtw_shares(const raglane_pairs* pairs, char* message, int64_t size);
RAGLANE_EXPORT int32_t raglane_edits(const raglane_pairs* pairs, char* message, int64_t size);

#include "recurrences.h"
#include "channels.h"

/* Up to this many elements, and numbers in the weights of a direction, raglane_backward computes the gradients of
 * values and weights in bfloat16 fastest. For more, a library that uses bfloat16 instructions is faster. */
RAGLANE_EXPORT int64_t raglane_few_elements(void);
RAGLANE_EXPORT int64_t raglane_few_weights(void);

/* Take a large block of memory, of at least `bytes`, from the allocator that keeps blocks between calls: for data that
 * only raglane_backward reads. `size`: the bytes of the block. Null, and `size` 0, if memory is exhausted. */
RAGLANE_EXPORT void* raglane_take_block(int64_t bytes, int64_t* size);
/* Free a block that is no longer read or written, with its size. */
RAGLANE_EXPORT void raglane_give_block(void* block, int64_t size);
/* Bytes from which a block is faster than malloc. */
RAGLANE_EXPORT int64_t raglane_least_block(void);

/* The name of an instruction set by its number, from 0; a better set follows those that it improves on; null if there
 * is none. Extensions of AVX-512 for bfloat16 run other dtypes as AVX-512 does. */
RAGLANE_EXPORT const char* raglane_isa_name(int64_t isa);
/* 1 if this library was built with an instruction set and this processor supports it, else 0. */
RAGLANE_EXPORT int32_t raglane_has_isa(int64_t isa);

/* RAGLANE_ABI of the library. */
RAGLANE_EXPORT int32_t raglane_abi(void);

/* 1 if calls run on a pool of threads of the library's own: it was built without OpenMP, or the environment variable
 * RAGLANE_THREADS was "own" at the first call. Else 0: they run on OpenMP's. The pool grows when a call needs threads.
 * After a call they poll for about 2 ms, and then sleep. Calls at the same time have different threads, and so
 * has a forked child. */
RAGLANE_EXPORT int32_t raglane_own_threads(void);

/* The structs of calls by their numbers, from 0, for callers that pack them field by field; null if there is none: a
 * line with the struct's name and bytes, then a line for each field, with name, type and offset, in the order of
 * memory. Each field of nested weights has its line, e.g. `weights[1].hidden`. Types: int64, double, pointer, char[24]. */
RAGLANE_EXPORT const char* raglane_fields(int32_t number);

/* out[i] = function(in[i]) factor[i], real (count), float or double, by the functions of the cells. `factor` may be null
 * for ones; arrays may be the same. */
RAGLANE_EXPORT int32_t raglane_apply(int64_t isa, int64_t dtype, int64_t threads, int64_t function, const void* in,
                                     const void* factor, void* out, int64_t count, char* message, int64_t size);

/* The peak for products: run on each of `threads` threads `rounds` times as many independent fused multiply-adds as
 * keep a core busy, only in registers; for bfloat16, the instruction of the products of `isa`. Writes to `operations`
 * the number of additions and multiplications on all threads. For benchmarks, which time the call. */
RAGLANE_EXPORT int32_t raglane_multiply_registers(int64_t isa, int64_t dtype, int64_t threads, int64_t rounds,
                                                  int64_t* operations, char* message, int64_t size);

#ifdef __cplusplus
}
#endif
#endif
