// Which sections of the training loop were open when.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <mutex>

namespace nvrx {

// A section is told to CUPTI on the thread that enters it. What other threads launch meanwhile, such as the backward
// pass that autograd runs, belongs to the section that was open then: that is looked up here.
class OpenSections {
public:
    // Returns what `close` is to be given. Times are those of CUPTI's records.
    std::uint64_t open(std::uint16_t section, std::uint64_t now) {
        const std::lock_guard lock(mutex_);
        if (spans_.size() == kMost) {
            spans_.pop_front();
            ++gone_;
        }
        // Sorted by begin, whatever the clock or another thread does.
        const std::uint64_t begin = spans_.empty() ? now : std::max(now, spans_.back().begin);
        spans_.push_back({section, begin, std::numeric_limits<std::uint64_t>::max()});
        return gone_ + spans_.size() - 1;
    }

    void close(std::uint64_t opened, std::uint64_t now) {
        const std::lock_guard lock(mutex_);
        if (opened >= gone_ && opened - gone_ < spans_.size()) spans_[opened - gone_].end = now;
    }

    // The last section that began before `when` and lasted beyond it; 0 for none.
    std::uint16_t at(std::uint64_t when) const {
        const std::lock_guard lock(mutex_);
        auto span = std::upper_bound(spans_.begin(), spans_.end(), when,
                                     [](std::uint64_t time, const Span& each) { return time < each.begin; });
        // Within a section there may have been so many others.
        for (int left = kLookBack; left > 0 && span != spans_.begin(); --left) {
            --span;
            if (when <= span->end) return span->section;
        }
        return 0;
    }

private:
    struct Span {
        std::uint16_t section;
        std::uint64_t begin, end;
    };
    static constexpr std::size_t kMost = 8192;
    static constexpr int kLookBack = 64;

    mutable std::mutex mutex_;
    std::deque<Span> spans_;
    std::uint64_t gone_ = 0;
};

}  // namespace nvrx
