// Attention for any CPU: vectors of four, which compilers know everywhere.
#include "attention_kernels.h"
#include "elements.h"

#include <cstring>
#include <type_traits>
#include <utility>

namespace quire {
namespace {

struct Isa {
    typedef float F __attribute__((vector_size(16)));
    typedef int32_t I __attribute__((vector_size(16)));
    static constexpr int kLanes = 4, kTileRows = 4, kWideRows = 2;
    static constexpr const char* kName = "portable";

    static inline F all(float value) { return F{value, value, value, value}; }
    static inline F load(const void* at) {
        F values;
        std::memcpy(&values, at, sizeof values);
        return values;
    }
    static inline void store(float* at, F values) { std::memcpy(at, &values, sizeof values); }
    static inline I load_words(const void* at) {
        I words;
        std::memcpy(&words, at, sizeof words);
        return words;
    }
    static inline F fma(F a, F b, F c) { return a * b + c; }
    static inline F max(F a, F b) { return reinterpret_cast<F>(pick(a > b, bits(a), bits(b))); }
    static inline float largest(F x) {
        const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
        return even > odd ? even : odd;
    }
    static inline float total(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static inline I where_at_least(F x, F limit, I value) { return (x >= limit) & value; }
    static inline F float16_of(I words) {
        return F{half(words[0]), half(words[1]), half(words[2]), half(words[3])};
    }
    template <class Element>
    static inline F load_as(const void* at) {
        const auto* from = static_cast<const Element*>(at);
        return F{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
    }
    static inline F load_bfloat16(const void* at) { return load_as<Bfloat16>(at); }
    static inline F load_float16(const void* at) { return load_as<Float16>(at); }
    static inline I load_bytes(const void* at) {
        const auto* from = static_cast<const int8_t*>(at);
        return I{from[0], from[1], from[2], from[3]};
    }

   private:
    static inline I bits(F values) { return reinterpret_cast<I>(values); }
    static inline I pick(I mask, I a, I b) { return (mask & a) | (~mask & b); }
    static inline float half(int32_t word) {
        return widen(Float16{static_cast<uint16_t>(word)});
    }
};

}  // namespace
}  // namespace quire

#include "attention_tiles.inc.h"

namespace quire {
const AttentionKernels kAttentionPortable = kKernels;
}
