// Linear layers for any CPU: vectors of four, which compilers know everywhere.
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "linear.h"
#include "variants.h"

namespace quire {
namespace {

struct Isa {
    static constexpr int64_t kLanes = 4, kTileRows = 4, kWideRows = 2;
    static constexpr bool kSplitsPairs = false;
    static constexpr int kVectors = 4;
    static constexpr int32_t kInt8Offset = 0;
    static constexpr const char* kName = "portable";
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));

    template <class To>
    static inline To read(const void* at) {
        To to;
        std::memcpy(&to, at, sizeof to);
        return to;
    }
    static inline F as_floats(I bits) { return reinterpret_cast<F>(bits); }

    static inline F zero() { return F{}; }
    static inline F all(float value) { return F{value, value, value, value}; }
    static inline I all(int32_t value) { return I{value, value, value, value}; }
    static inline I all_word(const void* at) { return all(read<int32_t>(at)); }
    static inline F load(const void* at) { return read<F>(at); }
    static inline void store(float* at, F values) { std::memcpy(at, &values, sizeof values); }
    static inline I load_words(const void* at) { return read<I>(at); }
    static inline F load_halves(const void* at) {
        const auto* halves = static_cast<const Float16*>(at);
        return F{widen(halves[0]), widen(halves[1]), widen(halves[2]), widen(halves[3])};
    }
    static inline F widen_bfloat16(const void* at) {
        const auto* halves = static_cast<const Bfloat16*>(at);
        return F{widen(halves[0]), widen(halves[1]), widen(halves[2]), widen(halves[3])};
    }
    // Pairs of e4m3 as float16 of the same exponent bits, widened: 2^8 too small.
    static inline void load_float8(const uint8_t* at, F& even, F& odd) {
        for (int i = 0; i < 4; ++i) {
            even[i] = widen(float8_as_half(at[2 * i]));
            odd[i] = widen(float8_as_half(at[2 * i + 1]));
        }
    }
    template <int kBits>
    static inline I shift_right(I words) {
        return words >> kBits;
    }
    template <int kBits>
    static inline I shift_left(I words) {
        return words << kBits;
    }
    static inline I load_bytes(const uint8_t* at) { return I{at[0], at[1], at[2], at[3]}; }
    static inline F minus(F values) { return -values; }
    static inline I look_up(const uint8_t* table, I codes) {
        uint8_t bytes[16];
        std::memcpy(bytes, &codes, sizeof bytes);
        for (uint8_t& byte : bytes) byte = table[byte];
        return read<I>(bytes);
    }
    static inline F low_halves(I words) { return as_floats(words << 16); }
    static inline F high_halves(I words) { return as_floats(words & -65536); }
    static inline I low_nibbles(I words) { return words & 0x0F0F0F0F; }
    static inline I high_nibbles(I words) { return (words >> 4) & 0x0F0F0F0F; }
    static inline F fma(F a, F b, F c) { return a * b + c; }
    static inline F times(F a, F b) { return a * b; }
    static inline F to_float(I values) { return __builtin_convertvector(values, F); }
    static inline I dot_bytes(I sum, I w, I x) {
        for (int shift = 24; shift >= 0; shift -= 8) sum += ((w << shift) >> 24) * ((x << shift) >> 24);
        return sum;
    }
    static inline I dot_nibbles(I sum, I w, I x) { return dot_bytes(sum, w, x); }
};

}  // namespace
}  // namespace quire

#include "linear_tiles.inc.h"

namespace quire {
const LinearKernels kLinearPortable = kKernels;
}
