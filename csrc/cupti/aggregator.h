// Turns records of kernels into statistics: of each kernel, and of each kernel in each section.
//
// It knows nothing of CUDA: real records reach it through records.h, tests call it directly or with synthetic ones.
// One thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "sections.h"
#include "sketch.h"

namespace nvrx {

// What became of records, since the aggregator was made.
struct Counts {
    std::uint64_t kernels = 0;        // counted in statistics
    std::uint64_t launches = 0;       // records of calls
    std::uint64_t correlations = 0;   // records that name the section of a call
    std::uint64_t unknown = 0;        // of a kind that is not looked at
    std::uint64_t untimed = 0;        // kernels that CUPTI could not time, or whose end is before their begin
    std::uint64_t unattributed = 0;   // kernels that belong to no section
    std::uint64_t crowded_out = 0;    // kernels beyond the limit on names, counted together under one name
};

struct KernelTimes {
    std::string name;
    std::uint64_t hash;
    Times times;
    std::vector<std::pair<std::uint16_t, Times>> sections;
};

// FNV-1a, 64 bits.
constexpr std::uint64_t hash_name(std::string_view name) noexcept {
    std::uint64_t hash = 14695981039346656037u;
    for (const char letter : name) hash = (hash ^ static_cast<std::uint8_t>(letter)) * 1099511628211u;
    return hash;
}

class Aggregator {
public:
    static constexpr std::size_t kMostSketches = 4096;
    static constexpr std::uint16_t kNoSection = 0;

    explicit Aggregator(const OpenSections& open);

    void kernel(const char* name, std::uint64_t start, std::uint64_t end, std::uint32_t correlation);
    void correlated(std::uint32_t correlation, std::uint64_t section);
    void launched(std::uint32_t correlation, std::uint64_t when);
    void unknown() { ++counts_.unknown; }

    // Ends a period: returns its statistics, most time first, and begins the next. Kernels whose launch nobody has told
    // of wait for one more period, unless this one is the last.
    std::vector<KernelTimes> take(bool is_last);
    const Counts& counts() const { return counts_; }
    std::size_t sketches() const { return entries_.size(); }

private:
    struct Entry {
        std::uint32_t name;
        std::uint16_t section;
        int idle_periods = 0;
        Sketch sketch;
    };
    struct Name {
        std::string text;
        std::uint64_t hash;
    };
    struct Launch {
        std::uint32_t correlation = 0;
        std::uint16_t section = 0;
        std::uint16_t period = 0;  // 0: empty
        bool is_certain = false;
    };
    struct Waiting {
        std::uint32_t correlation;
        std::uint32_t name;
        std::uint64_t ns;
    };
    struct Seen {
        const char* text = nullptr;
        std::uint32_t name = 0;
    };

    std::uint32_t name_of(const char* text);
    const Launch* launch_of(std::uint32_t correlation) const;
    void remember(std::uint32_t correlation, std::uint16_t section, bool is_certain);
    void count(std::uint32_t name, std::uint16_t section, std::uint64_t ns);
    Entry& entry(std::uint32_t name, std::uint16_t section);
    void settle(std::size_t given_up);
    void drop_idle();

    const OpenSections& open_;
    Counts counts_;
    std::deque<Name> names_;  // the texts stay where they are
    std::unordered_map<std::string_view, std::uint32_t> by_text_;
    std::array<Seen, 4096> seen_{};
    std::vector<std::unique_ptr<Entry>> entries_;
    std::unordered_map<std::uint64_t, Entry*> by_key_;
    std::vector<Launch> launches_;
    std::vector<Waiting> waiting_;
    std::size_t old_ = 0;  // so many of them have waited for a whole period
    std::size_t settle_at_;
    std::uint16_t period_ = 1;
};

}  // namespace nvrx
