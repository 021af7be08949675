// The thin binding: addresses and sizes in, results written where they point. The caller
// (src/quire/ops/native.py) checks shapes, dtypes and contiguity. The interpreter runs on meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "parallel.h"
#include "philox.h"
#include "sampling.h"

namespace nb = nanobind;

namespace {

// Raised whenever a signature changes; native.py refuses an object of another number.
constexpr int kInterfaceVersion = 4;

using Address = uintptr_t;
using Ints = int64_t*;
using ConstInts = const int64_t*;
using Floats = float*;
using ConstFloats = const float*;

// An address becomes a pointer of the type that the called function takes.
template <class T>
T as(Address address) {
    return reinterpret_cast<T>(address);
}

std::array<uint32_t, 4> philox_words(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    std::array<uint32_t, 4> words{};
    quire::philox_words(counter.data(), key.data(), words.data());
    return words;
}

void philox_uniform(Address out, int64_t rows, int64_t vocab, Address seeds, Address sample_index,
                    Address positions, int num_threads) {
    quire::philox_uniform(as<Floats>(out), rows, vocab, as<ConstInts>(seeds),
                          as<ConstInts>(sample_index), as<ConstInts>(positions), num_threads);
}

void philox_uniform_at(Address out, Address ids, int64_t rows, int64_t k, Address seeds,
                       Address sample_index, Address positions) {
    quire::philox_uniform_at(as<Floats>(out), as<ConstInts>(ids), rows, k, as<ConstInts>(seeds),
                             as<ConstInts>(sample_index), as<ConstInts>(positions));
}

void arg_max(Address ids, Address values, Address logits, int64_t rows, int64_t vocab,
             int num_threads) {
    quire::arg_max(as<Ints>(ids), as<Floats>(values), as<ConstFloats>(logits), rows, vocab,
                   num_threads);
}

void top_k(Address values, Address ids, Address logits, int64_t rows, int64_t vocab, int64_t k,
           int num_threads) {
    quire::top_k(as<Floats>(values), as<Ints>(ids), as<ConstFloats>(logits), rows, vocab, k,
                 num_threads);
}

void log_sum_exp(Address out, Address logits, Address temperatures, int64_t rows, int64_t vocab,
                 int num_threads) {
    quire::log_sum_exp(as<double*>(out), as<ConstFloats>(logits), as<ConstFloats>(temperatures),
                       rows, vocab, num_threads);
}

void token_rank(Address ranks, Address logits, Address ids, int64_t rows, int64_t vocab,
                int num_threads) {
    quire::token_rank(as<Ints>(ranks), as<ConstFloats>(logits), as<ConstInts>(ids), rows, vocab,
                      num_threads);
}

// The addresses of the three filters may be 0: no filters.
void choose(Address ids, Address logits, Address temperatures, Address top_k, Address top_p,
            Address min_p, int64_t rows, int64_t vocab, Address seeds, Address sample_index,
            Address positions, int num_threads) {
    quire::choose(as<Ints>(ids), as<ConstFloats>(logits), as<ConstFloats>(temperatures),
                  as<ConstInts>(top_k), as<ConstFloats>(top_p), as<ConstFloats>(min_p), rows, vocab,
                  as<ConstInts>(seeds), as<ConstInts>(sample_index), as<ConstInts>(positions),
                  num_threads);
}

// gomp_parallel: address of that function in the OpenMP library to share threads with, or 0.
void share_threads(Address gomp_parallel) {
    quire::parallel_region = as<quire::ParallelRegion>(gomp_parallel);
}

// The addresses and numbers of PagedRows (attention.h), in its order. element_bytes tells float32
// (4) from bfloat16 (2).
void paged_attention(std::array<Address, 8> addresses, std::array<int64_t, 9> numbers, float scale,
                     int element_bytes, int num_threads) {
    const auto [out, q, keys, values, tables, query_starts, context_lens, rows] = addresses;
    const auto [num_rows, kv_heads, group, head_dim, block_size, num_blocks, table_stride, q_stride,
                window] = numbers;
    const quire::PagedRows step{
        as<const int32_t*>(tables), as<const int32_t*>(query_starts),
        as<const int32_t*>(context_lens), as<const int32_t*>(rows), num_rows, kv_heads, group,
        head_dim, block_size, num_blocks, table_stride, q_stride, window, scale};
    if (element_bytes == 4) {
        quire::paged_attention(as<Floats>(out), as<ConstFloats>(q), as<ConstFloats>(keys),
                               as<ConstFloats>(values), step, num_threads);
    } else {
        using Half = uint16_t;
        quire::paged_attention(as<Half*>(out), as<const Half*>(q), as<const Half*>(keys),
                               as<const Half*>(values), step, num_threads);
    }
}

// A packed weight as numbers: format, variant, outputs, inputs, group (linear.h).
using PackedNumbers = std::array<int64_t, 5>;

quire::PackedWeight packed_weight(const PackedNumbers& numbers, Address data) {
    const auto [format, variant, outputs, inputs, group] = numbers;
    return {static_cast<quire::WeightFormat>(format), static_cast<int>(variant), outputs, inputs,
            group, as<const uint8_t*>(data)};
}

quire::Matrix matrix(Address data, int element, int64_t rows, int64_t columns, int64_t stride) {
    return {static_cast<quire::Element>(element), rows, columns, stride, as<const void*>(data)};
}

std::vector<std::string> linear_variants() {
    std::vector<std::string> names;
    for (int v = 0; v < quire::num_linear_variants(); ++v) {
        names.emplace_back(quire::linear_kernels(v).name);
    }
    return names;
}

int64_t linear_bytes(PackedNumbers numbers) {
    return quire::packed_bytes(packed_weight(numbers, 0));
}

void linear_pack(Address data, PackedNumbers numbers, Address weight, int element, bool search,
                 int num_threads) {
    const quire::PackedWeight packed = packed_weight(numbers, data);
    const auto from = matrix(weight, element, packed.outputs, packed.inputs, packed.inputs);
    quire::pack_weight(as<uint8_t*>(data), packed, from, search, num_threads);
}

void linear_unpack_rows(Address out, int element, Address ids, int64_t count, PackedNumbers numbers,
                        Address data) {
    const quire::PackedWeight packed = packed_weight(numbers, data);
    quire::unpack_rows(matrix(out, element, count, packed.inputs, packed.inputs), packed,
                       as<ConstInts>(ids));
}

// x: rows x inputs of an element type, with a stride between rows; bias may be 0.
void linear(Address out, Address x, Address bias, int element, int64_t rows, int64_t x_stride,
            PackedNumbers numbers, Address data, int num_threads) {
    const quire::PackedWeight packed = packed_weight(numbers, data);
    quire::linear(matrix(out, element, rows, packed.outputs, packed.outputs), packed,
                  matrix(x, element, rows, packed.inputs, x_stride), as<const void*>(bias),
                  num_threads);
}

double linear_peak(int format, int variant, int num_threads) {
    return quire::linear_peak(static_cast<quire::WeightFormat>(format), variant, num_threads);
}

}  // namespace

NB_MODULE(_core, m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("version", [] { return kInterfaceVersion; });
    m.def("share_threads", &share_threads);
    m.def("paged_attention", &paged_attention, Unlocked());
    m.def("philox_words", &philox_words);
    m.def("philox_uniform", &philox_uniform, Unlocked());
    m.def("philox_uniform_at", &philox_uniform_at, Unlocked());
    m.def("arg_max", &arg_max, Unlocked());
    m.def("top_k", &top_k, Unlocked());
    m.def("log_sum_exp", &log_sum_exp, Unlocked());
    m.def("token_rank", &token_rank, Unlocked());
    m.def("choose", &choose, Unlocked());
    m.def("linear_variants", &linear_variants);
    m.def("linear_bytes", &linear_bytes);
    m.def("linear_pack", &linear_pack, Unlocked());
    m.def("linear_unpack_rows", &linear_unpack_rows, Unlocked());
    m.def("linear", &linear, Unlocked());
    m.def("linear_peak", &linear_peak, Unlocked());
}
