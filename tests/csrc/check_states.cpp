// Checks every variant of the delta rule that this CPU runs, and the convolution, without Python:
// against sums in double precision; and that a sequence has the same bits in one step, in steps of any
// lengths, beside another sequence and on two threads.
//
// Prints a line per variant. The exit status is 1 if something was wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"
#include "elements.h"
#include "states.h"

namespace {

using namespace quire;

constexpr int64_t kBlockSize = 4;
constexpr int64_t kSequences = 2;

struct Case {
    Element element;
    DeltaHeads heads;
    int64_t width;

    int64_t channels() const {
        return 2 * heads.keys * heads.key_dim + heads.values * heads.value_dim;
    }
    int64_t outputs() const { return heads.values * heads.value_dim; }
    int64_t past_size() const { return channels() * (width - 1); }
};

// Contiguous numbers of an element.
class Values {
   public:
    Values(Element element, int64_t count)
        : element_(element), words_(static_cast<size_t>(count)) {}

    void fill(Random& random, float size) {
        for (size_t i = 0; i < words_.size(); ++i) set(static_cast<int64_t>(i), random.next() * size);
    }
    float at(int64_t i) const {
        switch (element_) {
            case Element::kFloat32: return get<float>(i);
            case Element::kBfloat16: return widen(get<Bfloat16>(i));
            default: return widen(get<Float16>(i));
        }
    }
    HeadRows rows(int64_t first, int64_t stride) {
        const int64_t bytes = element_ == Element::kFloat32 ? 4 : 2;
        return {element_, stride, reinterpret_cast<uint8_t*>(words_.data()) + first * stride * bytes};
    }
    bool operator==(const Values& other) const {
        return std::memcmp(words_.data(), other.words_.data(), words_.size() * 4) == 0;
    }

   private:
    void set(int64_t i, float value) {
        switch (element_) {
            case Element::kFloat32: return put<float>(i, value);
            case Element::kBfloat16: return put<Bfloat16>(i, value);
            default: return put<Float16>(i, value);
        }
    }
    template <class T>
    T get(int64_t i) const {
        T value;
        const auto* data = reinterpret_cast<const uint8_t*>(words_.data());
        std::memcpy(&value, data + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    }
    template <class T>
    void put(int64_t i, float from) {
        T value;
        narrow(value, from);
        auto* data = reinterpret_cast<uint8_t*>(words_.data());
        std::memcpy(data + i * static_cast<int64_t>(sizeof value), &value, sizeof value);
    }

    Element element_;
    std::vector<uint32_t> words_;
};

// Two sequences of one layer: what it is given, and its states.
class Layer {
   public:
    Layer(const Case& c, int64_t tokens)
        : case_(c),
          tokens_(tokens),
          qkv_(c.element, kSequences * tokens * c.channels()),
          gates_(c.element, kSequences * tokens * 2 * c.heads.values) {
        Random random;
        qkv_.fill(random, 2.0f);
        gates_.fill(random, 3.0f);
        for (int64_t i = 0; i < c.heads.values; ++i) {
            rate_.push_back(random.next() + 1.1f);
            shift_.push_back(random.next());
        }
        for (int64_t i = 0; i < c.width * c.channels(); ++i) weight_.push_back(random.next());
    }

    // Results of both operations for sequences [first, first + count), `chunk` tokens of each in a step.
    std::pair<Values, Values> run(int variant, int64_t first, int64_t count, int64_t chunk,
                                  int num_threads) {
        const int64_t size = case_.past_size() + case_.heads.memory_size();
        const int64_t blocks = tokens_ / kBlockSize + 1;
        std::vector<float> states(static_cast<size_t>(count * blocks * size), NAN);
        const StateLayer layer{states.data(), size};
        Values made(case_.element, count * tokens_ * case_.channels());
        Values out(case_.element, count * tokens_ * case_.outputs());
        for (int64_t done = 0; done < tokens_; done += chunk) {
            const int64_t now = std::min(chunk, tokens_ - done);
            // Rows of a step follow each other; parts of sequences do not, so each has its own step.
            const bool together = now == tokens_;
            for (int64_t s = 0; s < (together ? 1 : count); ++s) {
                const int64_t rows = together ? count : 1;
                std::vector<int32_t> starts, contexts, tables;
                for (int64_t r = 0; r <= rows; ++r) starts.push_back(static_cast<int32_t>(r * now));
                for (int64_t r = 0; r < rows; ++r) {
                    contexts.push_back(static_cast<int32_t>(done + now));
                    for (int64_t b = 0; b < blocks; ++b) {
                        const int64_t last = (done + now - 1) / kBlockSize;
                        // The block that a step begins with is among the last three.
                        const bool is_wanted = b <= last && (b + 2 >= last || b % 3 == 0);
                        const int64_t block = (s + r) * blocks + b;
                        tables.push_back(static_cast<int32_t>(is_wanted ? block : -1));
                    }
                }
                StatePlan plan;
                plan.prepare({tables.data(), blocks, starts.data(), contexts.data(), nullptr, rows,
                              kBlockSize});
                const int64_t from = (first + s) * tokens_ + done, to = s * tokens_ + done;
                const HeadRows qkv = qkv_.rows(from, case_.channels());
                convolve(plan, layer, made.rows(to, case_.channels()), qkv, weight_.data(),
                         case_.channels(), case_.width, num_threads);
                delta_rule(plan, layer,
                           {case_.heads, out.rows(to, case_.outputs()), qkv,
                            gates_.rows(from, 2 * case_.heads.values), rate_.data(), shift_.data()},
                           num_threads, variant);
            }
        }
        return {made, out};
    }

    bool is_convolved(const Values& made, double error) const {
        bool is_right = true;
        const int64_t channels = case_.channels();
        for (int64_t t = 0; t < tokens_; ++t) {
            for (int64_t c = t % 3; c < channels; c += 3) {
                double sum = 0;
                for (int64_t w = 0; w < case_.width; ++w) {
                    const int64_t from = t - case_.width + 1 + w;
                    const double factor = weight_[static_cast<size_t>(w * channels + c)];
                    if (from >= 0) sum += factor * qkv_.at(from * channels + c);
                }
                const double wanted = sum / (1 + std::exp(-sum));
                is_right &= std::fabs(made.at(t * channels + c) - wanted) <= error;
            }
        }
        return is_right;
    }

    // The first sequence's last head, column by column.
    bool is_remembered(const Values& out, double error) const {
        const auto [keys, values, dim, columns] = case_.heads;
        const int64_t head = values - 1, key_head = keys - 1, channels = case_.channels();
        std::vector<double> memory(static_cast<size_t>(dim * columns));
        bool is_right = true;
        for (int64_t t = 0; t < tokens_; ++t) {
            const auto at = [&](int64_t i) -> double { return qkv_.at(t * channels + i); };
            const int64_t q = key_head * dim, k = (keys + key_head) * dim;
            const int64_t v = 2 * keys * dim + head * columns;
            double q_size = 1e-6, k_size = 1e-6;
            for (int64_t d = 0; d < dim; ++d) {
                q_size += at(q + d) * at(q + d);
                k_size += at(k + d) * at(k + d);
            }
            const auto own = static_cast<size_t>(head);
            const double time = gates_.at(t * 2 * values + values + head) + shift_[own];
            const double decay = std::exp(-rate_[own] * std::log1p(std::exp(time)));
            const double strength = 1 / (1 + std::exp(-gates_.at(t * 2 * values + head)));
            for (int64_t e = 0; e < columns; ++e) {
                double stored = 0, asked = 0;
                const auto of = [&](int64_t d) -> double& {
                    return memory[static_cast<size_t>(d * columns + e)];
                };
                for (int64_t d = 0; d < dim; ++d) {
                    of(d) *= decay;
                    stored += of(d) * at(k + d) / std::sqrt(k_size);
                }
                for (int64_t d = 0; d < dim; ++d) {
                    of(d) += at(k + d) / std::sqrt(k_size) * strength * (at(v + e) - stored);
                    asked += of(d) * at(q + d) / std::sqrt(q_size * static_cast<double>(dim));
                }
                const float made = out.at(t * case_.outputs() + head * columns + e);
                is_right &= std::fabs(made - asked) <= error;
            }
        }
        return is_right;
    }

   private:
    Case case_;
    int64_t tokens_;
    Values qkv_, gates_;
    std::vector<float> rate_, shift_, weight_;
};

void describe(const Case& c) {
    std::printf("element %d key dim %d value dim %d width %d",
                static_cast<int>(c.element), static_cast<int>(c.heads.key_dim),
                static_cast<int>(c.heads.value_dim), static_cast<int>(c.width));
}

void check_case(Check<Case>& check, const Case& c, int variant) {
    Layer layer(c, 23);
    const auto [made, out] = layer.run(variant, 0, 1, 23, 1);
    const double error = c.element == Element::kFloat32    ? 5e-6
                         : c.element == Element::kBfloat16 ? 2e-2
                                                           : 3e-3;
    check.expect(layer.is_convolved(made, error), c, "a convolution");
    check.expect(layer.is_remembered(out, error), c, "a delta rule");
    for (const int64_t chunk : {1, 3, 4, 7}) {
        const auto again = layer.run(variant, 0, 1, chunk, 2);
        check.expect(made == again.first && out == again.second, c,
                     "other bits in steps of another length");
    }
    const auto both = layer.run(variant, 0, 2, 23, 2), apart = layer.run(variant, 0, 2, 5, 1);
    check.expect(both.first == apart.first && both.second == apart.second, c,
                 "other bits beside another sequence");
}

std::vector<Case> cases() {
    std::vector<Case> all;
    for (const Element e : {Element::kFloat32, Element::kBfloat16, Element::kFloat16}) {
        all.push_back({e, {1, 1, 8, 8}, 2});
        all.push_back({e, {2, 4, 13, 7}, 3});
        all.push_back({e, {1, 4, 32, 33}, 4});
        all.push_back({e, {2, 2, 128, 64}, 4});
        all.push_back({e, {1, 2, 64, 100}, 5});
    }
    return all;
}

}  // namespace

int main() {
    return check_variants<Case>(
        attention_variants(), [](int variant) { return attention_variant_name(variant); }, cases(),
        [](Check<Case>& check, const Case& c, int variant) { check_case(check, c, variant); });
}
