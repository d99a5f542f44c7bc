// The selective scan, forward and backward; raglane.h has its equations.
//
// The lanes of a vector are channels of one group. A task is a group of sequences times a set of such blocks of channels.
// It runs through each sequence in segments from border to border, and through a segment block by block, some states at
// a time, which stay in registers. Backward computes the states of a segment again, and keeps them in scratch.
#pragma once

#include "recurrence/tasks.h"

namespace raglane::RAGLANE_TARGET {

template <class S> class SelectiveLoops {
 public:
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;

  explicit SelectiveLoops(const SelectiveScan& call) : call_(call), c_(*call.call) {
    const int64_t groups = c_.groups, blocks = (per_group() + width - 1) / width;
    const int64_t wanted = (least_sets + groups - 1) / groups, needed = (blocks + most_blocks - 1) / most_blocks;
    sets_ = wanted > blocks ? blocks : wanted;
    if (sets_ < needed) sets_ = needed;
    blocks_ = blocks;
  }

  int32_t forward() {
    return run_tasks<A>(c_.threads, tasks(), forward_numbers(), poison(), [&](int64_t number, A* scratch) {
      Task task(*this, number, scratch);
      task.forward();
    });
  }

  // Sums over channels and sequences are those of tasks, in their order.
  int32_t backward() {
    const int64_t of_states = c_.channels * c_.states, of_rows = c_.groups * c_.states;
    const int64_t of_parameters = of_states + 2 * c_.channels, rows = sets_ > 1 ? c_.elements * of_rows : 0;
    Scratch<A> parameters, b_rows, c_rows;
    if (!parameters.reserve(call_.groups * of_parameters, poison()) || !b_rows.reserve(rows * sets_, poison()) ||
        !c_rows.reserve(rows * sets_, poison()))
      return RAGLANE_OUT_OF_MEMORY;
    parameters_ = parameters.get(), b_rows_ = b_rows.get(), c_rows_ = c_rows.get();
    const int32_t status =
        run_tasks<A>(c_.threads, tasks(), backward_numbers(), poison(), [&](int64_t number, A* scratch) {
          Task task(*this, number, scratch);
          task.backward();
        });
    if (status != RAGLANE_OK) return status;
    add_parameters((A*)c_.grad_A, 0, of_states);
    add_parameters((A*)c_.grad_D, of_states, c_.channels);
    add_parameters((A*)c_.grad_dt_bias, of_states + c_.channels, c_.channels);
    if (rows == 0) return RAGLANE_OK;
    on_threads((int)c_.threads, [&](int thread, int threads) {
      const int64_t first = rows * thread / threads / of_rows * of_rows;
      const int64_t end = thread + 1 == threads ? rows : rows * (thread + 1) / threads / of_rows * of_rows;
      if (c_.grad_B) write_sum((S*)c_.grad_B + first, b_rows_ + first, end - first, sets_, rows);
      if (c_.grad_C) write_sum((S*)c_.grad_C + first, c_rows_ + first, end - first, sets_, rows);
    });
    return RAGLANE_OK;
  }

 private:
  static constexpr int width = Lanes<A>::width, most_blocks = 8, least_sets = 4;
  static constexpr int together = registers == 32 ? 8 : 4;  // states in registers

  const SelectiveScan& call_;
  const raglane_selective_scan& c_;
  int64_t sets_, blocks_;  // of each group of channels
  A *parameters_ = nullptr, *b_rows_ = nullptr, *c_rows_ = nullptr;

  int64_t per_group() const { return c_.channels / c_.groups; }
  int64_t tasks() const { return call_.groups * c_.groups * sets_; }
  bool poison() const { return c_.flags & RAGLANE_POISON; }
  // Blocks of a set, and numbers of a vector for each state.
  int64_t set_blocks() const { return (blocks_ + sets_ - 1) / sets_; }
  int64_t vectors() const { return c_.states * width; }
  int64_t row_numbers() const { return 2 * border * c_.states + width; }
  int64_t forward_numbers() const { return set_blocks() * 3 * vectors() + row_numbers() + 3 * border * width; }
  int64_t backward_numbers() const {
    return set_blocks() * (5 * vectors() + 2 * width) + row_numbers() + 2 * border * vectors() +
           (6 + 2 * together) * border * width;
  }

  void add_parameters(A* to, int64_t first, int64_t count) {
    const int64_t stride = c_.channels * (c_.states + 2);
    if (!to) return;
    if (call_.groups > 0) return write_sum(to, parameters_ + first, count, call_.groups, stride);
    memset((void*)to, 0, count * sizeof(A));
  }

  // Adjacent elements of a sequence, from a border on.
  struct Segment {
    int64_t first;  // element
    int count;
    const unsigned char* resets;  // of the first, or null
    const A *B, *C;               // rows of the group
    int64_t stride;               // between them
  };

  class Task {
   public:
    Task(SelectiveLoops& loops, int64_t number, A* scratch) : l_(loops), c_(loops.c_) {
      const int64_t sets = l_.sets_, part = number % sets, blocks = l_.blocks_;
      group_ = number / sets % c_.groups, set_ = part;
      sequences_ = l_.call_.group + number / sets / c_.groups;
      first_ = blocks * part / sets, count_ = (int)(blocks * (part + 1) / sets - first_);
      next_ = scratch;
      h_ = take(l_.set_blocks() * l_.vectors()), a_ = take(l_.set_blocks() * l_.vectors());
      rest_ = take(l_.set_blocks() * l_.vectors());
      rows_ = take(l_.row_numbers());
      dt_ = take(border * width), in_ = take(border * width), y_ = take(border * width);
      for (int block = 0; block < count_; block++) read_states(a_, block, (const A*)c_.A);
      for (int64_t i = 0; i < count_ * l_.vectors(); i += width) {
        const Rate<A> rate = rate_of<A>(load(a_ + i));
        store(a_ + i, rate.whole), store(rest_ + i, rate.rest);
      }
    }

    void forward() {
      for (int64_t b = sequences_->begin; b < sequences_->end; b++) {
        const int64_t begin = c_.offsets[b], end = c_.offsets[b + 1];
        begin_states(h_, (const A*)c_.initial, b);
        for (int64_t first = begin; first < end; first += border) {
          if (first > begin && c_.borders) save(border_of(b, first), h_);
          const Segment segment = segment_of(first, end);
          for (int block = 0; block < count_; block++) {
            prepare(segment, block, y_);
            each_states([&](auto constant, int64_t s) {
              advance<decltype(constant)::value, false>(segment, block, s, nullptr, nullptr);
            });
            const int lanes = lanes_of(block);
            for (int t = 0; t < segment.count; t++)
              store((S*)c_.output + (first + t) * c_.channels + channel_of(block), load(y_ + t * width), lanes);
          }
        }
        for (int block = 0; block < count_; block++) write_states(h_, block, (A*)c_.final + b * c_.channels * c_.states);
      }
    }

    void backward() {
      const int64_t states = l_.set_blocks() * l_.vectors();
      grad_h_ = take(states), grad_a_ = take(states), grad_d_ = take(l_.set_blocks() * width);
      grad_bias_ = take(l_.set_blocks() * width);
      kept_h_ = take(border * together * width), kept_a_ = take(border * together * width);
      sums_b_ = take(border * l_.vectors()), sums_c_ = take(border * l_.vectors());
      grad_in_ = take(border * width), grad_dt_ = take(border * width), grad_y_ = take(border * width);
      memset((void*)grad_a_, 0, states * sizeof(A));
      memset((void*)grad_d_, 0, l_.set_blocks() * width * sizeof(A));
      memset((void*)grad_bias_, 0, l_.set_blocks() * width * sizeof(A));
      for (int64_t b = sequences_->begin; b < sequences_->end; b++) {
        const int64_t begin = c_.offsets[b], length = c_.offsets[b + 1] - begin;
        begin_states(grad_h_, (const A*)c_.grad_final, b);
        for (int64_t i = (length - 1) / border; i >= 0 && length > 0; i--) {
          const int64_t first = begin + i * border;
          if (i > 0) restore(border_of(b, first), h_);
          else begin_states(h_, (const A*)c_.initial, b);
          const Segment segment = segment_of(first, begin + length);
          memset((void*)sums_b_, 0, segment.count * l_.vectors() * sizeof(A));
          memset((void*)sums_c_, 0, segment.count * l_.vectors() * sizeof(A));
          for (int block = 0; block < count_; block++) back_through(segment, block);
          write_rows(segment, sums_b_, l_.b_rows_, (S*)c_.grad_B);
          write_rows(segment, sums_c_, l_.c_rows_, (S*)c_.grad_C);
        }
        if (c_.grad_initial)
          for (int block = 0; block < count_; block++)
            write_states(grad_h_, block, (A*)c_.grad_initial + b * c_.channels * c_.states);
      }
      const int64_t of_states = c_.channels * c_.states;
      A* to = l_.parameters_ + sequences_->place * (of_states + 2 * c_.channels);
      for (int block = 0; block < count_; block++) {
        write_states(grad_a_, block, to);
        store(to + of_states + channel_of(block), load(grad_d_ + block * width), lanes_of(block));
        store(to + of_states + c_.channels + channel_of(block), load(grad_bias_ + block * width), lanes_of(block));
      }
    }

   private:
    SelectiveLoops& l_;
    const raglane_selective_scan& c_;
    const Group* sequences_;
    int64_t group_, set_, first_;  // the group of channels, the set, and its first block
    int count_;                    // blocks
    A* next_;
    A *h_, *a_, *rest_, *rows_, *dt_, *in_, *y_;
    A *grad_h_, *grad_a_, *grad_d_, *grad_bias_, *kept_h_, *kept_a_, *sums_b_, *sums_c_, *grad_in_, *grad_dt_, *grad_y_;

    A* take(int64_t count) {
      A* begin = next_;
      next_ += whole_vectors<A>(count);
      return begin;
    }
    int64_t channel_of(int block) const { return group_ * l_.per_group() + (first_ + block) * width; }
    int lanes_of(int block) const {
      const int64_t rest = l_.per_group() - (first_ + block) * width;
      return (int)(rest < width ? rest : width);
    }
    A* of_block(A* states, int block) const { return states + block * l_.vectors(); }
    A* border_of(int64_t b, int64_t first) const {
      const int64_t row = c_.offsets[b] / border + (first - c_.offsets[b]) / border - 1;
      return (A*)c_.borders + row * c_.channels * c_.states;
    }

    // States (E, S) to vectors of channels, state after state, and back.
    void read_states(A* to, int block, const A* from) const {
      const int lanes = lanes_of(block);
      A* vectors = of_block(to, block);
      if (lanes < width) memset((void*)vectors, 0, l_.vectors() * sizeof(A));
      for (int lane = 0; lane < lanes; lane++) {
        const A* row = from + (channel_of(block) + lane) * c_.states;
        for (int64_t s = 0; s < c_.states; s++) vectors[s * width + lane] = row[s];
      }
    }
    void write_states(A* from, int block, A* to) const {
      const A* vectors = of_block(from, block);
      for (int lane = 0, lanes = lanes_of(block); lane < lanes; lane++) {
        A* row = to + (channel_of(block) + lane) * c_.states;
        for (int64_t s = 0; s < c_.states; s++) row[s] = vectors[s * width + lane];
      }
    }
    void begin_states(A* to, const A* from, int64_t b) const {
      if (!from) return (void)memset((void*)to, 0, count_ * l_.vectors() * sizeof(A));
      for (int block = 0; block < count_; block++) read_states(to, block, from + b * c_.channels * c_.states);
    }
    // A border has the vectors of a block one after the other, without those of channels that do not exist.
    void save(A* to, A* states) const {
      for (int block = 0; block < count_; block++) {
        const int lanes = lanes_of(block);
        for (int64_t s = 0; s < c_.states; s++)
          store(to + channel_of(block) * c_.states + s * lanes, load(of_block(states, block) + s * width), lanes);
      }
    }
    void restore(const A* from, A* states) const {
      for (int block = 0; block < count_; block++) {
        const int lanes = lanes_of(block);
        for (int64_t s = 0; s < c_.states; s++)
          store(of_block(states, block) + s * width, load(from + channel_of(block) * c_.states + s * lanes, lanes));
      }
    }

    Segment segment_of(int64_t first, int64_t end) const {
      Segment segment{first, (int)(end - first < border ? end - first : border), nullptr, nullptr, nullptr, 0};
      if (c_.resets) segment.resets = c_.resets + first;
      const int64_t states = c_.states, stride = c_.groups * states, at = first * stride + group_ * states;
      if constexpr (sizeof(S) == sizeof(A)) {
        segment.B = (const A*)c_.B + at, segment.C = (const A*)c_.C + at, segment.stride = stride;
      } else {
        for (int t = 0; t < segment.count; t++) {
          widen(rows_ + t * states, (const S*)c_.B + at + t * stride);
          widen(rows_ + (border + t) * states, (const S*)c_.C + at + t * stride);
        }
        segment.B = rows_, segment.C = rows_ + border * states, segment.stride = states;
      }
      return segment;
    }
    void widen(A* to, const S* from) const {
      for (int64_t s = 0; s < c_.states; s += width) {
        const int here = (int)(c_.states - s < width ? c_.states - s : width);
        store(to + s, load(from + s, here), here);
      }
    }

    V parameter(const void* values, int block) const {
      return values ? load((const A*)values + channel_of(block), lanes_of(block)) : V{};
    }
    V element(const void* values, int64_t row, int block) const {
      return load((const S*)values + row * c_.channels + channel_of(block), lanes_of(block));
    }
    // dt, dt x and D x of a block.
    void prepare(const Segment& segment, int block, A* y) const {
      const V bias = parameter(c_.dt_bias, block), skip = parameter(c_.D, block);
      for (int t = 0; t < segment.count; t++) {
        const V x = element(c_.x, segment.first + t, block);
        V d = element(c_.dt, segment.first + t, block) + bias;
        if (c_.softplus) d = softplus<A>(d);
        d = at_most((A)c_.most_dt, at_least((A)c_.least_dt, d));
        store(dt_ + t * width, d);
        store(in_ + t * width, d * x);
        if (y) store(y + t * width, c_.D ? skip * x : V{});
      }
    }

    // The first number of the next block, or the first block of the next segment, whose rows come to the caches while the
    // states of this one advance: more at once would wait for each other.
    int64_t next_of(const Segment& segment, int block, int64_t further) const {
      const bool is_last = block + 1 == count_;
      return (segment.first + (is_last ? further : 0)) * c_.channels + channel_of(is_last ? 0 : block + 1);
    }
    template <bool KEEP> void fetch_row(int64_t row) const {
      fetch<S>(c_.x, row), fetch<S>(c_.dt, row), fetch<S>(KEEP ? c_.grad_output : c_.output, row);
      if (KEEP) fetch<S>(c_.grad_x, row), fetch<S>(c_.grad_dt, row);
    }

    template <int N> struct Number {
      static constexpr int value = N;
    };
    // Call step(Number<N>, first) for all states, as many together as registers hold, then one by one.
    template <class Step> RAGLANE_INLINE void each_states(Step&& step) const {
      int64_t s = 0;
      for (; s + together <= c_.states; s += together) step(Number<together>{}, s);
      for (; s < c_.states; s++) step(Number<1>{}, s);
    }

    // Advance N states of a block through a segment, and add to y; or keep the states and decays before each element.
    template <int N, bool KEEP>
    void advance(const Segment& segment, int block, int64_t s, A* kept_h, A* kept_a) const {
      A* h = of_block(h_, block) + s * width;
      const A *a = of_block(a_, block) + s * width, *rest = of_block(rest_, block) + s * width;
      V state[N];
      RAGLANE_EACH state[i] = load(h + i * width);
      const int64_t next = next_of(segment, block, KEEP ? -border : border);
      for (int t = 0; t < segment.count; t++) {
        if (s == 0) fetch_row<KEEP>(next + t * c_.channels);
        if (segment.resets && segment.resets[t]) RAGLANE_EACH state[i] = V{};
        const V d = load(dt_ + t * width), in = load(in_ + t * width);
        const A *B = segment.B + t * segment.stride + s, *C = segment.C + t * segment.stride + s;
        V decay[N], steps[N];
        Rate<A> rate[N];
        RAGLANE_EACH steps[i] = d, rate[i] = {load(a + i * width), load(rest + i * width)};
        constexpr int each = N > 4 ? 4 : N;
#pragma GCC unroll 4
        for (int part = 0; part < N; part += each) decays<A, each>(decay + part, steps + part, rate + part);
        if constexpr (KEEP) {
          RAGLANE_EACH store(kept_h + (t * N + i) * width, state[i]);
          RAGLANE_EACH store(kept_a + (t * N + i) * width, decay[i]);
        }
        RAGLANE_EACH state[i] = fma(in, splat_at(B + i), decay[i] * state[i]);
        if constexpr (!KEEP) {
          V y = load(y_ + t * width);
          RAGLANE_EACH y = fma(state[i], splat_at(C + i), y);
          store(y_ + t * width, y);
        }
      }
      RAGLANE_EACH store(h + i * width, state[i]);
    }

    // The gradients of N states of a block, from the end of a segment to its start.
    template <int N> void retreat(const Segment& segment, int block, int64_t s) const {
      A *h = of_block(grad_h_, block) + s * width, *sums = of_block(grad_a_, block) + s * width;
      const A* a = of_block(a_, block) + s * width;
      V grad[N], of_a[N];
      RAGLANE_EACH grad[i] = load(h + i * width);
      RAGLANE_EACH of_a[i] = load(sums + i * width);
      for (int t = segment.count - 1; t >= 0; t--) {
        const V y = load(grad_y_ + t * width), d = load(dt_ + t * width), in = load(in_ + t * width);
        const A *B = segment.B + t * segment.stride + s, *C = segment.C + t * segment.stride + s;
        const int64_t at = t * l_.vectors() + s * width;
        V of_in = load(grad_in_ + t * width), of_dt = load(grad_dt_ + t * width);
        RAGLANE_EACH {
          const V decay = load(kept_a_ + (t * N + i) * width), before = decay * load(kept_h_ + (t * N + i) * width);
          const V input = splat_at(B + i);
          grad[i] = fma(y, splat_at(C + i), grad[i]);
          store(sums_c_ + at + i * width, fma(y, fma(in, input, before), load(sums_c_ + at + i * width)));
          store(sums_b_ + at + i * width, fma(grad[i], in, load(sums_b_ + at + i * width)));
          of_in = fma(grad[i], input, of_in);
          const V product = grad[i] * before;
          of_a[i] = fma(product, d, of_a[i]);
          of_dt = fma(product, load(a + i * width), of_dt);
          grad[i] = grad[i] * decay;
        }
        store(grad_in_ + t * width, of_in), store(grad_dt_ + t * width, of_dt);
        if (segment.resets && segment.resets[t]) RAGLANE_EACH grad[i] = V{};
      }
      RAGLANE_EACH store(h + i * width, grad[i]);
      RAGLANE_EACH store(sums + i * width, of_a[i]);
    }

    void back_through(const Segment& segment, int block) const {
      const int lanes = lanes_of(block);
      prepare(segment, block, nullptr);
      for (int t = 0; t < segment.count; t++)
        store(grad_y_ + t * width, c_.grad_output ? element(c_.grad_output, segment.first + t, block) : V{});
      memset((void*)grad_in_, 0, segment.count * width * sizeof(A));
      memset((void*)grad_dt_, 0, segment.count * width * sizeof(A));
      each_states([&](auto constant, int64_t s) {
        constexpr int N = decltype(constant)::value;
        advance<N, true>(segment, block, s, kept_h_, kept_a_);
        retreat<N>(segment, block, s);
      });
      const V bias = parameter(c_.dt_bias, block), skip = parameter(c_.D, block);
      V of_d = load(grad_d_ + block * width), of_bias = load(grad_bias_ + block * width);
      for (int t = segment.count - 1; t >= 0; t--) {
        const int64_t row = segment.first + t, at = row * c_.channels + channel_of(block);
        const V x = element(c_.x, row, block), y = load(grad_y_ + t * width), in = load(grad_in_ + t * width);
        const V raw = element(c_.dt, row, block) + bias;
        const V unbounded = c_.softplus ? softplus<A>(raw) : raw;
        V of_dt = fma(in, x, load(grad_dt_ + t * width) * rate_unit<A>);
        const auto is_bounded = (unbounded < (A)c_.least_dt) | (unbounded > (A)c_.most_dt);
        of_dt = is_bounded ? V{} : of_dt;
        if (c_.softplus) of_dt = of_dt * sigmoid<A>(raw);
        of_d = fma(y, x, of_d);
        of_bias = of_bias + of_dt;
        if (c_.grad_x) store((S*)c_.grad_x + at, fma(in, load(dt_ + t * width), skip * y), lanes);
        if (c_.grad_dt) store((S*)c_.grad_dt + at, of_dt, lanes);
      }
      store(grad_d_ + block * width, of_d), store(grad_bias_ + block * width, of_bias);
    }

    // Sums over the channels of a set: to the results, or to those of sets.
    void write_rows(const Segment& segment, const A* sums, A* parts, S* to) const {
      if (!to) return;
      A* row = rows_ + 2 * border * c_.states;
      for (int t = 0; t < segment.count; t++)
        for (int64_t s = 0; s < c_.states; s += width) {
          const int here = (int)(c_.states - s < width ? c_.states - s : width);
          for (int i = 0; i < here; i++) row[i] = sum_of(load(sums + (t * c_.states + s + i) * width));
          const int64_t at = ((segment.first + t) * c_.groups + group_) * c_.states + s;
          if (l_.sets_ == 1) store(to + at, load(row, here), here);
          else store(parts + set_ * c_.elements * c_.groups * c_.states + at, load(row, here), here);
        }
    }
  };
};

}  // namespace raglane::RAGLANE_TARGET
