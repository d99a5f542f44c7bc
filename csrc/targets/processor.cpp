// The instruction sets of this build and processor.
#include "targets/processor.h"

#include <string.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "abi/failure.h"
#include "runtime/tuning.h"
#include "targets/targets.h"

namespace raglane {
namespace {

#if defined(__x86_64__)
#define RAGLANE_CPU(part) (__builtin_cpu_supports(part) != 0)

enum Register { EAX, EBX, ECX, EDX };
// A bit of CPUID's leaf 7.
[[maybe_unused]] bool cpu_bit(unsigned leaf, Register word, int bit) {
  unsigned words[4];
  return __get_cpuid_count(7, leaf, &words[EAX], &words[EBX], &words[ECX], &words[EDX]) && (words[word] >> bit & 1);
}
#endif

// Tile registers take 8 KB per thread, so Linux requires a process to request them once.
[[maybe_unused]] bool tiles_permitted() {
#if defined(__linux__) && defined(__x86_64__)
  const long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

struct Set {
  const char *name, *family;
  const Kernels* kernels;          // null if there are none,
  const ByteKernels* byte_kernels; // and all three if this build is without the set
  bool here;                       // this processor supports it
};

#define RAGLANE_SET(name, family, loops, bytes, flags, detected)             \
  {#name, #family, RAGLANE_IF(RAGLANE_BUILT_##name, RAGLANE_IF(loops, &name::kernels)), \
   RAGLANE_IF(RAGLANE_BUILT_##name, RAGLANE_IF(bytes, &name::byte_kernels)), RAGLANE_IF(RAGLANE_BUILT_##name, (detected))},
#define RAGLANE_COUNT(name, family, loops, ...) +loops
constexpr int64_t isas = 0 RAGLANE_TARGETS(RAGLANE_COUNT);

struct Sets {
  Set all[16] = {RAGLANE_TARGETS(RAGLANE_SET)};

  Sets() {
    for (Set* set = all; set->name; set++) {
#if defined(RAGLANE_EMULATE)  // extensions for bfloat16 are emulated
      set->here = set->here || (set->kernels && !set->byte_kernels);
#endif
      // A build for one machine is without the portable set, whose loops its best set does not use.
      const Set& family = family_of(*set);
      set->here = set->here && (family.here || !family.kernels);
    }
  }
  const Set& family_of(const Set& of) const {
    const Set* found = all;
    while (strcmp(found->name, of.family) != 0) found++;
    return *found;
  }
};

// Cached: in a virtual machine the hypervisor emulates CPUID, which takes microseconds.
const Sets& sets() {
  static const Sets all;
  return all;
}

}  // namespace

const char* isa_name(int64_t isa) { return isa >= 0 && isa < isas ? sets().all[isa].name : nullptr; }

bool processor_has(int64_t isa) { return isa_name(isa) && sets().all[isa].here; }

bool has_all_dtypes(int64_t isa) { return sets().all[isa].byte_kernels; }

const Kernels& kernels_of(int64_t isa, int64_t dtype) {
  if (!processor_has(isa)) fail("isa must be one that this processor and this build have, got %lld", (long long)isa);
  const Set& set = sets().all[isa];
  return *(has_all_dtypes(isa) || dtype == RAGLANE_BFLOAT16 ? set : sets().family_of(set)).kernels;
}

const ByteKernels& byte_kernels_of(int64_t isa) {
  const Set& chosen = sets().all[isa];
  const Set& family = has_all_dtypes(isa) ? chosen : sets().family_of(chosen);
  const ByteKernels* best = family.byte_kernels;
  for (const Set* set = sets().all + isas; set->name; set++) {
    const Set& extended = sets().family_of(*set);
    if (set->here && (&extended == &chosen || &extended == &family)) best = set->byte_kernels;
  }
  return *best;
}

int64_t cache_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return tuning::unknown_cache;
}

}  // namespace raglane
