// The thin binding: addresses and sizes in, results written where they point. The caller
// (src/quire/ops/host/native.py) checks shapes, dtypes and contiguity. The interpreter runs on meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "adapters.h"
#include "attention.h"
#include "block_digests.h"
#include "find_runs.h"
#include "head_products.h"
#include "linear.h"
#include "parallel.h"
#include "philox.h"
#include "program.h"
#include "sampling.h"
#include "shared_group.h"
#include "states.h"
#include "step_inputs.h"
#include "step_launcher.h"

namespace nb = nanobind;

namespace {

// Raised whenever a signature changes; native.py refuses an object of another number.
constexpr int kInterfaceVersion = 30;

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
            Address min_p, int64_t rows, int64_t vocab, int64_t first, Address seeds,
            Address sample_index, Address positions, int num_threads) {
    quire::choose(as<Ints>(ids), as<ConstFloats>(logits), as<ConstFloats>(temperatures),
                  as<ConstInts>(top_k), as<ConstFloats>(top_p), as<ConstFloats>(min_p), rows, vocab,
                  first, as<ConstInts>(seeds), as<ConstInts>(sample_index),
                  as<ConstInts>(positions), num_threads);
}

void find_runs(Address tokens, int64_t token_stride, Address rows, Address lengths, int64_t count,
               int64_t min_length, int64_t max_length, int64_t searched, Address places) {
    quire::find_runs(as<const int32_t*>(tokens), token_stride, as<ConstInts>(rows),
                     as<ConstInts>(lengths), count, min_length, max_length, searched, as<Ints>(places));
}

nb::list chain_digests(nb::bytes parent, nb::bytes blocks, size_t block_bytes, bool is_portable) {
    if (parent.size() != quire::kDigestBytes || block_bytes == 0 || blocks.size() % block_bytes != 0)
        throw nb::value_error("needs a parent of 32 bytes, and whole blocks");
    const size_t num_blocks = blocks.size() / block_bytes;
    std::vector<uint8_t> digests(num_blocks * quire::kDigestBytes);
    quire::chain_digests(static_cast<const uint8_t*>(parent.data()),
                         static_cast<const uint8_t*>(blocks.data()), num_blocks, block_bytes,
                         digests.data(), is_portable);
    nb::list found;
    for (size_t i = 0; i < digests.size(); i += quire::kDigestBytes) {
        found.append(nb::bytes(digests.data() + i, quire::kDigestBytes));
    }
    return found;
}

void apply_masks(Address logits, Address places, Address words, int64_t count, int64_t vocab,
                 int64_t num_words, int num_threads) {
    quire::apply_masks(as<Floats>(logits), as<const int32_t*>(places), as<const int32_t*>(words),
                       count, vocab, num_words, num_threads);
}

void plan_prepare(quire::AttentionPlan& plan, Address tables, int64_t table_stride,
                  Address query_starts, Address context_lens, int64_t num_rows, int64_t block_size,
                  int64_t window, int64_t num_later_seen, int64_t kv_heads, int64_t group, int64_t head_dim,
                  Address ends, int num_threads, bool split, bool cascade) {
    plan.prepare({as<const int32_t*>(tables), table_stride, as<const int32_t*>(query_starts),
                  as<const int32_t*>(context_lens), num_rows, block_size, window, num_later_seen, kv_heads,
                  group, head_dim, as<const int32_t*>(ends)},
                 num_threads, {split, cascade});
}

void make_kv_layer(quire::KvLayer* at, int format, int64_t heads, int64_t num_blocks,
                   int64_t block_size, int64_t head_dim, Address keys, Address values,
                   int64_t num_values, float key_scale, float value_scale) {
    new (at) quire::KvLayer{static_cast<quire::KvFormat>(format), heads, num_blocks, block_size,
                            head_dim, as<uint8_t*>(keys), as<uint8_t*>(values), num_values,
                            key_scale, value_scale};
}

void make_head_rows(quire::HeadRows* at, Address data, int element, int64_t stride) {
    new (at) quire::HeadRows{static_cast<quire::Element>(element), stride, as<void*>(data)};
}

// soft_cap may be 0, the addresses of sinks and of sums too: none.
void paged_attention(const quire::AttentionPlan& plan, const quire::KvLayer& kv,
                     const quire::HeadRows& q, const quire::HeadRows& out, float scale,
                     float soft_cap, Address sinks, Address sums, int num_threads, int variant) {
    quire::paged_attention(plan, kv, q, out, {scale, soft_cap, as<ConstFloats>(sinks)}, num_threads,
                           variant, as<Floats>(sums));
}

void store_kv(const quire::KvLayer& kv, const quire::HeadRows& k, const quire::HeadRows& v,
              Address slots, int64_t count, int num_threads) {
    quire::store_kv(kv, k, v, as<ConstInts>(slots), count, num_threads);
}

void state_plan_prepare(quire::StatePlan& plan, Address tables, int64_t table_stride,
                        Address query_starts, Address context_lens, Address has_drafts,
                        int64_t num_rows, int64_t block_size) {
    plan.prepare({as<const int32_t*>(tables), table_stride, as<const int32_t*>(query_starts),
                  as<const int32_t*>(context_lens), as<const bool*>(has_drafts), num_rows,
                  block_size});
}

void make_state_layer(quire::StateLayer* at, Address data, int64_t size) {
    new (at) quire::StateLayer{as<Floats>(data), size};
}

void convolve(const quire::StatePlan& plan, const quire::StateLayer& layer,
              const quire::HeadRows& out, const quire::HeadRows& x, Address weight,
              int64_t channels, int64_t width, int num_threads) {
    quire::convolve(plan, layer, out, x, as<ConstFloats>(weight), channels, width, num_threads);
}

// Numbers of key and of value heads, and the sizes of their vectors.
using DeltaSizes = std::array<int64_t, 4>;

quire::DeltaHeads delta_heads(const DeltaSizes& sizes) {
    return {sizes[0], sizes[1], sizes[2], sizes[3]};
}

void delta_rule(const quire::StatePlan& plan, const quire::StateLayer& layer,
                const DeltaSizes& heads, const quire::HeadRows& out, const quire::HeadRows& qkv,
                const quire::HeadRows& gates, Address rate, Address shift, int num_threads,
                int variant) {
    quire::delta_rule(plan, layer,
                      {delta_heads(heads), out, qkv, gates, as<ConstFloats>(rate),
                       as<ConstFloats>(shift)},
                      num_threads, variant);
}

void make_packed_weight(quire::PackedWeight* at, int format, int variant, int64_t outputs,
                        int64_t inputs, int64_t group, int is_ordered, Address data) {
    new (at) quire::PackedWeight{static_cast<quire::WeightFormat>(format), variant, outputs, inputs,
                                 group, is_ordered != 0, as<const uint8_t*>(data)};
}

quire::MutableMatrix matrix(Address data, int element, int64_t rows, int64_t columns,
                            int64_t stride) {
    return {static_cast<quire::Element>(element), rows, columns, stride, as<void*>(data)};
}

// Variants by name, the best last, with their numbers.
using Variants = std::vector<std::pair<std::string, int>>;

template <class Name>
Variants named(quire::VariantSet variants, const Name& name) {
    Variants found;
    for (int v = 0; v <= quire::last_of(variants); ++v) {
        if ((variants >> v & 1) != 0) found.emplace_back(name(v), v);
    }
    return found;
}

Variants linear_variants() {
    return named(quire::running_variants(), [](int v) { return quire::linear_kernels(v).name; });
}

Variants attention_variants() {
    return named(quire::attention_variants(), quire::attention_variant_name);
}

int linear_pack(Address data, const quire::PackedWeight& packed, Address weight, int element,
                bool search, int num_threads) {
    return quire::pack_weight(
        as<uint8_t*>(data), packed,
        {static_cast<quire::Element>(element), as<const uint8_t*>(weight), -1, 0}, search,
        num_threads);
}

int linear_pack_file(Address data, const quire::PackedWeight& packed, int file, int64_t offset,
                     int element, bool search, int num_threads) {
    return quire::pack_weight(as<uint8_t*>(data), packed,
                              {static_cast<quire::Element>(element), nullptr, file, offset},
                              search, num_threads);
}

void linear_pack_blocks(Address data, const quire::PackedWeight& packed, Address blocks,
                        int64_t row_bytes, int num_threads) {
    quire::pack_blocks(as<uint8_t*>(data), packed, as<const uint8_t*>(blocks), row_bytes,
                       num_threads);
}

// zeros and order may be 0.
void linear_pack_stored(Address data, const quire::PackedWeight& packed, Address values,
                        Address scales, Address zeros, Address order, int num_threads) {
    quire::pack_stored(as<uint8_t*>(data), packed,
                       {as<const void*>(values), as<const void*>(scales), as<ConstFloats>(zeros),
                        as<ConstInts>(order)},
                       num_threads);
}

void linear_unpack_rows(Address out, int element, Address ids, int64_t count,
                        const quire::PackedWeight& packed) {
    quire::unpack_rows(matrix(out, element, count, packed.inputs, packed.inputs), packed,
                       as<ConstInts>(ids));
}

// x: rows x inputs of an element type. x_stride, out_stride: elements between rows. bias may be 0.
void linear(Address out, Address x, Address bias, int element, int64_t rows, int64_t x_stride,
            int64_t out_stride, const quire::PackedWeight& packed, int num_threads) {
    quire::linear(matrix(out, element, rows, packed.outputs, out_stride), packed,
                  matrix(x, element, rows, packed.inputs, x_stride), as<const void*>(bias),
                  num_threads);
}

// x: rows of heads, contiguous within a head; strides: elements between rows and between heads. out
// is contiguous. weights: of each head.
void head_products(Address out, Address x, int element, int64_t rows,
                   std::pair<int64_t, int64_t> strides,
                   const std::vector<quire::PackedWeight>& weights, int num_threads) {
    const int64_t size = static_cast<quire::Element>(element) == quire::Element::kFloat32 ? 4 : 2;
    const auto count = static_cast<int64_t>(weights.size());
    std::vector<quire::HeadProduct> heads;
    for (int64_t n = 0; n < count; ++n) {
        const quire::PackedWeight& weight = weights[static_cast<size_t>(n)];
        const auto to = out + static_cast<Address>(n * weight.outputs * size);
        const auto from = x + static_cast<Address>(n * strides.second * size);
        heads.push_back({matrix(to, element, rows, weight.outputs, count * weight.outputs), weight,
                         matrix(from, element, rows, weight.inputs, strides.first)});
    }
    if (count > 0) quire::head_products(heads.data(), count, num_threads);
}

// Bytes that a row of float32 takes once it is prepared for products with this weight; 0 if it is
// read as it is.
int64_t linear_operand_bytes(const quire::PackedWeight& packed) {
    const quire::Matrix x{quire::Element::kFloat32, 1, packed.inputs, packed.inputs, nullptr};
    return quire::linear_kernels(packed.variant).operand_bytes(packed, x);
}

double linear_peak(int format, int variant, int num_threads) {
    return quire::linear_peak(static_cast<quire::WeightFormat>(format), variant, num_threads);
}

// --- ranks (shared_group.h) ---

void all_reduce(quire::SharedGroup& group, Address x, int64_t count, int number, int num_threads) {
    group.all_reduce(as<void*>(x), count, static_cast<quire::Number>(number), num_threads);
}

void all_gather(quire::SharedGroup& group, Address out, Address x, int64_t bytes,
                int num_threads) {
    group.all_gather(as<void*>(out), as<const void*>(x), bytes, num_threads);
}

void reduce_scatter(quire::SharedGroup& group, Address out, Address x, int64_t count, int number,
                    int num_threads) {
    group.reduce_scatter(as<void*>(out), as<const void*>(x), count,
                         static_cast<quire::Number>(number), num_threads);
}

void all_to_all(quire::SharedGroup& group, Address out, Address x, int64_t bytes,
                int num_threads) {
    group.all_to_all(as<void*>(out), as<const void*>(x), bytes, num_threads);
}

// The errors of the engine's tree (base/errors.py).
void set_error(const char* kind, const std::exception& error) {
    const nb::object type = nb::module_::import_("quire.base.errors").attr(kind);
    PyErr_SetString(type.ptr(), error.what());
}

void translate_lost(const std::exception_ptr& raised, void*) {
    try {
        std::rethrow_exception(raised);
    } catch (const quire::RankLost& error) {
        set_error("RankLost", error);
    } catch (const quire::StepLost& error) {
        set_error("EngineError", error);
    }
}

// --- programs (program.h) ---

// views: buffer and offset of up to four operands; the instruction's kind ignores the rest.
void add_instruction(quire::Program& program, bool begins_phase, int kind,
                     const std::vector<std::pair<int64_t, int64_t>>& views, int64_t heads,
                     int64_t size, int64_t stride, int64_t layer, int64_t first,
                     int64_t count, int input, int element, Address table, Address frequencies, Address weight, Address bias, double scale,
                     double soft_cap, double eps, const DeltaSizes& delta,
                     const quire::PackedWeight& packed, quire::SharedGroup* group) {
    quire::Instruction instruction{static_cast<quire::Kind>(kind), {}, heads, size, stride, layer,
                                   first, count, static_cast<quire::Input>(input),
                                   static_cast<quire::Element>(element), as<const void*>(table),
                                   as<const double*>(frequencies), as<ConstFloats>(weight),
                                   as<ConstFloats>(bias), scale, static_cast<float>(soft_cap),
                                   static_cast<float>(eps), delta_heads(delta), packed, group};
    for (size_t i = 0; i < views.size(); ++i) {
        instruction.views.at(i) = {views[i].first, views[i].second};
    }
    program.add(instruction, begins_phase);
}

// Weights and the addresses of biases by expert; of none, no addresses.
void add_experts(quire::Program& program, const std::vector<quire::PackedWeight>& gate_up,
                 const std::vector<quire::PackedWeight>& down,
                 const std::vector<Address>& gate_up_biases, const std::vector<Address>& down_biases,
                 int64_t first, int64_t all, int64_t num_chosen, bool normalises, double alpha,
                 double limit, std::pair<int64_t, int64_t> groups, bool is_sigmoid, double scale,
                 Address route_bias, std::pair<int64_t, int64_t> adapted) {
    const quire::Routing routing{groups.first, groups.second, is_sigmoid, static_cast<float>(scale),
                                 as<ConstFloats>(route_bias)};
    quire::Experts experts{{}, first, all, num_chosen, normalises, static_cast<float>(alpha),
                           static_cast<float>(limit), routing, adapted.first, adapted.second};
    const auto bias = [](const std::vector<Address>& of, size_t expert) {
        return of.empty() ? nullptr : as<ConstFloats>(of.at(expert));
    };
    for (size_t e = 0; e < gate_up.size(); ++e) {
        experts.experts.push_back(
            {gate_up[e], down.at(e), bias(gate_up_biases, e), bias(down_biases, e)});
    }
    program.add_experts(std::move(experts));
}

// parts: address of down, address of up, rank, first output, number of outputs and scale of each.
using AdapterNumbers = std::tuple<Address, Address, int64_t, int64_t, int64_t, double>;

void set_adapter(quire::Adapter& adapter, int64_t layer, int element, int64_t inputs,
                 const std::vector<AdapterNumbers>& parts) {
    quire::AdapterLayer made{static_cast<quire::Element>(element), inputs, {}};
    for (const auto& [down, up, rank, first, outputs, scale] : parts) {
        made.parts.push_back({as<const void*>(down), as<const void*>(up), rank, first, outputs,
                              static_cast<float>(scale)});
    }
    adapter.set(layer, std::move(made));
}

void begin_adapters(quire::Adapters& adapters,
                    const std::vector<std::pair<int64_t, std::vector<int64_t>>>& groups) {
    std::vector<quire::AdapterRows> made;
    for (const auto& [slot, rows] : groups) made.push_back({slot, rows});
    adapters.begin_step(std::move(made));
}

// outside: addresses of the first buffers. groups: each cache group's plan, and the address of its
// slots, if it has any. kept: memory for what layers with states are given of some tokens, and these
// tokens with their number.
using StepPlan = std::variant<quire::AttentionPlan*, quire::StatePlan*>;

void run_program(quire::Program& program, int64_t rows, Address ids, Address positions,
                 const std::vector<Address>& outside,
                 const std::vector<std::pair<StepPlan, Address>>& groups,
                 const std::tuple<Address, int64_t, Address, int64_t>& kept, int num_threads) {
    const auto& [data, stride, tokens, count] = kept;
    quire::ProgramStep step{rows, as<ConstInts>(ids), as<ConstInts>(positions), {}, {},
                            {as<Floats>(data), stride, as<ConstInts>(tokens), count}};
    for (const Address each : outside) step.outside.push_back(as<Floats>(each));
    for (const auto& [plan, slots] : groups) {
        const auto* attention = std::get_if<quire::AttentionPlan*>(&plan);
        const auto* states = std::get_if<quire::StatePlan*>(&plan);
        step.groups.push_back({attention == nullptr ? nullptr : *attention, as<ConstInts>(slots),
                               states == nullptr ? nullptr : *states});
    }
    program.run(std::move(step), num_threads);
}

// wide: memory of the 64-bit results (ids, positions, slots of each group).
// narrow: memory of the 32-bit results (query starts, context lengths, table of each group), in
// this order.
// tables: address and row stride of each.
// total: tokens of the step; longest: blocks of a row.
void gather_step(Address wide, Address narrow, Address tokens, int64_t token_stride,
                 Address computed, Address rows, Address num_tokens, int64_t num_rows,
                 const std::vector<std::pair<Address, int64_t>>& tables, int64_t block_size,
                 int64_t total, int64_t longest) {
    auto* ids = as<Ints>(wide);
    auto* starts = as<int32_t*>(narrow);
    std::vector<quire::GroupTables> groups;
    for (const auto& [table, stride] : tables) {
        const auto g = static_cast<int64_t>(groups.size());
        groups.push_back({as<const int32_t*>(table), stride, ids + (2 + g) * total,
                          starts + 2 * num_rows + 1 + g * num_rows * longest, longest});
    }
    quire::gather_step({ids, ids + total, starts, starts + num_rows + 1}, groups,
                       {as<const int32_t*>(tokens), token_stride, as<ConstInts>(computed),
                        block_size},
                       as<const int32_t*>(rows), as<const int32_t*>(num_tokens), num_rows);
}

// --- launching (step_launcher.h) ---

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

// varying: indices of the arguments for the slot and for the numbers of words, deltas and runs.
// plan: words before the lists, rows, where the deltas begin, and the largest number of them.
// mail_layout: number of slots, their words, and where their flags begin.
void make_step_launcher(quire::StepLauncher* at, const std::string& driver, Address stream,
                        Address function, int64_t num_threads, int64_t shared_bytes,
                        int64_t max_programs, int64_t block, std::vector<uint64_t> arguments,
                        std::array<int64_t, 4> varying, std::array<int64_t, 4> plan,
                        Address mail, std::array<int64_t, 3> mail_layout) {
    new (at) quire::StepLauncher(
        driver, as<void*>(stream),
        {as<void*>(function), num_threads, shared_bytes, max_programs, block, std::move(arguments),
         varying[0], varying[1], varying[2], varying[3]},
        {plan[0], plan[1], plan[2], plan[3]},
        {as<int32_t*>(mail), mail_layout[0], mail_layout[1], mail_layout[2]});
}

int32_t launch_step(quire::StepLauncher& launcher, Address slot, int64_t mail_slot,
                    const Array<int32_t>& rows, const Array<int32_t>& num_tokens,
                    const Array<int32_t>& sample_rows, const Array<int64_t>& sample_indices,
                    const Array<int32_t>& deltas, int64_t num_runs, Address graph) {
    const quire::PackedPlan plan{rows.data(), num_tokens.data(), static_cast<int64_t>(rows.size()),
                                 sample_rows.data(), sample_indices.data(),
                                 static_cast<int64_t>(sample_rows.size()), deltas.data(),
                                 static_cast<int64_t>(deltas.size() / 4), num_runs};
    if (num_tokens.size() != rows.size() || sample_indices.size() != sample_rows.size() ||
        deltas.size() % 4 != 0) {
        throw std::runtime_error("the lists of the plan differ in length");
    }
    const nb::gil_scoped_release unlocked;
    return launcher.launch(plan, as<int32_t*>(slot), mail_slot, as<void*>(graph));
}

}  // namespace

NB_MODULE(_core, m) {
    using namespace nb::literals;
    using Unlocked = nb::call_guard<nb::gil_scoped_release>;
    m.def("version", [] { return kInterfaceVersion; });
    using Plan = quire::AttentionPlan;
    nb::class_<Plan>(m, "AttentionPlan")
        .def(nb::init<>())
        .def("prepare", &plan_prepare, nb::kw_only(), "tables"_a, "table_stride"_a,
             "query_starts"_a, "context_lens"_a, "num_rows"_a, "block_size"_a, "window"_a,
             "num_later_seen"_a, "kv_heads"_a, "group"_a, "head_dim"_a, "ends"_a, "num_threads"_a, "split"_a,
             "cascade"_a)
        .def_prop_ro("num_items", [](const Plan& plan) { return plan.items().size(); })
        .def_prop_ro("num_merges", [](const Plan& plan) { return plan.merges().size(); });
    m.def("attention_variants", &attention_variants);
    nb::class_<quire::KvLayer>(m, "KvLayer")
        .def("__init__", &make_kv_layer, nb::kw_only(), "format"_a, "heads"_a, "num_blocks"_a,
             "block_size"_a, "head_dim"_a, "keys"_a, "values"_a, "num_values"_a,
             "key_scale"_a = 1.0f, "value_scale"_a = 1.0f)
        .def_ro("heads", &quire::KvLayer::heads);
    nb::class_<quire::HeadRows>(m, "HeadRows")
        .def("__init__", &make_head_rows, nb::kw_only(), "data"_a, "element"_a, "stride"_a);
    m.def("paged_attention", &paged_attention, Unlocked());
    m.def("store_kv", &store_kv, Unlocked());
    nb::class_<quire::StatePlan>(m, "StatePlan")
        .def(nb::init<>())
        .def("prepare", &state_plan_prepare, nb::kw_only(), "tables"_a, "table_stride"_a,
             "query_starts"_a, "context_lens"_a, "has_drafts"_a, "num_rows"_a, "block_size"_a);
    nb::class_<quire::StateLayer>(m, "StateLayer")
        .def("__init__", &make_state_layer, nb::kw_only(), "data"_a, "size"_a);
    m.def("convolve", &convolve, Unlocked());
    m.def("delta_rule", &delta_rule, Unlocked());
    m.def("philox_words", &philox_words);
    m.def("philox_uniform", &philox_uniform, Unlocked());
    m.def("philox_uniform_at", &philox_uniform_at, Unlocked());
    m.def("arg_max", &arg_max, Unlocked());
    m.def("top_k", &top_k, Unlocked());
    m.def("log_sum_exp", &log_sum_exp, Unlocked());
    m.def("token_rank", &token_rank, Unlocked());
    m.def("choose", &choose, Unlocked());
    m.def("apply_masks", &apply_masks, Unlocked());
    m.def("chain_digests", &chain_digests, nb::arg(), nb::arg(), nb::arg(), nb::arg() = false,
          nb::sig("def chain_digests(parent: bytes, blocks: bytes, block_bytes: int,"
                  " is_portable: bool = False, /) -> list[bytes]"));
    m.def("find_runs", &find_runs, Unlocked());
    m.def("gather_step", &gather_step, nb::kw_only(), "wide"_a, "narrow"_a, "tokens"_a,
          "token_stride"_a, "computed"_a, "rows"_a, "num_tokens"_a, "num_rows"_a, "tables"_a,
          "block_size"_a, "total"_a, "longest"_a);
    nb::class_<quire::PackedWeight>(m, "PackedWeight")
        .def("__init__", &make_packed_weight, nb::kw_only(), "format"_a, "variant"_a, "outputs"_a,
             "inputs"_a, "group"_a, "is_ordered"_a, "data"_a);
    m.def("linear_variants", &linear_variants);
    m.def("linear_bytes", &quire::packed_bytes);
    m.def("linear_pack", &linear_pack, Unlocked());
    m.def("linear_pack_file", &linear_pack_file, Unlocked());
    m.def("linear_pack_blocks", &linear_pack_blocks, Unlocked());
    m.def("linear_pack_stored", &linear_pack_stored, Unlocked());
    m.def("linear_unpack_rows", &linear_unpack_rows, Unlocked());
    m.def("linear", &linear, Unlocked());
    m.def("head_products", &head_products, Unlocked());
    m.def("linear_operand_bytes", &linear_operand_bytes);
    m.def("linear_peak", &linear_peak, Unlocked());
    m.def("seconds_between_threads", &quire::seconds_between_threads, Unlocked());
    nb::register_exception_translator(translate_lost);
    using Group = quire::SharedGroup;
    nb::class_<Group>(m, "SharedGroup")
        .def(nb::init<const std::string&, int, int, int64_t, double>())
        .def("all_reduce", &all_reduce, Unlocked())
        .def("all_gather", &all_gather, Unlocked())
        .def("reduce_scatter", &reduce_scatter, Unlocked())
        .def("all_to_all", &all_to_all, Unlocked())
        .def("abort", &Group::abort, Unlocked())
        .def_prop_ro("seconds", &Group::seconds)
        .def_prop_ro("num_exchanges", &Group::num_exchanges);
    using Launcher = quire::StepLauncher;
    nb::class_<Launcher>(m, "StepLauncher")
        .def("__init__", &make_step_launcher, nb::kw_only(), "driver"_a, "stream"_a, "function"_a,
             "num_threads"_a, "shared_bytes"_a, "max_programs"_a, "block"_a, "arguments"_a,
             "varying"_a, "plan"_a, "mail"_a, "mail_layout"_a)
        .def("launch", &launch_step,  // without nanobind's text for arrays, which is no Python
             nb::sig("def launch(self, slot: int, mail_slot: int, rows: object, num_tokens: object,"
                     " sample_rows: object, sample_indices: object, deltas: object, num_runs: int,"
                     " graph: int, /) -> int"))
        .def("is_done", &Launcher::is_done)
        .def("wait", &Launcher::wait, Unlocked());
    nb::class_<quire::Adapter>(m, "Adapter").def(nb::init<int64_t>()).def("set", &set_adapter);
    nb::class_<quire::Adapters>(m, "Adapters")
        .def(nb::init<int64_t>())
        .def("put", [](quire::Adapters& adapters, int64_t slot,
                       std::shared_ptr<quire::Adapter> adapter) {
            adapters.put(slot, std::move(adapter));
        }, "slot"_a, "adapter"_a.none())
        .def("begin_step", &begin_adapters);
    nb::class_<quire::Program>(m, "Program")
        .def(nb::init<std::vector<int64_t>, std::vector<int64_t>, int64_t, int>())
        .def("add_layer", &quire::Program::add_layer)
        .def("add_state_layer", &quire::Program::add_state_layer)
        .def("use_adapters", &quire::Program::use_adapters)
        .def("add_experts", &add_experts, nb::kw_only(), "gate_up"_a, "down"_a,
             "gate_up_biases"_a, "down_biases"_a, "first"_a, "all"_a, "num_chosen"_a,
             "normalises"_a, "alpha"_a, "limit"_a, "groups"_a, "is_sigmoid"_a, "scale"_a,
             "route_bias"_a, "adapted"_a)
        .def_prop_ro("expert_pairs", &quire::Program::expert_pairs)
        .def("time_phases", &quire::Program::time_phases)
        .def_prop_ro("phase_seconds", &quire::Program::phase_seconds)
        .def("add", &add_instruction, nb::kw_only(), "begins_phase"_a, "kind"_a, "views"_a,
             "heads"_a, "size"_a, "stride"_a, "layer"_a, "first"_a, "count"_a, "input"_a, "element"_a, "table"_a,
             "frequencies"_a, "weight"_a, "bias"_a, "scale"_a, "soft_cap"_a,
             "eps"_a, "delta"_a, "packed"_a, "group"_a.none())
        .def("run", &run_program, Unlocked());
}
