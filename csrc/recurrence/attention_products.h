// Linear attention, backward by products of matrices, for decays of each head. A span is the steps from a border or a reset
// to the next. With S the state before it, G the gradient of that after it, D[t, s] the product of the decays after step s
// up to t, and rows q, k, v times its gain, and o, the gradients of outputs before the scale:
//   W = D * (q k'), Z = D * (o v'), both lower triangular
//   gradients of v times gain: W' o + D[last] k G;  of k: Z' q + D[last] v G';  of q: Z k + D[., first] o S'
//   that of the decay of a step: the sums over what passes it, of the elements of W * (o v') and of products with S and G
// The delta rule writes errors in place of v, each of which read the state before it by k. So k is a second reader, like q,
// below the diagonal alone; its o, the gradients of v with the other sign, are found from the last step to the first.
// All of these products are of numbers of the span, so that a decay of 0 is exact, and no decay is divided by.
#pragma once

#include "gemm/gemm.h"
#include "recurrence/attention_backward.h"

namespace raglane::RAGLANE_TARGET {

// A matrix whose numbers are broadcast: that of row r and depth k is data[r * row + k * step].
template <class A> struct Broadcast {
  const A* data;
  int64_t row, step;
};
// The part of the depth that a tile of rows reads, of a triangular matrix.
enum class Reach { all, from_row, to_row };

inline constexpr int rows_at_once = 4;

// Rows of `to` += those of a times b, whose rows are vectors. `fresh`: from zeros in place of `to`, otherwise from `to` times
// `factor`.
template <int N, class A>
RAGLANE_INLINE void multiply_rows(A* to, int64_t stride, bool fresh, A factor, const Broadcast<A>& a, const A* b, int64_t b_stride,
                                  int64_t begin, int64_t end) {
  using V = Vec<A>;
  constexpr int width = Lanes<A>::width;
  V sums[rows_at_once][N];
#pragma GCC unroll 4
  for (int r = 0; r < rows_at_once; r++)
    RAGLANE_EACH sums[r][i] = fresh ? V{} : factor * load(to + r * stride + i * width);
  for (int64_t k = begin; k < end; k++) {
    V row[N];
    RAGLANE_EACH row[i] = load(b + k * b_stride + i * width);
#pragma GCC unroll 4
    for (int r = 0; r < rows_at_once; r++) {
      const V x = splat_at(a.data + r * a.row + k * a.step);
      RAGLANE_EACH sums[r][i] = fma(x, row[i], sums[r][i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows_at_once; r++)
    RAGLANE_EACH store(to + r * stride + i * width, sums[r][i]);
}

// The same for many rows, up to whole tiles, and vectors.
template <class A>
void multiply_all(A* to, int64_t stride, bool fresh, A factor, Broadcast<A> a, const A* b, int64_t b_stride, int64_t rows,
                  int64_t columns, int64_t depth, Reach reach = Reach::all) {
  constexpr int width = Lanes<A>::width, most = registers == 32 ? 4 : 2;
  for (int64_t column = 0; column < columns;) {
    const int64_t vectors = (columns - column + width - 1) / width;
    const int N = vectors >= most ? most : vectors >= 2 ? 2 : 1;
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      const Broadcast<A> tile{a.data + row * a.row, a.row, a.step};
      const int64_t begin = reach == Reach::from_row ? row : 0;
      const int64_t end = reach == Reach::to_row && row + rows_at_once < depth ? row + rows_at_once : depth;
      A* place = to + row * stride + column;
      if (N == 4) multiply_rows<most>(place, stride, fresh, factor, tile, b + column, b_stride, begin, end);
      else if (N == 2) multiply_rows<2>(place, stride, fresh, factor, tile, b + column, b_stride, begin, end);
      else multiply_rows<1>(place, stride, fresh, factor, tile, b + column, b_stride, begin, end);
    }
    column += N * width;
  }
}

// Transpose rows of whole vectors, as many as whole vectors have.
template <class A>
void transpose_all(A* to, int64_t to_stride, const A* from, int64_t from_stride, int64_t rows, int64_t columns) {
  for (int64_t row = 0; row < rows; row += Lanes<A>::width)
    Panels<A>::pack_squares(from + row * from_stride, from_stride, columns, to + row, to_stride);
}

template <class S> class AttentionBackward<S>::Products : Task {
  using Task::b_, Task::begin_, Task::c_, Task::count_, Task::end_block_, Task::end_head_, Task::factors_, Task::first_;
  using Task::first_block_, Task::first_head_, Task::grad_k_, Task::grad_q_, Task::k_, Task::l_, Task::length_;
  using Task::part_of, Task::q_, Task::split_, Task::take;

 public:
  Products(const AttentionBackward& loops, int64_t number, A* scratch) : Task(loops, number, scratch), keys_(loops.padded_) {
    const int64_t end = end_block_ * columns < c_.value_size ? end_block_ * columns : c_.value_size;
    first_column_ = first_block_ * columns, values_ = end - first_column_;
    has_normaliser_ = c_.log_gain && split_ == 0;
    width_ = values_ + has_normaliser_, columns_ = whole(width_);
    k_columns_ = take(border * keys_), read_ = take(border * keys_);
    raw_ = take(border * columns_), v_ = take(border * columns_), grad_v_ = take(border * columns_);
    v_columns_ = take(border * columns_);
    passing_ = take(border * border), decays_ = take(border * border);
    readers_[0] = reader(q_, grad_q_);
    if (c_.delta) readers_[1] = reader(k_, grad_k_);
    state_ = take(columns_ * keys_), after_columns_ = take(columns_ * keys_);
    afters_ = take((end_head_ - first_head_) * columns_ * keys_), levels_ = take(end_head_ - first_head_);
  }
  static int64_t numbers(const AttentionBackward& l) {
    const int64_t values = whole(l.most_blocks() * columns + 1);
    return Task::numbers(l) + border * (2 * l.padded_ + 6 * values + 8 * border) + values * l.padded_ * (2 + l.most_heads()) +
           whole_vectors<A>(l.most_heads());
  }

  void run() {
    each_head([&](int64_t head, A* after) {
      read(after, state_of(head, c_.grad_final, c_.grad_final_normaliser), 0, keys_);
      if (has_normaliser_) levels_[head - first_head_] = l_.of_last_level(b_ * c_.heads + head);
    });
    has_after_ = c_.grad_final || c_.grad_final_normaliser;
    for (int64_t end = length_; end > 0; end = first_ - begin_) {
      const int64_t least = (end - 1) / border * border;
      int64_t from = end - 1;
      while (from > least && !l_.resets(begin_ + from)) from--;
      first_ = begin_ + from, count_ = (int)(end - from);
      run_span(from);
    }
    each_head([&](int64_t head, const A* after) { write(after, head); });
  }

 private:
  const int64_t keys_;  // numbers of a row of keys in scratch
  int64_t first_column_, values_, width_, columns_;  // the columns of v of this split; with a normaliser; in whole vectors
  bool has_normaliser_, has_after_, has_state_ = false, is_reset_ = false;
  // Rows of keys and of columns of v, and their transposes; D, W * (o v'); states, (columns, keys) but afters_.
  A *k_columns_, *read_, *raw_, *v_, *grad_v_, *v_columns_, *passing_, *decays_, *state_, *after_columns_, *afters_;
  // Rows that read the states, their gradients, and o; products with k, W and Z.
  struct Reader {
    const A* rows;
    A *grad, *o, *scores, *weights, *errors;
  };
  Reader readers_[2];  // q; with the delta rule k
  A* levels_;  // gradients of the stabilisers of heads after the span
  A passed_[border], from_state_[border], from_after_[border], of_levels_[border];

  static int64_t whole(int64_t columns) { return (whole_vectors<A>(columns) + rows_at_once - 1) / rows_at_once * rows_at_once; }
  template <class Visit> void each_head(Visit&& visit) const {
    for (int64_t head = first_head_; head < end_head_; head++) visit(head, afters_ + (head - first_head_) * columns_ * keys_);
  }
  Reader reader(const A* rows, A* grad) {
    const int64_t square = border * border;
    return {rows, grad, take(border * columns_), take(square), take(square), take(square)};
  }
  bool is_strict(const Reader& reader) const { return reader.rows == k_; }
  template <class Visit> void each_reader(Visit&& visit) const {
    visit(readers_[0]);
    if (c_.delta) visit(readers_[1]);
  }
  // Rows of scratch with numbers that count.
  int64_t rows() const { return whole(count_); }

  // A state (K, V) and its normaliser (K), each of which may be null for zeros.
  struct State {
    const A *state, *normaliser;
  };
  State state_of(int64_t head, const void* states, const void* normalisers) const {
    const int64_t at = b_ * c_.heads + head;
    return {states ? (const A*)states + at * l_.state_size() : nullptr,
            normalisers && has_normaliser_ ? (const A*)normalisers + at * c_.key_size : nullptr};
  }
  // Its rows of some keys to scratch (keys, columns), the normaliser after the columns of v.
  void read(A* to, const State& from, int64_t first, int64_t count) const {
    memset((void*)to, 0, count * columns_ * sizeof(A));
    for (int64_t key = first; key < first + count && key < c_.key_size; key++, to += columns_) {
      if (from.state) copy_row(to, from.state + key * c_.value_size + first_column_, values_);
      if (from.normaliser) to[values_] = from.normaliser[key];
    }
  }
  void write(const A* from, int64_t head) const {
    const int64_t at = b_ * c_.heads + head;
    A *states = (A*)c_.grad_initial, *normalisers = (A*)c_.grad_initial_normaliser;
    for (int64_t key = 0; key < c_.key_size; key++) {
      if (states)
        memcpy((void*)(states + at * l_.state_size() + key * c_.value_size + first_column_), from + key * columns_, values_ * sizeof(A));
      if (normalisers && has_normaliser_) normalisers[at * c_.key_size + key] = from[key * columns_ + values_];
    }
  }

  void run_span(int64_t from) {
    Task::begin_rows();
    const void* const arrays[] = {c_.q, c_.k, c_.grad_q, c_.grad_k};
    for (const void* array : arrays) fetch_before(array, c_.key_heads * c_.key_size, Task::key_head_ * c_.key_size, c_.key_size);
    transpose_all(k_columns_, border, k_, keys_, whole_vectors<A>(count_), keys_);
    each_reader([&](const Reader& reader) {
      multiply_all(reader.scores, border, true, (A)0, {reader.rows, keys_, 1}, k_columns_, border, rows(), count_, keys_);
    });
    is_reset_ = l_.resets(first_);
    has_state_ = !is_reset_ && (from > 0 || c_.initial || c_.initial_normaliser);
    each_head([&](int64_t head, A* after) { run_head(head, from, after); });
    has_after_ = !is_reset_;
    Task::end_rows();
  }

  void run_head(int64_t head, int64_t from, A* after) {
    A level = c_.log_gain ? level_before(first_, head) : 0;
    l_.find_factors(factors_, first_, count_, head, level);
    read_columns(head);
    const void* const arrays[] = {c_.v, c_.grad_output, c_.grad_v, has_normaliser_ ? c_.output : nullptr};
    for (const void* array : arrays) fetch_before(array, c_.heads * c_.value_size, head * c_.value_size + first_column_, values_);
    if (first_ - border > begin_)
      fetch_rows<A>(l_.border_at(b_, first_ - border, head), first_column_, c_.value_size, c_.key_size, values_);
    transpose_all(v_columns_, border, v_, columns_, whole_vectors<A>(count_), columns_);
    find_passing();
    each_reader([&](const Reader& reader) { weigh(reader); });
    find_values(head, after);
    memset((void*)decays_, 0, border * border * sizeof(A));
    each_reader([&](const Reader& reader) { find_errors(reader); });
    find_keys(after);
    if (has_state_) read_state(head, from);
    memset((void*)from_state_, 0, sizeof from_state_);
    each_reader([&](const Reader& reader) { find_queries(reader); });
    find_decays(head);
    if (has_normaliser_) add_levels(head);
    if (is_reset_) memset((void*)after, 0, columns_ * keys_ * sizeof(A));
    else if (from > 0 || c_.grad_initial || c_.grad_initial_normaliser) pass(after);
  }

  // Bring rows of the steps before the span, or of a state, to the caches.
  void fetch_before(const void* array, int64_t stride, int64_t column, int64_t count) const {
    const int64_t rows = first_ - begin_ < border ? first_ - begin_ : border;
    fetch_rows<S>(array, (first_ - rows) * stride + column, stride, rows, count);
  }
  template <class T> void fetch_rows(const void* array, int64_t at, int64_t stride, int64_t rows, int64_t count) const {
    for (int64_t row = 0; row < rows; row++)
      for (int64_t i = 0; i < count; i += 64 / sizeof(T)) fetch<T, true>(array, at + row * stride + i);
  }

  // v, v times its gain, and gradients of outputs before the division and the scale; the columns of a normaliser get ones.
  void read_columns(int64_t head) {
    const int64_t all = border * columns_ * sizeof(A);
    memset((void*)raw_, 0, all), memset((void*)v_, 0, all), memset((void*)readers_[0].o, 0, all);
    for (int t = 0; t < count_; t++) {
      const int64_t row = (first_ + t) * c_.heads + head, at = row * c_.value_size + first_column_;
      const A divisor = c_.log_gain ? l_.divisor(((const A*)c_.reads)[row], factors_.floor[t]) : 1, factor = (A)c_.scale / divisor;
      A *raw = raw_ + t * columns_, *v = v_ + t * columns_, *o = readers_[0].o + t * columns_;
      if (c_.delta) copy_row(raw, (const A*)c_.errors + at, values_);
      else copy_row(raw, (const S*)c_.v + at, values_);
      copy_row(v, raw, values_, factors_.gain[t]);
      if (c_.grad_output) copy_row(o, (const S*)c_.grad_output + at, values_, factor);
      if (!has_normaliser_) continue;
      raw[values_] = 1, v[values_] = factors_.gain[t];
      const A read = ((const A*)c_.reads)[row], size = read < 0 ? -read : read;
      const bool divides = size > factors_.floor[t] || size != size;
      const A product = l_.product_of_outputs(row);
      of_levels_[t] = product * ((A)c_.eps / divisor);
      if (divides) o[values_] = -(read < 0 ? -factor : factor) * product;
    }
  }

  // D, whose rows are steps t. from_after_: D[last].
  void find_passing() {
    constexpr int N = border / width;
    V row[N] = {}, lane[N];
    find_lanes(lane);
    A passed = 1;
    for (int t = 0; t < count_; t++) {
      const A decay = factors_.decay[t];
      passed_[t] = passed = passed * decay;
      RAGLANE_EACH row[i] = lane[i] == splat<V>((A)t) ? splat<V>((A)1) : row[i] * decay;
      RAGLANE_EACH store(passing_ + t * border + i * width, row[i]);
    }
    RAGLANE_EACH store(from_after_ + i * width, row[i]);
  }
  void weigh(const Reader& reader) const {
    end_with_zeros(reader.weights);
    each_vector(reader, [&](int at, auto is_read) {
      store(reader.weights + at, is_read ? load(passing_ + at) * load(reader.scores + at) : V{});
    });
  }
  void find_errors(const Reader& reader) const {
    multiply_all(reader.errors, border, true, (A)0, {reader.o, columns_, 1}, v_columns_, border, rows(), count_, width_);
    end_with_zeros(reader.errors);
    each_vector(reader, [&](int at, auto is_read) {
      const V error = load(reader.errors + at), decayed = load(reader.weights + at) * error;
      store(reader.errors + at, is_read ? load(passing_ + at) * error : V{});
      store(decays_ + at, load(decays_ + at) + (is_read ? decayed : V{}));
    });
  }
  void end_with_zeros(A* square) const { memset((void*)(square + count_ * border), 0, (rows() - count_) * border * sizeof(A)); }
  // Of rows of steps: where each is, and which of its columns are steps that the reader reads.
  template <class Visit> void each_vector(const Reader& reader, Visit&& visit) const {
    constexpr int N = border / width;
    V lane[N];
    find_lanes(lane);
    const int strict = is_strict(reader);
    for (int t = 0; t < count_; t++)
      RAGLANE_EACH visit(t * border + i * width, lane[i] <= splat<V>((A)(t - strict)));
  }
  template <int N> static void find_lanes(V (&lane)[N]) {
    A numbers[border];
    for (int i = 0; i < border; i++) numbers[i] = (A)i;
    RAGLANE_EACH lane[i] = load(numbers + i * width);
  }

  // from_after_: the products of k G with v, in place of D[last].
  void find_values(int64_t head, const A* after) {
    if (has_after_) multiply_all(grad_v_, columns_, true, (A)0, {k_, keys_, 1}, after, columns_, rows(), columns_, c_.key_size);
    for (int t = 0; t < count_; t++) {
      A *grad = grad_v_ + t * columns_, *v = v_ + t * columns_;
      const V tail = splat<V>(from_after_[t]);
      V sum{};
      for (int64_t i = 0; has_after_ && i < columns_; i += width) {
        const V g = load(grad + i) * tail, its = load(v + i);
        sum = fma(g, its, sum);
        store(grad + i, g), store(v + i, its * tail);
      }
      from_after_[t] = sum_of(sum);
    }
    const Reader& queries = readers_[0];
    multiply_all(grad_v_, columns_, !has_after_, (A)1, {queries.weights, 1, border}, queries.o, columns_, rows(), columns_, count_,
                 Reach::from_row);
    if (c_.delta) find_reads();
    for (int t = 0; t < count_; t++) {
      const A *grad = grad_v_ + t * columns_, gain = factors_.gain[t], total = dot(grad, raw_ + t * columns_, 0, columns_);
      l_.gain_parts_[part_of(t, head)] = c_.log_gain ? total * gain : total;
      if (!c_.grad_v) continue;
      S* to = (S*)c_.grad_v + ((first_ + t) * c_.heads + head) * c_.value_size + first_column_;
      in_vectors<A>(values_, [&](int64_t i, int lanes) { store(to + i, gain * load(grad + i), lanes); });
    }
  }

  // o of the errors, whose gradients are complete when those of the steps after them are.
  void find_reads() const {
    const Reader& reads = readers_[1];
    for (int t = count_ - 1; t >= 0; t--) {
      A *grad = grad_v_ + t * columns_, *o = reads.o + t * columns_;
      const V factor = splat<V>(-factors_.gain[t]);
      for (int64_t i = 0; i < columns_; i += width) {
        V sum = load(grad + i);
        for (int s = t + 1; s < count_; s++) sum = fma(splat_at(reads.weights + s * border + t), load(reads.o + s * columns_ + i), sum);
        store(grad + i, sum), store(o + i, factor * sum);
      }
    }
  }

  void find_keys(const A* after) {
    if (has_after_) {
      transpose_all(after_columns_, keys_, after, columns_, keys_, columns_);
      multiply_all(grad_k_, keys_, false, (A)1, {v_, columns_, 1}, after_columns_, keys_, rows(), keys_, width_);
    }
    each_reader([&](const Reader& reader) {
      multiply_all(grad_k_, keys_, false, (A)1, {reader.errors, 1, border}, reader.rows, keys_, rows(), keys_, count_, Reach::from_row);
    });
  }

  // Adds the products of rows S with o to from_state_; o gets the decays since the first step.
  void find_queries(const Reader& reader) {
    if (has_state_) multiply_all(read_, keys_, true, (A)0, {reader.o, columns_, 1}, state_, keys_, rows(), keys_, width_);
    for (int t = 0; t < count_; t++) {
      A *grad = reader.grad + t * keys_, *read = read_ + t * keys_, *o = reader.o + t * columns_;
      const V passed = splat<V>(passed_[t]);
      V sum{};
      for (int64_t i = 0; has_state_ && i < keys_; i += width) {
        const V g = load(read + i) * passed;
        sum = fma(g, load(reader.rows + t * keys_ + i), sum);
        store(grad + i, load(grad + i) + g);
      }
      from_state_[t] += sum_of(sum);
      for (int64_t i = 0; i < columns_; i += width) store(o + i, load(o + i) * passed);
    }
    multiply_all(reader.grad, keys_, false, (A)1, {reader.errors, border, 1}, k_, keys_, rows(), keys_, count_, Reach::to_row);
  }
  // The gradient of the state before the span.
  void pass(A* after) const {
    bool is_fresh = !has_after_;
    A factor = passed_[count_ - 1];
    each_reader([&](const Reader& reader) {
      multiply_all(after, columns_, is_fresh, factor, {reader.rows, 1, keys_}, reader.o, columns_, keys_, columns_, count_);
      is_fresh = false, factor = 1;
    });
  }
  // The state before the span, transposed.
  void read_state(int64_t head, int64_t from) const {
    State state = state_of(head, c_.initial, c_.initial_normaliser);
    if (from > 0) state = {l_.border_at(b_, first_, head), has_normaliser_ ? l_.normaliser_border_at(b_, first_, head) : nullptr};
    A* rows = grad_v_;  // some keys at a time
    for (int64_t first = 0; first < keys_; first += width) {
      read(rows, state, first, width);
      transpose_all(state_ + first, keys_, rows, columns_, width, columns_);
    }
  }

  void find_decays(int64_t head) {
    if (!c_.log_decay && !c_.log_gain) return;
    constexpr int N = border / width;
    A across = 0, leaving[border];
    V sums[N] = {}, lane[N];
    find_lanes(lane);
    if (has_state_ && has_after_) across = passed_[count_ - 1] * dot(state_, after_columns_, 0, columns_ * keys_);
    leaving[0] = across;
    for (int t = 1; t < count_; t++) leaving[t] = leaving[t - 1] + from_after_[t - 1];
    A entering = 0;
    for (int t = count_ - 1; t >= 0; t--) {
      V inside{};
      RAGLANE_EACH {
        sums[i] = sums[i] + load(decays_ + t * border + i * width);
        inside = inside + (lane[i] < splat<V>((A)t) ? sums[i] : V{});
      }
      entering += from_state_[t];
      l_.decay_parts_[part_of(t, head)] = sum_of(inside) + entering + leaving[t];
    }
  }

  A level_before(int64_t row, int64_t head) const {
    return row > begin_ ? ((const A*)c_.levels)[(row - 1) * c_.heads + head] : l_.number(c_.initial_stabiliser, b_ * c_.heads + head);
  }
  // The gradients of the stabiliser, which without eps would be zeros: a factor of the states and of the divisor would
  // cancel. They go to the larger one of the two numbers of which it is the maximum.
  void add_levels(int64_t head) {
    A& grad = levels_[head - first_head_];
    for (int t = count_ - 1; t >= 0; t--) {
      const int64_t row = first_ + t;
      const auto levels = l_.levels_of(row, head, level_before(row, head));
      const bool stays = levels.before == levels.after;
      grad -= of_levels_[t];
      (stays ? l_.decay_parts_ : l_.gain_parts_)[part_of(t, head)] += grad;
      if (!stays || l_.resets(row)) grad = 0;
    }
  }
};

}  // namespace raglane::RAGLANE_TARGET
