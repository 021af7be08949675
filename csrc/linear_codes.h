// Codes of a group's integers, at most 8 bits each and not negative, in 32-bit words.
//
// An operand is 4 integers, a byte each. 8 bits: a word is an operand. 4 bits: a word's low halves
// are an operand, its high halves the next. Integers with multiples stand as they are before
// they are multiplied.
//
//   5 bits, operands 0..7 in words 0..4       6 bits, operands 0..3 in words 0..2
//     bits 0..4   0  1  2  3  4                 bits 0..5   0   1   2
//     bits 5..7   5  6  7  .  .  (bits 0..2)    bits 6..7   3   3   3   (bits 0..1, 2..3, 4..5)
//     bits 5..6   .  .  .  5  6  (bits 3..4)
//     bit  7      .  .  .  7  7  (bit 3, bit 4)
#pragma once

#include <cstdint>
#include <cstring>

#include "linear.h"

namespace quire {

inline uint32_t bits_at(uint32_t word, int shift, uint32_t mask) { return word >> shift & mask; }

// words: count * bits / 32 of one output. codes: count of them, a whole number of words.
inline void encode(uint32_t* words, Values values, const uint8_t* codes, int64_t count) {
    const auto operand = [&](int64_t i) {
        uint32_t word;
        std::memcpy(&word, codes + 4 * i, sizeof word);
        return word;
    };
    for (int64_t i = 0; 4 * i < count;) {
        if (values == Values::kInt8) {
            *words++ = operand(i++);
        } else if (values == Values::kInt5) {
            const uint32_t a = operand(i + 5), b = operand(i + 6), c = operand(i + 7);
            *words++ = operand(i) | (a & 0x07070707) << 5;
            *words++ = operand(i + 1) | (b & 0x07070707) << 5;
            *words++ = operand(i + 2) | (c & 0x07070707) << 5;
            *words++ = operand(i + 3) | (a & 0x18181818) << 2 | (c & 0x08080808) << 4;
            *words++ = operand(i + 4) | (b & 0x18181818) << 2 | (c & 0x10101010) << 3;
            i += 8;
        } else if (values == Values::kInt6) {
            const uint32_t last = operand(i + 3);
            *words++ = operand(i) | (last & 0x03030303) << 6;
            *words++ = operand(i + 1) | (last & 0x0C0C0C0C) << 4;
            *words++ = operand(i + 2) | (last & 0x30303030) << 2;
            i += 4;
        } else {
            *words++ = operand(i) | operand(i + 1) << 4;
            i += 2;
        }
    }
}

inline void decode(uint8_t* codes, Values values, const uint32_t* words, int64_t count) {
    const auto put = [&](int64_t i, uint32_t word) {
        std::memcpy(codes + 4 * i, &word, sizeof word);
    };
    for (int64_t i = 0; 4 * i < count;) {
        if (values == Values::kInt8) {
            put(i++, *words++);
        } else if (values == Values::kInt5) {
            for (int j = 0; j < 5; ++j) put(i + j, words[j] & 0x1F1F1F1F);
            put(i + 5, bits_at(words[0], 5, 0x07070707) | bits_at(words[3], 2, 0x18181818));
            put(i + 6, bits_at(words[1], 5, 0x07070707) | bits_at(words[4], 2, 0x18181818));
            put(i + 7, bits_at(words[2], 5, 0x07070707) | bits_at(words[3], 4, 0x08080808) |
                           bits_at(words[4], 3, 0x10101010));
            i += 8, words += 5;
        } else if (values == Values::kInt6) {
            for (int j = 0; j < 3; ++j) put(i + j, words[j] & 0x3F3F3F3F);
            put(i + 3, bits_at(words[0], 6, 0x03030303) | bits_at(words[1], 4, 0x0C0C0C0C) |
                           bits_at(words[2], 2, 0x30303030));
            i += 4, words += 3;
        } else {
            put(i, *words & 0x0F0F0F0F);
            put(i + 1, bits_at(*words++, 4, 0x0F0F0F0F));
            i += 2;
        }
    }
}

}  // namespace quire
