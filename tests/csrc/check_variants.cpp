// Checks which variants (variants.h) CPUs with given features run.
//
// Prints a line. The exit status is 1 if something was wrong.
#include <cstdio>

#include "check.h"

namespace {

using namespace quire;

// A kind of CPU, its features, and the variants that it runs.
struct Case {
    const char* cpu;
    X86Features features;
    VariantSet expected;
};

void describe(const Case& c) { std::printf("%s", c.cpu); }

constexpr VariantSet kPortable = set_of(Variant::kPortable);
constexpr VariantSet kAvx2 = kPortable | set_of(Variant::kAvx2);
constexpr VariantSet kAvxVnni = kAvx2 | set_of(Variant::kAvxVnni);
constexpr VariantSet kAvx512 = kAvx2 | set_of(Variant::kAvx512);
constexpr VariantSet kBf16 = kAvx512 | set_of(Variant::kAvx512Bf16);

// avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, amx
constexpr Case kCases[] = {
    {"Sandy Bridge, no AVX2", {false, false, false, false, false, false}, kPortable},
    {"Haswell and Zen 3", {true, false, false, false, false, false}, kAvx2},
    {"Skylake-X, AVX-512 without VNNI", {true, false, true, false, false, false}, kAvx2},
    {"Cascade Lake", {true, false, true, true, false, false}, kAvx512},
    {"Zen 4", {true, false, true, true, true, false}, kBf16},
    {"Zen 5", {true, true, true, true, true, false}, kBf16 | kAvxVnni},
    {"Sapphire Rapids", {true, true, true, true, true, true},
     kBf16 | kAvxVnni | set_of(Variant::kAmx)},
    {"Sapphire Rapids, tiles not permitted", {true, true, true, true, true, false},
     kBf16 | kAvxVnni},
    {"Alder Lake, and AVX10 on 256 bits", {true, true, false, false, false, false}, kAvxVnni},
    {"AVX-512 VNNI alone", {true, false, false, true, false, false}, kAvx2},
    {"bfloat16 without VNNI", {true, false, true, false, true, true}, kAvx2},
    {"a virtual machine that hides AVX2", {false, true, true, true, true, true}, kPortable},
};

}  // namespace

int main() {
    Check<Case> check;
    for (const Case& c : kCases) check.expect(variants_with(c.features) == c.expected, c, "variants");
    const Case here{"this CPU", {}, 0};
    check.expect((running_variants() & ~VariantSet{QUIRE_COMPILED_VARIANTS}) == 0, here, "not compiled");
    check.expect(last_of(0) == -1 && last_of(kAvxVnni) == 2 && last_of(kBf16) == 4, here, "the last");
    std::printf("variants: %lld checks, %lld wrong\n", static_cast<long long>(check.count()),
                static_cast<long long>(check.failures()));
    return check.failures() == 0 ? 0 : 1;
}
