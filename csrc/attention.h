// Attention of a step's rows over paged keys and values (P 4.1, eq. 4).
// Shape legend: T tokens of the step, S rows, N = K * G query heads, K KV heads, G query heads of
// one KV head, H head dim, B blocks, P tokens per block, L longest block table.
//
// A query's keys are reduced in spans of 256 positions, which begin at multiples of 256:
//
//   score[t] = sum over h = 0, 1, ... of (q[h] * scale / ln 2) * K[t][h]   one lane per token
//   weight[t] = 2^(score[t] - peak), sum over t in 16 lanes, then a fixed tree
//   part[h] = sum over t = 0, 1, ... of weight[t] * V[t][h]                one lane per element
//
// and the spans' (peak, sum, part) are folded in the order of their positions. A soft cap is applied to
// a score as soon as it is there; a sink joins the sum when the last span is folded. Where the variant
// has dots of bfloat16 and keys and values are such, h and t go in pairs (2 i, 2 i + 1), and queries times
// the scale, and weights in the last line, are rounded to bfloat16 (attention_dots.inc.h). In tiles of AMX
// they go in steps of 32: the even ones and the odd ones of a step are summed apart, the two are added, and
// that is added to the steps before (attention_matrices.inc.h). No query's
// arithmetic depends on another's, on how the work is cut or on where the blocks stand: its bits are
// the same alone, in any batch, chunked in any way, and on any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "linear.h"  // Element

namespace quire {

constexpr int64_t kSpan = 256;  // positions that are reduced together

// int8: H numbers and their float32 scale, which is the largest magnitude / 127. It stands behind a
// value's numbers and before a key's.
enum class KvFormat : int { kFloat32, kBfloat16, kFloat16, kInt8 };

// Bytes of one token's key or value of one head.
inline int64_t kv_row_bytes(KvFormat format, int64_t head_dim) {
    if (format == KvFormat::kInt8) return head_dim + 4;
    return head_dim * (format == KvFormat::kFloat32 ? 4 : 2);
}

// Keys and values of one layer: [K, B] blocks of P rows of kv_row_bytes each, contiguous. Values of a
// block stand row by row. Its keys are turned, so that the same elements of neighbouring tokens are a
// vector: the rows' words of 4 bytes as [W, P], then the bytes of each row that make no word, [P, rest].
struct KvLayer {
    KvFormat format;
    int64_t heads;
    int64_t num_blocks;
    int64_t block_size;
    int64_t head_dim;
    uint8_t* keys;
    uint8_t* values;
};

// Queries, keys, values or results: [T, heads, H], the heads of a token contiguous.
struct HeadRows {
    Element element;
    int64_t stride;  // elements between tokens
    void* data;
};

// One step as one cache group sees it. tables[S, L]: block ids (row stride table_stride), read
// until the step's last layer; entries that no query sees may be anything. query_starts[S + 1],
// context_lens[S]: read by `prepare` alone. window: 0 is none. ahead: so many positions behind a query
// are seen too, where the row has them. ends[T]: a token sees the keys before that position as well, and
// along a row no token sees less far than the one before it; read until the step's last layer, or null.
struct AttentionStep {
    const int32_t* tables;
    int64_t table_stride;
    const int32_t* query_starts;
    const int32_t* context_lens;
    int64_t num_rows;
    int64_t block_size;
    int64_t window;
    int64_t ahead;
    int64_t kv_heads;
    int64_t group;
    int64_t head_dim;
    const int32_t* ends;
};

// `count` new tokens of a row, which has `context`: step tokens [token, token + count) at
// [position, position + count).
struct QueryPiece {
    int64_t row;
    int64_t token;
    int64_t position;
    int64_t count;
    int64_t context;
};

// What one thread computes at once, for each KV head: the queries of some pieces (of one row, or of
// rows with the same blocks there) over spans [first_span, end_span). What it finds goes to the
// result if partial < 0, else to states[partial ...]: one per query if the item folds its spans
// (which it may if they are the queries' first), else one per span and query.
struct AttentionItem {
    int32_t first_piece;
    int32_t num_pieces;
    int64_t tokens;
    int64_t first_span;
    int64_t end_span;
    int64_t partial;
    bool folds;

    int64_t states() const { return partial < 0 ? 0 : folds ? 1 : end_span - first_span; }
};

// Where states of a piece stand: those of an item, from its token `offset` on.
struct PartialSource {
    int32_t item;
    int64_t offset;
};

// A piece whose states are folded after all items are done.
struct MergeJob {
    QueryPiece piece;
    int32_t first_source;
    int32_t num_sources;
};

struct PlanOptions {
    bool split = true;    // cut long contexts, so that all threads have work
    bool cascade = true;  // read blocks once for all rows that share them
};

// How a step's work is cut. Made once per step and used by all layers of a cache group; its memory
// is kept from step to step.
class AttentionPlan {
   public:
    void prepare(const AttentionStep& step, int num_threads, PlanOptions options = {});

    const AttentionStep& step() const { return step_; }
    const std::vector<QueryPiece>& pieces() const { return pieces_; }
    const std::vector<AttentionItem>& items() const { return items_; }
    const std::vector<PartialSource>& sources() const { return sources_; }
    const std::vector<MergeJob>& merges() const { return merges_; }
    const std::vector<int32_t>& order() const { return order_; }  // items, the longest first
    int64_t states() const { return states_; }  // of all items of one head, G per token
    int threads() const { return threads_; }    // worth waking

   private:
    struct Row {
        int64_t new_tokens, context, shared_spans;
        int32_t first_source, num_sources;
    };
    struct Candidate {
        int32_t first_block, row;
    };

    int64_t first_seen(int64_t position) const {
        if (step_.window == 0 || position < step_.window) return 0;
        return position - step_.window + 1;
    }
    int64_t end_seen(const QueryPiece& piece) const;
    void read_rows();
    void find_groups();
    int64_t shared_spans(int32_t a, int32_t b) const;
    void add_group(size_t begin, size_t end, int64_t shared);
    void add_block(int32_t row, int64_t first, int64_t count);
    void cut(AttentionItem item, int64_t parts, bool begins);
    int64_t parts_of(const AttentionItem& item) const;
    void sort_items();

    AttentionStep step_{};
    PlanOptions options_;
    int threads_ = 1;
    double target_ = 0;
    int64_t states_ = 0;
    std::vector<Row> rows_;
    std::vector<Candidate> candidates_;
    std::vector<QueryPiece> pieces_;
    std::vector<AttentionItem> items_;
    std::vector<PartialSource> sources_;
    std::vector<MergeJob> merges_;
    std::vector<int32_t> order_;
};

// Variants by number, best last; only those below num_attention_variants() run here.
int num_attention_variants();
const char* attention_variant_name(int variant);

// How products of queries and keys become weights. With a soft cap (0 is none) a score is
// cap * tanh(scale * product / cap). sinks[N]: logits that join the softmax's sum without a value, or
// null.
struct Weighing {
    float scale;
    float soft_cap = 0;
    const float* sinks = nullptr;
};

// out = softmax(scores) v for all tokens of the plan's step. q and out may have any element type,
// whatever the format of keys and values. variant: -1 is the best. sums[T, N, 2]: where the largest
// score of each query goes and the sum of its weights relative to that, for who adds other keys; or
// null.
void paged_attention(const AttentionPlan& plan, const KvLayer& kv, const HeadRows& q,
                     const HeadRows& out, const Weighing& weighing, int num_threads,
                     int variant = -1, float* sums = nullptr);

// Tokens [begin, end) of k and v go to their slots (block * P + offset), by the calling thread.
void store_tokens(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
                  int64_t begin, int64_t end);

inline void store_token(const KvLayer& kv, const HeadRows& k, const HeadRows& v,
                        const int64_t* slots, int64_t token) {
    store_tokens(kv, k, v, slots, token, token + 1);
}

// All of `count` tokens, on several threads.
void store_kv(const KvLayer& kv, const HeadRows& k, const HeadRows& v, const int64_t* slots,
              int64_t count, int num_threads);

}  // namespace quire
