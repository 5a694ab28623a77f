#include "aggregator.h"

#include <algorithm>
#include <cstring>

namespace nvrx {

namespace {

// Calls of which the section is remembered: CUPTI hands over kernels before or after their launches, thousands apart.
constexpr std::uint32_t kLaunches = 1u << 18;
// Kernels that wait for the record of their launch.
constexpr std::size_t kFirstSettle = 1u << 13, kMostWaiting = 1u << 18;
constexpr int kIdlePeriods = 8;
constexpr char kCrowd[] = "(other kernels)";

std::uint64_t key(std::uint32_t name, std::uint16_t section) { return std::uint64_t{name} << 16 | section; }

}  // namespace

Aggregator::Aggregator(const OpenSections& open) : open_(open), launches_(kLaunches), settle_at_(kFirstSettle) {}

void Aggregator::kernel(const char* name, std::uint64_t start, std::uint64_t end, std::uint32_t correlation) {
    const std::uint64_t ns = end - start;  // right if the clock has passed its highest value, too
    if (name == nullptr || (start == 0 && end == 0) || ns >> 63) {
        ++counts_.untimed;
        return;
    }
    const std::uint32_t named = name_of(name);
    if (const Launch* launch = launch_of(correlation)) {
        count(named, launch->section, ns);
        return;
    }
    waiting_.push_back({correlation, named, ns});
    if (waiting_.size() >= settle_at_) settle(waiting_.size() >= kMostWaiting ? kMostWaiting / 2 : 0);
}

void Aggregator::correlated(std::uint32_t correlation, std::uint64_t section) {
    ++counts_.correlations;
    remember(correlation, section > 0xffff ? kNoSection : static_cast<std::uint16_t>(section), true);
}

void Aggregator::launched(std::uint32_t correlation, std::uint64_t when) {
    ++counts_.launches;
    const Launch* launch = launch_of(correlation);
    if (launch == nullptr || !launch->is_certain) remember(correlation, open_.at(when), false);
}

std::vector<KernelTimes> Aggregator::take(bool is_last) {
    // The launch of a kernel that has just come may be on its way, that of one that came a period ago is not.
    settle(is_last ? waiting_.size() : old_);
    std::unordered_map<std::uint32_t, std::vector<Entry*>> by_name;
    for (const auto& each : entries_) {
        if (each->sketch.count() > 0) by_name[each->name].push_back(each.get());
    }
    std::vector<KernelTimes> found;
    found.reserve(by_name.size());
    for (auto& [name, entries] : by_name) {
        KernelTimes kernel{names_[name].text, names_[name].hash, {}, {}};
        Sketch all;
        for (const Entry* each : entries) {
            all.merge(each->sketch);
            if (each->section != kNoSection) kernel.sections.emplace_back(each->section, each->sketch.times());
        }
        kernel.times = all.times();
        found.push_back(std::move(kernel));
    }
    const auto spent = [](const KernelTimes& each) { return each.times.mean_us * static_cast<double>(each.times.count); };
    std::sort(found.begin(), found.end(), [&](const auto& a, const auto& b) { return spent(a) > spent(b); });
    drop_idle();
    old_ = waiting_.size();
    period_ = period_ == 0xffff ? 1 : static_cast<std::uint16_t>(period_ + 1);
    return found;
}

// CUPTI keeps one text per kernel, so mostly the address says which it is. A module that is unloaded may give its
// address to another name: the text is compared.
std::uint32_t Aggregator::name_of(const char* text) {
    Seen& seen = seen_[(reinterpret_cast<std::uintptr_t>(text) >> 4 ^ reinterpret_cast<std::uintptr_t>(text)) %
                       seen_.size()];
    if (seen.text == text && names_[seen.name].text == text) return seen.name;
    auto known = by_text_.find(text);
    if (known == by_text_.end() && by_text_.size() >= kMostSketches && text != kCrowd) {
        ++counts_.crowded_out;
        text = kCrowd;
        known = by_text_.find(text);
    }
    if (known == by_text_.end()) {
        names_.push_back({text, hash_name(text)});
        known = by_text_.emplace(names_.back().text, static_cast<std::uint32_t>(names_.size() - 1)).first;
    }
    seen = {text, known->second};
    return known->second;
}

const Aggregator::Launch* Aggregator::launch_of(std::uint32_t correlation) const {
    const Launch& launch = launches_[correlation % kLaunches];
    // Numbers come round after 2^32 launches: what is older than the last period is of another round.
    const bool is_recent = launch.period == period_ || launch.period + 1 == period_ ||
                           (period_ == 1 && launch.period == 0xffff);
    return launch.period != 0 && launch.correlation == correlation && is_recent ? &launch : nullptr;
}

void Aggregator::remember(std::uint32_t correlation, std::uint16_t section, bool is_certain) {
    launches_[correlation % kLaunches] = {correlation, section, period_, is_certain};
}

void Aggregator::count(std::uint32_t name, std::uint16_t section, std::uint64_t ns) {
    ++counts_.kernels;
    if (section == kNoSection) ++counts_.unattributed;
    entry(name, section).sketch.add(ns);
}

Aggregator::Entry& Aggregator::entry(std::uint32_t name, std::uint16_t section) {
    auto known = by_key_.find(key(name, section));
    if (known != by_key_.end()) return *known->second;
    if (entries_.size() >= kMostSketches && names_[name].text != kCrowd) {
        ++counts_.crowded_out;
        // One more, for all that are too many.
        name = name_of(kCrowd);
        section = kNoSection;
        known = by_key_.find(key(name, section));
        if (known != by_key_.end()) return *known->second;
    }
    entries_.push_back(std::make_unique<Entry>(Entry{name, section, 0, {}}));
    by_key_.emplace(key(name, section), entries_.back().get());
    return *entries_.back();
}

// Counts the kernels whose launch is known by now, and the first `given_up` as of no section; the others wait on.
void Aggregator::settle(std::size_t given_up) {
    std::size_t left = 0, left_of_old = 0;
    for (std::size_t i = 0; i < waiting_.size(); ++i) {
        const Waiting each = waiting_[i];
        if (const Launch* launch = launch_of(each.correlation)) {
            count(each.name, launch->section, each.ns);
        } else if (i < given_up) {
            count(each.name, kNoSection, each.ns);
        } else {
            waiting_[left++] = each;
            if (i < old_) ++left_of_old;
        }
    }
    waiting_.resize(left);
    old_ = left_of_old;
    settle_at_ = std::max(kFirstSettle, 2 * left);
}

// Kernels with names of their own for every shape would fill the memory in time.
void Aggregator::drop_idle() {
    bool dropped = false;
    for (auto& each : entries_) {
        each->idle_periods = each->sketch.count() > 0 ? 0 : each->idle_periods + 1;
        each->sketch.clear();
        if (each->idle_periods >= kIdlePeriods) {
            by_key_.erase(key(each->name, each->section));
            each.reset();
            dropped = true;
        }
    }
    if (!dropped) return;
    entries_.erase(std::remove(entries_.begin(), entries_.end(), nullptr), entries_.end());
    // Names are numbered anew, those that are left.
    std::deque<Name> kept;
    std::unordered_map<std::uint32_t, std::uint32_t> renumbered;
    by_key_.clear();
    for (auto& each : entries_) {
        const auto [place, is_new] = renumbered.emplace(each->name, static_cast<std::uint32_t>(kept.size()));
        if (is_new) kept.push_back(std::move(names_[each->name]));
        each->name = place->second;
        by_key_.emplace(key(each->name, each->section), each.get());
    }
    for (Waiting& each : waiting_) {
        const auto [place, is_new] = renumbered.emplace(each.name, static_cast<std::uint32_t>(kept.size()));
        if (is_new) kept.push_back(std::move(names_[each.name]));
        each.name = place->second;
    }
    names_ = std::move(kept);
    by_text_.clear();
    for (std::uint32_t i = 0; i < names_.size(); ++i) by_text_.emplace(names_[i].text, i);
    seen_.fill({});
}

}  // namespace nvrx
