// Checks of calls of recurrences, and the run of those that are divided into groups of sequences.
#pragma once

#include "abi/checks.h"

namespace raglane {

inline constexpr int64_t most_width = 1 << 20, most_rows = int64_t(1) << 40;

inline void between(const char* name, int64_t value, int64_t least, int64_t most) {
  at_least(name, value, least);
  if (value > most) fail("%s must be at most %lld, got %lld", name, (long long)most, (long long)value);
}

inline void check_size(const char* name, int64_t size) { between(name, size, 1, most_width); }

template <class Call> void check_head(const Call& call) {
  if (call.abi != RAGLANE_ABI) fail("abi must be %d, got %lld", RAGLANE_ABI, (long long)call.abi);
  if (call.dtype < RAGLANE_FLOAT32 || call.dtype > RAGLANE_BFLOAT16)
    fail("dtype must be RAGLANE_FLOAT32, RAGLANE_FLOAT64 or RAGLANE_BFLOAT16, got %lld", (long long)call.dtype);
  between("threads", call.threads, 1, most_threads);
  between("sequences", call.sequences, 0, most_rows);
  between("elements", call.elements, 0, most_rows);
}

template <class Call> using GroupedKernel = int32_t (*Kernels::*)(const GroupedCall<Call>&);

// Run a call: check(call) validates it, and returns the operations of an element.
template <class Call, class Check>
int32_t run_grouped(const Call* given, Check&& check, GroupedKernel<Call> kernel, char* message, int64_t size) {
  return guarded(message, size, [&] {
    present("call", given);
    Call mine = *given;
    check_head(mine);
    const double operations = check(mine);
    const Kernels& kernels = kernels_of(mine.isa, mine.dtype);
    const std::vector<int64_t> offsets = checked_offsets(mine.offsets, mine.sequences, mine.elements);
    mine.offsets = offsets.data();
    if (mine.flags == 0) mine.threads = useful_threads(mine.threads, operations * (double)mine.elements);
    const std::vector<Group> groups = groups_of(mine.offsets, mine.sequences, mine.elements);
    return (kernels.*kernel)({&mine, groups.data(), (int64_t)groups.size()});
  });
}

}  // namespace raglane
