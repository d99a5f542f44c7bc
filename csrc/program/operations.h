// The instructions of a program: those that are applied number by number, and those on whole rows.
//
// NOTE (bits): the bits of a number depend only on its own operands, and those of a sum on its row: incomplete vectors
// are loaded and stored partially, and the order of a sum depends only on the length of the row.
#pragma once

#include "gemm/gemm.h"
#include "program/code.h"
#include "simd/activations.h"

namespace raglane::RAGLANE_TARGET {

// The position of an operand or a result: the lanes' rows of a slot, from a column.
struct At {
  int64_t slot;   // index of the first lane's pointer in the table of rows
  int64_t start;
  int64_t step;   // 1; or 0 to repeat one column
  // Of a matrix: columns from one of its rows to the next, from a group of rows to the next; and those of a row if the
  // slot has only the rows that are computed together.
  int64_t row = 0, group = 0, back = 0;
};

// An instruction for a range of adjacent lanes, and of rows [begin, end) of its matrix: columns of a row, of which
// `segments` parts are rows of `part` columns. Others do all of their work at once.
template <class A> struct Operation {
  void (*run)(const Operation& operation, A* const* rows, int first, int count, int64_t begin, int64_t end);
  At to[2], from[3];
  int64_t width, segments, part;
  int64_t group;  // rows of a group
  bool is_flat;   // no operand depends on the row of a matrix
  bool is_matrix;
  A epsilon;
  const int64_t* runs;
};

template <class A> RAGLANE_INLINE A* row_of(const At& at, A* const* rows, int lane) {
  return rows[at.slot + lane] + at.start;
}
// The position of a row of a matrix, of rows from `begin` that are computed together.
template <class A> RAGLANE_INLINE A* matrix_row(const At& at, A* const* rows, int lane, int64_t row, int64_t group, int64_t begin) {
  return row_of(at, rows, lane) + row * at.row + group * at.group - begin * at.back;
}

// ---- one number at a time ---------------------------------------------------------------------------------------

// F::apply<A, N>(x, y, z) stores its result for N vectors of three operands in the first.
template <class A, class F, int OPERANDS>
void each(const Operation<A>& operation, A* const* rows, int first, int count, int64_t begin, int64_t end) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width, ahead = 4;
  const int64_t columns = operation.is_flat ? (end - begin) * operation.part : operation.part;
  const int64_t rows_each = operation.is_flat ? end - begin : 1;
  for (int lane = first; lane < first + count; lane++)
  for (int64_t row = begin; row < end; row += rows_each) {
    // Other instructions have one row, and this would take a tenth of their time.
    const bool is_matrix = operation.is_matrix;
    const int64_t group = is_matrix && operation.group != operation.segments ? row / operation.group : 0;
    A* to = is_matrix ? matrix_row(operation.to[0], rows, lane, row, group, begin) : row_of(operation.to[0], rows, lane);
    alignas(64) A splats[OPERANDS][width];
    const A* from[3] = {};
    int64_t step[3] = {};
#pragma GCC unroll 3
    for (int o = 0; o < OPERANDS; o++) {
      from[o] = is_matrix ? matrix_row(operation.from[o], rows, lane, row, group, begin) : row_of(operation.from[o], rows, lane);
      step[o] = operation.from[o].step;
      if (step[o] == 0) store(splats[o], splat_at(from[o])), from[o] = splats[o];
    }
    int64_t i = 0;
    for (; i + ahead * width <= columns; i += ahead * width) {
      V x[3][ahead];
#pragma GCC unroll 3
      for (int o = 0; o < OPERANDS; o++)
#pragma GCC unroll 4
        for (int v = 0; v < ahead; v++) x[o][v] = load(from[o] + (i + v * width) * step[o]);
      F::template apply<A, ahead>(x[0], x[1], x[2]);
#pragma GCC unroll 4
      for (int v = 0; v < ahead; v++) store(to + i + v * width, x[0][v]);
    }
    for (; i < columns; i += width) {
      int part = (int)(columns - i < width ? columns - i : width);
      V x[3][1];
#pragma GCC unroll 3
      for (int o = 0; o < OPERANDS; o++) x[o][0] = load(from[o] + i * step[o], step[o] ? part : width);
      F::template apply<A, 1>(x[0], x[1], x[2]);
      store(to + i, x[0][0], part);
    }
  }
}

// 1 if a comparison holds, else 0.
template <class V, class M> RAGLANE_INLINE V truth(M holds) { return holds ? V{} + 1 : V{}; }

// Operations on independent vectors. x, y, z: a vector of each operand.
#define RAGLANE_LANEWISE(name, expression)                                              \
  struct name {                                                                         \
    template <class A, int N>                                                           \
    static RAGLANE_INLINE void apply(Vec<A>* a, const Vec<A>* b, const Vec<A>* c) {     \
      using V = Vec<A>;                                                                 \
      RAGLANE_EACH {                                                                    \
        [[maybe_unused]] const V x = a[i], y = b[i], z = c[i];                          \
        a[i] = expression;                                                              \
      }                                                                                 \
    }                                                                                   \
  };
#define RAGLANE_BESIDE(name, expression)                                                 \
  struct name {                                                                         \
    template <class A, int N>                                                           \
    static RAGLANE_INLINE void apply(Vec<A>* a, const Vec<A>*, const Vec<A>*) {         \
      expression;                                                                       \
    }                                                                                   \
  };
// Number by number, by a function of the C library, for rare operations. It is called by its builtin name, because an
// inline function of C++ could be merged by the linker into one version for all instruction sets.
#define RAGLANE_BY_NUMBER(name, function, arguments)                                             \
  struct name {                                                                                  \
    template <class A, int N>                                                                    \
    static RAGLANE_INLINE void apply(Vec<A>* a, const Vec<A>* b, const Vec<A>*) {                \
      RAGLANE_EACH for (int j = 0; j < Lanes<A>::width; j++) {                                   \
        const A x = a[i][j];                                                                     \
        [[maybe_unused]] const A y = b[i][j];                                                    \
        if constexpr (sizeof(A) == 4) a[i][j] = __builtin_##function##f arguments;               \
        else a[i][j] = __builtin_##function arguments;                                           \
      }                                                                                          \
    }                                                                                            \
  };

RAGLANE_LANEWISE(Copy, x)
RAGLANE_LANEWISE(Neg, -x)
RAGLANE_LANEWISE(Abs, ((V)((typename Lanes<A>::integer)x & ~sign_bit<A>())))
RAGLANE_LANEWISE(Sign, (x > (A)0 ? splat<V>((A)1) : x < (A)0 ? splat<V>((A)-1) : x))
RAGLANE_LANEWISE(Not, truth<V>(x == (A)0))
RAGLANE_LANEWISE(Relu, at_least((A)0, x))
RAGLANE_BESIDE(Exp, (exp<A, N>(a)))
RAGLANE_BESIDE(Expm1, (expm1<A, N>(a)))
RAGLANE_LANEWISE(Log, log<A>(x))
RAGLANE_LANEWISE(Log1p, log1p<A>(x))
RAGLANE_LANEWISE(Sqrt, square_root(x))
RAGLANE_LANEWISE(Rsqrt, (A)1 / square_root(x))
RAGLANE_LANEWISE(Reciprocal, (A)1 / x)
RAGLANE_BESIDE(Sigmoid, (squash<A, N, 0>(a)))
RAGLANE_BESIDE(Tanh, (squash<A, 0, N>(a)))
RAGLANE_LANEWISE(Erf, erf<A>(x))
RAGLANE_BY_NUMBER(Sin, sin, (x))
RAGLANE_BY_NUMBER(Cos, cos, (x))
RAGLANE_BY_NUMBER(Floor, floor, (x))
RAGLANE_BY_NUMBER(Round, nearbyint, (x))
RAGLANE_LANEWISE(Add, x + y)
RAGLANE_LANEWISE(Sub, x - y)
RAGLANE_LANEWISE(Mul, x * y)
RAGLANE_LANEWISE(Div, x / y)
RAGLANE_LANEWISE(Max, (((x > y) | (x != x)) ? x : y))
RAGLANE_LANEWISE(Min, (((x < y) | (x != x)) ? x : y))
RAGLANE_LANEWISE(Lt, truth<V>(x < y))
RAGLANE_LANEWISE(Le, truth<V>(x <= y))
RAGLANE_LANEWISE(Gt, truth<V>(x > y))
RAGLANE_LANEWISE(Ge, truth<V>(x >= y))
RAGLANE_LANEWISE(Eq, truth<V>(x == y))
RAGLANE_LANEWISE(Ne, truth<V>(x != y))
RAGLANE_LANEWISE(And, truth<V>((x != (A)0) & (y != (A)0)))
RAGLANE_LANEWISE(Or, truth<V>((x != (A)0) | (y != (A)0)))
RAGLANE_BY_NUMBER(Pow, pow, (x, y))
RAGLANE_LANEWISE(SigmoidBackward, x * y * ((A)1 - y))
RAGLANE_LANEWISE(TanhBackward, x * ((A)1 - y * y))
RAGLANE_LANEWISE(Fma, fma(x, y, z))
RAGLANE_LANEWISE(Where, (x != (A)0 ? y : z))
#undef RAGLANE_LANEWISE
#undef RAGLANE_BY_NUMBER
#undef RAGLANE_BESIDE

// ---- a row at a time ----------------------------------------------------------------------------------------------

// The first `count` entries of a vector, `fill` after them.
template <class A> RAGLANE_INLINE Vec<A> first_of(Vec<A> v, int count, A fill) {
  alignas(64) A part[Lanes<A>::width];
  store(part, splat<Vec<A>>(fill));
  store(part, v, count);
  return load(part);
}

template <class F, class A, int HALF, int... I> RAGLANE_INLINE Vec<A> folded(Vec<A> v, Integers<I...> all) {
  v = F::join(v, (Vec<A>)__builtin_shufflevector(v, v, (I ^ HALF)...));
  if constexpr (HALF > 1) return folded<F, A, HALF / 2>(v, all);
  else return v;
}

struct Summing {
  template <class V> static RAGLANE_INLINE V join(V x, V y) { return x + y; }
};
struct Largest {
  template <class V> static RAGLANE_INLINE V join(V x, V y) { return ((x > y) | (x != x)) ? x : y; }
};

// Reduce vector_at(i, count) for i = 0, width, 2 * width ...; every entry of the result is the total. Four vectors
// are reduced in parallel, then these four, then their entries.
template <class F, class A, class At> RAGLANE_INLINE Vec<A> reduced(int64_t columns, A neutral, At&& vector_at) {
  constexpr int width = Lanes<A>::width;
  Vec<A> four[4];
  for (Vec<A>& one : four) one = splat<Vec<A>>(neutral);
  int64_t i = 0;
  for (; i + 4 * width <= columns; i += 4 * width)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) four[v] = F::join(four[v], vector_at(i + v * width, width));
#pragma GCC unroll 4
  for (int v = 0; v < 4; v++, i += width) {
    if (i >= columns) break;
    int count = (int)(columns - i < width ? columns - i : width);
    Vec<A> here = vector_at(i, count);
    four[v] = F::join(four[v], count < width ? first_of<A>(here, count, neutral) : here);
  }
  Vec<A> all = F::join(F::join(four[0], four[1]), F::join(four[2], four[3]));
  return folded<F, A, width / 2>(all, typename UpTo<width>::type{});
}

// Call body(i, count) for the vectors of a range of columns.
template <class A, class Body> RAGLANE_INLINE void by_vectors(int64_t columns, Body&& body) {
  constexpr int width = Lanes<A>::width;
  int64_t i = 0;
  for (; i + width <= columns; i += width) body(i, width);
  if (i < columns) body(i, (int)(columns - i));
}

template <class A> void row_sum(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++) {
    const A* a = row_of(operation.from[0], rows, lane);
    A* to = row_of(operation.to[0], rows, lane);
    for (int64_t s = 0; s < operation.segments; s++, a += part)
      to[s] = reduced<Summing, A>(part, 0, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { return load(a + i, n); })[0];
  }
}

// Sums of products of a matrix's numbers along its rows.
template <class A> void row_dot(const Operation<A>& operation, A* const* rows, int first, int count, int64_t begin, int64_t end) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++)
    for (int64_t row = begin; row < end; row++) {
      const int64_t group = operation.group == operation.segments ? 0 : row / operation.group;
      alignas(64) A splats[2][width];
      const A* from[2];
      int64_t step[2];
#pragma GCC unroll 2
      for (int o = 0; o < 2; o++) {
        from[o] = matrix_row(operation.from[o], rows, lane, row, group, begin), step[o] = operation.from[o].step;
        if (step[o] == 0) store(splats[o], splat_at(from[o])), from[o] = splats[o];
      }
      V four[4] = {};
      int64_t i = 0;
      for (; i + 4 * width <= part; i += 4 * width)
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++)
          four[v] = fma(load(from[0] + (i + v * width) * step[0]), load(from[1] + (i + v * width) * step[1]), four[v]);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++, i += width) {
        if (i >= part) break;
        const int n = (int)(part - i < width ? part - i : width);
        V x = load(from[0] + i * step[0], step[0] ? n : width), y = load(from[1] + i * step[1], step[1] ? n : width);
        if (n < width) x = first_of<A>(x, n, 0), y = first_of<A>(y, n, 0);
        four[v] = fma(x, y, four[v]);
      }
      V all = (four[0] + four[1]) + (four[2] + four[3]);
      *matrix_row(operation.to[0], rows, lane, row, group, begin) =
          folded<Summing, A, width / 2>(all, typename UpTo<width>::type{})[0];
    }
}

// The same along its columns, for rows of one group; `is_first`: sums begin with them.
template <class A, bool SPLAT_X, bool SPLAT_Y>
void add_rows(A* to, const A* x, const A* y, int64_t x_row, int64_t y_row, int64_t columns, int64_t count,
                             bool is_first) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width, ahead = 4;
  int64_t i = 0;
  for (; i + ahead * width <= columns; i += ahead * width) {
    V sums[ahead] = {};
    if (!is_first)
#pragma GCC unroll 4
      for (int v = 0; v < ahead; v++) sums[v] = load(to + i + v * width);
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 4
      for (int v = 0; v < ahead; v++)
        sums[v] = fma(SPLAT_X ? splat_at(x + r * x_row) : load(x + r * x_row + i + v * width),
                      SPLAT_Y ? splat_at(y + r * y_row) : load(y + r * y_row + i + v * width), sums[v]);
#pragma GCC unroll 4
    for (int v = 0; v < ahead; v++) store(to + i + v * width, sums[v]);
  }
  for (; i < columns; i += width) {
    const int n = (int)(columns - i < width ? columns - i : width);
    V sum = {};
    if (!is_first) sum = load(to + i, n);
    for (int64_t r = 0; r < count; r++)
      sum = fma(SPLAT_X ? splat_at(x + r * x_row) : load(x + r * x_row + i, n),
                SPLAT_Y ? splat_at(y + r * y_row) : load(y + r * y_row + i, n), sum);
    store(to + i, sum, n);
  }
}
template <class A> void column_dot(const Operation<A>& operation, A* const* rows, int first, int count, int64_t begin, int64_t end) {
  const At &x = operation.from[0], &y = operation.from[1];
  for (int lane = first; lane < first + count; lane++)
    for (int64_t row = begin, next; row < end; row = next) {
      const int64_t group = row / operation.group, group_end = (group + 1) * operation.group;
      next = group_end < end ? group_end : end;
      A* to = matrix_row(operation.to[0], rows, lane, row, group, begin);
      const A *a = matrix_row(x, rows, lane, row, group, begin), *b = matrix_row(y, rows, lane, row, group, begin);
      auto add = x.step ? y.step ? add_rows<A, false, false> : add_rows<A, false, true>
                 : y.step ? add_rows<A, true, false> : add_rows<A, true, true>;
      add(to, a, b, x.row, y.row, operation.part, next - row, row == group * operation.group);
    }
}

template <class A> void row_max(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++) {
    const A* a = row_of(operation.from[0], rows, lane);
    A* to = row_of(operation.to[0], rows, lane);
    for (int64_t s = 0; s < operation.segments; s++, a += part)
      to[s] = reduced<Largest, A>(part, -Logarithm<A>::infinity,
                                  [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { return load(a + i, n); })[0];
  }
}

template <class A> void norm(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  using V = Vec<A>;
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++) {
    const A* a = row_of(operation.from[0], rows, lane);
    A* to = row_of(operation.to[0], rows, lane);
    A* scales = row_of(operation.to[1], rows, lane);
    for (int64_t s = 0; s < operation.segments; s++, a += part, to += part) {
      V mean = reduced<Summing, A>(part, 0, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { return load(a + i, n); });
      mean = mean / (A)part;
      V variance = reduced<Summing, A>(part, 0, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA {
        V centred = load(a + i, n) - mean;
        return centred * centred;
      });
      V scale = (A)1 / square_root(variance / (A)part + operation.epsilon);
      by_vectors<A>(part, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { store(to + i, (load(a + i, n) - mean) * scale, n); });
      scales[s] = scale[0];
    }
  }
}

template <class A> void norm_backward(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  using V = Vec<A>;
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++) {
    const A* g = row_of(operation.from[0], rows, lane);
    const A* y = row_of(operation.from[1], rows, lane);
    const A* scales = row_of(operation.from[2], rows, lane);
    A* to = row_of(operation.to[0], rows, lane);
    for (int64_t s = 0; s < operation.segments; s++, g += part, y += part, to += part) {
      V mean = reduced<Summing, A>(part, 0, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { return load(g + i, n); });
      V along = reduced<Summing, A>(
          part, 0, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { return load(g + i, n) * load(y + i, n); });
      mean = mean / (A)part, along = along / (A)part;
      V scale = splat<V>(scales[s]);
      by_vectors<A>(part, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA {
        store(to + i, scale * (load(g + i, n) - mean - load(y + i, n) * along), n);
      });
    }
  }
}

template <class A> void row_cumsum(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  const int64_t part = operation.part;
  for (int lane = first; lane < first + count; lane++) {
    const A* a = row_of(operation.from[0], rows, lane);
    A* to = row_of(operation.to[0], rows, lane);
    for (int64_t s = 0; s < operation.segments; s++, a += part, to += part) {
      A sum = 0;
      for (int64_t i = 0; i < part; i++) to[i] = sum += a[i];
    }
  }
}

template <class A> void gather(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  for (int lane = first; lane < first + count; lane++) {
    const A* a = row_of(operation.from[0], rows, lane);
    A *to = row_of(operation.to[0], rows, lane), *end = to + operation.width;
    for (const int64_t* run = operation.runs; to < end; to += run[1], run += 2) {
      if (run[1] == 1) *to = a[run[0]];
      else by_vectors<A>(run[1], [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { store(to + i, load(a + run[0] + i, n), n); });
    }
  }
}

// Conversions from and to the caller's rows of bfloat16.
template <class A> void widen(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  if constexpr (sizeof(A) == 4)
    for (int lane = first; lane < first + count; lane++) {
      const bfloat16* from = (const bfloat16*)rows[operation.from[0].slot + lane];
      A* to = row_of(operation.to[0], rows, lane);
      by_vectors<A>(operation.width, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA { store(to + i, load(from + i, n), n); });
    }
}
template <class A> void round_off(const Operation<A>& operation, A* const* rows, int first, int count, int64_t, int64_t) {
  if constexpr (sizeof(A) == 4)
    for (int lane = first; lane < first + count; lane++) {
      const A* from = row_of(operation.from[0], rows, lane);
      const int64_t step = operation.from[0].step;
      bfloat16* to = (bfloat16*)rows[operation.to[0].slot + lane];
      by_vectors<A>(operation.width, [&](int64_t i, int n) RAGLANE_INLINE_LAMBDA {
        store(to + i, step ? load(from + i, n) : splat_at(from), n);
      });
    }
}

// By raglane_operation; null for products, which process all lanes together.
template <class A> using Run = void (*)(const Operation<A>&, A* const*, int, int, int64_t, int64_t);
template <class A> Run<A> run_of(int64_t operation) {
  static constexpr Run<A> table[RAGLANE_OPERATIONS] = {
      each<A, Copy, 1>, each<A, Neg, 1>, each<A, Abs, 1>, each<A, Sign, 1>, each<A, Not, 1>, each<A, Relu, 1>,
      each<A, Exp, 1>, each<A, Expm1, 1>, each<A, Log, 1>, each<A, Log1p, 1>, each<A, Sqrt, 1>, each<A, Rsqrt, 1>,
      each<A, Reciprocal, 1>, each<A, Sigmoid, 1>, each<A, Tanh, 1>, each<A, Erf, 1>, each<A, Sin, 1>, each<A, Cos, 1>,
      each<A, Floor, 1>, each<A, Round, 1>, each<A, Add, 2>, each<A, Sub, 2>,
      each<A, Mul, 2>, each<A, Div, 2>, each<A, Max, 2>, each<A, Min, 2>, each<A, Lt, 2>, each<A, Le, 2>,
      each<A, Gt, 2>, each<A, Ge, 2>, each<A, Eq, 2>, each<A, Ne, 2>, each<A, And, 2>, each<A, Or, 2>, each<A, Pow, 2>,
      each<A, SigmoidBackward, 2>, each<A, TanhBackward, 2>, each<A, Fma, 3>, each<A, Where, 3>, row_sum<A>,
      row_max<A>, norm<A>, norm_backward<A>, row_cumsum<A>, row_dot<A>,
      column_dot<A>, gather<A>, nullptr};
  return table[operation];
}

}  // namespace raglane::RAGLANE_TARGET
