// Multiplies rows by a weight of random numbers: VARIANT FORMAT ROWS TIMES. For counting instructions
// under emulation (benchmarks/kernels/instructions.py): two numbers of times differ by products alone.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "linear.h"
#include "variants.h"

int main(int count, char** given) {
    using namespace quire;
    if (count != 5) return 2;
    const int variant = std::atoi(given[1]), rows = std::atoi(given[3]), times = std::atoi(given[4]);
    if ((running_variants() >> variant & 1) == 0) return 3;
    constexpr int64_t kOutputs = 128, kInputs = 1024, kGroup = 128;
    PackedWeight weight{static_cast<WeightFormat>(std::atoi(given[2])), variant, kOutputs, kInputs,
                        kGroup, false, nullptr};
    uint32_t state = 1;
    const auto random = [&state] {  // bfloat16 between 1 and 2, and their negatives
        state = state * 1664525 + 1013904223;
        return static_cast<uint16_t>((state >> 31 << 15) | 0x3F80 | (state >> 20 & 0x7F));
    };
    std::vector<uint16_t> numbers(kOutputs * kInputs), x(rows * kInputs), out(rows * kOutputs);
    for (uint16_t& number : numbers) number = random();
    for (uint16_t& number : x) number = random();
    std::vector<uint8_t> packed(packed_bytes(weight) + 64);
    weight.data = packed.data() + (64 - reinterpret_cast<uintptr_t>(packed.data()) % 64);
    const WeightRows from{Element::kBfloat16, reinterpret_cast<const uint8_t*>(numbers.data()), -1, 0};
    if (pack_weight(const_cast<uint8_t*>(weight.data), weight, from, false, 1) != 0) return 4;
    for (int i = 0; i < times; ++i) {
        linear({Element::kBfloat16, rows, kOutputs, kOutputs, out.data()}, weight,
               {Element::kBfloat16, rows, kInputs, kInputs, x.data()}, nullptr, 1);
    }
    return 0;
}
