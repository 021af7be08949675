// One item of the plan for one KV head, and the folding of its states: included by
// attention_tiles.inc.h. Legend: M queries of an item, piece by piece, token by token, G of each token.
#pragma once

namespace quire {
namespace {

struct Query {
    int64_t token;  // of the step
    int64_t last;   // position that it sees
    int64_t first;
    int64_t low, high;  // what it sees of the span at hand
};

template <class Element>
void read_query(float* to, const Element* from, float scale, int64_t dim, int64_t padded) {
    for (int64_t h = 0; h < dim; ++h) to[h] = widen(from[h]) * scale;
    fill(to + dim, to + padded, 0.0f);
}

void read_query(float* to, const HeadRows& q, int64_t token, int64_t head, float scale, int64_t dim,
                int64_t padded) {
    const int64_t at = token * q.stride + head * dim;
    switch (q.element) {
        case Element::kFloat32:
            return read_query(to, static_cast<const float*>(q.data) + at, scale, dim, padded);
        case Element::kBfloat16:
            return read_query(to, static_cast<const Bfloat16*>(q.data) + at, scale, dim, padded);
        default:
            return read_query(to, static_cast<const Float16*>(q.data) + at, scale, dim, padded);
    }
}

constexpr int64_t kTokensAhead = 4;  // of queries and results, whose rows stand far apart

inline void fetch_heads(const HeadRows& rows, int64_t token, int64_t first, int64_t count,
                        int64_t dim) {
    const int64_t size = rows.element == Element::kFloat32 ? 4 : 2;
    const int64_t at = (token * rows.stride + first * dim) * size;
    const uint8_t* from = static_cast<const uint8_t*>(rows.data) + at;
    for (int64_t b = 0; b < count * dim * size; b += 64) fetch_line(from + b);
}

template <class Element>
void write_result(Element* to, State state, int64_t dim, float factor) {
    const float scale = factor / *state.sum;
    // Adding 0 makes -0, which depends on how zeros were added, 0.
    for (int64_t h = 0; h < dim; ++h) narrow(to[h], state.acc[h] * scale + 0.0f);
}

void write_result(const AttentionCall& call, int64_t token, int64_t head, State state) {
    const HeadRows& out = call.out;
    const int64_t dim = call.kv.value_dim(), at = token * out.stride + head * dim;
    const float factor = call.kv.value_factor();
    switch (out.element) {
        case Element::kFloat32:
            return write_result(static_cast<float*>(out.data) + at, state, dim, factor);
        case Element::kBfloat16:
            return write_result(static_cast<Bfloat16*>(out.data) + at, state, dim, factor);
        default: return write_result(static_cast<Float16*>(out.data) + at, state, dim, factor);
    }
}

QUIRE_INLINE void keep_sums(const AttentionCall& call, int64_t token, int64_t head, State state) {
    if (call.sums == nullptr) return;
    float* to = call.sums + (token * call.step.kv_heads * call.step.group + head) * 2;
    to[0] = static_cast<float>(*state.peak * kLn2);
    to[1] = *state.sum;
}

QUIRE_INLINE State state_at(float* memory) { return {memory, memory + 1, memory + kStateHead}; }

template <class Kv>
class ItemRun {
   public:
    ItemRun(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next)
        : call_(call),
          item_(*unit.item),
          next_(next),
          step_(call.step),
          pieces_(call.pieces + item_.first_piece),
          head_(unit.head),
          dim_(call.kv.head_dim),
          value_dim_(call.kv.value_dim()),
          padded_(call.padded_dim()),
          q_stride_(Kv::kDots ? (dim_ + 31) / 32 * 16 : (dim_ + 15) / 16 * 16),
          queries_(item_.tokens * step_.group),
          row_bytes_(kv_row_bytes(call.kv.format, dim_)),
          head_bytes_(call.kv.is_latent() ? 0 : call.kv.num_blocks * call.kv.block_size * row_bytes_),
          column_bytes_(call.kv.is_latent() ? row_bytes_ : 4) {
        const bool is_latent = call.kv.is_latent();
        keys_ = {call.kv.keys + head_ * head_bytes_,
                 is_latent ? 4 : 4 * step_.block_size,
                 step_.block_size * row_bytes_,
                 row_bytes_,
                 !is_latent && step_.block_size % kLanes == 0,
                 is_latent};
        values_ = is_latent ? keys_.data + (Kv::kScaled ? sizeof(float) : 0)
                            : call.kv.values + head_ * head_bytes_;
        value_scales_ = is_latent ? keys_.data : values_ + dim_;
        const int64_t tokens_size = (queries_ * static_cast<int64_t>(sizeof(Query)) + 63) / 64 * 16;
        const int64_t tile_size =
            maximum((Kv::kDots ? kSpan / 2 : kTile) * padded_, is_latent ? kTile * q_stride_ : 0);
        const int64_t rows = queries_ + Kv::kRowsAfter;
        float* memory = attention_scratch(rows * (q_stride_ + kSpan + call.state_size()) +
                                          queries_ * call.state_size() + tile_size + tokens_size + kSpan);
        tile_ = memory;
        q_ = tile_ + tile_size;
        weights_ = q_ + rows * q_stride_;
        states_ = weights_ + rows * kSpan;
        parts_ = states_ + queries_ * call.state_size();
        scales_ = parts_ + rows * call.state_size();
        all_ = reinterpret_cast<Query*>(scales_ + kSpan);
    }

    void run() {
        read_queries();
        for (int64_t span = item_.first_span; span < item_.end_span; ++span) {
            if (!see(span * kSpan)) {
                if (!keeps_spans()) continue;
            } else {
                score();
                weigh();
                add_values();
                check_parts();
            }
            finish_span(span - item_.first_span);
        }
        if (!keeps_spans()) finish();
    }

   private:
    bool keeps_spans() const { return item_.partial >= 0 && !item_.folds; }
    State state(int64_t m) const { return state_at(states_ + m * call_.state_size()); }
    State part(int64_t m) const { return state_at(parts_ + m * call_.state_size()); }

    void read_queries() {
        const float cap = call_.weighing.soft_cap, scale = call_.weighing.scale * call_.kv.key_factor();
        const float factor = cap == 0 ? static_cast<float>(scale * kLog2E) : scale / cap;
        int64_t m = 0;
        for (int32_t p = 0; p < item_.num_pieces; ++p) {
            const QueryPiece& piece = pieces_[p];
            for (int64_t i = 0; i < piece.count; ++i) {
                const int64_t position = piece.position + i;
                const int64_t first = step_.first_seen(position);
                int64_t last = position + step_.num_later_seen;
                if (step_.ends != nullptr) last = maximum(last, step_.ends[piece.token + i] - 1);
                last = minimum(last, piece.context - 1);
                const int64_t num_later_seen = minimum(i + kTokensAhead, piece.count - 1);
                fetch_heads(call_.q, piece.token + num_later_seen, head_ * step_.group, step_.group, dim_);
                for (int64_t g = 0; g < step_.group; ++g, ++m) {
                    all_[m] = {piece.token + i, last, first, 0, 0};
                    seen_ = maximum(seen_, last + 1);
                    float* row = q_ + m * q_stride_;
                    read_query(Kv::kDots ? tile_ : row, call_.q, piece.token + i,
                               head_ * step_.group + g, factor, dim_,
                               Kv::kDots ? 2 * q_stride_ : q_stride_);
#ifdef QUIRE_BFLOAT16_DOTS
                    if constexpr (Kv::kDots) narrow_row(row, tile_, q_stride_);
#endif
                    clear(state(m));
                }
            }
        }
    }

    // Finds the part of the span beginning at `start` that the queries see. Returns false if it is
    // empty.
    bool see(int64_t start) {
        begin_ = kSpan;
        end_ = 0;
        for (int64_t m = 0; m < queries_; ++m) {
            Query& query = all_[m];
            query.low = maximum(query.first - start, 0);
            query.high = minimum(query.last + 1 - start, kSpan);
            clear(part(m));
            if (query.low >= query.high) continue;
            begin_ = minimum(begin_, query.low);
            end_ = maximum(end_, query.high);
        }
        if (begin_ >= end_) return false;
        place(start, begin_, end_);
        // No other block is ever read: neighbours in a vector stand in the same one, or are tokens
        // that are seen.
        int64_t first = begin_, last = end_ - 1;
        if (keys_.together) {
            first = begin_ / kLanes * kLanes;
            columns_[first] = columns_[begin_] - 4 * (begin_ - first);
            last = last / kLanes * kLanes;
        }
        fill(columns_ + begin_ / kTile * kTile, columns_ + first, columns_[first]);
        fill(columns_ + end_, columns_ + kSpan + kAhead, columns_[last]);
        // Fill the offsets on both sides of the visible part: they are read, but have weight 0.
        fill(offsets_ + first_together(), offsets_ + begin_, offsets_[begin_]);
        fill(offsets_ + end_, offsets_ + kSpan + kAhead, offsets_[end_ - 1]);
        look_ahead(start);
        return true;
    }

    // Chooses the addresses to prefetch while the last keys and values of the span are read. They
    // are the span's first values and the keys of the next span. Both have the same place in a
    // block, and fill it.
    void look_ahead(int64_t start) {
        const auto address = [](const uint8_t* at) { return reinterpret_cast<intptr_t>(at); };
        const int64_t first = begin_ / kSumLanes * kSumLanes;
        const int64_t last = (end_ + kSumLanes - 1) / kSumLanes * kSumLanes;
        const int64_t to_values = address(values_) - address(keys_.data);
        int64_t t = maximum(first, last - kAhead);
        for (int64_t from = first; t < last; ++t, ++from) {
            columns_[t + kAhead] = columns_[maximum(from, begin_)] + to_values;
        }
        if (start + kSpan < item_.end_span * kSpan) {
            return look_at(start + kSpan, seen_, pieces_->row, keys_.data);
        }
        if (next_.item == nullptr) return;
        const QueryPiece& piece = call_.pieces[next_.item->first_piece];
        const int64_t seen = step_.first_seen(piece.position);
        look_at(maximum(next_.item->first_span * kSpan, seen), piece.context, piece.row,
                call_.kv.keys + next_.head * head_bytes_);
    }

    // The keys of a row's tokens [position, context) that stand in the blocks at `keys`.
    void look_at(int64_t position, int64_t context, int64_t row, const uint8_t* keys) {
        const int32_t* table = step_.tables + row * step_.table_stride;
        const int64_t from_values = reinterpret_cast<intptr_t>(keys) - reinterpret_cast<intptr_t>(values_);
        const int64_t last = end_together();
        int64_t t = maximum(first_together(), last - kAhead);
        while (t < last && position < context) {
            const int64_t block = position / step_.block_size;
            int64_t in_block = position - block * step_.block_size;
            const int64_t at = from_values + table[block] * keys_.block_bytes;
            for (; t < last && in_block < step_.block_size; ++t, ++in_block, ++position) {
                offsets_[t + kAhead] = at + in_block * row_bytes_;
            }
        }
    }

    // Finds where span positions [from, to) stand, of the span that begins at `start`.
    void place(int64_t start, int64_t from, int64_t to) {
        const int32_t* table = step_.tables + pieces_->row * step_.table_stride;
        for (int64_t t = from; t < to;) {
            const int64_t block = (start + t) / step_.block_size;
            const int64_t next = minimum((block + 1) * step_.block_size - start, to);
            int64_t in_block = start + t - block * step_.block_size;
            for (const int64_t at = table[block] * keys_.block_bytes; t < next; ++t, ++in_block) {
                offsets_[t] = at + in_block * row_bytes_;
                columns_[t] = at + in_block * column_bytes_;
            }
        }
    }

    // The queries [first, last) that see something of span positions [from, to).
    void rows_of(int64_t from, int64_t to, int64_t& first, int64_t& last) const {
        const auto sees = [&](int64_t m) {
            return all_[m].low < all_[m].high && all_[m].low < to && all_[m].high > from;
        };
        for (first = 0; first < queries_ && !sees(first);) ++first;
        for (last = queries_; last > first && !sees(last - 1);) --last;
    }

    // Returns a function that counts the positions from `from` on, at most `tokens`, that some
    // queries see.
    auto reach(int64_t from, int64_t tokens) const {
        return [=](int64_t first, int64_t last) {
            int64_t high = from;
            for (int64_t m = first; m < last; ++m) high = maximum(high, all_[m].high);
            return minimum(high - from, tokens);
        };
    }

    // The visible part of the span, widened to whole groups of tokens whose values are read
    // together.
    int64_t first_together() const { return begin_ / Kv::kTokens * Kv::kTokens; }
    int64_t end_together() const { return (end_ + Kv::kTokens - 1) / Kv::kTokens * Kv::kTokens; }

    // The words of a key, padded to whole tiles if tiles multiply it.
    int64_t words() const { return Kv::kMatrices ? q_stride_ : (row_bytes_ + 3) / 4; }

    void score() {
        const bool in_place = keys_.together && words() * 4 == row_bytes_;
        // Words for dots are read as they are, others are widened once for many queries.
        const bool copies = !in_place || (!Kv::kDots && queries_ > Kv::kFewRows);
        for (int64_t tile = begin_ / kTile * kTile; tile < end_; tile += kTile) {
            int64_t first, last;
            rows_of(tile, tile + kTile, first, last);
            const int64_t left = minimum(kTile, end_ - tile);
            const int64_t tokens = (left + kSumLanes - 1) / kSumLanes * kSumLanes;
            const auto seen = reach(tile, left);
#ifdef QUIRE_BFLOAT16_DOTS
            if constexpr (Kv::kDots) {
                dot_scores(tile, first, last, tokens, copies);
                continue;
            }
#endif
            if (copies) {
                load_keys<Kv>(tile_, keys_, columns_ + tile, tokens);
                const ScoreTile<WidenedKeys> products{weights_ + tile, q_, q_stride_, {tile_}, dim_};
                run_rows(products, first, last, seen);
            } else {
                const StoredKeys<Kv> stored{keys_, columns_ + tile};
                const ScoreTile<StoredKeys<Kv>> products{weights_ + tile, q_, q_stride_, stored, dim_};
                run_rows(products, first, last, seen);
            }
        }
        if constexpr (Kv::kScaled) read_scales(keys_.data, columns_);
    }

#ifdef QUIRE_BFLOAT16_DOTS
    void dot_scores(int64_t tile, int64_t first, int64_t last, int64_t tokens, bool copies) {
        const auto seen = reach(tile, tokens);
        if (!copies) {
            const int64_t others = minimum(first + Kv::kBlockRows, last);
            const auto run = [&](auto fetches, int64_t begin, int64_t end) {
                using Words = StoredWords<decltype(fetches)::value>;
                const Words stored{keys_, columns_ + tile};
                const typename Kv::template Scores<Words> products{weights_ + tile, q_, q_stride_,
                                                                   stored, words()};
                Kv::over_rows(products, begin, end, seen);
            };
            run(std::true_type{}, first, others);
            return run(std::false_type{}, others, last);
        }
        if (keys_.are_rows) {
            gather_rows(tile_, keys_, columns_ + tile, tokens, words());
        } else if (keys_.together) {
            gather_words<true>(tile_, keys_, columns_ + tile, tokens, words());
        } else {
            gather_words<false>(tile_, keys_, columns_ + tile, tokens, words());
        }
        const typename Kv::template Scores<TileWords> products{weights_ + tile, q_, q_stride_, {tile_},
                                                               words()};
        Kv::over_rows(products, first, last, seen);
    }

    // The sums of weighted values of span positions [from, from + tokens), both multiples of kTokens, for
    // queries [first, last). acc: of query 0.
    void dot_values(float* acc, int64_t first, int64_t last, int64_t from, int64_t tokens, bool pairs) {
        const int64_t stride = call_.state_size();
        const uint8_t* weights = reinterpret_cast<const uint8_t*>(weights_) + 2 * from;
        const auto seen = reach(from, tokens);
        if (!pairs) {
            const auto stored = Kv::stored_pairs(values_, offsets_ + from, tile_);
            using Stored = std::remove_const_t<decltype(stored)>;
            const typename Kv::template Values<Stored> products{acc, stride, weights, stored, value_dim_};
            return Kv::over_rows(products, first, last, seen);
        }
        pair_values(tile_, padded_, values_, offsets_ + from, tokens, value_dim_);
        using Pairs = typename Kv::MadePairs;
        const Pairs made{tile_, padded_};
        const typename Kv::template Values<Pairs> products{acc, stride, weights, made, padded_};
        Kv::over_rows(products, first, last, seen);
    }
#endif

    // Scales of the tokens from begin_ to end_.
    void read_scales(const uint8_t* scales, const int64_t* places) {
        for (int64_t t = begin_; t < end_; ++t) {
            std::memcpy(scales_ + t, scales + places[t], sizeof(float));
        }
    }

    void scale_row(float* row, int64_t low, int64_t high) const {
        for (int64_t t = low; t < high; ++t) row[t] *= scales_[t];
    }

    // Computes the weights of all queries. A weight is 0 wherever its query does not see the
    // position, which includes the widened ends.
    void weigh() {
        const int64_t begin = first_together(), end = end_together();
        const auto cap = static_cast<float>(call_.weighing.soft_cap * kLog2E);
        for (int64_t m = 0; m < queries_; ++m) {
            const Query& query = all_[m];
            float* row = weights_ + m * kSpan;
            if (query.low >= query.high) {
                Kv::clear_weights(row, begin, end);
                continue;
            }
            if constexpr (Kv::kScaled) scale_row(row, query.low, query.high);
            if (cap != 0) {
                cap_scores(row, query.low, query.high, cap);
            }
            const State mine = part(m);
            weigh_scores<Kv>(row, query.low, query.high, *mine.peak, *mine.sum);
            Kv::clear_weights(row, begin, query.low);
            Kv::clear_weights(row, query.high, end);
        }
        if constexpr (Kv::kScaled) {
            read_scales(value_scales_, offsets_);
            for (int64_t m = 0; m < queries_; ++m) {
                if (all_[m].low < all_[m].high) {
                    scale_row(weights_ + m * kSpan, all_[m].low, all_[m].high);
                }
            }
        }
    }

    void add_values() {
        const bool widens = queries_ > Kv::kFewRows || value_dim_ % kLanes != 0;
        int64_t first, last;
#ifdef QUIRE_BFLOAT16_DOTS
        if constexpr (Kv::kDots) {
            rows_of(begin_, end_, first, last);
            const int64_t from = first_together();
            return dot_values(parts_ + kStateHead, first, last, from, end_together() - from, widens);
        }
#endif
        for (int64_t m = 0; m < queries_; ++m) clear_sums(m);
        for (int64_t tile = begin_ / kTile * kTile; tile < end_; tile += kTile) {
            rows_of(tile, tile + kTile, first, last);
            const int64_t from = maximum(tile, begin_);
            add_tile(first, last, from, minimum(tile + kTile, end_) - from, widens);
        }
    }

    void clear_sums(int64_t m) {
        std::memset(part(m).acc, 0, static_cast<size_t>(padded_) * sizeof(float));
    }

    // Adds the values of span positions [from, from + tokens) to queries [first, last).
    void add_tile(int64_t first, int64_t last, int64_t from, int64_t tokens, bool widens) {
        const int64_t stride = call_.state_size();
        float* acc = parts_ + kStateHead;
        const auto seen = reach(from, tokens);
        if (widens) {
            widen_values<Kv>(tile_, padded_, values_, offsets_ + from, tokens, value_dim_);
            const WidenedValues widened{tile_, padded_};
            const ValueTile<WidenedValues> products{acc, stride, weights_ + from, widened, padded_};
            run_rows(products, first, last, seen);
        } else {
            const StoredValues<Kv> stored{values_, offsets_ + from};
            const ValueTile<StoredValues<Kv>> products{acc, stride, weights_ + from, stored, value_dim_};
            run_rows(products, first, last, seen);
        }
    }

    // 0 times a value that is not finite is NaN. Where a query does not see all that others of the
    // item see, such a sum is taken again over what it sees.
    void check_parts() {
        for (int64_t m = 0; m < queries_; ++m) {
            const Query& query = all_[m];
            if (query.low >= query.high || (query.low <= begin_ && query.high >= end_)) continue;
            float* acc = part(m).acc;
            I wrong{};
            for (int64_t h = 0; h < padded_; h += kLanes) {
                const F sums = Isa::load(acc + h);
                wrong |= reinterpret_cast<I>(sums - sums);
            }
            int32_t any = 0;
            for (int64_t i = 0; i < kLanes; ++i) any |= wrong[i];
            if (any == 0) continue;
            add_again(m, query);
        }
    }

    // Where values are read together, a visible value replaces each hidden one. Sums of tiles are
    // stored after the sums of all queries, since tiles have more rows.
    void add_again(int64_t m, const Query& query) {
#ifdef QUIRE_BFLOAT16_DOTS
        if constexpr (Kv::kDots) {
            constexpr int64_t kTokens = Kv::kTokens;
            const int64_t low = query.low / kTokens * kTokens;
            const int64_t high = (query.high + kTokens - 1) / kTokens * kTokens;
            int64_t kept[kSpan];
            const auto bytes = static_cast<size_t>(high - low) * sizeof *kept;
            std::memcpy(kept, offsets_ + low, bytes);
            fill(offsets_ + low, offsets_ + query.low, offsets_[query.low]);
            fill(offsets_ + query.high, offsets_ + high, offsets_[query.high - 1]);
            const State after = part(queries_);
            dot_values(after.acc - m * call_.state_size(), m, m + 1, low, high - low, true);
            std::memcpy(part(m).acc, after.acc, static_cast<size_t>(padded_) * sizeof(float));
            std::memcpy(offsets_ + low, kept, bytes);
            return;
        }
#endif
        clear_sums(m);
        for (int64_t t = query.low; t < query.high; t += kTile) {
            add_tile(m, m + 1, t, minimum(kTile, query.high - t), true);
        }
    }

    void finish_span(int64_t span) {
        for (int64_t m = 0; m < queries_; ++m) {
            if (keeps_spans()) {
                copy_state(kept(span, m), part(m), padded_);
            } else {
                fold(state(m), part(m), padded_);
            }
        }
    }

    State kept(int64_t span, int64_t m) const {
        return state_at(call_.state_of(item_, head_, span, 0) + m * call_.state_size());
    }

    void finish() {
        const float* sinks = call_.weighing.sinks;
        for (int64_t m = 0; m < queries_; ++m) {
            if (item_.partial >= 0) {
                copy_state(kept(0, m), state(m), padded_);
            } else {
                const int64_t head = head_ * step_.group + m % step_.group;
                if (sinks != nullptr) add_sink(state(m), sinks[head]);
                keep_sums(call_, all_[m].token, head, state(m));
                const int64_t num_later_seen = minimum(m + kTokensAhead * step_.group, queries_ - 1);
                fetch_heads(call_.out, all_[num_later_seen].token, head, 1, value_dim_);
                write_result(call_, all_[m].token, head, state(m));
            }
        }
    }

    const AttentionCall& call_;
    const AttentionItem& item_;
    const AttentionUnit& next_;
    const AttentionStep& step_;
    const QueryPiece* pieces_;
    const int64_t head_, dim_, value_dim_, padded_, q_stride_, queries_, row_bytes_, head_bytes_;
    const int64_t column_bytes_;  // between the columns of neighbouring tokens
    KeyBlocks keys_;
    const uint8_t *values_, *value_scales_;
    float *tile_, *q_, *weights_, *states_, *parts_, *scales_;
    Query* all_;
    int64_t seen_ = 0;             // tokens of the row that stand in the item's blocks
    int64_t begin_ = 0, end_ = 0;  // of the span at hand: what any query sees
    int64_t offsets_[kSpan + kAhead];  // of its tokens' values, in bytes
    int64_t columns_[kSpan + kAhead];  // and where the words of their keys begin
};

#ifdef QUIRE_AMX
void run_in_tiles(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next) {
    TileConfiguration tiles;
    tiles.set(minimum(unit.item->tokens * call.step.group, kTileHeight), kTileBytes);
    ItemRun<Bfloat16Matrices>(call, unit, next).run();
}
#endif

void run_item(const AttentionCall& call, const AttentionUnit& unit, const AttentionUnit& next) {
#ifdef QUIRE_OTHER_FORMATS
    if (call.kv.format != KvFormat::kBfloat16) return QUIRE_OTHER_FORMATS.run_item(call, unit, next);
#ifdef QUIRE_AMX
    run_in_tiles(call, unit, next);
#else
    ItemRun<Bfloat16Dots>(call, unit, next).run();
#endif
#else
    switch (call.kv.format) {
        case KvFormat::kFloat32: return ItemRun<Float32Kv>(call, unit, next).run();
        case KvFormat::kBfloat16: return ItemRun<Bfloat16Kv>(call, unit, next).run();
        case KvFormat::kFloat16: return ItemRun<Float16Kv>(call, unit, next).run();
        case KvFormat::kFloat8: return ItemRun<Float8Kv>(call, unit, next).run();
        default: return ItemRun<Int8Kv>(call, unit, next).run();
    }
#endif
}

void run_merge(const AttentionCall& call, const MergeJob& job, int64_t head) {
    const int64_t group = call.step.group, padded = call.padded_dim();
    const State state = state_at(attention_scratch(call.state_size()));
    for (int64_t m = 0; m < job.piece.count * group; ++m) {
        clear(state);
        for (int32_t s = 0; s < job.num_sources; ++s) {
            const PartialSource& source = call.sources[job.first_source + s];
            const AttentionItem& item = call.items[source.item];
            for (int64_t span = 0; span < item.states(); ++span) {
                float* first = call.state_of(item, head, span, source.offset);
                fold(state, state_at(first + m * call.state_size()), padded);
            }
        }
        const int64_t token = job.piece.token + m / group;
        const int64_t query_head = head * group + m % group;
        if (call.weighing.sinks != nullptr) add_sink(state, call.weighing.sinks[query_head]);
        keep_sums(call, token, query_head, state);
        write_result(call, token, query_head, state);
    }
}

}  // namespace
}  // namespace quire

#include "attention_store.inc.h"
