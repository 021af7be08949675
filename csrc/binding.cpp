// The thin binding: addresses and sizes in, results written where they point. The caller
// (src/quire/ops/native.py) checks shapes, dtypes and contiguity. The interpreter runs on meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "linear.h"
#include "philox.h"
#include "program.h"
#include "sampling.h"
#include "step_inputs.h"

namespace nb = nanobind;

namespace {

// Raised whenever a signature changes; native.py refuses an object of another number.
constexpr int kInterfaceVersion = 7;

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

// addresses: tables, query_starts, context_lens; numbers: AttentionStep's (attention.h), in its order.
void plan_prepare(quire::AttentionPlan& plan, std::array<Address, 3> addresses,
                  std::array<int64_t, 7> numbers, int num_threads, bool split, bool cascade) {
    const auto [tables, query_starts, context_lens] = addresses;
    const auto [table_stride, num_rows, block_size, window, kv_heads, group, head_dim] = numbers;
    plan.prepare({as<const int32_t*>(tables), table_stride, as<const int32_t*>(query_starts),
                  as<const int32_t*>(context_lens), num_rows, block_size, window, kv_heads, group,
                  head_dim},
                 num_threads, {split, cascade});
}

// One layer's keys and values: two addresses, and KvLayer's numbers in its order.
quire::KvLayer kv_layer(const std::array<Address, 2>& addresses,
                        const std::array<int64_t, 5>& numbers) {
    const auto [format, heads, num_blocks, block_size, head_dim] = numbers;
    return {static_cast<quire::KvFormat>(format), heads, num_blocks, block_size, head_dim,
            as<uint8_t*>(addresses[0]), as<uint8_t*>(addresses[1])};
}

// Address, element type (linear.h) and token stride.
using HeadRowNumbers = std::array<int64_t, 3>;

quire::HeadRows head_rows(const HeadRowNumbers& numbers) {
    return {static_cast<quire::Element>(numbers[1]), numbers[2],
            as<void*>(static_cast<Address>(numbers[0]))};
}

void paged_attention(const quire::AttentionPlan& plan, std::array<Address, 2> kv,
                     std::array<int64_t, 5> kv_numbers, HeadRowNumbers q, HeadRowNumbers out,
                     float scale, int num_threads, int variant) {
    quire::paged_attention(plan, kv_layer(kv, kv_numbers), head_rows(q), head_rows(out),
                           scale, num_threads, variant);
}

void store_kv(std::array<Address, 2> kv, std::array<int64_t, 5> kv_numbers, HeadRowNumbers k,
              HeadRowNumbers v, Address slots, int64_t count, int num_threads) {
    quire::store_kv(kv_layer(kv, kv_numbers), head_rows(k), head_rows(v),
                    as<ConstInts>(slots), count, num_threads);
}

std::vector<std::string> attention_variants() {
    std::vector<std::string> names;
    for (int v = 0; v < quire::num_attention_variants(); ++v) {
        names.emplace_back(quire::attention_variant_name(v));
    }
    return names;
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

void linear_pack_blocks(Address data, PackedNumbers numbers, Address blocks, int num_threads) {
    quire::pack_blocks(as<uint8_t*>(data), packed_weight(numbers, data), as<const uint8_t*>(blocks),
                       num_threads);
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

// Bytes that a row of float32 takes once it is prepared for products with this weight; 0 if it is
// read as it is.
int64_t linear_operand_bytes(PackedNumbers numbers) {
    const quire::PackedWeight packed = packed_weight(numbers, 0);
    const auto x = matrix(0, static_cast<int>(quire::Element::kFloat32), 1, packed.inputs,
                          packed.inputs);
    return quire::linear_kernels(packed.variant).operand_bytes(packed, x);
}

double linear_peak(int format, int variant, int num_threads) {
    return quire::linear_peak(static_cast<quire::WeightFormat>(format), variant, num_threads);
}

// --- programs (program.h) ---

using Numbers = std::vector<int64_t>;

void make_program(quire::Program* at, Numbers widths, Numbers places, int64_t arena_width,
                  int attention_variant) {
    new (at) quire::Program(std::move(widths), std::move(places), arena_width, attention_variant);
}

void add_layer(quire::Program& program, size_t group, std::array<Address, 2> kv,
               std::array<int64_t, 5> kv_numbers) {
    program.add_layer({group, kv_layer(kv, kv_numbers)});
}

// views: buffer and offset of up to four.
void add_instruction(quire::Program& program, int kind, std::array<int64_t, 8> views,
                     std::array<int64_t, 2> sizes, std::array<Address, 2> addresses, int64_t layer,
                     double number, PackedNumbers weight, Address data, bool begins_phase) {
    quire::Instruction instruction{
        static_cast<quire::Kind>(kind), {}, sizes, {}, layer, number, packed_weight(weight, data)};
    for (size_t i = 0; i < 4; ++i) instruction.views[i] = {views[2 * i], views[2 * i + 1]};
    for (size_t i = 0; i < 2; ++i) instruction.addresses[i] = as<const void*>(addresses[i]);
    program.add(instruction, begins_phase);
}

// groups: each cache group's plan, and the address of its slots.
void run_program(quire::Program& program, int64_t rows, Address ids, Address positions, Address out,
                 std::vector<std::pair<quire::AttentionPlan*, Address>> groups, int num_threads) {
    quire::ProgramStep step{
        rows, as<ConstInts>(ids), as<ConstInts>(positions), {}, as<Floats>(out)};
    for (const auto& [plan, slots] : groups) step.groups.push_back({plan, as<ConstInts>(slots)});
    program.run(std::move(step), num_threads);
}

// out: memory of the 64-bit results (ids, positions, slots of each group) and of the 32-bit ones
// (query starts, context lengths, table of each group), one after the other. in: tokens, computed,
// rows, number of tokens of each. tables: address and row stride.
void gather_step(std::array<Address, 2> out, std::array<Address, 4> in,
                 std::array<int64_t, 5> numbers,
                 std::vector<std::pair<Address, int64_t>> tables) {
    const auto [tokens, computed, rows, num_tokens] = in;
    const auto [token_stride, block_size, num_rows, total, longest] = numbers;
    auto* wide = as<Ints>(out[0]);
    auto* narrow = as<int32_t*>(out[1]);
    std::vector<quire::GroupTables> groups;
    for (const auto& [table, stride] : tables) {
        const auto g = static_cast<int64_t>(groups.size());
        groups.push_back({as<const int32_t*>(table), stride, wide + (2 + g) * total,
                          narrow + 2 * num_rows + 1 + g * num_rows * longest, longest});
    }
    quire::gather_step({wide, wide + total, narrow, narrow + num_rows + 1}, groups,
                       {as<const int32_t*>(tokens), token_stride, as<ConstInts>(computed),
                        block_size},
                       as<const int32_t*>(rows), as<const int32_t*>(num_tokens), num_rows);
}

}  // namespace

NB_MODULE(_core, m) {
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("version", [] { return kInterfaceVersion; });
    using Plan = quire::AttentionPlan;
    nb::class_<Plan>(m, "AttentionPlan")
        .def(nb::init<>())
        .def("prepare", &plan_prepare)
        .def_prop_ro("num_items", [](const Plan& plan) { return plan.items().size(); })
        .def_prop_ro("num_merges", [](const Plan& plan) { return plan.merges().size(); });
    m.def("attention_variants", &attention_variants);
    m.def("paged_attention", &paged_attention, Unlocked());
    m.def("store_kv", &store_kv, Unlocked());
    m.def("philox_words", &philox_words);
    m.def("philox_uniform", &philox_uniform, Unlocked());
    m.def("philox_uniform_at", &philox_uniform_at, Unlocked());
    m.def("arg_max", &arg_max, Unlocked());
    m.def("top_k", &top_k, Unlocked());
    m.def("log_sum_exp", &log_sum_exp, Unlocked());
    m.def("token_rank", &token_rank, Unlocked());
    m.def("choose", &choose, Unlocked());
    m.def("gather_step", &gather_step);
    m.def("linear_variants", &linear_variants);
    m.def("linear_bytes", &linear_bytes);
    m.def("linear_pack", &linear_pack, Unlocked());
    m.def("linear_pack_blocks", &linear_pack_blocks, Unlocked());
    m.def("linear_unpack_rows", &linear_unpack_rows, Unlocked());
    m.def("linear", &linear, Unlocked());
    m.def("linear_operand_bytes", &linear_operand_bytes);
    m.def("linear_peak", &linear_peak, Unlocked());
    nb::class_<quire::Program>(m, "Program")
        .def("__init__", &make_program)
        .def("add_layer", &add_layer)
        .def("add", &add_instruction)
        .def("run", &run_program, Unlocked());
}
