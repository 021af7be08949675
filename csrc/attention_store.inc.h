// Keys and values on their way into blocks, and the variant's table: included by attention_items.inc.h.
#pragma once

namespace quire {
namespace {

template <class To, class From>
void store_head(uint8_t* to, const From* from, int64_t dim) {
    if constexpr (std::is_same_v<To, From>) {
        std::memcpy(to, from, static_cast<size_t>(dim) * sizeof(To));
    } else {
        auto* out = reinterpret_cast<To*>(to);
        for (int64_t h = 0; h < dim; ++h) narrow(out[h], widen(from[h]));
    }
}

// To the nearest. Adding 1.5 * 2^23 leaves the rounded number in the lowest bits.
template <class From>
void store_int8_head(uint8_t* to, uint8_t* scale_to, const From* from, int64_t dim) {
    int32_t peak = 0;
    for (int64_t h = 0; h < dim; ++h) {
        const int32_t magnitude = bits_of(widen(from[h])) & 0x7FFFFFFF;
        peak = magnitude > peak ? magnitude : peak;
    }
    // Below this the inverse would overflow, and such values are as good as nothing.
    const float largest = float_of(peak), inverse = largest < 1e-30f ? 0.0f : 127.0f / largest;
    const float scale = largest / 127.0f;
    for (int64_t h = 0; h < dim; ++h) {
        to[h] = static_cast<uint8_t>(bits_of(widen(from[h]) * inverse + 12582912.0f));
    }
    std::memcpy(scale_to, &scale, sizeof scale);
}

template <class From>
void store_float8_head(uint8_t* to, const From* from, int64_t dim, float scale) {
    const float inverse = 1.0f / scale;
    for (int64_t h = 0; h < dim; ++h) to[h] = float8_of(widen(from[h]) * inverse);
}

// scale: of float8.
template <class From>
void store_value(uint8_t* to, const KvLayer& kv, const From* from, float scale) {
    switch (kv.format) {
        case KvFormat::kFloat32: return store_head<float>(to, from, kv.head_dim);
        case KvFormat::kBfloat16: return store_head<Bfloat16>(to, from, kv.head_dim);
        case KvFormat::kFloat16: return store_head<Float16>(to, from, kv.head_dim);
        case KvFormat::kFloat8: return store_float8_head(to, from, kv.head_dim, scale);
        default: return store_int8_head(to, to + kv.head_dim, from, kv.head_dim);
    }
}

// A key's bytes, one after the other.
template <class From>
void store_key_row(uint8_t* row, const KvLayer& kv, const From* from) {
    if (kv.format != KvFormat::kInt8) return store_value(row, kv, from, kv.key_scale);
    store_int8_head(row + sizeof(float), row, from, kv.head_dim);
}

// Writes the words of a row to column `in_block` of a block, and the rest after all words. row:
// scratch memory for the row.
template <class From>
void store_key(uint8_t* block, int64_t in_block, const KvLayer& kv, const From* from, uint8_t* row) {
    store_key_row(row, kv, from);
    const int64_t bytes = kv_row_bytes(kv.format, kv.head_dim), words = bytes / 4, rest = bytes % 4;
    uint8_t* to = block + in_block * 4;
    for (int64_t w = 0; w < words; ++w, to += 4 * kv.block_size) std::memcpy(to, row + 4 * w, 4);
    std::memcpy(block + words * 4 * kv.block_size + in_block * rest, row + 4 * words,
                static_cast<size_t>(rest));
}

// One tensor's tokens [begin, end), head by head.
template <bool kKeys, class From>
void store_rows(const KvLayer& kv, uint8_t* to, const HeadRows& rows, const int64_t* slots,
                int64_t begin, int64_t end) {
    const int64_t dim = kv.head_dim, bytes = kv_row_bytes(kv.format, dim);
    auto* row = reinterpret_cast<uint8_t*>(attention_scratch(dim + 1));
    for (int64_t k = 0; k < kv.heads; ++k, to += kv.num_blocks * kv.block_size * bytes) {
        for (int64_t t = begin; t < end; ++t) {
            const From* from = static_cast<const From*>(rows.data) + t * rows.stride + k * dim;
            if (kv.is_latent()) {
                store_key_row(to + slots[t] * bytes, kv, from);
            } else if constexpr (kKeys) {
                const int64_t block = slots[t] / kv.block_size;
                const int64_t in_block = slots[t] - block * kv.block_size;
                store_key(to + block * kv.block_size * bytes, in_block, kv, from, row);
            } else {
                store_value(to + slots[t] * bytes, kv, from, kv.value_scale);
            }
        }
    }
}

void store_tokens(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
                  int64_t begin, int64_t end) {
    const auto store = [&](auto keys, uint8_t* to, const HeadRows& rows) {
        constexpr bool kKeys = decltype(keys)::value;
        switch (rows.element) {
            case Element::kFloat32:
                return store_rows<kKeys, float>(kv, to, rows, slots, begin, end);
            case Element::kBfloat16:
                return store_rows<kKeys, Bfloat16>(kv, to, rows, slots, begin, end);
            default: return store_rows<kKeys, Float16>(kv, to, rows, slots, begin, end);
        }
    };
    store(std::true_type{}, kv.keys, k);
    if (!kv.is_latent()) store(std::false_type{}, kv.values, v);
}

const AttentionKernels kKernels = {Isa::kName, run_item, run_merge, store_tokens};

}  // namespace
}  // namespace quire
