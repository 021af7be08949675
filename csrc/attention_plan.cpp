#include <algorithm>
#include <numeric>

#include "attention.h"

namespace quire {
namespace {

constexpr int64_t kMaxQueries = 96;    // of an item, where a token has fewer
constexpr int64_t kSharedTokens = 16;  // rows with more new tokens reuse enough by themselves
constexpr int64_t kMinSpans = 2;       // of an item that is one of several of its queries
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kFixedQueries = 6;  // reading keys and values takes as long as so many queries
constexpr double kAloneWork = 1 << 17;  // products that one thread does before another wakes

int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void AttentionPlan::prepare(const AttentionStep& step, int num_threads, PlanOptions options) {
    step_ = step;
    options_ = options;
    threads_ = num_threads;
    states_ = 0;
    pieces_.clear();
    items_.clear();
    sources_.clear();
    merges_.clear();
    read_rows();
    if (options.cascade && step.window == 0) find_groups();
    const int64_t block = std::max<int64_t>(1, kMaxQueries / step.group);
    for (size_t r = 0; r < rows_.size(); ++r) {
        const int64_t count = rows_[r].new_tokens, blocks = up(count, block);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t first = b * count / blocks;
            add_block(static_cast<int32_t>(r), first, (b + 1) * count / blocks - first);
        }
    }
    sort_items();
}

// Returns the first position that the tokens of a piece do not see.
int64_t AttentionPlan::end_seen(const QueryPiece& piece) const {
    int64_t end = piece.position + piece.count + step_.num_later_seen;
    if (step_.ends != nullptr && piece.count > 0) {
        end = std::max<int64_t>(end, step_.ends[piece.token + piece.count - 1]);
    }
    return std::min(end, piece.context);
}

// Also sets what an item should cost at most, in spans times queries.
void AttentionPlan::read_rows() {
    rows_.resize(static_cast<size_t>(step_.num_rows));
    double cost = 0;
    for (int64_t r = 0; r < step_.num_rows; ++r) {
        const int64_t count = step_.query_starts[r + 1] - step_.query_starts[r];
        const int64_t context = step_.context_lens[r];
        rows_[static_cast<size_t>(r)] = {count, context, 0, 0, 0};
        const auto keys = static_cast<double>(context - step_.first_seen(context - count));
        cost += keys * static_cast<double>(kFixedQueries + count * step_.group);
    }
    const double products = cost * static_cast<double>(step_.kv_heads * step_.head_dim);
    if (products < kAloneWork) threads_ = 1;
    const double heads = static_cast<double>(step_.kv_heads);
    target_ = cost / kSpan * heads / static_cast<double>(threads_ * kItemsPerThread);
}

// Whole spans at the beginning of both rows that stand in the same blocks.
int64_t AttentionPlan::shared_spans(int32_t a, int32_t b) const {
    const int32_t* table_a = step_.tables + a * step_.table_stride;
    const int32_t* table_b = step_.tables + b * step_.table_stride;
    const int64_t context = std::min(rows_[static_cast<size_t>(a)].context,
                                     rows_[static_cast<size_t>(b)].context);
    const int64_t limit = up(context / kSpan * kSpan, step_.block_size);
    const int64_t same = std::mismatch(table_a, table_a + limit, table_b).first - table_a;
    return std::min(same * step_.block_size, context) / kSpan;
}

// Rows are put side by side by their first block. One joins the group before it unless that would
// make the spans that are read once fewer.
void AttentionPlan::find_groups() {
    candidates_.clear();
    for (int32_t r = 0; r < static_cast<int32_t>(rows_.size()); ++r) {
        const Row& row = rows_[static_cast<size_t>(r)];
        if (row.new_tokens == 0 || row.new_tokens > kSharedTokens || row.context < kSpan) continue;
        candidates_.push_back({step_.tables[r * step_.table_stride], r});
    }
    std::stable_sort(candidates_.begin(), candidates_.end(),
                     [](auto a, auto b) { return a.first_block < b.first_block; });
    for (size_t begin = 0; begin < candidates_.size();) {
        const Candidate leader = candidates_[begin];
        int64_t shared = 0, tokens = rows_[static_cast<size_t>(leader.row)].new_tokens;
        size_t end = begin + 1;
        for (; end < candidates_.size(); ++end) {
            const Candidate next = candidates_[end];
            tokens += rows_[static_cast<size_t>(next.row)].new_tokens;
            if (next.first_block != leader.first_block || tokens * step_.group > kMaxQueries) break;
            const int64_t common = shared_spans(leader.row, next.row);
            const auto members = static_cast<int64_t>(end - begin);
            const int64_t both = shared == 0 ? common : std::min(shared, common);
            if (both == 0 || both * members < shared * (members - 1)) break;
            shared = both;
        }
        if (shared > 0) add_group(begin, end, shared);
        begin = end;
    }
}

void AttentionPlan::add_group(size_t begin, size_t end, int64_t shared) {
    AttentionItem item{};
    item.first_piece = static_cast<int32_t>(pieces_.size());
    item.num_pieces = static_cast<int32_t>(end - begin);
    for (size_t i = begin; i < end; ++i) {
        const int32_t r = candidates_[i].row;
        const Row& row = rows_[static_cast<size_t>(r)];
        const int64_t position = row.context - row.new_tokens;
        pieces_.push_back({r, step_.query_starts[r], position, row.new_tokens, row.context});
        item.tokens += row.new_tokens;
    }
    item.end_span = shared;
    const auto first_item = static_cast<int32_t>(items_.size());
    cut(item, parts_of(item), true);
    int64_t offset = 0;
    for (size_t i = begin; i < end; ++i) {
        Row& row = rows_[static_cast<size_t>(candidates_[i].row)];
        row.shared_spans = shared;
        row.first_source = static_cast<int32_t>(sources_.size());
        for (auto it = first_item; it < static_cast<int32_t>(items_.size()); ++it) {
            sources_.push_back({it, offset});
        }
        row.num_sources = static_cast<int32_t>(sources_.size()) - row.first_source;
        offset += row.new_tokens;
    }
}

// New tokens [first, first + count) of a row: one item if it can see all and is short enough.
void AttentionPlan::add_block(int32_t r, int64_t first, int64_t count) {
    const Row& row = rows_[static_cast<size_t>(r)];
    const int64_t position = row.context - row.new_tokens + first;
    const QueryPiece piece{r, step_.query_starts[r] + first, position, count, row.context};
    AttentionItem item{};
    item.first_piece = static_cast<int32_t>(pieces_.size());
    item.num_pieces = 1;
    item.tokens = count;
    item.first_span = std::max(step_.first_seen(position) / kSpan, row.shared_spans);
    item.end_span = up(end_seen(piece), kSpan);
    item.partial = -1;
    pieces_.push_back(piece);
    const int64_t parts = parts_of(item);
    if (parts == 1 && row.shared_spans == 0) return items_.push_back(item);
    const auto first_source = static_cast<int32_t>(sources_.size());
    for (int32_t s = 0; s < row.num_sources; ++s) {
        PartialSource source = sources_[static_cast<size_t>(row.first_source + s)];
        source.offset += first;
        sources_.push_back(source);
    }
    auto next = static_cast<int32_t>(items_.size());
    if (item.end_span > item.first_span) cut(item, parts, row.shared_spans == 0);
    for (; next < static_cast<int32_t>(items_.size()); ++next) sources_.push_back({next, 0});
    const auto num_sources = static_cast<int32_t>(sources_.size()) - first_source;
    merges_.push_back({piece, first_source, num_sources});
}

int64_t AttentionPlan::parts_of(const AttentionItem& item) const {
    if (!options_.split || threads_ == 1) return 1;
    const int64_t spans = item.end_span - item.first_span;
    const auto cost = static_cast<double>(spans * (kFixedQueries + item.tokens * step_.group));
    const auto num_parts = static_cast<int64_t>(cost / std::max(target_, 1.0) + 0.5);
    return std::max<int64_t>(1, std::min(num_parts, spans / kMinSpans));
}

// The item's spans as several items that keep their states. begins: the first are the queries'
// first.
void AttentionPlan::cut(AttentionItem item, int64_t parts, bool begins) {
    const int64_t first = item.first_span, spans = item.end_span - first;
    for (int64_t p = 0; p < parts; ++p) {
        item.first_span = first + p * spans / parts;
        item.end_span = first + (p + 1) * spans / parts;
        item.folds = begins && p == 0;
        item.partial = states_;
        states_ += item.states() * item.tokens * step_.group;
        items_.push_back(item);
    }
}

void AttentionPlan::sort_items() {
    order_.resize(items_.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [this](int32_t a, int32_t b) {
        const auto cost = [this](int32_t i) {
            const AttentionItem& item = items_[static_cast<size_t>(i)];
            return (item.end_span - item.first_span) * (kFixedQueries + item.tokens * step_.group);
        };
        return cost(a) > cost(b);
    });
}

}  // namespace quire
