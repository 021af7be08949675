// What the checks of this folder share: numbers, a count of what was right, and a line per variant.
#pragma once

#include <cstdint>
#include <cstdio>

#include "variants.h"

namespace quire {

class Random {
   public:
    uint32_t bits() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<uint32_t>(state_ >> 32);
    }
    // In [-1, 1].
    float next() { return static_cast<float>(static_cast<int32_t>(bits())) * 0x1p-31f; }

   private:
    uint64_t state_ = 1;
};

// Counts, and tells the first things that are wrong. describe(c) prints what a case is.
template <class Case>
class Check {
   public:
    void expect(bool is_right, const Case& c, const char* what) {
        ++count_;
        if (is_right || ++failures_ > 5) return;
        std::printf("  wrong: %s; ", what);
        describe(c);
        std::printf("\n");
    }
    int64_t count() const { return count_; }
    int64_t failures() const { return failures_; }

   private:
    int64_t count_ = 0, failures_ = 0;
};

// Calls check_case(check, case, variant) for all of them; returns the exit status.
template <class Case, class Cases, class Name, class CheckCase>
int check_variants(VariantSet variants, const Name& name, const Cases& cases,
                   const CheckCase& check_case) {
    int64_t failures = 0;
    for (int variant = 0; variant <= last_of(variants); ++variant) {
        if ((variants >> variant & 1) == 0) continue;
        Check<Case> check;
        for (const Case& c : cases) check_case(check, c, variant);
        failures += check.failures();
        std::printf("%s: %lld checks, %lld wrong\n", name(variant),
                    static_cast<long long>(check.count()),
                    static_cast<long long>(check.failures()));
    }
    return failures == 0 ? 0 : 1;
}

}  // namespace quire
