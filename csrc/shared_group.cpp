#include "shared_group.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "elements.h"
#include "parallel.h"

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kHeaderBytes = 3 * 4096;  // with the lines
constexpr int kPatientLooks = 300;      // before the core is offered to others: some microseconds
constexpr auto kAwake = std::chrono::microseconds(200);  // how long a rank looks before it sleeps
constexpr auto kNap = std::chrono::milliseconds(20);     // before it looks whether the other lives
constexpr int64_t kBlock = 512;                          // numbers that are summed at once
constexpr int64_t kThreadBytes = 32 * 1024;  // bytes that pay for another thread

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "words are shared by processes");

// Sleeps for a nap, or until woken, unless the word is no longer what was seen.
void sleep_on(Word& word, uint32_t seen) {
#if defined(__linux__)
    const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &nap, nullptr, 0);
#else
    if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake(Word& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

[[noreturn]] void fail(const std::string& subject, int error) {
    throw std::runtime_error(subject + ": " + std::strerror(error) + ".");
}

int64_t bytes_of(Number number) {
    switch (number) {
        case Number::kBfloat16:
        case Number::kFloat16: return 2;
        case Number::kFloat64:
        case Number::kInt64: return 8;
        default: return 4;
    }
}

// Converts a number to the type of its sum, and back.
inline double widened(double value) { return value; }
inline int32_t widened(int32_t value) { return value; }
inline int64_t widened(int64_t value) { return value; }
inline float widened(float value) { return value; }
inline float widened(Bfloat16 value) { return widen(value); }
inline float widened(Float16 value) { return widen(value); }
template <class T>
inline void put(T& out, T value) {
    out = value;
}
inline void put(Bfloat16& out, float value) { narrow(out, value); }
inline void put(Float16& out, float value) { narrow(out, value); }

using RankBuffers = std::array<const uint8_t*, SharedGroup::kMostRanks>;

// out[i] = the sum of all parts' [i]; out may be one of the parts.
template <class T>
void sum_as(uint8_t* to, const RankBuffers& parts, int num_parts, int64_t begin, int64_t end) {
    using Wide = decltype(widened(T{}));
    T* out = reinterpret_cast<T*>(to);
    Wide total[kBlock];
    for (int64_t first = begin; first < end; first += kBlock) {
        const int64_t count = std::min(kBlock, end - first);
        const T* x = reinterpret_cast<const T*>(parts[0]) + first;
        for (int64_t i = 0; i < count; ++i) total[i] = widened(x[i]);
        for (int p = 1; p < num_parts; ++p) {
            const T* y = reinterpret_cast<const T*>(parts[static_cast<size_t>(p)]) + first;
            for (int64_t i = 0; i < count; ++i) total[i] += widened(y[i]);
        }
        for (int64_t i = 0; i < count; ++i) put(out[first + i], total[i]);
    }
}

void sum(Number number, uint8_t* out, const RankBuffers& parts, int num_parts, int64_t begin,
         int64_t end) {
    switch (number) {
        case Number::kFloat32: return sum_as<float>(out, parts, num_parts, begin, end);
        case Number::kBfloat16: return sum_as<Bfloat16>(out, parts, num_parts, begin, end);
        case Number::kFloat16: return sum_as<Float16>(out, parts, num_parts, begin, end);
        case Number::kFloat64: return sum_as<double>(out, parts, num_parts, begin, end);
        case Number::kInt32: return sum_as<int32_t>(out, parts, num_parts, begin, end);
        case Number::kInt64: return sum_as<int64_t>(out, parts, num_parts, begin, end);
    }
}

// Calls work(begin, end) for parts of [0, count) whose items are `bytes` each.
template <class Work>
void share(int64_t count, int64_t bytes, int num_threads, Work work) {
    const int64_t max_threads = 1 + count * bytes / kThreadBytes;
    parallel_for(count, static_cast<int>(std::min<int64_t>(num_threads, max_threads)), work);
}

void copy(uint8_t* to, const uint8_t* from, int64_t bytes, int num_threads) {
    share(bytes, 1, num_threads, [=](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
    });
}

}  // namespace

// num_ranks, slot_bytes: 0 until the first has joined. lost: 0, or the reason and a rank + 1.
struct SharedGroup::Header {
    Word num_ranks, slot_bytes, lost;
};

struct alignas(128) SharedGroup::Line {
    Word has_joined, count, sleepers;
};

class SharedGroup::Timed {
   public:
    explicit Timed(SharedGroup& group) : group_(group) {}
    ~Timed() {
        group_.seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count();
    }

   private:
    SharedGroup& group_;
    Clock::time_point begin_ = Clock::now();
};

SharedGroup::SharedGroup(const std::string& path, int rank, int size, int64_t slot_bytes,
                         double timeout_s)
    : rank_(rank),
      size_(size),
      slot_bytes_(slot_bytes),
      bytes_(kHeaderBytes + 2 * size * slot_bytes),
      timeout_s_(timeout_s) {
    static_assert(sizeof(Header) <= sizeof(Line), "the header is as long as a line at most");
    static_assert((1 + kMostRanks) * sizeof(Line) <= kHeaderBytes, "the lines have room");
    file_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file_ < 0) fail("Cannot open " + path, errno);
    try {
        join();
    } catch (...) {
        if (memory_ != nullptr) munmap(memory_, static_cast<size_t>(bytes_));
        close(file_);
        throw;
    }
}

SharedGroup::~SharedGroup() {
    munmap(memory_, static_cast<size_t>(bytes_));
    close(file_);
}

void SharedGroup::join() {
    // Taken now: a page that cannot be had later would end the process.
    if (const int error = posix_fallocate(file_, 0, bytes_)) fail("No memory to share", error);
    void* memory = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE, MAP_SHARED,
                        file_, 0);
    if (memory == MAP_FAILED) fail("Cannot map memory to share", errno);
    memory_ = static_cast<uint8_t*>(memory);
#if defined(F_OFD_SETLK)
    // Byte g of the file is locked while rank g lives: the system frees it, however that ends.
    struct flock mine {};
    mine.l_type = F_WRLCK, mine.l_whence = SEEK_SET, mine.l_start = rank_, mine.l_len = 1;
    if (fcntl(file_, F_OFD_SETLK, &mine) != 0) {
        fail("Rank " + std::to_string(rank_) + " is there already", errno);
    }
#endif
    const auto agree = [](Word& word, int64_t mine_is, const char* subject) {
        uint32_t others = 0;
        const auto expected = static_cast<uint32_t>(mine_is);
        if (word.compare_exchange_strong(others, expected) || others == expected) return;
        throw std::runtime_error(std::string("Ranks differ in ") + subject + ": " +
                                 std::to_string(others) + " and " + std::to_string(expected) + ".");
    };
    agree(header()->num_ranks, size_, "how many they are");
    agree(header()->slot_bytes, slot_bytes_, "the size of their slots");
    line(rank_)->has_joined.store(1);
}

SharedGroup::Header* SharedGroup::header() const { return reinterpret_cast<Header*>(memory_); }

SharedGroup::Line* SharedGroup::line(int rank) const {
    return reinterpret_cast<Line*>(memory_) + 1 + rank;
}

uint8_t* SharedGroup::slot(int rank) const {
    return memory_ + kHeaderBytes + (2 * rank + piece_ % 2) * slot_bytes_;
}

uint32_t SharedGroup::num_exchanges() const { return line(rank_)->count.load(); }

// Says that this rank has come so far, and waits until all have.
void SharedGroup::meet() {
    check();
    Line& mine = *line(rank_);
    mine.count.store(++count_);
    if (mine.sleepers.load() > 0) wake(mine.count);
    for (int g = 0; g < size_; ++g) {
        if (g != rank_) wait_for(g, count_);
    }
    check();
}

void SharedGroup::wait_for(int rank, uint32_t count) {
    Line& other = *line(rank);
    const auto has_come = [&] {
        return static_cast<int32_t>(other.count.load(std::memory_order_acquire) - count) >= 0;
    };
    for (int looks = 0; looks < kPatientLooks; ++looks) {
        if (has_come()) return;
        pause_briefly();
    }
    const auto begin = Clock::now();
    while (Clock::now() - begin < kAwake) {
        if (has_come()) return;
        std::this_thread::yield();
    }
    other.sleepers.fetch_add(1);
    for (uint32_t seen = other.count.load(); !has_come(); seen = other.count.load()) {
        if (header()->lost.load() != 0) break;
        sleep_on(other.count, seen);
        if (has_come()) break;
        if (has_ended(rank) && !has_come()) lose(kEnded, rank);
        if (std::chrono::duration<double>(Clock::now() - begin).count() > timeout_s_) {
            lose(kLate, rank);
        }
    }
    other.sleepers.fetch_sub(1);
    check();
}

bool SharedGroup::has_ended(int rank) const {
#if defined(F_OFD_SETLK)
    struct flock theirs {};
    theirs.l_type = F_WRLCK, theirs.l_whence = SEEK_SET, theirs.l_start = rank, theirs.l_len = 1;
    const bool has_joined = line(rank)->has_joined.load() != 0;
    return has_joined && fcntl(file_, F_OFD_GETLK, &theirs) == 0 && theirs.l_type == F_UNLCK;
#else
    (void)rank;
    return false;  // the process that started the ranks aborts for it
#endif
}

void SharedGroup::lose(Reason reason, int rank) {
    uint32_t none = 0;
    header()->lost.compare_exchange_strong(none, reason << 16 | static_cast<uint32_t>(rank + 1));
    for (int g = 0; g < size_; ++g) wake(line(g)->count);
}

void SharedGroup::check() const {
    const uint32_t lost = header()->lost.load();
    if (lost == 0) return;
    const std::string rank_name = "Rank " + std::to_string((lost & 0xFFFF) - 1) + " of " +
                            std::to_string(size_) + " (counted from 0) ";
    switch (lost >> 16) {
        case kEnded: throw RankLost(rank_name + "is gone.");
        case kLate: throw RankLost(rank_name + "did not come in time.");
        default: throw RankLost(rank_name + "has given up.");
    }
}

void SharedGroup::all_reduce(void* x, int64_t count, Number number, int num_threads) {
    const Timed timed(*this);
    const int64_t bytes = bytes_of(number), max_threads = slot_bytes_ / bytes;
    for (int64_t first = 0; first < count; first += max_threads, ++piece_) {
        const int64_t num = std::min(max_threads, count - first);
        uint8_t* mine = static_cast<uint8_t*>(x) + first * bytes;
        copy(slot(rank_), mine, num * bytes, num_threads);
        meet();
        RankBuffers parts{};
        for (int g = 0; g < size_; ++g) parts[static_cast<size_t>(g)] = slot(g);
        parts[static_cast<size_t>(rank_)] = mine;
        share(num, bytes, num_threads, [&](int64_t begin, int64_t end) {
            sum(number, mine, parts, size_, begin, end);
        });
    }
}

void SharedGroup::all_gather(void* out, const void* x, int64_t bytes, int num_threads) {
    const Timed timed(*this);
    for (int64_t first = 0; first < bytes; first += slot_bytes_, ++piece_) {
        const int64_t num = std::min(slot_bytes_, bytes - first);
        const uint8_t* mine = static_cast<const uint8_t*>(x) + first;
        copy(slot(rank_), mine, num, num_threads);
        meet();
        for (int g = 0; g < size_; ++g) {
            uint8_t* to = static_cast<uint8_t*>(out) + g * bytes + first;
            copy(to, g == rank_ ? mine : slot(g), num, num_threads);
        }
    }
}

void SharedGroup::reduce_scatter(void* out, const void* x, int64_t count, Number number,
                                 int num_threads) {
    const Timed timed(*this);
    const int64_t bytes = bytes_of(number), max_threads = slot_bytes_ / bytes / size_;
    for (int64_t first = 0; first < count; first += max_threads, ++piece_) {
        const int64_t num = std::min(max_threads, count - first);
        for (int g = 0; g < size_; ++g) {
            const uint8_t* from = static_cast<const uint8_t*>(x) + (g * count + first) * bytes;
            copy(slot(rank_) + g * num * bytes, from, num * bytes, num_threads);
        }
        meet();
        RankBuffers parts{};
        for (int g = 0; g < size_; ++g) {
            parts[static_cast<size_t>(g)] = slot(g) + rank_ * num * bytes;
        }
        uint8_t* to = static_cast<uint8_t*>(out) + first * bytes;
        share(num, bytes, num_threads, [&](int64_t begin, int64_t end) {
            sum(number, to, parts, size_, begin, end);
        });
    }
}

void SharedGroup::all_to_all(void* out, const void* x, int64_t bytes, int num_threads) {
    const Timed timed(*this);
    const int64_t max_threads = slot_bytes_ / size_;
    for (int64_t first = 0; first < bytes; first += max_threads, ++piece_) {
        const int64_t num = std::min(max_threads, bytes - first);
        for (int g = 0; g < size_; ++g) {
            const uint8_t* from = static_cast<const uint8_t*>(x) + g * bytes + first;
            copy(slot(rank_) + g * num, from, num, num_threads);
        }
        meet();
        for (int g = 0; g < size_; ++g) {
            uint8_t* to = static_cast<uint8_t*>(out) + g * bytes + first;
            copy(to, slot(g) + rank_ * num, num, num_threads);
        }
    }
}

}  // namespace quire
