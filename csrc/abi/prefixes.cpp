// Beam search and alignment by CTC, and recursions over pairs: checks of arguments, and the calls.
#include <cstring>
#include <memory>

#include "abi/checks.h"
#include "transduction/align.h"
#include "transduction/pairs.h"
#include "transduction/search.h"

namespace {

using namespace raglane;

using State = std::vector<std::vector<int64_t>>;  // a record per sequence

// Within this limit no sum of sizes overflows; beyond it no machine has the memory.
constexpr int64_t most = int64_t(1) << 40;

void within(const char* name, int64_t value, int64_t least, int64_t limit = most) {
  at_least(name, value, least);
  if (value > limit) fail("%s must be at most %lld, got %lld", name, (long long)limit, (long long)value);
}

template <class Call> void check_head(const Call& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  within("threads", call.threads, 1, most_threads);
  within("sequences", call.sequences, 0);
}

template <class Call> void check_classes(const Call& call) {
  check_head(call);
  if (call.dtype != RAGLANE_FLOAT32 && call.dtype != RAGLANE_FLOAT64) fail("dtype must be float or double, got another");
  within("elements", call.elements, 0);
  within("classes", call.classes, 1);
  within("blank", call.blank, 0, call.classes - 1);
  if (call.elements > 0) present("log_probs", call.log_probs);
}

void check(const raglane_search& call) {
  check_classes(call);
  within("beam", call.beam, 1);
  at_least("tokens_per_step", call.tokens_per_step, 1);
  if (!(call.weight >= 0 && call.weight < infinity && std::abs(call.bonus) < infinity && call.least < infinity))
    fail("weight, bonus and least must be finite, got other numbers");
  within("order", call.order, 0);
  if (call.order == 0) return;
  within("contexts", call.contexts, 1), within("begin", call.begin, 0, call.contexts - 1), within("grams", call.grams, 0);
  for (const void* part : {(const void*)call.first, (const void*)call.shorter, (const void*)call.backoff})
    present("contexts", part);
  for (const void* part : {(const void*)call.tokens, (const void*)call.next, (const void*)call.gram_log_probs})
    if (call.grams > 0) present("grams", part);
}

// Run body(call, log_probs of float or double) with a checked copy of a call.
template <class Call, class Body> int32_t run(const Call* given, char* message, int64_t size, Body&& body) {
  return guarded(message, size, [&] {
    present("call", given);
    const Call call = *given;
    body(call);
    return RAGLANE_OK;
  });
}

template <class T> void search(const raglane_search& call, State& found) {
  const std::vector<int64_t> offsets = checked_offsets(call.offsets, call.sequences, call.elements);
  std::vector<int64_t> begins;
  if (call.state) begins = checked_offsets(call.state_offsets, call.sequences, call.state_size);
  for_each_sequence(call.threads, call.sequences, [&](int64_t b) {
    Search<T> one(call, b);
    if (call.state) one.load(std::vector<int64_t>(call.state + begins[b], call.state + begins[b + 1]));
    one.run((const T*)call.log_probs + offsets[b] * call.classes, offsets[b + 1] - offsets[b]);
    found[b] = one.save();
  });
}

template <class T> void align_all(const raglane_alignment& call) {
  const std::vector<int64_t> offsets = checked_offsets(call.offsets, call.sequences, call.elements);
  const std::vector<int64_t> labels = checked_offsets(call.label_offsets, call.sequences, call.labels);
  for_each_sequence(call.threads, call.sequences, [&](int64_t b) {
    align(call, b, (const T*)call.log_probs + offsets[b] * call.classes, offsets[b + 1] - offsets[b],
          call.targets + labels[b], labels[b + 1] - labels[b], call.times + 2 * labels[b], call.confidences + labels[b]);
  });
}

// Run body(item, T, U, first row of the left and of the right sequence, first number of the table) for each item.
template <class Body> void for_each_pair(const raglane_pairs& call, bool has_tables, Body&& body) {
  check_head(call);
  within("left_elements", call.left_elements, 0), within("right_elements", call.right_elements, 0);
  const std::vector<int64_t> left = checked_offsets(call.left_offsets, call.sequences, call.left_elements);
  const std::vector<int64_t> right = checked_offsets(call.right_offsets, call.sequences, call.right_elements);
  std::vector<int64_t> tables(call.sequences + 1);
  for (int64_t b = 0; b < call.sequences && has_tables; b++) {
    const int64_t rows = left[b + 1] - left[b], columns = right[b + 1] - right[b];
    if (columns > 0 && rows > (most - tables[b]) / columns) fail("pairs must be at most %lld, got more", (long long)most);
    tables[b + 1] = tables[b] + rows * columns;
  }
  if (has_tables && tables.back() != call.pairs)
    fail("pairs must be the sum of products of lengths, %lld, got %lld", (long long)tables.back(), (long long)call.pairs);
  if (has_tables && !(call.gamma > 0 && call.gamma < infinity)) fail("gamma must be finite and above 0, got %g", call.gamma);
  if (has_tables && call.pairs > 0) present("costs", call.costs), present("reach", call.reach);
  for_each_sequence(call.threads, call.sequences, [&](int64_t b) {
    body(b, left[b + 1] - left[b], right[b + 1] - right[b], left[b], right[b], tables[b]);
  });
}

}  // namespace

extern "C" {

int32_t raglane_find_prefixes(const raglane_search* search_call, void** found, int64_t* state_size, char* message,
                              int64_t size) {
  return run(search_call, message, size, [&](const raglane_search& call) {
    check(call);
    present("found", found), present("state_size", state_size);
    auto state = std::make_unique<State>(call.sequences);
    call.dtype == RAGLANE_FLOAT32 ? search<float>(call, *state) : search<double>(call, *state);
    *state_size = 0;
    for (const auto& record : *state) *state_size += (int64_t)record.size();
    *found = state.release();
  });
}

int32_t raglane_take_prefixes(void* found, int64_t* state_offsets, int64_t* state, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("found", found);
    const std::unique_ptr<State> owned((State*)found);
    if (!state_offsets) return RAGLANE_OK;
    *state_offsets = 0;
    for (const auto& record : *owned) {
      std::copy(record.begin(), record.end(), state);
      state += record.size(), state_offsets[1] = *state_offsets + (int64_t)record.size(), state_offsets++;
    }
    return RAGLANE_OK;
  });
}

int32_t raglane_best_alignment(const raglane_alignment* alignment, char* message, int64_t size) {
  return run(alignment, message, size, [&](const raglane_alignment& call) {
    check_classes(call);
    within("labels", call.labels, 0);
    for (const void* part : {(const void*)call.targets, (const void*)call.times, (const void*)call.confidences})
      if (call.labels > 0) present("targets, times, confidences", part);
    if (call.sequences > 0) present("scores", call.scores);
    call.dtype == RAGLANE_FLOAT32 ? align_all<float>(call) : align_all<double>(call);
  });
}

int32_t raglane_soft_dtw(const raglane_pairs* pairs, char* message, int64_t size) {
  return run(pairs, message, size, [&](const raglane_pairs& call) {
    for_each_pair(call, true, [&](int64_t, int64_t rows, int64_t columns, int64_t, int64_t, int64_t table) {
      soft_dtw(call.costs + table, call.reach + table, rows, columns, call.gamma);
    });
  });
}

int32_t raglane_soft_dtw_shares(const raglane_pairs* pairs, char* message, int64_t size) {
  return run(pairs, message, size, [&](const raglane_pairs& call) {
    if (call.pairs > 0) present("shares", call.shares);
    for_each_pair(call, true, [&](int64_t, int64_t rows, int64_t columns, int64_t, int64_t, int64_t table) {
      soft_dtw_shares(call.costs + table, call.reach + table, call.shares + table, rows, columns, call.gamma);
    });
  });
}

int32_t raglane_edits(const raglane_pairs* pairs, char* message, int64_t size) {
  return run(pairs, message, size, [&](const raglane_pairs& call) {
    if (call.left_elements > 0) present("left", call.left);
    if (call.right_elements > 0) present("right", call.right);
    if (call.sequences > 0) present("counts", call.counts);
    for_each_pair(call, false, [&](int64_t b, int64_t rows, int64_t columns, int64_t left, int64_t right, int64_t) {
      count_edits(call.left + left, rows, call.right + right, columns, call.counts + 3 * b);
    });
  });
}
}
