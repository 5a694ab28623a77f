// Threads that launch, one that flushes and takes, another tool that takes CUPTI away: run under sanitizers.
//
// sanitize.sh builds and runs it; exits 0 if no kernel was lost or counted twice.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../cupti/activity.h"

using namespace nvrx;

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    std::exit(1);
}

template <typename Function>
Function* function(void* library, const char* name) {
    auto* found = reinterpret_cast<Function*>(dlsym(library, name));
    require(found != nullptr, name);
    return found;
}

std::uint64_t counted(const std::vector<KernelTimes>& kernels) {
    std::uint64_t count = 0;
    for (const auto& kernel : kernels) count += kernel.times.count;
    return count;
}

constexpr int kThreads = 4, kRounds = 2000, kPerRound = 3;
constexpr std::chrono::seconds kPatience{60};

// As many launches as there are must come out, by whatever threads and in whatever order.
void launches_from_threads(const std::string& path) {
    Activity& activity = Activity::open(path);
    activity.attach();
    void* library = dlopen(path.c_str(), RTLD_NOW);
    auto* launch = function<void(const char*, std::uint64_t, int, int)>(library, "sim_launch");
    auto* set = function<void(const char*, long)>(library, "sim_set");
    set("correlation", 0xffffffffL - kThreads * kRounds / 2);  // numbers come round on the way
    std::atomic<bool> ends{false};
    std::uint64_t taken = 0;
    const std::uint64_t outer = activity.enter(1);  // so that all the time somebody is inside
    std::thread reporter([&] {
        while (!ends) {
            activity.flush(kPatience);
            taken += counted(activity.collector().take(false));
            (void)activity.collector().buffers();
        }
    });
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number) {
        threads.emplace_back([&, number] {
            static const char* const names[] = {"gemm", "adam", "ncclDevKernel_AllReduce", "a kernel with a longer name"};
            for (int round = 0; round < kRounds; ++round) {
                const std::uint64_t inner = activity.enter(static_cast<std::uint16_t>(2 + number));
                launch(names[(number + round) % 4], static_cast<std::uint64_t>(1000 + round), kPerRound, 211);
                activity.leave(inner, true);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    activity.leave(outer, true);
    ends = true;
    reporter.join();
    require(activity.flush(kPatience), "records are read in time");
    taken += counted(activity.collector().take(true));
    const Counts counts = activity.collector().counts();
    const Buffers buffers = activity.collector().buffers();
    require(taken == kThreads * kRounds * kPerRound - buffers.dropped, "every kernel is counted once");
    require(counts.unattributed == 0, "every kernel is in the section of its launch");
    require(counts.unknown == 0 && counts.untimed == 0, "every record is understood");
    function<void()>(library, "sim_taken_over")();
    activity.attach();
    const std::uint64_t after = activity.enter(1);
    launch("gemm", 1000, 1, 211);
    activity.leave(after, true);
    require(activity.flush(kPatience) && counted(activity.collector().take(true)) == 1, "it goes on after another tool");
}

// A pool that is too small: what is refused is known, and nothing is written beyond a buffer.
void small_pool() {
    constexpr std::size_t distance = sizeof(abi::Kernel);
    Collector collector(std::make_unique<EvenlySpaced>(distance), 4 * distance, 3);
    std::atomic<std::uint64_t> lost{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number) {
        threads.emplace_back([&] {
            for (int round = 0; round < kRounds; ++round) {
                std::size_t size = 0;
                std::uint8_t* buffer = collector.request(size);
                if (buffer == nullptr) {
                    lost += 4;
                    continue;
                }
                for (std::size_t i = 0; i < size / distance; ++i) {
                    abi::Kernel record{};
                    record.kind = i == 3 ? 51u : static_cast<std::uint32_t>(abi::kKindConcurrentKernel);
                    record.start = 1000;
                    record.end = 1000 + i;
                    record.name = "k";
                    std::memcpy(buffer + i * distance, &record, distance);
                }
                collector.complete(buffer, size);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    require(collector.drain(kPatience), "buffers are read in time");
    const std::uint64_t read = counted(collector.take(true)) + collector.counts().unknown;
    require(read == 4 * kThreads * kRounds - lost, "every record is read or known to be lost");
    require(collector.buffers().made <= 3 && collector.buffers().refused * 4 == lost, "refusals are counted");
}

// Buffers come back in any order, some of them twice, some of them empty, beside those of somebody else.
void buffers_in_any_order() {
    constexpr std::size_t distance = sizeof(abi::Kernel), at_once = 8;
    Collector collector(std::make_unique<EvenlySpaced>(distance), 4 * distance, kThreads * at_once);
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number) {
        threads.emplace_back([&, number] {
            alignas(8) std::uint8_t foreign[distance] = {};
            for (int round = 0; round < kRounds / 10; ++round) {
                std::vector<std::uint8_t*> lent;
                std::size_t size = 0;
                while (lent.size() < at_once) {
                    std::uint8_t* buffer = collector.request(size);
                    if (buffer == nullptr) continue;  // the reader has them
                    abi::Kernel record{};
                    record.kind = abi::kKindKernel;
                    record.start = 1;
                    record.end = 2;
                    record.name = "k";
                    std::memcpy(buffer, &record, distance);
                    lent.push_back(buffer);
                }
                std::rotate(lent.begin(), lent.begin() + (round + number) % 8, lent.end());
                std::reverse(lent.begin(), lent.begin() + 5);
                for (std::size_t i = 0; i < lent.size(); ++i) {
                    // Half a record at its end, or nothing but half a one.
                    collector.complete(lent[i], i % 2 == 0 ? distance + distance / 2 : distance / 2);
                }
                collector.complete(foreign, distance);
            }
        });
    }
    for (auto& thread : threads) thread.join();
    require(collector.drain(kPatience), "buffers are read in time");
    constexpr std::uint64_t rounds = kThreads * (kRounds / 10);
    require(counted(collector.take(true)) == rounds * at_once / 2, "whole records are counted once");
    require(collector.buffers().foreign == rounds, "those of somebody else are left alone");

    std::size_t size = 0;
    std::uint8_t* twice = collector.request(size);
    collector.complete(twice, 0);
    collector.complete(twice, 0);
    require(collector.drain(kPatience) && collector.buffers().foreign == rounds + 1, "once is enough");
}

// A thread launches all the time: while the process forks, and when it ends.
void fork_and_exit(const std::string& path) {
    Activity& activity = Activity::open(path);
    auto* launch = function<void(const char*, std::uint64_t, int, int)>(dlopen(path.c_str(), RTLD_NOW), "sim_launch");
    static std::atomic<long> launched{0};
    std::thread([&activity, launch] {
        for (;;) {
            const std::uint64_t section = activity.enter(1);
            launch("k", 1000, 1, 211);
            activity.leave(section, true);
            ++launched;
        }
    }).detach();
    for (int i = 0; i < 20; ++i) {
        const pid_t child = fork();
        if (child == 0) {
            activity.leave(activity.enter(2), true);
            _exit(activity.flush(kPatience) && activity.drain(kPatience) ? 0 : 1);
        }
        int status = 1;
        require(waitpid(child, &status, 0) == child && status == 0, "a fork does nothing, and ends");
    }
    for (const long until = launched + 1000; launched < until;) std::this_thread::yield();
}

// More names than there is room for, of which all but one go again.
void names_come_and_go() {
    OpenSections open;
    Aggregator aggregator(open);
    for (int period = 0; period < 20; ++period) {
        for (std::size_t i = 0; i < Aggregator::kMostSketches + 100; ++i) {
            const std::string name = "kernel" + std::to_string(period < 3 ? i + static_cast<std::size_t>(period) * 50 : 0);
            aggregator.kernel(name.c_str(), 1, 1 + i * i * i, 0);
        }
        require(counted(aggregator.take(true)) == Aggregator::kMostSketches + 100, "every kernel is counted");
    }
    require(aggregator.sketches() == 1, "kernels that are gone make room");
}

}  // namespace

int main(int, char** arguments) {
    names_come_and_go();
    small_pool();
    buffers_in_any_order();
    launches_from_threads(arguments[1]);
    fork_and_exit(arguments[1]);
    std::puts("passed");
}
