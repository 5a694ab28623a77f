// Kernels as CUPTI's activity interface reports them: the record source on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "collector.h"
#include "library.h"

namespace nvrx {

// CUPTI has one set of callbacks per process, so there is one of these. It is never destroyed: buffers may come at any
// time, and cuptiFinalize, which takes CUPTI away from everybody in the process, is never called.
class Activity {
public:
    // Opens the library at `path`, or returns what is open already. Throws std::runtime_error.
    static Activity& open(const std::string& path);

    // Makes CUPTI ours: at the beginning, and again after another tool has had it. Throws std::runtime_error, such as
    // when a profiler holds it.
    void attach();
    // Before another tool takes it: what was recorded is handed over, and nothing is recorded any more.
    void release();
    // The first `enter` has CUPTI record kernels, the last `leave` ends that. Returns a number that `leave` is to be
    // given, on the same thread: on another one, kernels that the first one launches belong to the section until that
    // enters or leaves another. In a fork, which has neither a GPU nor the thread that reads, all of this does nothing.
    std::uint64_t enter(std::uint16_t section);
    // With `is_ours` false another tool has taken CUPTI meanwhile: nothing is switched off.
    void leave(std::uint64_t entered, bool is_ours);
    // Asks for the records of all kernels that have ended, and waits for their statistics; false if that takes longer.
    bool flush(std::chrono::milliseconds patience);
    // Waits for the statistics of what was handed over; false if that takes longer.
    bool drain(std::chrono::milliseconds patience);

    Collector& collector() { return *collector_; }
    const Library& library() const { return library_; }

private:
    static constexpr std::uint64_t kNothing = ~std::uint64_t{0};
    static constexpr std::size_t kMostLeftElsewhere = 1024;

    explicit Activity(const std::string& path);
    void switch_on();
    void switch_off();
    bool forget_entered(std::uint64_t number);
    void forget_left_elsewhere();
    std::uint64_t now() const;

    const Library library_;
    std::unique_ptr<Collector> collector_;
    std::mutex mutex_;
    bool probed_ = false, was_attached_ = false;
    int inside_ = 0;
    bool is_on_ = false;
    std::set<std::uint64_t> left_elsewhere_;  // on another thread than the one that has entered
};

}  // namespace nvrx
