// The part of CUPTI's binary interface that is used, declared here so that a build needs no CUDA header.
//
// Offsets and numbers have been the same from CUpti_ActivityKernel4 (CUDA 9) to CUpti_ActivityKernel10 (CUDA 13).
// Where the headers are found, abi_check.cpp compares every one of them, and the build fails on a difference.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nvrx::abi {

enum Kind : std::uint32_t {
    kKindKernel = 3,
    kKindDriver = 4,
    kKindRuntime = 5,
    kKindConcurrentKernel = 10,
    kKindExternalCorrelation = 39,
};

// Of the three that CUPTI leaves to its users, the one that torch.profiler does not push.
constexpr std::uint32_t kExternalKind = 5;

struct Record {
    std::uint32_t kind;
};

struct Kernel {
    std::uint32_t kind;
    std::uint8_t caches_and_registers[12];
    std::uint64_t start;  // ns; 0 if it could not be measured
    std::uint64_t end;
    std::uint64_t completed;
    std::uint32_t device;
    std::uint32_t context;
    std::uint32_t stream;
    std::int32_t grid[3];
    std::int32_t block[3];
    std::uint32_t memory[4];
    std::uint32_t correlation;
    std::int64_t grid_id;
    const char* name;  // mangled
};

struct Api {
    std::uint32_t kind;
    std::uint32_t call;
    std::uint64_t start;  // ns, of the same clock as kernels
    std::uint64_t end;
    std::uint32_t process;
    std::uint32_t thread;
    std::uint32_t correlation;
    std::uint32_t result;
};

struct External {
    std::uint32_t kind;
    std::uint32_t external_kind;
    std::uint64_t external_id;
    std::uint32_t correlation;
    std::uint32_t reserved;
};

static_assert(offsetof(Kernel, start) == 16 && offsetof(Kernel, correlation) == 92);
static_assert(offsetof(Kernel, name) == 104 && sizeof(Kernel) == 112);
static_assert(sizeof(Api) == 40 && sizeof(External) == 24);

// Calls that launch kernels: of all others no record is wanted.
constexpr std::uint32_t kRuntimeLaunches[] = {211, 214, 269, 270, 272, 311, 312, 430, 431, 505, 506};
constexpr std::uint32_t kDriverLaunches[] = {307, 442, 477, 478, 480, 514, 515, 652, 653};

enum Result : int {
    kSuccess = 0,
    kEndOfBuffer = 12,
    kMultipleSubscribers = 39,
};

// cuptiGetVersion: CUDA 11.0 is 13, CUDA 13.0 is 130000. Beyond the last one nobody has compared the layout.
constexpr std::uint32_t kOldestVersion = 13;
constexpr std::uint32_t kFirstUnknownVersion = 140000;

using RequestBuffer = void (*)(std::uint8_t** buffer, std::size_t* size, std::size_t* max_records);
using BufferComplete = void (*)(void* context, std::uint32_t stream, std::uint8_t* buffer, std::size_t size,
                                std::size_t valid);
using Timestamp = std::uint64_t (*)();

}  // namespace nvrx::abi
