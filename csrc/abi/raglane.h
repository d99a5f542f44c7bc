/* Raglane's CPU kernels: the whole C interface.
 *
 * One call runs one recurrent layer, in one direction or in both at once, on a ragged batch: N elements that lie
 * sequence after sequence, and B + 1 offsets. There are two kinds of layers: those whose weights meet the state as
 * a matrix, and element-wise ones, where a unit's past is its own alone. Another call runs a step of any cell, given as
 * data. Rows are moved between that layout and those of padded tensors and packs. Letters: B sequences, N elements, D
 * input size, H hidden size, P size of the state h (the projection's where there is one, else H), K directions, G gates.
 *
 * Every pointer is owned by the caller and used during the call alone. All matrices are row-major without gaps,
 * except where a row length is given. `real` is the type that `dtype` names: float, double or bfloat16 (16 bits,
 * computed with as float). Unless said otherwise no two arrays of a call may overlap, and inputs are not written.
 * Integers by which memory is addressed (offsets, sizes, order) are copied and the copies checked, so that a caller who
 * writes them meanwhile gets an error or other numbers, never other memory.
 *
 * Functions return a raglane_status, and on failure write a message, zero-terminated, of at most `size` bytes.
 * Scratch of a call: packed weights, at most 96 rows per thread, in inference at most 256 MB of input products, and
 * copies of what gradients of values and weights are made of (in bfloat16, wider ones); with `checkpoint_every`, the
 * gates of a round too. Of an element-wise one: packed weights, at most 192 rows of gates per thread, 130 rows of sums
 * per direction.
 * All of it is reserved before anything is written in place: a call that fails leaves its arguments as they were.
 * No function throws. Two things outlive a call: what is known of the processor, and large blocks of scratch, which wait
 * for the next call, whichever thread's, and which the system may take back meanwhile; see raglane_take_block(). Calls
 * from several threads may run side by side. All threads of a call round as the caller's does, and take denormal numbers
 * for 0 where it does.
 * After fork, a child must ask for one thread: OpenMP's threads do not survive a fork.
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

/* Raised whenever a struct below changes; Python refuses a library of another version. */
#define RAGLANE_ABI 14

enum raglane_status { RAGLANE_OK = 0, RAGLANE_BAD_ARGUMENT = 1, RAGLANE_OUT_OF_MEMORY = 2 };
/* RAGLANE_INT8: all numbers of the call are float, the weights too. These are packed as int8, with a scale for each row
 * of a matrix. What they are multiplied with is rounded to int8, with a scale for each row of values, h, or what is
 * projected, so a sequence's bits do not depend on the batch. Sums are of int32, the same on every instruction set. A row
 * with a number that is not finite gives NaN. For raglane_forward without gates, and raglane_pack; no size is above
 * 65,536. */
enum raglane_dtype { RAGLANE_FLOAT32 = 0, RAGLANE_FLOAT64 = 1, RAGLANE_BFLOAT16 = 2, RAGLANE_INT8 = 3 };
enum raglane_function {
  RAGLANE_EXP = 0,
  RAGLANE_TANH = 1,
  RAGLANE_SIGMOID = 2,
  RAGLANE_EXPM1 = 3,
  RAGLANE_LOG = 4,
  RAGLANE_LOG1P = 5,
  RAGLANE_ERF = 6
};

/* How the work is divided. The results are bit-identical either way; 0 lets the kernel choose. For tests. */
enum raglane_flags {
  RAGLANE_POISON = 1,        /* fill scratch with NaN */
  RAGLANE_FOLD = 2,          /* compute input products inside the time loop */
  RAGLANE_PREPARE = 4,       /* compute all input products before it */
  RAGLANE_TEAM = 8,          /* the threads of a direction share their rows and divide the hidden units */
  RAGLANE_NO_TEAM = 16       /* every thread has rows of its own */
};

/* A struct below is a list of its fields, type and name, from which raglane_fields() follows too. All fields but a name
 * have 8 bytes, so that the layout is the same everywhere. */
#define RAGLANE_FIELD(type, name) type name;

/* A cell besides its arithmetic: a line of csrc/cells/table.h. */
#define RAGLANE_CELL_FACTS_FIELDS(FIELD)                                                                             \
  FIELD(raglane_name, name)       /* as in raglane.cells.CELLS, zero-terminated */                                   \
  FIELD(int64_t, is_elementwise)  /* 1: a unit's past is its own alone; 0: weights meet the state as a matrix */     \
  FIELD(int64_t, gates)           /* G */                                                                            \
  FIELD(int64_t, slots)           /* S: blocks of H per element in grad_gates */                                     \
  FIELD(int64_t, saved)           /* blocks of H per element in gates; 0 where gates is null */                      \
  FIELD(int64_t, has_c)           /* 1: there is a second state, c */                                                \
  FIELD(int64_t, projects)        /* 1: h may be a projection */                                                     \
  FIELD(int64_t, skips)           /* 1: the output takes up the input: as it is where D is H, else by the weights    \
                                     `skip`, with which there is one more slot, and one more saved */                \
  FIELD(int64_t, factors)         /* V: recurrent factors per unit of an element-wise cell */                        \
  FIELD(int64_t, biases)          /* blocks of H in a bias */
typedef char raglane_name[24];
typedef struct raglane_cell_facts { RAGLANE_CELL_FACTS_FIELDS(RAGLANE_FIELD) } raglane_cell_facts;

/* The facts of a cell by its number, from 0 on without gaps; RAGLANE_BAD_ARGUMENT where there is none. */
RAGLANE_EXPORT int32_t raglane_describe_cell(int64_t cell, raglane_cell_facts* facts, char* message, int64_t size);

/* Weights of one direction, as torch lays them out. Gate blocks stand in the order: LSTM i f g o; GRU r z n; IndRNN h;
 * minGRU z n; minLSTM f i n; QRNN n f o; SRU n f r. */
#define RAGLANE_WEIGHTS_FIELDS(FIELD)                                                                                \
  FIELD(const void*, input)       /* real (G * H, D) */                                                              \
  FIELD(const void*, hidden)      /* real (G * H, P). Element-wise: the factors, real (V * H): IndRNN, SRU (f r);    \
                                     null where V is 0 */                                                            \
  FIELD(const void*, input_bias)  /* real (blocks of a bias * H), SRU those of f r; or null */                       \
  FIELD(const void*, hidden_bias) /* real (G * H) or null; null if element-wise */                                   \
  FIELD(const void*, projection)  /* real (P, H); null where P is H because there is none */                         \
  FIELD(const void*, skip)        /* real (H, D): cells that skip, where D is not H; else null */
typedef struct raglane_weights { RAGLANE_WEIGHTS_FIELDS(RAGLANE_FIELD) } raglane_weights;

/* Gradients of one direction's weights, of their shapes; null where they are not wanted. */
#define RAGLANE_WEIGHT_GRADIENTS_FIELDS(FIELD)                                                                       \
  FIELD(void*, input) FIELD(void*, hidden) FIELD(void*, input_bias) FIELD(void*, hidden_bias)                        \
  FIELD(void*, projection) FIELD(void*, skip)
typedef struct raglane_weight_gradients { RAGLANE_WEIGHT_GRADIENTS_FIELDS(RAGLANE_FIELD) } raglane_weight_gradients;

/* Forward, reverse; the second is not read where K is 1. */
typedef raglane_weights raglane_weights_pair[2];
typedef raglane_weight_gradients raglane_weight_gradients_pair[2];

/* A layer's call, of either kind. "Matrix" stands for layers whose weights meet the state as a matrix, "element-wise"
 * for the others, in which P is H, and S counts the slot that comes with `skip`. */
#define RAGLANE_LAYER_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi)              /* RAGLANE_ABI */                                                                 \
  FIELD(int64_t, isa)              /* an instruction set that raglane_has_isa() confirms */                          \
  FIELD(int64_t, cell)             /* the number of one, see raglane_describe_cell() */                              \
  FIELD(int64_t, dtype)            /* raglane_dtype */                                                               \
  FIELD(int64_t, flags)            /* raglane_flags, or 0; element-wise: those of poison and teams count */          \
  FIELD(int64_t, threads)          /* at least 1 */                                                                  \
  FIELD(int64_t, directions)       /* K: 1, or 2 */                                                                  \
  FIELD(int64_t, sequences)        /* B, may be 0 */                                                                 \
  FIELD(int64_t, elements)         /* N, may be 0 */                                                                 \
  FIELD(int64_t, input_size)       /* D, at least 1 */                                                               \
  FIELD(int64_t, hidden_size)      /* H, at least 1 */                                                               \
  FIELD(int64_t, projection_size)  /* P where there is a projection, else 0 */                                       \
  FIELD(int64_t, gate_stride)      /* matrix: row length of gates and grad_gates, in reals: at least S * H, and      \
                                      S * (H rounded up to a multiple of 16) where gates are saved. Element-wise:    \
                                      not read */                                                                    \
  FIELD(int64_t, checkpoint_every) /* 0 where backward reads saved gates; else (matrix alone) it computes them       \
                                      again, for so many steps of a sequence at a time, which are all that it has in \
                                      scratch. Forward prepares no input products in scratch then. */                \
                                                                                                                     \
  FIELD(const int64_t*, offsets)   /* (B + 1), first 0, last N, never falling */                                     \
  FIELD(const void*, values)       /* real (N, D) */                                                                 \
  FIELD(const void*, initial_h)    /* real (K, B, P); null for zeros. Element-wise cells with c read that of empty   \
                                      sequences alone. */                                                            \
  FIELD(const void*, initial_c)    /* real (K, B, H); cells with c alone; null for zeros */                          \
  FIELD(raglane_weights_pair, weights)                                                                               \
  FIELD(const void*, packed)       /* forward alone: what raglane_pack made of these weights for this instruction    \
                                      set, dtype and sizes, which is read in its place; null where the call packs    \
                                      them itself */                                                                 \
                                                                                                                     \
  /* Written by forward, read by backward. */                                                                        \
  FIELD(void*, output)   /* real (N, K * P), forward then reverse in each row. May be null in forward, of a matrix   \
                            where `gates` is. Element-wise cells with c: null in backward. */                        \
  FIELD(void*, final_h)  /* real (K, B, P); forward alone */                                                         \
  FIELD(void*, final_c)  /* real (K, B, H); forward alone, cells with c alone, else null */                          \
  FIELD(void*, gates)    /* null where nothing is saved, and in forward where no backward follows. Matrix: real      \
                            (K, N, gate_stride): LSTM i f g o, GRU r z n and W_hn h + b_hn, in an order that the     \
                            kernels and the instruction set choose. Element-wise: real (K, N, saved blocks * H),     \
                            what backward reads of them, gate after gate. */                                         \
  FIELD(void*, c_states) /* c after each element, cells with c alone: real (K, N, H), element-wise (N, K * H). May   \
                            be null where `gates` is. */                                                             \
                                                                                                                     \
  /* Backward alone. Null gradients are zeros. */                                                                    \
  FIELD(const void*, grad_output)   /* real (N, K * P) or null */                                                    \
  FIELD(const void*, grad_c_states) /* of the shape of c_states, or null: cells with c alone */                      \
  FIELD(const void*, grad_final_h)  /* real (K, B, P) or null */                                                     \
  FIELD(const void*, grad_final_c)  /* real (K, B, H) or null */                                                     \
  /* With `checkpoint_every`, the next four and `gates` are not read: what would stand in them is scratch. */        \
  FIELD(void*, grad_gates)     /* out. Matrix: real (K, N, gate_stride), of which the first S * H of a row are       \
                                  written: gradients of the gates' arguments, gate after gate. With S = G + 1 (GRU:  \
                                  r, z, n, n) that of the last gate is there twice: with respect to the input        \
                                  product, and to the hidden one. Element-wise: real (K, N, S * H), gradients of the \
                                  input products. May be `gates` itself. */                                          \
  FIELD(void*, previous_h)     /* out, matrix, real (K, N, P): h before each element. May be `c_states` itself if P  \
                                  is H. */                                                                           \
  FIELD(void*, grad_h)         /* out, real (K, N, P): the whole gradient of h; with a projection alone, else null */\
  FIELD(void*, unprojected)    /* out, real (K, N, H): o * tanh(c); with a projection alone, else null */            \
  FIELD(void*, grad_skip)      /* out, real (K, N, H): what reaches the values past all products; cells that skip,   \
                                  without `skip`; else null */                                                       \
  FIELD(void*, grad_initial_h) /* out, real (K, B, P); null where it is not wanted */                                 \
  FIELD(void*, grad_initial_c) /* out, real (K, B, H); cells with c alone; null where it is not wanted */             \
  FIELD(void*, grad_values)    /* out, real (N, D), the sum over the directions; null where it is not wanted here */  \
  FIELD(raglane_weight_gradients_pair, grad_weights) /* out */
typedef struct raglane_layer { RAGLANE_LAYER_FIELDS(RAGLANE_FIELD) } raglane_layer;

/* Run a layer: outputs and final states, and with `gates` what the backward pass reads. */
RAGLANE_EXPORT int32_t raglane_forward(const raglane_layer* layer, char* message, int64_t size);

/* Walk a layer back in time: gradients of the gates' arguments and of the initial states. What is not sequential
 * (gradients of the values, weights and biases) are plain products and sums of grad_gates, made here where the call asks
 * for them. A sum's terms come in the order of memory, whatever the threads; the sums for biases and factors of an
 * element-wise layer in an order that the lengths alone decide. */
RAGLANE_EXPORT int32_t raglane_backward(const raglane_layer* layer, char* message, int64_t size);

/* Pack the weights of a layer for many calls of forward. Of the layer its sizes, isa, cell, dtype and weights are read.
 * `to`, 64-byte aligned, has `*bytes` bytes; with a null `to` they are only counted. The format is this library's, and
 * holds for this process. */
RAGLANE_EXPORT int32_t raglane_pack(const raglane_layer* layer, void* to, int64_t* bytes, char* message, int64_t size);
/* One step of any cell as data: a program of src/raglane/programs/program.py, in numbers. A call runs it over all elements
 * of a batch. A program is integers, one after another:
 *
 *   counts        blocks, weights, instructions, outputs, states, columns (of all gathers together)
 *   each block    raglane_block, width, index: of each kind but locals, the indices are 0, 1, 2 ... in any order
 *   each weight   groups, rows, depth
 *   each instruction  raglane_operation, width, segments, epsilon, weight, columns; then places: two results, three
 *                 operands; those that the operation does not have are not read
 *   each output   place, width
 *   each state    place of the next state
 *   columns       of the gathers, in the order of their instructions
 *
 * A place is four integers: block, start, spread, number; block -1 for the number. Epsilons and numbers are doubles,
 * given by their bits. */
enum raglane_block { RAGLANE_ELEMENT = 0, RAGLANE_SEQUENCE = 1, RAGLANE_STATE = 2, RAGLANE_VECTOR = 3, RAGLANE_LOCAL = 4 };
enum raglane_operation {
  RAGLANE_OF_COPY, RAGLANE_OF_NEG, RAGLANE_OF_ABS, RAGLANE_OF_SIGN, RAGLANE_OF_NOT, RAGLANE_OF_RELU, RAGLANE_OF_EXP,
  RAGLANE_OF_EXPM1, RAGLANE_OF_LOG, RAGLANE_OF_LOG1P, RAGLANE_OF_SQRT, RAGLANE_OF_RSQRT, RAGLANE_OF_RECIPROCAL,
  RAGLANE_OF_SIGMOID, RAGLANE_OF_TANH, RAGLANE_OF_ERF, RAGLANE_OF_SIN, RAGLANE_OF_COS, RAGLANE_OF_FLOOR,
  RAGLANE_OF_ROUND, RAGLANE_OF_ADD, RAGLANE_OF_SUB, RAGLANE_OF_MUL, RAGLANE_OF_DIV, RAGLANE_OF_MAX, RAGLANE_OF_MIN,
  RAGLANE_OF_LT, RAGLANE_OF_LE, RAGLANE_OF_GT, RAGLANE_OF_GE, RAGLANE_OF_EQ, RAGLANE_OF_NE, RAGLANE_OF_AND,
  RAGLANE_OF_OR, RAGLANE_OF_POW, RAGLANE_OF_SIGMOID_BACKWARD, RAGLANE_OF_TANH_BACKWARD, RAGLANE_OF_FMA,
  RAGLANE_OF_WHERE, RAGLANE_OF_ROW_SUM, RAGLANE_OF_ROW_MAX, RAGLANE_OF_NORM, RAGLANE_OF_NORM_BACKWARD,
  RAGLANE_OF_ROW_CUMSUM, RAGLANE_OF_GATHER, RAGLANE_OF_PRODUCT, RAGLANE_OPERATIONS
};

/* A tensor of a program's call. */
#define RAGLANE_TENSOR_FIELDS(FIELD)                                                                                 \
  FIELD(void*, data)              /* may be null where there are no numbers */                                       \
  FIELD(int64_t, dtype)           /* the call's; of elements and outputs of a call in float also bfloat16, widened   \
                                     when read and rounded when written */                                           \
  FIELD(raglane_strides, strides) /* of a weight from group to group, row to row, and number to number; of others    \
                                     the first alone, from row to row, whose numbers stand side by side: not below   \
                                     0, of an output at least its width */
typedef int64_t raglane_strides[3];
typedef struct raglane_tensor { RAGLANE_TENSOR_FIELDS(RAGLANE_FIELD) } raglane_tensor;

/* A program's call. `tensors` are, in this order: elements (N, width), sequences (B, width),
 * states (B, width), vectors (width), weights (groups, rows, depth), all read alone; then outputs (N, width) and final
 * states (B, width), written alone. Of each kind as many as the program has, in the order of their indices. An output
 * may be in the memory of an element's tensor, where no other output and no next state is a place of that element: a row
 * is written once nothing of it is still to be read. Otherwise nothing that is written may overlap anything. An empty
 * sequence's final states are its initial ones. */
#define RAGLANE_PROGRAM_FIELDS(FIELD)                                                                                \
  FIELD(int64_t, abi) FIELD(int64_t, isa) /* as above */                                                             \
  FIELD(int64_t, dtype)           /* RAGLANE_FLOAT32 or RAGLANE_FLOAT64: what is computed with */                    \
  FIELD(int64_t, flags)           /* raglane_flags, or 0; input products are those of elements and vectors alone */  \
  FIELD(int64_t, threads) FIELD(int64_t, sequences) FIELD(int64_t, elements) /* as above */                          \
  FIELD(int64_t, ascending)       /* 1: from a sequence's first element to its last; 0: from its last to its first */\
  FIELD(const int64_t*, offsets)  /* (B + 1), first 0, last N, never falling */                                      \
  FIELD(const int64_t*, code)     /* the program */                                                                  \
  FIELD(int64_t, code_size)       /* of how many integers */                                                         \
  FIELD(const raglane_tensor*, tensors)                                                                              \
  FIELD(int64_t, tensor_count)
typedef struct raglane_program { RAGLANE_PROGRAM_FIELDS(RAGLANE_FIELD) } raglane_program;

/* Run a program. The bits of a sequence's outputs and final states depend on that sequence, the parameters and the
 * instruction set alone. */
RAGLANE_EXPORT int32_t raglane_run_program(const raglane_program* program, char* message, int64_t size);

/* Sums over all elements, for the gradients of parameters: of outer products, and of rows. */
#define RAGLANE_OUTER_FIELDS(FIELD)                                                                                  \
  FIELD(int64_t, abi) FIELD(int64_t, isa) FIELD(int64_t, dtype) /* as above; bfloat16 too */                         \
  FIELD(int64_t, flags)                                     /* RAGLANE_POISON or 0 */                                \
  FIELD(int64_t, threads) FIELD(int64_t, elements)          /* as above */                                           \
  FIELD(int64_t, groups)                                    /* at least 1 */                                         \
  FIELD(int64_t, left_columns) FIELD(int64_t, right_columns) /* of each group, at least 1 */                         \
  FIELD(int64_t, left_stride) FIELD(int64_t, right_stride)  /* from row to row, in reals: at least 0 */              \
  FIELD(const void*, left)  /* real (N, groups * left_columns) */                                                    \
  FIELD(const void*, right) /* real (N, groups * right_columns); null where `to` is */                               \
  FIELD(void*, to)          /* out, real (groups, left_columns, right_columns): for each group the sum of the outer  \
                               products of a row of left and the row of right; null where it is not wanted */         \
  FIELD(void*, sums)        /* out, real (groups * left_columns): the sum of the rows of left; null where it is not  \
                               wanted */
typedef struct raglane_outer { RAGLANE_OUTER_FIELDS(RAGLANE_FIELD) } raglane_outer;

/* A sum's terms come in the order of memory, whatever the threads. */
RAGLANE_EXPORT int32_t raglane_outer_products(const raglane_outer* outer, char* message, int64_t size);

/* Where the rows of a batch are in another layout: a padded tensor, or the data of a pack. Rows are bytes. */
#define RAGLANE_ROWS_FIELDS(FIELD)                                                                                   \
  FIELD(int64_t, abi)          /* RAGLANE_ABI */                                                                     \
  FIELD(int64_t, threads)      /* at least 1 */                                                                      \
  FIELD(int64_t, is_pack)      /* 1 for a pack, 0 for a padded tensor */                                             \
  FIELD(int64_t, row_bytes)    /* of one element; the features of a row have no gaps */                              \
  FIELD(int64_t, sequences) FIELD(int64_t, steps) FIELD(int64_t, elements) /* B, T, N */                             \
  FIELD(int64_t, sequence_stride) FIELD(int64_t, step_stride) /* in a padded tensor, the bytes from one row to that  \
                                  of the next sequence, and of the next step; not read of a pack */                  \
  FIELD(const int64_t*, sizes) /* read by raglane_flatten alone. A padded tensor: (B), the lengths. A pack: (T), the \
                                  number of sequences that have each step */                                         \
  FIELD(const int64_t*, order) /* read by raglane_flatten alone. A pack: (B), its sequences, longest first; null     \
                                  where they stand in that order */                                                  \
  FIELD(int64_t*, offsets)     /* (B + 1), written by raglane_flatten alone, for callers that want them */           \
  FIELD(int64_t*, plan)        /* (B + 1), of a pack (2 * B + 1 + T): written by raglane_flatten, read by the other  \
                                  two: the offsets, and of a pack order and sizes, so that the way back is the way   \
                                  there whatever became of the caller's arrays. Its content is private. */           \
  FIELD(void*, flat)           /* (N), sequence after sequence */                                                    \
  FIELD(void*, table)          /* a padded tensor (T, B) or (B, T), or a pack (N) */
typedef struct raglane_rows { RAGLANE_ROWS_FIELDS(RAGLANE_FIELD) } raglane_rows;

/* Checks sizes and order, writes offsets and plan, and does what raglane_gather does. */
RAGLANE_EXPORT int32_t raglane_flatten(const raglane_rows* rows, char* message, int64_t size);
/* From the table to `flat`, by the plan that raglane_flatten wrote. */
RAGLANE_EXPORT int32_t raglane_gather(const raglane_rows* rows, char* message, int64_t size);
/* From `flat` to the table, zeros where a padded tensor has no element. Otherwise as raglane_gather. */
RAGLANE_EXPORT int32_t raglane_scatter(const raglane_rows* rows, char* message, int64_t size);

/* Where the gradients of values and weights in bfloat16 are best asked for in raglane_backward: up to this many
 * elements, with this many numbers in the weights of a direction. Beyond, a library that multiplies bfloat16 by an
 * instruction is faster. */
RAGLANE_EXPORT int64_t raglane_few_elements(void);
RAGLANE_EXPORT int64_t raglane_few_weights(void);

/* A large block of memory, of at least `bytes`, of those that wait from one call to the next: for results that only
 * raglane_backward reads. `size`: the bytes of the block. Null, and `size` 0, where there is none. */
RAGLANE_EXPORT void* raglane_take_block(int64_t bytes, int64_t* size);
/* Give back a block that is no longer read or written, with its size. */
RAGLANE_EXPORT void raglane_give_block(void* block, int64_t size);
/* From so many bytes on a block is faster than an allocator, which keeps what is smaller. */
RAGLANE_EXPORT int64_t raglane_least_block(void);

/* The name of an instruction set by its number, from 0 on, a better one after those that it is better than; null where
 * there is none. What adds to AVX-512 for bfloat16 alone runs other dtypes as AVX-512 does. */
RAGLANE_EXPORT const char* raglane_isa_name(int64_t isa);
/* 1 where this library was built with an instruction set and this processor has it, else 0. */
RAGLANE_EXPORT int32_t raglane_has_isa(int64_t isa);

/* RAGLANE_ABI of the library. */
RAGLANE_EXPORT int32_t raglane_abi(void);

/* The structs that calls pass, by their numbers from 0 on, for callers that build them number by number; null where
 * there is none. A line with the struct's name and bytes, then a line for each field: name, type and offset, in the
 * order of memory; of weights each by itself, as in `weights[1].hidden`. Types: int64, pointer, char[24]. */
RAGLANE_EXPORT const char* raglane_fields(int32_t number);

/* out[i] = function(in[i]), real (count) both, float or double: what the cells compute with, for tests. They may
 * be the same array. */
RAGLANE_EXPORT int32_t raglane_apply(int64_t isa, int64_t dtype, int64_t function, const void* in, void* out,
                                     int64_t count, char* message, int64_t size);

/* The most that products can reach: on each of `threads` threads `rounds` times as many independent fused multiply-adds,
 * in registers alone, as keep a core busy; of bfloat16, the instruction that the products of `isa` use. `operations`,
 * written, is how many additions and multiplications that were on all threads. For benchmarks, which time the call. */
RAGLANE_EXPORT int32_t raglane_multiply_registers(int64_t isa, int64_t dtype, int64_t threads, int64_t rounds,
                                                  int64_t* operations, char* message, int64_t size);

#ifdef __cplusplus
}
#endif
#endif
