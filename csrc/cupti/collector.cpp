#include "collector.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <new>

namespace nvrx {

Collector::Collector(std::unique_ptr<RecordSource> source, std::size_t buffer_bytes, std::size_t most_buffers)
    : source_(std::move(source)),
      buffer_bytes_(buffer_bytes / sizeof(Aligned) * sizeof(Aligned)),
      most_buffers_(most_buffers),
      aggregator_(sections_),
      reader_([this] { read(); }) {}

Collector::~Collector() {
    {
        const std::lock_guard lock(mutex_);
        ends_ = true;
    }
    filled_.notify_one();
    reader_.join();
}

std::uint8_t* Collector::request(std::size_t& size) {
    const std::lock_guard lock(mutex_);
    size = buffer_bytes_;
    if (!free_.empty()) {
        std::uint8_t* buffer = free_.back();
        free_.pop_back();
        made_.find(buffer)->second.is_lent = true;
        return buffer;
    }
    if (made_.size() >= most_buffers_) {
        ++buffers_.refused;
        size = 0;
        return nullptr;
    }
    try {
        auto memory = std::unique_ptr<Aligned[]>(new Aligned[buffer_bytes_ / sizeof(Aligned)]);
        auto* buffer = reinterpret_cast<std::uint8_t*>(memory.get());
        free_.reserve(made_.size() + 1);  // so that giving it back needs no memory
        made_.emplace(buffer, Made{std::move(memory), true});
        ++buffers_.made;
        return buffer;
    } catch (const std::bad_alloc&) {  // no exception may reach the driver
        ++buffers_.refused;
        size = 0;
        return nullptr;
    }
}

void Collector::complete(std::uint8_t* buffer, std::size_t valid) {
    {
        const std::lock_guard lock(mutex_);
        const auto made = made_.find(buffer);
        if (made == made_.end() || !made->second.is_lent) {
            ++buffers_.foreign;
            return;
        }
        made->second.is_lent = false;
        if (discards_ || !enqueue({buffer, std::min(valid, buffer_bytes_)})) {
            ++buffers_.discarded;
            free_.push_back(buffer);
            return;
        }
    }
    filled_.notify_one();
}

bool Collector::enqueue(Filled filled) {
    try {
        queue_.push_back(filled);
    } catch (const std::bad_alloc&) {  // no exception may reach the driver
        return false;
    }
    ++handed_over_;
    return true;
}

void Collector::discard(bool whether) {
    const std::lock_guard lock(mutex_);
    discards_ = whether;
}

bool Collector::drain(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    const std::uint64_t until = handed_over_;
    return read_.wait_for(lock, patience, [&] { return done_ >= until; });
}

std::vector<KernelTimes> Collector::take(bool is_last) {
    const std::lock_guard lock(aggregating_);
    return aggregator_.take(is_last);
}

Counts Collector::counts() const {
    const std::lock_guard lock(aggregating_);
    return aggregator_.counts();
}

std::size_t Collector::sketches() const {
    const std::lock_guard lock(aggregating_);
    return aggregator_.sketches();
}

Buffers Collector::buffers() const {
    const std::lock_guard lock(mutex_);
    return buffers_;
}

void Collector::read() {
    pthread_setname_np(pthread_self(), "nvrx-kernels");
    // Signals are for the threads of the program.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    for (;;) {
        Filled filled;
        {
            std::unique_lock lock(mutex_);
            filled_.wait(lock, [&] { return ends_ || !queue_.empty(); });
            if (queue_.empty()) return;
            filled = queue_.front();
            queue_.pop_front();
        }
        bool is_read = true;
        try {
            const std::lock_guard lock(aggregating_);
            read_records(*source_, filled.buffer, filled.valid, aggregator_);
        } catch (const std::bad_alloc&) {  // training is worth more than its statistics
            is_read = false;
        }
        const std::uint64_t dropped = source_->dropped(), unreadable = source_->unreadable();
        {
            const std::lock_guard lock(mutex_);
            buffers_.dropped += dropped;
            buffers_.unreadable += unreadable;
            if (!is_read) ++buffers_.discarded;
            free_.push_back(filled.buffer);
            ++done_;
        }
        read_.notify_all();
    }
}

}  // namespace nvrx
