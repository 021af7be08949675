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
void store_int8_head(uint8_t* to, const From* from, int64_t dim) {
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
    std::memcpy(to + dim, &scale, sizeof scale);
}

// One tensor's tokens [begin, end).
template <class From>
void store_rows(const KvLayer& kv, uint8_t* to, const HeadRows& rows, const int64_t* slots,
                int64_t begin, int64_t end) {
    const int64_t dim = kv.head_dim, bytes = kv_row_bytes(kv.format, dim);
    const int64_t head_bytes = kv.num_blocks * kv.block_size * bytes;
    for (int64_t t = begin; t < end; ++t) {
        const From* from = static_cast<const From*>(rows.data) + t * rows.stride;
        uint8_t* place = to + slots[t] * bytes;
        for (int64_t k = 0; k < kv.heads; ++k, from += dim, place += head_bytes) {
            switch (kv.format) {
                case KvFormat::kFloat32: store_head<float>(place, from, dim); break;
                case KvFormat::kBfloat16: store_head<Bfloat16>(place, from, dim); break;
                case KvFormat::kFloat16: store_head<Float16>(place, from, dim); break;
                default: store_int8_head(place, from, dim);
            }
        }
    }
}

void store_tokens(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
                  int64_t begin, int64_t end) {
    const auto store = [&](uint8_t* to, const HeadRows& rows) {
        switch (rows.element) {
            case Element::kFloat32: return store_rows<float>(kv, to, rows, slots, begin, end);
            case Element::kBfloat16: return store_rows<Bfloat16>(kv, to, rows, slots, begin, end);
            default: return store_rows<Float16>(kv, to, rows, slots, begin, end);
        }
    };
    store(kv.keys, k);
    store(kv.values, v);
}

const AttentionKernels kKernels = {Isa::kName, run_item, run_merge, store_tokens};

}  // namespace
}  // namespace quire
