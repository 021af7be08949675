// Checks vpdpbusd: its emulation (emulated_vnni.h) against plain sums, and instructions of this CPU
// against the emulation, bit by bit. avx512_vnni: the same instruction as AVX-512 encodes it.
//
// Prints a line for each. The exit status is 1 if something was wrong.
#include <cstdio>
#include <cstring>

#include "check.h"
#include "emulated_vnni.h"

#ifdef QUIRE_X86_VARIANTS
#include <immintrin.h>
#endif

namespace {

using namespace quire;

struct Case {
    int number;
};

void describe(const Case& c) { std::printf("case %d", c.number); }

struct Numbers {
    alignas(32) uint32_t sum[8], w[8], x[8];
};

// Every second case has only the largest and the least numbers, whose sums wrap around.
Numbers numbers_of(const Case& c, Random& random) {
    const auto extreme = [&](uint32_t high, uint32_t low) {
        uint32_t word = 0;
        for (int i = 0; i < 4; ++i) word = word << 8 | (random.bits() % 2 == 0 ? high : low);
        return word;
    };
    const bool is_extreme = c.number % 2 == 1;
    Numbers n;
    for (int i = 0; i < 8; ++i) {
        n.sum[i] = is_extreme ? (random.bits() % 2 == 0 ? 0x7FFFFFFFu : 0x80000000u) : random.bits();
        n.w[i] = is_extreme ? extreme(0xFF, 0) : random.bits();
        n.x[i] = is_extreme ? extreme(0x7F, 0x80) : random.bits();
    }
    return n;
}

void check_sums(Check<Case>& check, const Case& c, Numbers n) {
    const Numbers before = n;
    emulated_vpdpbusd(n.sum, n.w, n.x);
    bool is_right = true;
    for (int i = 0; i < 8; ++i) {
        int64_t sum = static_cast<int32_t>(before.sum[i]);
        for (int b = 0; b < 32; b += 8) {
            const int64_t w = before.w[i] >> b & 255;
            sum += w * static_cast<int8_t>(before.x[i] >> b & 255);
        }
        is_right &= n.sum[i] == static_cast<uint32_t>(sum);
    }
    check.expect(is_right, c, "not the sums");
}

// What the multiplication by panels relies on: +128 in weights is taken back by -128 times the sum of
// inputs, and sums of a whole group of the largest numbers do not overflow.
void check_offset(Check<Case>& check) {
    const Case c{-1};
    Numbers n;
    for (int i = 0; i < 8; ++i) n.w[i] = 0x01010101u * (128 - 127), n.x[i] = 0x7F7F7F7Fu;
    for (int i = 0; i < 8; ++i) n.sum[i] = static_cast<uint32_t>(-128 * 127 * 65536);
    for (int k = 0; k < 65536; k += 4) emulated_vpdpbusd(n.sum, n.w, n.x);
    check.expect(static_cast<int32_t>(n.sum[7]) == -127 * 127 * 65536, c, "an offset remains");
}

#ifdef QUIRE_X86_VARIANTS

__attribute__((target("avx2,avxvnni"))) void vex(Numbers& n) {
    auto* words = reinterpret_cast<__m256i*>(n.sum);
    const auto w = *reinterpret_cast<const __m256i*>(n.w), x = *reinterpret_cast<const __m256i*>(n.x);
    *words = _mm256_dpbusd_avx_epi32(*words, w, x);
}

__attribute__((target("avx2,avx512vl,avx512vnni"))) void evex(Numbers& n) {
    auto* words = reinterpret_cast<__m256i*>(n.sum);
    const auto w = *reinterpret_cast<const __m256i*>(n.w), x = *reinterpret_cast<const __m256i*>(n.x);
    *words = _mm256_dpbusd_epi32(*words, w, x);
}

template <void (*kInstruction)(Numbers&)>
void check_hardware(Check<Case>& check, const Case& c, Numbers n) {
    Numbers expected = n;
    kInstruction(n);
    emulated_vpdpbusd(expected.sum, expected.w, expected.x);
    check.expect(std::memcmp(n.sum, expected.sum, sizeof n.sum) == 0, c, "other bits than emulated");
}

#endif

template <class CheckCase>
int64_t run(const char* name, const CheckCase& check_case) {
    Check<Case> check;
    Random random;
    for (Case c{0}; c.number < 1000; ++c.number) check_case(check, c, numbers_of(c, random));
    check_offset(check);
    std::printf("%s: %lld checks, %lld wrong\n", name, static_cast<long long>(check.count()),
                static_cast<long long>(check.failures()));
    return check.failures();
}

}  // namespace

int main() {
    int64_t failures = run("emulated", check_sums);
#ifdef QUIRE_X86_VARIANTS
    if (__builtin_cpu_supports("avxvnni")) failures += run("avx_vnni", check_hardware<vex>);
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl")) {
        failures += run("avx512_vnni", check_hardware<evex>);
    }
#endif
    return failures == 0 ? 0 : 1;
}
