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
// and the spans' (peak, sum, part) are folded in the order of their positions. A soft cap is
// applied to each score immediately; a sink joins the sum when the last span is folded.
//
// Variants with bfloat16 dots take h and t in pairs (2 i, 2 i + 1), if keys and values are
// bfloat16. They round scaled queries, and the weights in the last line, to bfloat16
// (attention_dots.inc.h). AMX tiles take steps of 32. The even and the odd elements of a step are
// summed apart, then added to each other and to the earlier steps (attention_matrices.inc.h).
//
// A query's arithmetic depends neither on other queries, nor on the division of the work, nor on
// the addresses of the blocks. Its bits are the same alone, in any batch, chunked in any way, and
// on any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "elements.h"
#include "linear.h"  // Element
#include "variants.h"

namespace quire {

constexpr int64_t kSpan = 256;  // positions that are reduced together

// int8: H numbers and their float32 scale, which is the largest magnitude / 127. It stands behind a
// value's numbers and before a key's. float8: e4m3, divided by the layer's scales when it is stored.
enum class KvFormat : int { kFloat32, kBfloat16, kFloat16, kInt8, kFloat8 };

// Bytes of one token's key or value of one head.
inline int64_t kv_row_bytes(KvFormat format, int64_t head_dim) {
    if (format == KvFormat::kInt8) return head_dim + 4;
    if (format == KvFormat::kFloat8) return head_dim;
    return head_dim * (format == KvFormat::kFloat32 ? 4 : 2);
}

// Keys and values of one layer: [K, B] blocks of P rows of kv_row_bytes each, contiguous. Values of a
// block stand row by row. Its keys are turned, so that the same elements of neighbouring tokens are a
// vector: the rows' words of 4 bytes as [W, P], then the bytes of each row that make no word, [P, rest].
//
// num_values > 0: latent vectors. All heads share one key per token, whole words that stand row by
// row, and its first num_values elements are the token's value. `keys` points to them; `values` is unused.
struct KvLayer {
    KvFormat format;
    int64_t heads;
    int64_t num_blocks;
    int64_t block_size;
    int64_t head_dim;
    uint8_t* keys;
    uint8_t* values;
    int64_t num_values = 0;
    float key_scale = 1, value_scale = 1;  // of float8

    // Return the factors of products with stored keys, and of sums of stored values.
    float key_factor() const { return format == KvFormat::kFloat8 ? kFloat8Factor * key_scale : 1; }
    float value_factor() const {
        return format == KvFormat::kFloat8 ? kFloat8Factor * value_scale : 1;
    }
    bool is_latent() const { return num_values > 0; }
    int64_t value_dim() const { return is_latent() ? num_values : head_dim; }
};

// Queries, keys, values or results: [T, heads, H], the heads of a token contiguous.
struct HeadRows {
    Element element;
    int64_t stride;  // elements between tokens
    void* data;
};

// One step as one cache group sees it. For latent vectors, kv_heads is the number of parts of the query
// heads, and group the heads of a part. A thread computes a part at once. The pointers stay valid until the step's last layer, except
// query_starts and context_lens, which `prepare` alone reads.
// tables: [S, L] block ids (row stride table_stride); entries that no query sees are undefined.
// query_starts, context_lens: [S + 1] and [S].
// window: number of visible positions, or 0 for all; -c if the query's chunk of c is visible.
// num_later_seen: number of later positions in the row that a query also sees.
// ends: [T] or null; a token also sees the keys before this position. It never falls along a row.
struct AttentionStep {
    const int32_t* tables;
    int64_t table_stride;
    const int32_t* query_starts;
    const int32_t* context_lens;
    int64_t num_rows;
    int64_t block_size;
    int64_t window;
    int64_t num_later_seen;
    int64_t kv_heads;
    int64_t group;
    int64_t head_dim;
    const int32_t* ends;

    // Returns the first position that a query at a position sees.
    int64_t first_seen(int64_t position) const {
        if (window < 0) return position - position % -window;
        return window == 0 || position < window ? 0 : position - window + 1;
    }
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

// The work that one thread does at once, for each KV head: the queries of some pieces over spans
// [first_span, end_span). The pieces belong to one row, or to rows that share those blocks. If
// partial < 0, the item writes its result to the output. Otherwise it writes to states[partial
// ...]. That is one state per query if the item folds its spans (which needs the queries' first
// spans), else one per span and query.
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

// The states of a piece: an item's states, from token `offset` of the item.
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

// The division of a step's work. It is made once per step for all layers of a cache group, and
// reuses its memory.
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

// Returns the variants with code for attention that run here.
VariantSet attention_variants();
const char* attention_variant_name(int variant);

// Weights from products of queries and keys. With a soft cap (0 is none) a score is cap *
// tanh(scale * product / cap). sinks[N]: logits that join the softmax's sum without a value, or
// null.
struct Weighing {
    float scale;
    float soft_cap = 0;
    const float* sinks = nullptr;
};

// Computes out = softmax(scores) v for all tokens of the plan's step. q and out may have any
// element type, whatever the format of keys and values. Heads of out have kv.value_dim() elements.
// variant: index of the kernels, or -1 for the best.
// sums: [T, N, 2] or null; receives each query's largest score and the sum of its weights relative
// to it. A caller can use them to merge other keys.
void paged_attention(const AttentionPlan& plan, const KvLayer& kv, const HeadRows& q,
                     const HeadRows& out, const Weighing& weighing, int num_threads,
                     int variant = -1, float* sums = nullptr);

// Tokens [begin, end) of k and v go to their slots (block * P + offset), by the calling thread. Of
// latent vectors k has all elements, and v is unused.
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
