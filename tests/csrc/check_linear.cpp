// Checks every variant of the linear layers that this CPU runs, without Python: against double
// precision or, for quantised weights, bit by bit against the same sums written plainly; and that a
// row has the same bits alone, in any batch and on two threads.
//
// Prints a line per variant. The exit status is 1 if something was wrong.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "elements.h"
#include "linear.h"

namespace {

using namespace quire;

constexpr int64_t kMostRows = 19;
constexpr int64_t kBlockInputs = 512, kRowBytes = 1024;  // of rows of blocks: more than any needs

struct Case {
    WeightFormat format;
    Element element;  // of activations, bias and results
    int64_t outputs, inputs, group, rows;
    bool is_constant;  // largest magnitudes everywhere

    // Rounded here, so that each bit of a product is known; stored: packed as a checkpoint has it.
    bool is_quantised() const {
        return format >= WeightFormat::kInt8 && format <= WeightFormat::kInt4Multiples;
    }
    bool is_stored() const { return format > WeightFormat::kInt4Multiples; }
};

int64_t size_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

// A matrix of an element, and what its values are.
class Values {
   public:
    Values(Element element, int64_t rows, int64_t columns)
        : element_(element), rows_(rows), columns_(columns) {
        bytes_.resize(static_cast<size_t>(rows * columns * size_of(element)));
    }

    void set(int64_t i, float value) {
        switch (element_) {
            case Element::kFloat32: return put(i, value);
            case Element::kBfloat16: return put(i, narrowed<Bfloat16>(value));
            default: return put(i, narrowed<Float16>(value));
        }
    }

    float at(int64_t i) const {
        switch (element_) {
            case Element::kFloat32: return got<float>(i);
            case Element::kBfloat16: return widen(got<Bfloat16>(i));
            default: return widen(got<Float16>(i));
        }
    }

    float at(int64_t row, int64_t column) const { return at(row * columns_ + column); }

    Matrix part(int64_t first, int64_t rows) const {
        return {element_, rows, columns_, columns_, row(first)};
    }
    Matrix all() const { return part(0, rows_); }
    MutableMatrix all() { return {element_, rows_, columns_, columns_, bytes_.data()}; }
    const uint8_t* row(int64_t i) const { return bytes_.data() + i * row_bytes(); }
    int64_t row_bytes() const { return columns_ * size_of(element_); }

   private:
    template <class T>
    static T narrowed(float value) {
        T out;
        narrow(out, value);
        return out;
    }
    template <class T>
    void put(int64_t i, T value) {
        std::memcpy(bytes_.data() + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
    }
    template <class T>
    T got(int64_t i) const {
        T value;
        std::memcpy(&value, bytes_.data() + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }

    Element element_;
    int64_t rows_, columns_;
    std::vector<uint8_t> bytes_;
};

Element stored_element(const Case& c) {
    switch (c.format) {
        case WeightFormat::kBfloat16: return Element::kBfloat16;
        case WeightFormat::kFloat16: return Element::kFloat16;
        default: return Element::kFloat32;
    }
}

// A layer that was packed, and the activations and results of a case.
class Layer {
   public:
    Layer(const Case& c, int variant)
        : case_(c),
          x_(c.element, c.rows, c.inputs),
          bias_(c.element, 1, c.outputs),
          unpacked_(Element::kFloat32, c.outputs, c.inputs) {
        Random random;
        Values weight(stored_element(c), c.outputs, c.inputs);
        for (int64_t i = 0; i < c.outputs * c.inputs; ++i) {
            weight.set(i, c.is_constant ? 1.0f : random.next());
        }
        for (int64_t i = 0; i < c.rows * c.inputs; ++i) x_.set(i, activation(random.next()));
        for (int64_t i = 0; i < c.outputs; ++i) bias_.set(i, random.next());
        weight_ = {c.format, variant, c.outputs, c.inputs, c.group, false, nullptr};
        data_.resize(static_cast<size_t>(packed_bytes(weight_)));
        if (c.is_stored()) {
            pack_numbers(random);
        } else {
            const MutableMatrix all = weight.all();
            pack_weight(data_.data(), weight_,
                        {all.element, static_cast<const uint8_t*>(all.data), -1, 0},
                        c.format == WeightFormat::kInt4, 1);
        }
        weight_.data = data_.data();
        std::vector<int64_t> ids;
        for (int64_t n = 0; n < c.outputs; ++n) ids.push_back(n);
        unpack_rows(unpacked_.all(), weight_, ids.data());
    }

    const PackedWeight& weight() const { return weight_; }
    const LinearKernels& kernels() const { return linear_kernels(weight_.variant); }
    const Values& x() const { return x_; }
    float unpacked(int64_t n, int64_t k) const { return unpacked_.at(n, k); }
    float bias(int64_t n) const { return bias_.at(n); }

    // Of rows [first, first + rows).
    Values multiply(int64_t first, int64_t rows, int num_threads) const {
        Values out(case_.element, rows, case_.outputs);
        linear(out.all(), weight_, x_.part(first, rows), bias_.all().data, num_threads);
        return out;
    }

    // As the layout in linear.h says.
    float scale(int64_t n, int64_t g) const {
        const PanelLayout layout(weight_);
        const int64_t begin = n / layout.panel * packed_panel_bytes(weight_) + layout.scales(g);
        const int64_t lane = n % layout.panel;
        if (case_.format == WeightFormat::kInt4Multiples) {
            int32_t word;
            std::memcpy(&word, data_.data() + begin + lane * 4, sizeof word);
            return float_of(word & -65536);
        }
        Bfloat16 stored;
        std::memcpy(&stored, data_.data() + begin + lane * 2, sizeof stored);
        return widen(stored);
    }

   private:
    // Random numbers of the format, as a checkpoint stores them.
    void pack_numbers(Random& random) {
        const FormatParts& parts = weight_.parts();
        const int64_t count = case_.outputs * case_.inputs, groups = case_.outputs * weight_.groups();
        std::vector<uint8_t> codes(static_cast<size_t>(count + kRowBytes * case_.outputs));
        for (uint8_t& code : codes) code = static_cast<uint8_t>(128 * (random.next() + 1));
        if (case_.format >= WeightFormat::kQ4_1) {
            // Every odd byte as that of a small float16.
            for (size_t i = 1; i < codes.size(); i += 2) codes[i] = 0x20 | (codes[i] & 0x83);
            return pack_blocks(data_.data(), weight_, codes.data(), kRowBytes, 1);
        }
        std::vector<float> scales(static_cast<size_t>(groups)), zeros(scales.size());
        std::vector<uint8_t> powers(scales.size());
        for (size_t i = 0; i < scales.size(); ++i) {
            scales[i] = static_cast<float>(1 + i % 7) * 0x1p-9f;
            zeros[i] = static_cast<float>(i % 15) - 7.0f;
            powers[i] = static_cast<uint8_t>(120 + i % 5);
        }
        for (int64_t i = 0; i < count; ++i) {
            uint8_t& code = codes[static_cast<size_t>(i)];
            if (parts.values == quire::Values::kInt4) code = static_cast<uint8_t>((code & 15) - 8);
            if (parts.values == quire::Values::kFloat8 && (code & 0x7F) == 0x7F) code = 0;
        }
        const void* factors = scales.data();
        if (parts.scales == Scales::kPower) factors = powers.data();
        pack_stored(data_.data(), weight_, {codes.data(), factors, zeros.data(), nullptr}, 1);
    }

    // Exactly a bfloat16 where weights are, because a variant may round activations to it.
    float activation(float value) const {
        if (case_.is_constant) return value < 0 ? -2.0f : 2.0f;
        if (case_.format != WeightFormat::kBfloat16) return value;
        Bfloat16 near;
        narrow(near, value);
        return widen(near);
    }

    Case case_;
    PackedWeight weight_;
    Values x_, bias_, unpacked_;
    std::vector<uint8_t> data_;
};

void describe(const Case& c) {
    std::printf("format %d element %d outputs %lld inputs %lld group %lld",
                static_cast<int>(c.format), static_cast<int>(c.element),
                static_cast<long long>(c.outputs), static_cast<long long>(c.inputs),
                static_cast<long long>(c.group));
}

double error_of(Element element) {
    return element == Element::kFloat32 ? 0x1p-24 : element == Element::kBfloat16 ? 0x1p-8 : 0x1p-11;
}

void check_dense(Check<Case>& check, const Case& c, const Layer& layer, const Values& out) {
    const double element_error = error_of(c.element);
    bool is_right = true;
    for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t n = 0; n < c.outputs; ++n) {
            double sum = layer.bias(n), size = std::fabs(sum);
            for (int64_t k = 0; k < c.inputs; ++k) {
                const double weight = layer.unpacked(n, k), product = weight * layer.x().at(row, k);
                sum += product;
                size += std::fabs(product);
            }
            // Of sums in any order, each rounded once; dots of bfloat16 round products too.
            const double sum_error = static_cast<double>(c.inputs + 2) * 0x1p-23 * size;
            const double error = std::fabs(out.at(row, n) - sum);
            is_right &= error <= sum_error + element_error * (std::fabs(sum) + sum_error);
        }
    }
    check.expect(is_right, c, "further from the sum in double precision than rounding explains");
}

// One row's activations as int8 with scales: what `prepare` makes of it.
class QuantisedRow {
   public:
    QuantisedRow(const Case& c, const Layer& layer, int64_t row)
        : scales_(static_cast<size_t>(layer.weight().groups())), offsets_(scales_.size()) {
        const Matrix x = layer.x().part(row, 1);
        const int64_t bytes = layer.kernels().operand_bytes(layer.weight(), x);
        values_.resize(static_cast<size_t>(bytes));
        const MutableOperand operand{1, bytes, reinterpret_cast<uint8_t*>(values_.data()),
                                     scales_.data(), offsets_.data()};
        layer.kernels().prepare(operand, layer.weight(), x, 0, 1);
        for (int64_t k = 0; k < c.inputs; ++k) {
            const double scale = this->scale(k / layer.weight().group);
            const double error = std::fabs(layer.x().at(row, k) - scale * value(k));
            is_near_ &= error <= scale * (0.5 + 1e-4) && value(k) >= -127;
        }
    }
    int32_t value(int64_t k) const { return values_[static_cast<size_t>(k)]; }
    float scale(int64_t g) const { return scales_[static_cast<size_t>(g)]; }
    bool is_near() const { return is_near_; }

   private:
    std::vector<int8_t> values_;
    std::vector<float> scales_;
    std::vector<int32_t> offsets_;
    bool is_near_ = true;
};

float quantised_sum(const Case& c, const Layer& layer, const QuantisedRow& x, int64_t n) {
    const bool is_fused = std::strcmp(layer.kernels().name, "portable") != 0;
    const int64_t group = layer.weight().group;
    float total = 0;
    for (int64_t g = 0; g < layer.weight().groups(); ++g) {
        const float scale = layer.scale(n, g);
        int64_t sum = 0;
        for (int64_t k = g * group; k < (g + 1) * group && k < c.inputs; ++k) {
            const float integer = scale > 0 ? layer.unpacked(n, k) / scale : 0.0f;
            sum += static_cast<int64_t>(integer) * x.value(k);
        }
        const float both = scale * x.scale(g), value = static_cast<float>(sum);
        const float product = value * both;
        total = is_fused ? std::fma(value, both, total) : product + total;
    }
    return total + layer.bias(n);
}

// Of stored numbers: near the sum in double precision, of activations as they are rounded.
void check_stored(Check<Case>& check, const Case& c, const Layer& layer, const Values& out) {
    const bool rounds = layer.weight().rounds_activations();
    bool is_right = true;
    for (int64_t row = 0; row < c.rows; ++row) {
        std::vector<double> x;
        if (rounds) {
            const QuantisedRow rounded(c, layer, row);
            for (int64_t k = 0; k < c.inputs; ++k) {
                const float scale = rounded.scale(k / c.group);
                x.push_back(static_cast<double>(scale) * rounded.value(k));
            }
        } else {
            for (int64_t k = 0; k < c.inputs; ++k) x.push_back(layer.x().at(row, k));
        }
        for (int64_t n = 0; n < c.outputs; ++n) {
            double sum = layer.bias(n), size = std::fabs(sum);
            for (int64_t k = 0; k < c.inputs; ++k) {
                const double product = layer.unpacked(n, k) * x[static_cast<size_t>(k)];
                sum += product;
                size += std::fabs(product);
            }
            // Offsets are added apart, so that more may cancel out than in the plain sum.
            const double error = std::fabs(out.at(row, n) - sum);
            is_right &= error <= 1e-5 * size + 1e-5 + error_of(c.element) * std::fabs(sum);
        }
    }
    check.expect(is_right, c, "stored numbers: far from the sum in double precision");
}

void check_quantised(Check<Case>& check, const Case& c, const Layer& layer, const Values& out) {
    Values expected(c.element, 1, c.outputs);
    bool is_near = true, is_right = true;
    for (int64_t row = 0; row < c.rows; ++row) {
        const QuantisedRow x(c, layer, row);
        is_near &= x.is_near();
        for (int64_t n = 0; n < c.outputs; ++n) expected.set(n, quantised_sum(c, layer, x, n));
        is_right &= std::memcmp(expected.row(0), out.row(row),
                                static_cast<size_t>(out.row_bytes())) == 0;
    }
    check.expect(is_near, c, "activations are not rounded to the nearest int8");
    check.expect(is_right, c, "not the bits of exact sums in each group");
}

void check_batches(Check<Case>& check, const Case& c, const Layer& layer) {
    std::vector<Values> alone;
    for (int64_t row = 0; row < c.rows; ++row) alone.push_back(layer.multiply(row, 1, 1));
    for (int64_t rows = 1; rows <= c.rows; rows += rows < kMostRows ? 1 : c.rows - kMostRows + 1) {
        const int64_t first = c.rows - rows;
        for (int num_threads = 1; num_threads <= 2; ++num_threads) {
            const Values out = layer.multiply(first, rows, num_threads);
            bool is_same = true;
            for (int64_t row = 0; row < rows; ++row) {
                is_same &= std::memcmp(out.row(row), alone[static_cast<size_t>(first + row)].row(0),
                                       static_cast<size_t>(out.row_bytes())) == 0;
            }
            check.expect(is_same, c, "a row has other bits in a batch");
        }
    }
}

void check_case(Check<Case>& check, const Case& c, int variant) {
    const Layer layer(c, variant);
    const Values out = layer.multiply(0, c.rows, 1);
    if (c.is_quantised()) {
        check_quantised(check, c, layer, out);
    } else if (c.is_stored()) {
        check_stored(check, c, layer, out);
    } else {
        check_dense(check, c, layer, out);
    }
    check_batches(check, c, layer);
}

struct Format {
    WeightFormat format;
    std::vector<Element> elements;
    std::vector<int64_t> groups;
    int64_t long_inputs;  // more than a chunk of the panel has
};

std::vector<Format> formats() {
    const Element f32 = Element::kFloat32, bf16 = Element::kBfloat16, f16 = Element::kFloat16;
    return {{WeightFormat::kFloat32, {f32}, {1}, 5001},
            {WeightFormat::kBfloat16, {bf16, f32}, {1}, 9001},
            {WeightFormat::kFloat16, {f16, f32}, {1}, 9001},
            {WeightFormat::kInt8, {f32, bf16}, {0, 32, 128}, 17001},
            {WeightFormat::kInt4, {f32, f16}, {32, 64, 128}, 34001},
            {WeightFormat::kInt4Multiples, {f32, f16}, {128}, 34001}};
}

// A group of 0: all inputs, as a multiple of 8.
int64_t group_of(int64_t group, int64_t inputs) { return group > 0 ? group : (inputs + 7) / 8 * 8; }

std::vector<Case> cases() {
    // Multiples of a panel and of its steps, one less and one more.
    const int64_t shapes[][2] = {{1, 1}, {5, 3}, {33, 131}, {63, 64}, {70, 37}};
    std::vector<Case> all;
    for (const Format& f : formats()) {
        for (const int64_t group : f.groups) {
            for (const Element element : f.elements) {
                for (const auto& [n, k] : shapes) {
                    all.push_back({f.format, element, n, k, group_of(group, k), kMostRows, false});
                }
            }
            const Element element = f.elements[0];
            all.push_back({f.format, element, 17, 70, group_of(group, 70), 133, false});
            all.push_back({f.format, element, 17, 1030, group_of(group, 1030), 3, true});
            const int64_t k = f.long_inputs;
            all.push_back({f.format, element, 17, k, group_of(group, k), 3, false});
        }
    }
    for (int i = static_cast<int>(WeightFormat::kFloat8); i < static_cast<int>(WeightFormat::kCount); ++i) {
        const auto format = static_cast<WeightFormat>(i);
        const bool is_k = format >= WeightFormat::kQ2_K;
        const bool is_block = format >= WeightFormat::kQ4_1 || format == WeightFormat::kFloat4;
        const bool is_small = is_k && format != WeightFormat::kQ4_K && format != WeightFormat::kQ5_K;
        const int64_t group = is_small ? 16 : 32;
        all.push_back({format, Element::kFloat32, 70, kBlockInputs, group, kMostRows, false});
        if (is_block) continue;
        for (const int64_t other : {int64_t{24}, int64_t{128}}) {
            all.push_back({format, Element::kBfloat16, 33, 301, other, kMostRows, false});
        }
    }
    return all;
}

}  // namespace

int main() {
    return check_variants<Case>(
        running_variants(), [](int variant) { return linear_kernels(variant).name; }, cases(),
        [](Check<Case>& check, const Case& c, int variant) { check_case(check, c, variant); });
}
