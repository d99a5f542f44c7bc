// Recurrences in which a channel reads only itself: the convolution before others, and the RG-LRU, forward and backward;
// abi/channels.h has their equations.
//
// A task is a group of sequences times a set of adjacent channels. It runs through each sequence row by row, and through
// the row vector by vector, so that memory is read as one stream. Sums over rows are those of groups, in their order.
#pragma once

#include "recurrence/tasks.h"

namespace raglane::RAGLANE_TARGET {

template <class S, class Call> class ChannelLoops {
 public:
  using A = typename Arithmetic<S>::type;
  using V = Vec<A>;

 protected:
  static constexpr int width = Lanes<A>::width, most_vectors = 8, least_sets = 4, rows_ahead = 8;

  struct Task {
    Group sequences;
    int64_t set, first, end;  // the set and its channels
    A* scratch;               // rows of the channels of a set

    int64_t stride() const { return whole_vectors<A>(end - first); }
    A* row(int64_t index) const { return scratch + index * stride(); }
    void clear(int64_t begin, int64_t count) const { memset((void*)row(begin), 0, count * stride() * sizeof(A)); }
    // Call step(channel, column, lanes) for the vectors of the set: a column is that of a row of scratch. Whole vectors
    // have a constant number of lanes.
    template <class Step> RAGLANE_INLINE void each(Step&& step) const {
      int64_t column = 0;
      for (; column + width <= end - first; column += width) step(first + column, column, width);
      if (column < end - first) step(first + column, column, (int)(end - first - column));
    }
    // The same for pairs of vectors, whose arithmetic is interleaved: step<N>(channel, column, lanes).
    template <class Step> RAGLANE_INLINE void each_pair(Step&& step) const {
      int64_t column = 0;
      for (; column + 2 * width <= end - first; column += 2 * width)
        step.template operator()<2>(first + column, column, width);
      for (; column < end - first; column += width)
        step.template operator()<1>(first + column, column, lanes_of<A>(column, end - first));
    }
  };

  const Call& c_;
  const Group* group_;
  int64_t groups_, sets_;
  Scratch<A> sums_;

  explicit ChannelLoops(const GroupedCall<Call>& call) : c_(*call.call), group_(call.group), groups_(call.groups) {
    const int64_t vectors = (c_.channels + width - 1) / width, needed = (vectors + most_vectors - 1) / most_vectors;
    sets_ = vectors < least_sets ? vectors : least_sets;
    if (sets_ < needed) sets_ = needed;
  }

  bool poison() const { return c_.flags & RAGLANE_POISON; }
  bool resets(int64_t t) const { return c_.resets && c_.resets[t]; }
  // Bring the elements of a vector of channels, some rows ahead, to the caches: those of a set are no stream.
  template <class... Arrays> RAGLANE_INLINE void fetch_ahead(int64_t at, Arrays... arrays) const {
    (fetch<S>(arrays, at + rows_ahead * c_.channels), ...);
  }

  // Call step(task) for all tasks, with `rows` rows of scratch.
  template <class Step> int32_t run(int64_t rows, Step&& step) const {
    const int64_t vectors = (c_.channels + width - 1) / width, most = (vectors + sets_ - 1) / sets_ * width;
    return run_tasks<A>(c_.threads, groups_ * sets_, rows * most, poison(), [&](int64_t number, A* scratch) {
      const int64_t set = number % sets_, end = vectors * (set + 1) / sets_ * width;
      const int64_t first = vectors * set / sets_ * width;
      step(Task{group_[number / sets_], set, first, end < c_.channels ? end : c_.channels, scratch});
    });
  }

  // Sums over the rows of groups, `kinds` of each channel.
  bool reserve_sums(int64_t kinds) { return sums_.reserve(groups_ * kinds * c_.channels, poison()); }
  // Those of a task are the first rows of its scratch.
  void keep_sum(const Task& task, int64_t kinds, int64_t kind) const {
    A* to = sums_.get() + (task.sequences.place * kinds + kind) * c_.channels;
    task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
      store(to + channel, load(task.row(kind) + column), lanes);
    });
  }
  static void add(A* to, V v) { store(to, load(to) + v); }
  void write_sums(void* to, int64_t kinds, int64_t kind) const {
    if (!to) return;
    if (groups_ == 0) return (void)memset(to, 0, c_.channels * sizeof(A));
    write_sum((A*)to, sums_.get() + kind * c_.channels, c_.channels, groups_, kinds * c_.channels);
  }
};

template <class S> class ConvolutionLoops : ChannelLoops<S, raglane_convolution> {
  using Base = ChannelLoops<S, raglane_convolution>;
  using typename Base::A, typename Base::V, typename Base::Task;
  using Base::c_;

 public:
  explicit ConvolutionLoops(const GroupedCall<raglane_convolution>& call) : Base(call) {}

  int32_t forward() {
    if (!read_taps()) return RAGLANE_OUT_OF_MEMORY;
    return this->run(0, [&](const Task& task) {
      for (int64_t b = task.sequences.begin; b < task.sequences.end; b++) {
        for (int64_t t = c_.offsets[b]; t < c_.offsets[b + 1]; t++) convolve(task, b, t);
        finish(task, b);
      }
    });
  }

  int32_t backward() {
    const int64_t kinds = c_.taps + 1;
    if (!read_taps() || !this->reserve_sums(kinds)) return RAGLANE_OUT_OF_MEMORY;
    const int32_t status = this->run(kinds, [&](const Task& task) {
      task.clear(0, kinds);
      for (int64_t b = task.sequences.begin; b < task.sequences.end; b++) {
        const int64_t oldest = oldest_of(b);
        for (int64_t p = c_.offsets[b] - (c_.initial ? c_.kept : 0); p < c_.offsets[b + 1]; p++)
          back_through(task, b, p, oldest);
      }
      for (int64_t kind = 0; kind < kinds; kind++) this->keep_sum(task, kinds, kind);
    });
    if (status != RAGLANE_OK) return status;
    this->write_sums(c_.grad_bias, kinds, c_.taps);
    for (int64_t back = 0; c_.grad_weight && back < c_.taps; back++) {
      this->write_sums(taps_.get(), kinds, back);
      for (int64_t channel = 0; channel < c_.channels; channel++)
        ((A*)c_.grad_weight)[(channel + 1) * c_.taps - 1 - back] = taps_.get()[channel];
    }
    return RAGLANE_OK;
  }

 private:
  Scratch<A> taps_;  // (K, E), that of the element itself first

  bool read_taps() {
    if (!taps_.reserve(c_.taps * c_.channels, this->poison())) return false;
    for (int64_t back = 0; back < c_.taps; back++)
      for (int64_t channel = 0; channel < c_.channels; channel++)
        taps_.get()[back * c_.channels + channel] = ((const A*)c_.weight)[(channel + 1) * c_.taps - 1 - back];
    return true;
  }
  V tap(int64_t back, int64_t channel, int lanes) const { return load(taps_.get() + back * c_.channels + channel, lanes); }

  // Places are elements; those before the start of a sequence are of its initial state, those at its end of the final one.
  int64_t in_state(int64_t b, int64_t index) const { return (b * c_.kept + index) * c_.channels; }
  V at(int64_t b, int64_t place, int64_t channel, int lanes) const {
    const int64_t begin = c_.offsets[b];
    if (place >= begin) return load((const S*)c_.x + place * c_.channels + channel, lanes);
    return load((const A*)c_.initial + in_state(b, c_.kept + place - begin) + channel, lanes);
  }
  // Whether a place is read together with the one before it.
  bool reads_on(int64_t b, int64_t place) const {
    const int64_t begin = c_.offsets[b];
    if (place >= begin && place < c_.offsets[b + 1] && this->resets(place)) return false;
    return place > begin || c_.initial;
  }
  // The first place that is part of the final state.
  int64_t oldest_of(int64_t b) const {
    int64_t oldest = c_.offsets[b + 1];
    while (oldest > c_.offsets[b + 1] - c_.kept && reads_on(b, oldest)) oldest--;
    return oldest;
  }

  void convolve(const Task& task, int64_t b, int64_t t) const {
    int64_t count = 1;
    while (count < c_.taps && reads_on(b, t + 1 - count)) count++;
    const int64_t inner = t - c_.offsets[b] + 1 < count ? t - c_.offsets[b] + 1 : count;
    task.each([&](int64_t channel, int64_t, int lanes) RAGLANE_INLINE_LAMBDA {
      this->fetch_ahead(t * c_.channels + channel, c_.x, c_.output);
      V sum = c_.bias ? load((const A*)c_.bias + channel, lanes) : V{};
      for (int64_t back = 0; back < inner; back++)
        sum = fma(load((const S*)c_.x + (t - back) * c_.channels + channel, lanes), tap(back, channel, lanes), sum);
      for (int64_t back = inner; back < count; back++)
        sum = fma(at(b, t - back, channel, lanes), tap(back, channel, lanes), sum);
      store((S*)c_.output + t * c_.channels + channel, sum, lanes);
    });
  }
  void finish(const Task& task, int64_t b) const {
    const int64_t oldest = oldest_of(b), first = c_.offsets[b + 1] - c_.kept;
    for (int64_t place = first; place < c_.offsets[b + 1]; place++)
      task.each([&](int64_t channel, int64_t, int lanes) RAGLANE_INLINE_LAMBDA {
        const V last = place < oldest ? V{} : at(b, place, channel, lanes);
        store((A*)c_.final + in_state(b, place - first) + channel, last, lanes);
      });
  }
  void back_through(const Task& task, int64_t b, int64_t place, int64_t oldest) const {
    const int64_t begin = c_.offsets[b], end = c_.offsets[b + 1];
    int64_t count = c_.grad_output ? 1 : 0;
    while (count > 0 && count < c_.taps && place + count < end && reads_on(b, place + count)) count++;
    task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
      const V x = at(b, place, channel, lanes);
      V grad = {};
      if (c_.grad_final && place >= oldest)
        grad = load((const A*)c_.grad_final + in_state(b, place - (end - c_.kept)) + channel, lanes);
      for (int64_t back = place < begin ? begin - place : 0; back < count; back++) {
        const V y = load((const S*)c_.grad_output + (place + back) * c_.channels + channel, lanes);
        grad = fma(y, tap(back, channel, lanes), grad);
        this->add(task.row(back) + column, y * x);
        if (back == 0) this->add(task.row(c_.taps) + column, y);
      }
      if (place >= begin && c_.grad_x) store((S*)c_.grad_x + place * c_.channels + channel, grad, lanes);
      if (place < begin && c_.grad_initial)
        store((A*)c_.grad_initial + in_state(b, c_.kept + place - begin) + channel, grad, lanes);
    });
  }
};

// How an RG-LRU decays the states of N vectors by exp(-d), and the factors of what it writes.
template <class A, int N = 1> struct GatedDecay {
  Vec<A> kept[N], root[N], factor[N];

  RAGLANE_INLINE GatedDecay(const Vec<A>* d, Vec<A> fresh) {
    Vec<A> lost[N];
    RAGLANE_EACH lost[i] = -d[i];
    expm1<A, N>(lost);
    RAGLANE_EACH {
      kept[i] = (A)1 + lost[i];
      root[i] = square_root(-lost[i] * ((A)2 + lost[i]));
      factor[i] = root[i] + fresh * ((A)1 - root[i]);
    }
  }
  RAGLANE_INLINE Vec<A> advance(Vec<A> h, Vec<A> x, Vec<A> entry, int i = 0) const {
    return fma(kept[i], h, x * entry * factor[i]);
  }
};

template <class S> class RglruLoops : ChannelLoops<S, raglane_rglru> {
  using Base = ChannelLoops<S, raglane_rglru>;
  using typename Base::A, typename Base::V, typename Base::Task;
  using Base::c_, Base::width;

 public:
  explicit RglruLoops(const GroupedCall<raglane_rglru>& call) : Base(call) {}

  int32_t forward() {
    return this->run(1, [&](const Task& task) {
      for (int64_t b = task.sequences.begin; b < task.sequences.end; b++) {
        read_state(task, 0, c_.initial, b);
        for (int64_t t = c_.offsets[b]; t < c_.offsets[b + 1]; t++) {
          if (c_.borders && t > c_.offsets[b] && (t - c_.offsets[b]) % border == 0) write_state(task, 0, border_at(b, t));
          if (this->resets(t)) task.clear(0, 1);
          task.each_pair([&]<int N>(int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
            const int64_t at = t * c_.channels + channel;
            RAGLANE_EACH this->fetch_ahead(at + i * width, c_.x, c_.entry, c_.recurrent, c_.output);
            advance<N>(t, channel, lanes, task.row(0) + column);
            RAGLANE_EACH store((S*)c_.output + at + i * width, load(task.row(0) + column + i * width), lanes);
          });
        }
        write_state(task, 0, (A*)c_.final + b * c_.channels);
      }
    });
  }

  int32_t backward() {
    Scratch<A> of_fresh;  // sums over the channels of a set
    const int64_t rows = c_.grad_fresh ? c_.elements : 0;
    if (!this->reserve_sums(kinds) || !of_fresh.reserve(rows * this->sets_, this->poison())) return RAGLANE_OUT_OF_MEMORY;
    const int32_t status = this->run(states + border, [&](const Task& task) {
      task.clear(0, kinds);
      for (int64_t b = task.sequences.begin; b < task.sequences.end; b++) {
        const int64_t begin = c_.offsets[b], end = c_.offsets[b + 1];
        read_state(task, of_state, c_.grad_final, b);
        for (int64_t first = begin + (end - begin - 1) / border * border; first >= begin && first < end; first -= border) {
          const int64_t last = first + border < end ? first + border : end;
          if (first > begin) read_state(task, of_h, border_at(b, first), 0);
          else read_state(task, of_h, c_.initial, b);
          advance_segment(task, first, last);
          for (int64_t t = last - 1; t >= first; t--) {
            const A fresh = back_through(task, t, task.row(states + t - first));
            if (rows > 0) of_fresh.get()[task.set * rows + t] = fresh;
            if (this->resets(t)) task.clear(of_state, 1);
          }
        }
        if (c_.grad_initial) write_state(task, of_state, (A*)c_.grad_initial + b * c_.channels);
      }
      for (int64_t kind = 0; kind < kinds; kind++) this->keep_sum(task, kinds, kind);
    });
    if (status != RAGLANE_OK) return status;
    this->write_sums(c_.grad_entry_bias, kinds, of_entry);
    this->write_sums(c_.grad_recurrent_bias, kinds, of_recurrent);
    this->write_sums(c_.grad_rates, kinds, of_rates);
    if (rows > 0) write_sum((A*)c_.grad_fresh, of_fresh.get(), rows, this->sets_, rows);
    return RAGLANE_OK;
  }

 private:
  // Rows of scratch in backward: sums, the state and its gradient, and the states before the elements of a segment.
  enum { of_entry, of_recurrent, of_rates, kinds, of_h = kinds, of_state, states };

  A* border_at(int64_t b, int64_t t) const {
    return (A*)c_.borders + (c_.offsets[b] / border + (t - c_.offsets[b]) / border - 1) * c_.channels;
  }
  void read_state(const Task& task, int64_t row, const void* from, int64_t b) const {
    task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
      store(task.row(row) + column, from ? load((const A*)from + b * c_.channels + channel, lanes) : V{});
    });
  }
  void write_state(const Task& task, int64_t row, A* to) const {
    task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
      store(to + channel, load(task.row(row) + column), lanes);
    });
  }

  V element(const void* values, int64_t t, int64_t channel, int lanes) const {
    return load((const S*)values + t * c_.channels + channel, lanes);
  }
  // The gates of the state, then those of the input, of N vectors.
  template <int N> RAGLANE_INLINE void read_gates(V* gates, int64_t t, int64_t channel, int lanes) const {
    const void *values[] = {c_.recurrent, c_.entry}, *biases[] = {c_.recurrent_bias, c_.entry_bias};
    for (int kind = 0; kind < 2; kind++)
      RAGLANE_EACH gates[kind * N + i] = element(values[kind], t, channel + i * width, lanes) +
                                         load((const A*)biases[kind] + channel + i * width, lanes);
    squash<A, 2 * N, 0>(gates);
  }
  V fresh(int64_t t) const { return splat<V>(c_.fresh ? ((const A*)c_.fresh)[t] : (A)0); }

  // Advance N vectors of states by an element.
  template <int N> RAGLANE_INLINE void advance(int64_t t, int64_t channel, int lanes, A* states) const {
    V gates[2 * N], d[N];
    read_gates<N>(gates, t, channel, lanes);
    RAGLANE_EACH d[i] = gates[i] * load((const A*)c_.rates + channel + i * width, lanes);
    const GatedDecay<A, N> decay(d, fresh(t));
    RAGLANE_EACH {
      const V x = element(c_.x, t, channel + i * width, lanes);
      store(states + i * width, decay.advance(load(states + i * width), x, gates[N + i], i));
    }
  }
  // Keep the states before the elements of a segment.
  void advance_segment(const Task& task, int64_t first, int64_t last) const {
    for (int64_t t = first; t < last; t++) {
      if (this->resets(t)) task.clear(of_h, 1);
      task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
        store(task.row(states + t - first) + column, load(task.row(of_h) + column));
        if (t + 1 < last) advance<1>(t, channel, lanes, task.row(of_h) + column);
      });
    }
  }
  // The gradients of an element; returns that of `fresh`.
  A back_through(const Task& task, int64_t t, const A* before) const {
    A sum = 0;
    task.each([&](int64_t channel, int64_t column, int lanes) RAGLANE_INLINE_LAMBDA {
      const V x = element(c_.x, t, channel, lanes), rates = load((const A*)c_.rates + channel, lanes);
      V gates[2];
      read_gates<1>(gates, t, channel, lanes);
      const V recurrent = gates[0], entry = gates[1], d = recurrent * rates;
      const GatedDecay<A> decay(&d, fresh(t));
      V grad = load(task.row(of_state) + column);
      if (c_.grad_output) grad = grad + element(c_.grad_output, t, channel, lanes);
      const V factor = grad * x * entry, root = factor * ((A)1 - fresh(t));
      const V slope = root / at_least((A)0.0005, decay.root[0]) * decay.kept[0];
      const V of_decay = decay.kept[0] * (slope - grad * load(before + column));
      const V to_entry = grad * x * decay.factor[0] * entry * ((A)1 - entry);
      const V to_recurrent = of_decay * rates * recurrent * ((A)1 - recurrent);
      this->add(task.row(of_entry) + column, to_entry);
      this->add(task.row(of_recurrent) + column, to_recurrent);
      this->add(task.row(of_rates) + column, of_decay * recurrent);
      store(task.row(of_state) + column, grad * decay.kept[0]);
      sum += sum_of(factor * ((A)1 - decay.root[0]));
      const int64_t at = t * c_.channels + channel;
      if (c_.grad_x) store((S*)c_.grad_x + at, grad * entry * decay.factor[0], lanes);
      if (c_.grad_entry) store((S*)c_.grad_entry + at, to_entry, lanes);
      if (c_.grad_recurrent) store((S*)c_.grad_recurrent + at, to_recurrent, lanes);
    });
    return sum;
  }
};

}  // namespace raglane::RAGLANE_TARGET
