// The rate of fused multiply-adds of one thread, in GF/s: sums that do not wait for each other, in registers alone.
#include <chrono>
#include <cstdio>

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * lanes)));

int main() {
    constexpr int sums = 12;
    constexpr long steps = 250'000'000;
    Vector sum[sums] = {}, factor = {}, addend = {};
    for (int lane = 0; lane < lanes; ++lane) {
        factor[lane] = 0.999f;
        addend[lane] = 0.001f;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (long step = 0; step < steps; ++step) {
#pragma GCC unroll 12
        for (int each = 0; each < sums; ++each) {
            sum[each] = sum[each] * factor + addend;
        }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    float total = 0;
    for (const Vector& each : sum) {
        total += each[0];
    }
    // The total is printed, so that no compiler leaves the loop out.
    std::printf("%.1f %g\n", 2.0 * lanes * sums * steps / seconds.count() / 1e9, total);
}
