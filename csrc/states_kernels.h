// The interface between the delta rule of one instruction set and states.cpp.
#pragma once

#include "states.h"

namespace quire {

// Numbers computed once per token and head, before threads share the heads' columns.
// keys: [K, T] records of key_stride floats: k (D), q (D), k . q.
// gates: [N, T] of (decay, strength).
struct DeltaCall {
    const DeltaRule& rule;
    const StateLayer& layer;
    const StatePiece* pieces;
    int64_t tokens;
    int64_t key_stride;
    const float* keys;
    const float* gates;
};

// run: a row's way through columns [column, column + columns) of a value head, as far as there are so
// many. memory: D times `columns` floats, aligned to 64 bytes, to work in.
struct DeltaKernels {
    const char* name;
    int64_t columns;
    void (*run)(const DeltaCall& call, const StateRow& row, int64_t head, int64_t column,
                float* memory);
};

extern const DeltaKernels kDeltaPortable, kDeltaAvx2, kDeltaAvx512, kDeltaNeon;

}  // namespace quire
