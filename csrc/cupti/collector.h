// Buffers on their way: lent to CUPTI, filled, read by a thread of our own, lent again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "aggregator.h"
#include "records.h"

namespace nvrx {

struct Buffers {
    std::uint64_t made = 0;      // that exist
    std::uint64_t refused = 0;   // requests beyond the limit: the driver drops records then
    std::uint64_t foreign = 0;   // handed over, but lent by somebody else, or not lent now
    std::uint64_t discarded = 0; // not read: another tool's records may be in them, or memory lacks
    std::uint64_t dropped = 0;   // records that the driver says it has dropped
    std::uint64_t unreadable = 0;  // read up to a record that makes no sense
};

class Collector {
public:
    static constexpr std::size_t kBufferBytes = std::size_t{1} << 18;
    static constexpr std::size_t kMostBuffers = 256;

    explicit Collector(std::unique_ptr<RecordSource> source, std::size_t buffer_bytes = kBufferBytes,
                       std::size_t most_buffers = kMostBuffers);
    // Reads what has been handed over, then ends. Nobody may have a buffer any more; not in a fork,
    // which has no such thread.
    ~Collector();
    Collector(const Collector&) = delete;
    Collector& operator=(const Collector&) = delete;

    // Both are called on threads of the driver, in the midst of launches: they wait for nothing but a short lock.
    std::uint8_t* request(std::size_t& size);
    // What is not lent, as a buffer that is handed over twice, is left alone.
    void complete(std::uint8_t* buffer, std::size_t valid);

    // With true, what is handed over from now on is not read.
    void discard(bool whether);

    // Waits until all that was handed over before has been read; false if that takes longer.
    bool drain(std::chrono::milliseconds patience);
    std::vector<KernelTimes> take(bool is_last);
    Counts counts() const;
    Buffers buffers() const;
    std::size_t sketches() const;
    OpenSections& sections() { return sections_; }

private:
    struct Filled {
        std::uint8_t* buffer;
        std::size_t valid;
    };
    struct Aligned {
        alignas(8) std::uint8_t bytes[8];
    };

    struct Made {
        std::unique_ptr<Aligned[]> memory;
        bool is_lent;
    };

    bool enqueue(Filled filled);
    void read();

    const std::unique_ptr<RecordSource> source_;
    const std::size_t buffer_bytes_, most_buffers_;

    mutable std::mutex mutex_;  // of what follows
    std::condition_variable filled_, read_;
    std::unordered_map<std::uint8_t*, Made> made_;
    std::vector<std::uint8_t*> free_;
    std::deque<Filled> queue_;
    Buffers buffers_;
    std::uint64_t handed_over_ = 0, done_ = 0;
    bool ends_ = false, discards_ = false;

    OpenSections sections_;
    mutable std::mutex aggregating_;  // of the aggregator; never taken on a thread of the driver
    Aggregator aggregator_;

    std::thread reader_;
};

}  // namespace nvrx
