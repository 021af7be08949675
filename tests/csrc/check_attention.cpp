// Checks every variant of attention that this CPU runs, without Python: against a softmax in double
// precision over the stored keys and values; and that a row has the same bits alone, however the
// work is cut, in blocks of another size, and on two threads. Whatever no query sees is no number.
//
// Prints a line per variant. The exit status is 1 if something was wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "attention.h"
#include "elements.h"

namespace {

using namespace quire;

constexpr float kFloat8Scale = 0.03f;  // stored numbers are large, small and subnormal

struct Row {
    int64_t context, new_tokens;  // the context ends with the new tokens
};

struct Case {
    KvFormat format;
    Element element;  // of queries and results, and of keys and values before they are stored
    int64_t head_dim, kv_heads, group, block_size, window;
    int64_t shared;  // positions whose blocks all rows have in common
    std::vector<Row> rows;
    float soft_cap = 0;
    bool has_sinks = false;
    int64_t ahead = 0;
    int64_t bad = -1;  // a position whose values are no numbers; those that do not see it hear nothing
    int64_t num_values = 0;  // of latent vectors, of which a token has one for all heads

    int64_t heads() const { return kv_heads * group; }
    int64_t stored_heads() const { return num_values > 0 ? 1 : kv_heads; }
    int64_t value_dim() const { return num_values > 0 ? num_values : head_dim; }
};

int64_t size_of(Element element) { return element == Element::kFloat32 ? 4 : 2; }

template <class T>
float read_as(const void* data, int64_t i) {
    T value;
    std::memcpy(&value, static_cast<const uint8_t*>(data) + i * static_cast<int64_t>(sizeof value),
                sizeof value);
    return widen(value);
}

// Contiguous values of an element.
class Values {
   public:
    Values(Element element, int64_t count)
        : element_(element), bytes_(static_cast<size_t>(count * size_of(element))) {}
    void fill(Random& random, float size) {
        const auto count = static_cast<int64_t>(bytes_.size()) / size_of(element_);
        for (int64_t i = 0; i < count; ++i) set(i, random.next() * size);
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
            case Element::kFloat32: return read_as<float>(bytes_.data(), i);
            case Element::kBfloat16: return read_as<Bfloat16>(bytes_.data(), i);
            default: return read_as<Float16>(bytes_.data(), i);
        }
    }
    HeadRows rows(int64_t first, int64_t stride) {
        return {element_, stride, bytes_.data() + first * stride * size_of(element_)};
    }
    bool is_same(int64_t at, const Values& other, int64_t count) const {
        return std::memcmp(bytes_.data() + at * size_of(element_), other.bytes_.data(),
                           static_cast<size_t>(count * size_of(element_))) == 0;
    }

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

    Element element_;
    std::vector<uint8_t> bytes_;
};

// Blocks full of keys and values, the rows' tables, and their queries.
class Batch {
   public:
    explicit Batch(const Case& c)
        : case_(c), num_blocks_(lay_out()), q_(c.element, starts_.back() * c.heads() * c.head_dim) {
        Random random;
        q_.fill(random, 2.0f);
        for (int64_t head = 0; head < c.heads(); ++head) sinks_.push_back(4 * random.next());
        const std::vector<int64_t> places = seen_slots();
        const auto count = static_cast<int64_t>(places.size()), stride = c.stored_heads() * c.head_dim;
        Values k(c.element, count * stride), v(c.element, count * stride);
        k.fill(random, c.num_values > 0 ? 1.0f : 2.0f);
        v.fill(random, 1.0f);
        for (int64_t i = 0; i < count * stride; ++i) {
            if (bad_slots_.count(places[static_cast<size_t>(i / stride)]) > 0) v.set(i, NAN);
        }
        const int64_t rows = num_blocks_ * c.block_size * c.stored_heads();
        keys_.assign(static_cast<size_t>(rows * row_bytes()), 0xFF);
        if (c.num_values == 0) values_.assign(keys_.size(), 0xFF);
        store_kv(layer(), k.rows(0, stride), v.rows(0, stride), places.data(), count, 2);
    }

    // Results of rows [first, first + count).
    Values attend(int variant, int64_t first, int64_t count, int num_threads, PlanOptions options) {
        std::vector<int32_t> starts, lens;
        for (int64_t r = first; r <= first + count; ++r) {
            starts.push_back(starts_[static_cast<size_t>(r)] - starts_[static_cast<size_t>(first)]);
        }
        for (int64_t r = first; r < first + count; ++r) {
            lens.push_back(static_cast<int32_t>(case_.rows[static_cast<size_t>(r)].context));
        }
        return run(variant, first, start(first), starts, lens, num_threads, options);
    }

    // Of `count` new tokens of a row, from its `from`th on.
    Values attend_chunk(int variant, int64_t row, int64_t from, int64_t count) {
        const Row& whole = case_.rows[static_cast<size_t>(row)];
        const auto len = static_cast<int32_t>(whole.context - whole.new_tokens + from + count);
        return run(variant, row, start(row) + from, {0, static_cast<int32_t>(count)}, {len}, 1, {});
    }
    int64_t query_size() const { return case_.heads() * case_.head_dim; }
    int64_t token_size() const { return case_.heads() * case_.value_dim(); }
    int64_t start(int64_t row) const { return starts_[static_cast<size_t>(row)]; }
    float scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.head_dim)); }

    // Of the query at `position` of a row, which is the step's token `token`.
    std::vector<double> expected(int64_t row, int64_t position, int64_t token, int64_t head) const {
        const int64_t kv_head = case_.num_values > 0 ? 0 : head / case_.group;
        const int64_t dim = case_.head_dim, value_dim = case_.value_dim();
        std::vector<double> scores, sums(static_cast<size_t>(value_dim));
        double peak = -1e300;
        const int64_t first = first_seen(position);
        const int64_t context = case_.rows[static_cast<size_t>(row)].context;
        const int64_t end = std::min(position + case_.ahead + 1, context);
        for (int64_t t = first; t < end; ++t) {
            double score = 0;
            for (int64_t h = 0; h < dim; ++h) {
                const double q = q_.at((token * case_.heads() + head) * dim + h);
                score += q * stored_key(row, kv_head, t, h);
            }
            score *= scale();
            const double cap = case_.soft_cap;
            scores.push_back(cap == 0 ? score : cap * std::tanh(score / cap));
            peak = std::fmax(peak, scores.back());
        }
        const double sink = sinks_[static_cast<size_t>(head)];
        double total = case_.has_sinks ? std::exp(sink - peak) : 0;
        for (int64_t t = first; t < end; ++t) {
            const double weight = std::exp(scores[static_cast<size_t>(t - first)] - peak);
            total += weight;
            for (int64_t h = 0; h < value_dim; ++h) {
                sums[static_cast<size_t>(h)] += weight * stored_value(row, kv_head, t, h);
            }
        }
        for (double& sum : sums) sum /= total;
        return sums;
    }

   private:
    // The first position that the query at a position sees; a window below 0 is a chunk's length.
    int64_t first_seen(int64_t position) const {
        const int64_t size = case_.window;
        if (size < 0) return position / -size * -size;
        return size == 0 ? 0 : std::max<int64_t>(0, position - size + 1);
    }

    // Of `starts.back()` step tokens, of rows from `first` on, whose queries begin at `token`.
    Values run(int variant, int64_t first, int64_t token, const std::vector<int32_t>& starts,
               const std::vector<int32_t>& lens, int num_threads, PlanOptions options) {
        const AttentionStep step{tables_.data() + first * table_stride_,
                                 table_stride_,
                                 starts.data(),
                                 lens.data(),
                                 static_cast<int64_t>(lens.size()),
                                 case_.block_size,
                                 case_.window,
                                 case_.ahead,
                                 case_.kv_heads,
                                 case_.group,
                                 case_.head_dim};
        AttentionPlan plan;
        plan.prepare(step, num_threads, options);
        Values out(case_.element, starts.back() * token_size());
        paged_attention(plan, layer(), q_.rows(token, query_size()), out.rows(0, token_size()),
                        {scale(), case_.soft_cap, case_.has_sinks ? sinks_.data() : nullptr},
                        num_threads, variant);
        return out;
    }

    // Where the tokens stand that some query sees, in an order that has nothing to do with blocks.
    std::vector<int64_t> seen_slots() {
        std::vector<int64_t> slots;
        for (size_t r = 0; r < case_.rows.size(); ++r) {
            const Row& row = case_.rows[r];
            const int64_t oldest = row.context - row.new_tokens;
            for (int64_t t = std::max<int64_t>(first_seen(oldest), r > 0 ? case_.shared : 0); t < row.context; ++t) {
                const size_t entry = r * static_cast<size_t>(table_stride_) +
                                     static_cast<size_t>(t / case_.block_size);
                slots.push_back(tables_[entry] * case_.block_size + t % case_.block_size);
                if (t == case_.bad) bad_slots_.insert(slots.back());
            }
        }
        return slots;
    }

    int64_t row_bytes() const { return kv_row_bytes(case_.format, case_.head_dim); }

    KvLayer layer() {
        return {case_.format,   case_.stored_heads(), num_blocks_,    case_.block_size,
                case_.head_dim, keys_.data(),         values_.data(), case_.num_values,
                kFloat8Scale,   kFloat8Scale};
    }

    // Tables with blocks in falling order behind the shared ones; returns the number of blocks.
    int64_t lay_out() {
        const int64_t size = case_.block_size, shared = case_.shared / size;
        const auto blocks = [&](int64_t n) { return (n + size - 1) / size; };
        int64_t total = shared;
        starts_.push_back(0);
        for (const Row& row : case_.rows) {
            starts_.push_back(starts_.back() + static_cast<int32_t>(row.new_tokens));
            total += blocks(row.context) > shared ? blocks(row.context) - shared : 0;
            table_stride_ = std::max(table_stride_, blocks(row.context));
        }
        int64_t next = total;
        for (const Row& row : case_.rows) {
            for (int64_t b = 0; b < table_stride_; ++b) {
                const bool is_used = b < blocks(row.context);
                const int64_t id = b < shared ? b : is_used ? --next : -1;
                tables_.push_back(static_cast<int32_t>(id));
            }
        }
        return total;
    }

    // Of a position the byte where its head's block begins.
    int64_t block_at(int64_t row, int64_t head, int64_t position) const {
        const int64_t entry = row * table_stride_ + position / case_.block_size;
        const int64_t block = head * num_blocks_ + tables_[static_cast<size_t>(entry)];
        return block * case_.block_size * row_bytes();
    }

    // A key's bytes stand in the words of its block, [W, P], and in [P, rest].
    void copy_key(uint8_t* to, const uint8_t* block, int64_t in_block, int64_t from, int64_t count) const {
        const int64_t size = case_.block_size, words = row_bytes() / 4, rest = row_bytes() % 4;
        for (int64_t b = from; b < from + count; ++b) {
            const int64_t at = b < words * 4 ? (b / 4 * size + in_block) * 4 + b % 4
                                             : words * size * 4 + in_block * rest + b - words * 4;
            *to++ = block[at];
        }
    }

    double stored_key(int64_t row, int64_t head, int64_t position, int64_t h) const {
        const uint8_t* block = keys_.data() + block_at(row, head, position);
        const int64_t in_block = position % case_.block_size, size = row_bytes() / case_.head_dim;
        if (case_.num_values > 0) return stored_latent(block + in_block * row_bytes(), h);
        uint8_t bytes[4], scale[4];
        if (case_.format != KvFormat::kInt8) {
            copy_key(bytes, block, in_block, h * size, size);
            return number(bytes, 0);
        }
        copy_key(scale, block, in_block, 0, 4);
        copy_key(bytes, block, in_block, 4 + h, 1);
        return static_cast<int8_t>(bytes[0]) * read_as<float>(scale, 0);
    }

    double stored_latent(const uint8_t* row, int64_t h) const {
        if (case_.format != KvFormat::kInt8) return number(row, h);
        return static_cast<int8_t>(row[4 + h]) * read_as<float>(row, 0);
    }

    double stored_value(int64_t row, int64_t head, int64_t position, int64_t h) const {
        if (case_.num_values > 0) return stored_key(row, 0, position, h);
        const int64_t in_block = position % case_.block_size;
        const uint8_t* at = values_.data() + block_at(row, head, position) + in_block * row_bytes();
        if (case_.format != KvFormat::kInt8) return number(at, h);
        return static_cast<int8_t>(at[h]) * read_as<float>(at + case_.head_dim, 0);
    }

    double number(const uint8_t* row, int64_t h) const {
        switch (case_.format) {
            case KvFormat::kFloat32: return read_as<float>(row, h);
            case KvFormat::kBfloat16: return read_as<Bfloat16>(row, h);
            case KvFormat::kFloat8: return float8(row[h]);
            default: return read_as<Float16>(row, h);
        }
    }

    static double float8(uint8_t code) {
        const int exponent = code >> 3 & 0xF, mantissa = code & 7;
        if ((code & 0x7F) == 0x7F) return NAN;
        const double size = exponent == 0 ? std::ldexp(mantissa, -9)
                                          : std::ldexp(8 + mantissa, exponent - 10);
        return kFloat8Scale * (code & 0x80 ? -size : size);
    }

    Case case_;
    int64_t table_stride_ = 0;
    std::vector<int32_t> tables_, starts_;
    int64_t num_blocks_;
    Values q_;
    std::vector<uint8_t> keys_, values_;
    std::vector<float> sinks_;
    std::set<int64_t> bad_slots_;
};

void describe(const Case& c) {
    std::printf("format %d element %d head dim %d values %d group %d block size %d",
                static_cast<int>(c.format), static_cast<int>(c.element),
                static_cast<int>(c.head_dim), static_cast<int>(c.value_dim()),
                static_cast<int>(c.group), static_cast<int>(c.block_size));
}

// Whether queries and weights are rounded to bfloat16 for its dots.
bool rounds_queries(const Case& c, int variant) {
    const std::string name = attention_variant_name(variant);
    return c.format == KvFormat::kBfloat16 && (name == "avx512_bf16" || name == "amx");
}

// Values are below 1, so errors are absolute.
void check_results(Check<Case>& check, const Case& c, const Batch& batch, const Values& out,
                   int variant) {
    const double error = c.element == Element::kBfloat16 || rounds_queries(c, variant) ? 4e-3
                         : c.element == Element::kFloat32                              ? 3e-6
                                                                                       : 5e-4;
    bool is_right = true;
    for (size_t r = 0; r < c.rows.size(); ++r) {
        const auto row = static_cast<int64_t>(r);
        for (int64_t i = 0; i < c.rows[r].new_tokens; i += 3) {
            const int64_t token = batch.start(row) + i;
            const int64_t position = c.rows[r].context - c.rows[r].new_tokens + i;
            const int64_t head = (row + i) % c.heads();
            const std::vector<double> sums = batch.expected(row, position, token, head);
            for (int64_t h = 0; h < c.value_dim(); ++h) {
                const float value = out.at((token * c.heads() + head) * c.value_dim() + h);
                const double sum = sums[static_cast<size_t>(h)];
                is_right &= std::isnan(sum) ? std::isnan(value) : std::fabs(value - sum) <= error;
            }
        }
    }
    check.expect(is_right, c, "further from the softmax in double precision than rounding is");
}

void check_case(Check<Case>& check, const Case& c, int variant) {
    Batch batch(c);
    const auto rows = static_cast<int64_t>(c.rows.size());
    const Values out = batch.attend(variant, 0, rows, 1, {false, false});
    check_results(check, c, batch, out, variant);
    for (const PlanOptions options : {PlanOptions{true, false}, PlanOptions{true, true}}) {
        for (int num_threads = 1; num_threads <= 2; ++num_threads) {
            const Values again = batch.attend(variant, 0, rows, num_threads, options);
            check.expect(out.is_same(0, again, batch.start(rows) * batch.token_size()), c,
                         "other bits where the work was cut in another way");
        }
    }
    const auto is_same = [&](int64_t token, const Values& other, int64_t count) {
        return out.is_same(token * batch.token_size(), other, count * batch.token_size());
    };
    for (int64_t row = 0; row < rows; ++row) {
        const Values alone = batch.attend(variant, row, 1, 1, {});
        const int64_t first = batch.start(row), count = batch.start(row + 1) - first;
        check.expect(is_same(first, alone, count), c, "a row has other bits in a batch");
        if (c.ahead > 0) continue;
        for (int64_t i = 0, size = 1; i < count; i += size, size = size % 23 + 5) {
            const int64_t some = std::min(size, count - i);
            const Values chunk = batch.attend_chunk(variant, row, i, some);
            check.expect(is_same(first + i, chunk, some), c, "a chunk has other bits");
        }
    }
    Case other = c;
    other.block_size = c.block_size % 16 == 0 ? 4 : 16;
    const Values moved = Batch(other).attend(variant, 0, rows, 2, {});
    check.expect(is_same(0, moved, batch.start(rows)), c, "other bits in blocks of another size");
    if (c.num_values == 0 || c.kv_heads == 1) return;
    other = c;
    other.kv_heads = 1;
    other.group = c.heads();
    const Values whole = Batch(other).attend(variant, 0, rows, 2, {});
    check.expect(is_same(0, whole, batch.start(rows)), c, "other bits where heads are not in parts");
}

std::vector<Case> cases() {
    const Element f32 = Element::kFloat32, bf16 = Element::kBfloat16, f16 = Element::kFloat16;
    const std::vector<Row> decodes = {{1, 1}, {600, 1}, {257, 1}, {777, 1}};
    const std::vector<Row> mixed = {{9, 9}, {301, 1}, {270, 70}, {32, 1}, {64, 5}};
    const std::vector<Row> shared = {{600, 1}, {601, 2}, {900, 1}};
    std::vector<Case> all;
    for (const KvFormat format :
         {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFloat16, KvFormat::kInt8,
          KvFormat::kFloat8}) {
        const Element element = format == KvFormat::kBfloat16  ? bf16
                                : format == KvFormat::kFloat16 ? f16
                                                               : f32;
        for (const Element e : {element, f32}) {
            all.push_back({format, e, 64, 2, 2, 16, 0, 0, mixed});
            all.push_back({format, e, 40, 1, 7, 1, 0, 0, decodes});
            all.push_back({format, e, 27, 2, 3, 3, 100, 0, mixed});
            all.push_back({format, e, 27, 2, 3, 3, -100, 0, mixed});
            all.push_back({format, e, 64, 1, 4, 16, -7, 0, mixed});
            all.push_back({format, e, 128, 1, 4, 32, 0, 576, shared});
            all.push_back({format, e, 64, 2, 2, 16, 0, 0, mixed, 1.5f, true});
            all.push_back({format, e, 27, 2, 3, 3, 100, 0, mixed, 30.0f, false});
            all.push_back({format, e, 128, 1, 4, 32, 0, 576, shared, 0, true});
            all.push_back({format, e, 32, 1, 2, 16, 0, 0, {{70, 70}, {290, 290}}, 0, false, 400});
        }
    }
    // Latent vectors: sizes with and without whole vectors of words, and of values.
    for (const KvFormat format :
         {KvFormat::kFloat32, KvFormat::kBfloat16, KvFormat::kFloat16, KvFormat::kInt8,
          KvFormat::kFloat8}) {
        const Element element = format == KvFormat::kBfloat16 ? bf16 : f32;
        const auto add = [&](Case c, int64_t num_values) {
            c.num_values = num_values;
            all.push_back(c);
        };
        add({format, element, 96, 1, 16, 16, 0, 0, mixed}, 64);
        add({format, element, 40, 2, 3, 1, 0, 0, decodes}, 32);
        add({format, f32, 28, 1, 5, 3, 0, 0, mixed}, 20);
        add({format, element, 80, 3, 7, 32, 0, 576, shared}, 80);
        add({format, element, 24, 2, 40, 16, 0, 0, decodes}, 7);
        add({format, element, 72, 1, 2, 16, 0, 0, mixed, 0, false, 0, 280}, 64);
        add({format, element, 576, 1, 16, 16, 0, 0, {{300, 1}, {40, 9}}}, 512);
    }
    // Whole steps of 32 tokens and elements, and less than that.
    const std::vector<Row> steps = {{31, 31}, {33, 2}, {288, 1}, {289, 40}, {511, 17}, {512, 16}};
    const int64_t dims[] = {16, 80, 96, 256, 66, 48, 64, 128}, sizes[] = {16, 48, 256, 64};
    for (int64_t i = 0; i < 8; ++i) {
        const int64_t window = i % 3 == 0 ? 45 : 0, size = sizes[i % 4];
        all.push_back({KvFormat::kBfloat16, bf16, dims[i], 1, i + 1, size, window, 0, steps});
    }
    for (const int64_t bad : {20, 280, 295}) {
        all.push_back({KvFormat::kBfloat16, bf16, 64, 1, 3, 16, 50, 0, steps, 0, false, 0, bad});
        all.push_back({KvFormat::kBfloat16, bf16, 80, 1, 1, 16, 0, 0, steps, 0, false, 0, bad});
    }
    all.push_back({KvFormat::kBfloat16, f32, 64, 1, 40, 16, 0, 0, {{300, 40}, {20, 1}}});
    all.push_back({KvFormat::kBfloat16, bf16, 64, 1, 5, 16, 0, 512, {{513, 1}, {530, 9}, {600, 16}}});
    return all;
}

}  // namespace

int main() {
    return check_variants<Case>(
        attention_variants(), [](int variant) { return attention_variant_name(variant); }, cases(),
        [](Check<Case>& check, const Case& c, int variant) { check_case(check, c, variant); });
}
