// The instruction sets of this build and of this processor.
#include "targets/processor.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(RAGLANE_X86)
#include <cpuid.h>
#endif

#include "abi/failure.h"
#include "runtime/tuning.h"

namespace raglane {
namespace {

#if defined(RAGLANE_X86)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}
#endif

#if defined(RAGLANE_VNNI)
// The bits of CPUID's leaf 7: of AVX512-VNNI, and of its form for AVX2, AVX-VNNI.
bool has_avx512_vnni() {
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c >> 11 & 1);
}
bool has_avx2_vnni() {
  unsigned a, b, c, d;
  return __builtin_cpu_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(RAGLANE_PAIRS)
bool has_avx512_bfloat16() {
#if defined(RAGLANE_EMULATE)
  return has_avx512();
#else
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#endif
}

// Tile registers are 8 KB per thread, so a process has to ask Linux for them, once.
bool has_tiles() {
#if defined(RAGLANE_EMULATE)
  return has_avx512();
#elif defined(__linux__)
  unsigned a, b, c, d;
  if (!has_avx512_bfloat16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d >> 22 & 1) || !(d >> 24 & 1)) return false;  // AMX-BF16, AMX-TILE
  const long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}
#endif

bool ask_processor(int64_t isa) {
  switch (isa) {
    case RAGLANE_PORTABLE: return true;
#if defined(RAGLANE_X86)
    case RAGLANE_AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case RAGLANE_AVX512: return has_avx512();
#endif
#if defined(RAGLANE_PAIRS)
    case RAGLANE_AVX512_BF16: return has_avx512_bfloat16();
    case RAGLANE_AMX: return has_tiles();
#endif
  }
  return false;
}

}  // namespace

// Asked once: on a virtual machine the instruction that asks is the hypervisor's to answer, which takes microseconds.
bool processor_has(int64_t isa) {
  static const uint64_t known = [] {
    uint64_t sets = 0;
    for (int64_t i = RAGLANE_PORTABLE; i <= RAGLANE_AMX; i++) sets |= (uint64_t)ask_processor(i) << i;
    return sets;
  }();
  return isa >= RAGLANE_PORTABLE && isa <= RAGLANE_AMX && (known >> isa & 1);
}

const Kernels& kernels_of(int64_t isa, int64_t dtype) {
  if (!processor_has(isa)) fail("isa: got %lld; this processor or this build does not have it", (long long)isa);
#if defined(RAGLANE_PAIRS)
  if (dtype == RAGLANE_BFLOAT16 && isa == RAGLANE_AVX512_BF16) return avx512bf16::kernels;
  if (dtype == RAGLANE_BFLOAT16 && isa == RAGLANE_AMX) return amx::kernels;
#else
  (void)dtype;
#endif
#if defined(RAGLANE_X86)
  if (isa == RAGLANE_AVX2) return avx2::kernels;
  if (isa >= RAGLANE_AVX512) return avx512::kernels;
#endif
  return portable::kernels;
}

const ByteKernels& byte_kernels_of(int64_t isa) {
#if defined(RAGLANE_VNNI)
  static const bool of_avx512 = has_avx512_vnni(), of_avx2 = has_avx2_vnni();
  if (isa >= RAGLANE_AVX512 && of_avx512) return avx512vnni::byte_kernels;
  if (isa == RAGLANE_AVX2 && of_avx2) return avx2vnni::byte_kernels;
#endif
#if defined(RAGLANE_X86)
  if (isa == RAGLANE_AVX2) return avx2::byte_kernels;
  if (isa >= RAGLANE_AVX512) return avx512::byte_kernels;
#else
  (void)isa;
#endif
  return portable::byte_kernels;
}

int64_t cache_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  if (bytes > 0) return bytes;
#endif
  return tuning::unknown_cache;
}

}  // namespace raglane
