// Which sections of the training loop were open when.
#pragma once

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
        spans_.push_back({section, now, std::numeric_limits<std::uint64_t>::max()});
        return gone_ + spans_.size() - 1;
    }

    void close(std::uint64_t opened, std::uint64_t now) {
        const std::lock_guard lock(mutex_);
        if (opened >= gone_ && opened - gone_ < spans_.size()) spans_[opened - gone_].end = now;
    }

    // The last section that began before `when` and lasted beyond it; 0 for none.
    std::uint16_t at(std::uint64_t when) const {
        const std::lock_guard lock(mutex_);
        int looked_at = 0;
        for (auto span = spans_.rbegin(); span != spans_.rend() && looked_at < kLookBack; ++span) {
            if (span->begin > when) continue;
            if (when <= span->end) return span->section;
            ++looked_at;  // within a section there may have been so many others
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
