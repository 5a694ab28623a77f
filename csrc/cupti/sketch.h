// Durations of one kernel in a bounded space: exact count, sum, extremes and deviation, and quantiles to 1 %.
//
// Buckets grow by a factor of 1.0202 each, as in DDSketch (Masson, Rim, Lee, 2019): whatever falls into one is within
// 1 % of its middle. Only buckets that have been met are kept, 160 of them; one kernel's times fill some dozens. When
// they do not suffice the two outermost of the longer side, seen from the median, become one, so tails get coarse and
// the middle stays. `coarse` tells when the median itself has come to lie in such a tail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace nvrx {

struct Times {
    double min_us = 0, max_us = 0, median_us = 0, mean_us = 0, deviation_us = 0;
    std::uint64_t count = 0;
    bool coarse = false;
};

class Sketch {
public:
    static constexpr int kBuckets = 160;
    static constexpr double kRelativeError = 0.01;

    void add(std::uint64_t ns) noexcept {
        ++count_;
        min_ = std::min(min_, ns);
        max_ = std::max(max_, ns);
        // Welford, 1962.
        const double distance = static_cast<double>(ns) - mean_;
        mean_ += distance / static_cast<double>(count_);
        squares_ += distance * (static_cast<double>(ns) - mean_);
        put(bucket_of(ns), 1);
    }

    void merge(const Sketch& other) noexcept {
        if (other.count_ == 0) return;
        const auto mine = static_cast<double>(count_), theirs = static_cast<double>(other.count_);
        const double distance = other.mean_ - mean_;
        // Chan, Golub and LeVeque, 1979.
        squares_ += other.squares_ + distance * distance * mine * theirs / (mine + theirs);
        mean_ += distance * theirs / (mine + theirs);
        count_ += other.count_;
        min_ = std::min(min_, other.min_);
        max_ = std::max(max_, other.max_);
        for (int i = 0; i < other.used_; ++i) put(other.index_[i], other.hits_[i]);
        low_folded_ = low_folded_ || other.low_folded_;
        high_folded_ = high_folded_ || other.high_folded_;
    }

    std::uint64_t count() const noexcept { return count_; }
    void clear() noexcept { *this = Sketch(); }

    Times times() const noexcept {
        Times found;
        if (count_ == 0) return found;
        found.count = count_;
        found.min_us = static_cast<double>(min_) / 1e3;
        found.max_us = static_cast<double>(max_) / 1e3;
        found.mean_us = mean_ / 1e3;
        found.deviation_us = std::sqrt(squares_ / static_cast<double>(count_)) / 1e3;
        const int lower = place_of((count_ - 1) / 2), upper = place_of(count_ / 2);
        found.median_us = (value(lower) + value(upper)) / 2e3;
        found.coarse = (low_folded_ && lower == 0) || (high_folded_ && upper == used_ - 1);
        return found;
    }

private:
    // Bucket 0 is for a duration of 0, bucket i for (growth^(i-2), growth^(i-1)] ns.
    static std::uint16_t bucket_of(std::uint64_t ns) noexcept {
        if (ns == 0) return 0;
        return static_cast<std::uint16_t>(1 + std::ceil(std::log(static_cast<double>(ns)) * kPerLog));
    }

    double value(int place) const noexcept {
        const int index = index_[place];
        if (index == 0) return 0;
        const double middle = 2 * std::pow(kGrowth, index - 1) / (kGrowth + 1);
        return std::clamp(middle, static_cast<double>(min_), static_cast<double>(max_));
    }

    void put(std::uint16_t index, std::uint32_t hits) noexcept {
        // The same as before, mostly.
        if (last_ < used_ && index_[last_] == index) return raise(last_, hits);
        if (used_ > 0 && low_folded_ && index < index_[0]) return raise(0, hits);
        if (used_ > 0 && high_folded_ && index > index_[used_ - 1]) return raise(used_ - 1, hits);
        int place = static_cast<int>(std::lower_bound(index_, index_ + used_, index) - index_);
        if (place < used_ && index_[place] == index) {
            last_ = static_cast<std::uint16_t>(place);
            return raise(place, hits);
        }
        if (used_ == kBuckets) {
            fold();
            return put(index, hits);
        }
        const std::size_t behind = static_cast<std::size_t>(used_ - place);
        std::memmove(index_ + place + 1, index_ + place, behind * sizeof *index_);
        std::memmove(hits_ + place + 1, hits_ + place, behind * sizeof *hits_);
        index_[place] = index;
        hits_[place] = hits;
        ++used_;
        last_ = static_cast<std::uint16_t>(place);
    }

    void raise(int place, std::uint32_t hits) noexcept {
        const std::uint32_t room = std::numeric_limits<std::uint32_t>::max() - hits_[place];
        hits_[place] += std::min(room, hits);
    }

    void fold() noexcept {
        std::uint64_t all = 0;
        for (int i = 0; i < used_; ++i) all += hits_[i];
        const bool low = place_of(all / 2) >= used_ / 2;
        const int from = low ? 0 : used_ - 1, into = low ? 1 : used_ - 2;
        raise(into, hits_[from]);
        if (low) {
            std::memmove(index_, index_ + 1, static_cast<std::size_t>(used_ - 1) * sizeof *index_);
            std::memmove(hits_, hits_ + 1, static_cast<std::size_t>(used_ - 1) * sizeof *hits_);
        }
        --used_;
        last_ = 0;
        (low ? low_folded_ : high_folded_) = true;
    }

    int place_of(std::uint64_t rank) const noexcept {
        std::uint64_t seen = 0;
        for (int i = 0; i < used_; ++i) {
            seen += hits_[i];
            if (seen > rank) return i;
        }
        return used_ - 1;
    }

    static constexpr double kGrowth = (1 + kRelativeError) / (1 - kRelativeError);
    static constexpr double kPerLog = 1 / 0.020000666706669435;  // ln(kGrowth)

    std::uint64_t count_ = 0;
    std::uint64_t min_ = std::numeric_limits<std::uint64_t>::max();
    std::uint64_t max_ = 0;
    double mean_ = 0;
    double squares_ = 0;
    std::uint16_t used_ = 0;
    std::uint16_t last_ = 0;
    bool low_folded_ = false;
    bool high_folded_ = false;
    std::uint16_t index_[kBuckets] = {};
    std::uint32_t hits_[kBuckets] = {};
};

static_assert(sizeof(Sketch) <= 1024, "a kernel's times take at most 1 KiB");

}  // namespace nvrx
