#include "activity.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <stdexcept>
#include <utility>
#include <vector>

namespace nvrx {

namespace {

Activity* the_one = nullptr;  // set before CUPTI knows of the callbacks
std::mutex opening;

class FromCupti final : public RecordSource {
public:
    explicit FromCupti(const Library& library) : library_(library) {}

    const abi::Record* next(std::uint8_t* buffer, std::size_t size, const abi::Record* previous) const override {
        const abi::Record* record = previous;
        const int result = library_.next_record(buffer, size, &record);
        if (result == abi::kSuccess) return record;
        if (result != abi::kEndOfBuffer) ++unreadable_;
        return nullptr;
    }

    std::uint64_t dropped() const override {
        std::size_t count = 0;
        return library_.dropped_records(nullptr, 0, &count) == abi::kSuccess ? count : 0;
    }

    std::uint64_t unreadable() const override { return std::exchange(unreadable_, 0); }

private:
    const Library& library_;
    mutable std::uint64_t unreadable_ = 0;  // of the thread that reads
};

// Sections that this thread has entered and not left, as CUPTI has them on its stack of this thread.
struct Entered {
    std::uint64_t number;
    std::uint16_t section;
};
thread_local std::vector<Entered> entered_here;

std::atomic<bool> is_fork{false};

void request_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records) {
    *max_records = 0;
    *buffer = the_one->collector().request(*size);
}

void buffer_complete(void*, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
    the_one->collector().complete(buffer, valid);
}

// A profiler that ran before may have left a clock of its own, which need not count nanoseconds.
std::uint64_t nanoseconds() {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1000000000u + static_cast<std::uint64_t>(time.tv_nsec);
}

void no_callback() {}

}  // namespace

Activity& Activity::open(const std::string& path) {
    const std::lock_guard lock(opening);
    if (the_one == nullptr) the_one = new Activity(path);
    return *the_one;
}

Activity::Activity(const std::string& path)
    : library_(path), collector_(std::make_unique<Collector>(std::make_unique<FromCupti>(library_))) {
    pthread_atfork(nullptr, nullptr, [] { is_fork = true; });
}

void Activity::attach() {
    const std::lock_guard lock(mutex_);
    if (!probed_) {
        // There can be one subscriber. To have been one for a moment tells whether somebody else is.
        void* subscriber = nullptr;
        const int result = library_.subscribe(&subscriber, reinterpret_cast<void*>(no_callback), nullptr);
        if (result == abi::kMultipleSubscribers) {
            throw std::runtime_error("a profiler holds CUPTI in this process");
        }
        library_.check(result, "cuptiSubscribe");
        library_.check(library_.unsubscribe(subscriber), "cuptiUnsubscribe");
        probed_ = true;
    }
    library_.check(library_.register_callbacks(request_buffer, buffer_complete), "cuptiActivityRegisterCallbacks");
    if (library_.register_timestamp != nullptr) {
        library_.check(library_.register_timestamp(nanoseconds), "cuptiActivityRegisterTimestampCallback");
    }
    if (was_attached_) {
        // A buffer that was ours goes on being filled while another tool records, by its clock.
        collector_->discard(true);
        library_.flush_all(0);
        collector_->discard(false);
    }
    was_attached_ = true;
    inside_ = 0;  // an interrupted section may never have been left
    is_on_ = false;
    switch_on();  // so that what is wrong shows now
    switch_off();
}

void Activity::release() {
    const std::lock_guard lock(mutex_);
    if (is_on_) switch_off();
    library_.flush_all(0);
}

std::uint64_t Activity::enter(std::uint16_t section) {
    if (is_fork) return kNothing;
    {
        const std::lock_guard lock(mutex_);
        if (!is_on_) switch_on();
        ++inside_;
        forget_left_elsewhere();
    }
    library_.push_external(abi::kExternalKind, section);
    const std::uint64_t number = collector_->sections().open(section, now());
    entered_here.push_back({number, section});
    return number;
}

void Activity::leave(std::uint64_t entered, bool is_ours) {
    if (is_fork || entered == kNothing) return;
    collector_->sections().close(entered, now());
    const std::lock_guard lock(mutex_);
    if (!forget_entered(entered)) {
        left_elsewhere_.insert(entered);
        // Of threads that have ended nobody asks for theirs.
        if (left_elsewhere_.size() > kMostLeftElsewhere) left_elsewhere_.erase(left_elsewhere_.begin());
    }
    forget_left_elsewhere();
    if (inside_ > 0) --inside_;
    if (!is_ours) {
        is_on_ = false;
    } else if (inside_ == 0 && is_on_) {
        switch_off();
    }
}

// Takes a section from this thread's stack, wherever it lies there: a generator may leave its own after that of whoever
// reads it has begun. False: this thread has not entered it.
bool Activity::forget_entered(std::uint64_t number) {
    const auto found = std::find_if(entered_here.rbegin(), entered_here.rend(),
                                    [&](const Entered& each) { return each.number == number; });
    if (found == entered_here.rend()) return false;
    const auto above = found.base();  // those that were entered after it, and stay
    for (auto each = above - 1; each != entered_here.end(); ++each) library_.pop_external(abi::kExternalKind, nullptr);
    for (auto each = above; each != entered_here.end(); ++each) {
        library_.push_external(abi::kExternalKind, each->section);
    }
    entered_here.erase(above - 1);
    return true;
}

// Takes those from this thread's stack that another thread has left.
void Activity::forget_left_elsewhere() {
    if (left_elsewhere_.empty()) return;
    for (std::size_t i = entered_here.size(); i-- > 0;) {
        const std::uint64_t number = entered_here[i].number;
        if (left_elsewhere_.erase(number) > 0) forget_entered(number);
    }
}

bool Activity::flush(std::chrono::milliseconds patience) {
    if (is_fork) return true;
    library_.check(library_.flush_all(0), "cuptiActivityFlushAll");
    return collector_->drain(patience);
}

bool Activity::drain(std::chrono::milliseconds patience) { return is_fork || collector_->drain(patience); }

void Activity::switch_on() {
    library_.check(library_.enable(abi::kKindExternalCorrelation), "cuptiActivityEnable(EXTERNAL_CORRELATION)");
    if (library_.enable_runtime_call != nullptr && library_.enable_driver_call != nullptr) {
        // Not every version knows every call.
        for (const std::uint32_t call : abi::kRuntimeLaunches) library_.enable_runtime_call(call, 1);
        for (const std::uint32_t call : abi::kDriverLaunches) library_.enable_driver_call(call, 1);
    } else {
        library_.check(library_.enable(abi::kKindRuntime), "cuptiActivityEnable(RUNTIME)");
        library_.check(library_.enable(abi::kKindDriver), "cuptiActivityEnable(DRIVER)");
    }
    library_.check(library_.enable(abi::kKindConcurrentKernel), "cuptiActivityEnable(CONCURRENT_KERNEL)");
    is_on_ = true;
}

void Activity::switch_off() {
    library_.disable(abi::kKindConcurrentKernel);
    if (library_.enable_runtime_call != nullptr && library_.enable_driver_call != nullptr) {
        for (const std::uint32_t call : abi::kRuntimeLaunches) library_.enable_runtime_call(call, 0);
        for (const std::uint32_t call : abi::kDriverLaunches) library_.enable_driver_call(call, 0);
    } else {
        library_.disable(abi::kKindRuntime);
        library_.disable(abi::kKindDriver);
    }
    library_.disable(abi::kKindExternalCorrelation);
    is_on_ = false;
}

std::uint64_t Activity::now() const {
    std::uint64_t time = 0;
    library_.get_timestamp(&time);
    return time;
}

}  // namespace nvrx
